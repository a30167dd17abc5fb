"""How tests get a kernel's operators: compiled for the GPU where there is one, else run on the host.

`load_op(builder class)` gives `torch.ops.ds_cuda` and `device` the tensors' device: "cuda" with a GPU, "cpu" under the
emulation, whose `README.md` says what it proves. With `in_force` the kernels serve the fronts that users call.
`DS_CUDA_EMULATED=1` emulates although there is a GPU; `DS_CUDA_SANITIZE=1` builds the emulation with the address and
undefined-behaviour sanitizers (`run_sanitized.py`).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.ops import registry
from deepspeed.ops.op_builder import OpBuilder
from deepspeed.ops.op_builder.toolchain import Toolchain
from deepspeed.testing.tiers import thin_out
from ds_ext_cuda.accelerator import CUDA_Accelerator
from ds_ext_cuda.op_builder import builders

HERE = Path(__file__).parent
CSRC = HERE.parent / "src" / "ds_ext_cuda" / "csrc"
SIZES = (0, 1, 7, 1023, 65537)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class EmulatedBuilder(OpBuilder):
    """`.cu` files for the host: g++ with the headers of `emulated/` in place of CUDA's; operators for CPU tensors.

    Args:
        name: of the op.
        sources: its files.
        namespace: where its operators are registered.
        register_fakes: as `OpBuilder.register_fakes`.
    """

    min_torch = "2.10"

    def __init__(
        self,
        name: str,
        sources: Sequence[str],
        namespace: str = "ds_cuda",
        register_fakes: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(f"emulated_{name}")
        self._sources = [str(path) for path in sources]
        self._register_fakes = register_fakes
        self.op_namespace = namespace

    @classmethod
    def of(cls, kernel: OpBuilder) -> "EmulatedBuilder":
        return cls(kernel.name, kernel.sources(), kernel.op_namespace, kernel.register_fakes)

    def absolute_name(self) -> str:
        return f"ds_ext_cuda.tests.{self.name}_op"

    def sources(self) -> list[str]:
        return self._sources

    def include_paths(self) -> list[str]:
        return [str(HERE / "emulated"), str(CSRC)]

    def cxx_args(self) -> list[str]:
        # The library is loaded in a process of tests only: all symbols may be seen, so that kernels have names.
        # Compiling takes longer than running, at -O2 even more so.
        args = ["-O1", "-std=c++20", "-ffp-contract=off", "-DDS_CUDA_EMULATED"]
        args += ["-Wall", "-Wno-unknown-pragmas", "-Wno-attributes"]
        return [*args, "-g", "-fno-omit-frame-pointer", *_sanitizers()] if _sanitizers() else args

    def extra_ldflags(self) -> list[str]:
        return ["-ldl", *_sanitizers()]

    def compile_command(self, toolchain: Toolchain, source: Path, object_path: Path, flags: Sequence[str]) -> list[str]:
        """The default, and that a `.cu` file is C++."""
        command = super().compile_command(toolchain, source, object_path, flags)
        at = command.index("-c")
        return [*command[:at], "-x", "c++", *command[at:]]

    def register_fakes(self) -> None:
        self._register_fakes()


def _sanitizers() -> list[str]:
    if os.environ.get("DS_CUDA_SANITIZE") != "1":
        return []
    return ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def _on_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("DS_CUDA_EMULATED") != "1"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _is_asked_for("numel", metafunc):
        metafunc.parametrize("numel", SIZES)
    if _is_asked_for("dtype", metafunc):
        metafunc.parametrize("dtype", DTYPES, ids=[str(dtype).removeprefix("torch.") for dtype in DTYPES])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thin_out(item for item in items if item.path.is_relative_to(HERE))


def _is_asked_for(name: str, metafunc: pytest.Metafunc) -> bool:
    """A test that states values of its own, as those of core's suite do, gets these."""
    stated = [marker.args[0] for marker in metafunc.definition.iter_markers("parametrize")]
    return name in metafunc.fixturenames and not any(name in names for names in stated)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if _on_gpu() else "cpu"


@pytest.fixture(scope="session")
def load_op() -> Callable[[type], Any]:
    """Builder class -> its operators, loaded once per process."""

    def load(kind: type) -> Any:
        builder = kind()
        return (builder if _on_gpu() else EmulatedBuilder.of(builder)).load()

    return load


@pytest.fixture(scope="session")
def emulated_builder() -> type[EmulatedBuilder]:
    return EmulatedBuilder


@pytest.fixture(scope="session")
def numbers(device: str) -> Callable[..., torch.Tensor]:
    """Random tensors that begin one element into their storage, so that nothing is aligned; `offset=0`: aligned."""

    def make(*shape: int, dtype=torch.float32, seed=0, shift=0.0, scale=2.0, offset=1) -> torch.Tensor:
        numel = torch.Size(shape).numel()
        made = torch.randn(numel + offset, generator=torch.Generator().manual_seed(seed)) * scale + shift
        return made.to(dtype).to(device)[offset:].view(shape)

    return make


class HostAccelerator(PlainAccelerator):
    """An accelerator whose tensors lie in host memory and whose builders are this extension's, for the host."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds = {
            name: type(name, (_EmulatedKind,), {"kind": kind, "NAME": kind.NAME, "__module__": __name__})
            for name, kind in builders().items()
        }

    def get_op_builder(self, class_name: str) -> Any:
        return self._kinds.get(class_name)


class _EmulatedKind(EmulatedBuilder):
    """A builder class in place of `kind`."""

    kind: type[OpBuilder]

    def __init__(self) -> None:
        kernel = self.kind()
        super().__init__(kernel.name, kernel.sources(), kernel.op_namespace, kernel.register_fakes)


@pytest.fixture(scope="session")
def accelerator_with_kernels() -> PlainAccelerator | CUDA_Accelerator:
    return CUDA_Accelerator() if _on_gpu() else HostAccelerator()


@pytest.fixture
def in_force(accelerator_with_kernels: PlainAccelerator | CUDA_Accelerator) -> Iterator[None]:
    """These kernels serve the fronts."""
    before = get_accelerator()
    set_accelerator(accelerator_with_kernels)
    registry.reset()
    yield
    set_accelerator(before)
    registry.reset()
