"""The operators of `csrc/` on a CPU: host code built by the C++ compiler, kernels compiled by SYCL's runtime.

`nox -s sycl` installs that runtime (1.7 GB) and says where it is; without it these tests are skipped.
"""

import os
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.ops import registry

RUNTIME = "DS_SYCL_RUNTIME"
FOLDER = Path(__file__).parent
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

SIZES = (0, 1, 7, 1023, 65537)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _why_not():
    if not os.environ.get(RUNTIME):
        return f"SYCL kernels run on a CPU where {RUNTIME} names a folder with dpcpp-cpp-rt: nox -s sycl"
    return "the SYCL operators need torch 2.10" if TORCH < (2, 10) else None


def pytest_collection_modifyitems(config, items):
    """Without the runtime one skipped test of each file says so, and the others are left out."""
    reason = _why_not()
    if reason is None:
        return
    own = [item for item in items if item.path.is_relative_to(FOLDER)]
    first = {item.path: item for item in reversed(own)}
    for item in first.values():
        item.add_marker(pytest.mark.skip(reason=reason))
    rest = {item for item in own if item is not first[item.path]}
    items[:] = [item for item in items if item not in rest]
    config.hook.pytest_deselected(items=list(rest))


def pytest_generate_tests(metafunc):
    if _is_asked_for("numel", metafunc):
        metafunc.parametrize("numel", SIZES)
    if _is_asked_for("dtype", metafunc):
        metafunc.parametrize("dtype", DTYPES, ids=[str(dtype).removeprefix("torch.") for dtype in DTYPES])


def _is_asked_for(name, metafunc):
    """A test of core's suite brings values of its own."""
    stated = [marker.args[0] for marker in metafunc.definition.iter_markers("parametrize")]
    return name in metafunc.fixturenames and not any(name in names for names in stated)


def _on_host(kind):
    """The builder class `kind`, for a CPU as its device: everything but the device's header and the compiler is its."""
    from deepspeed.ops.op_builder import OpBuilder
    from deepspeed.ops.op_builder.toolchain import find_compiler
    from ds_ext_xpu.op_builder import sycl_kernel_include

    runtime = Path(os.environ[RUNTIME])

    class OnHost(kind):
        def toolchain(self):
            return find_compiler()

        def compile_command(self, *arguments):
            return OpBuilder.compile_command(self, *arguments)

        def include_paths(self):
            return [str(FOLDER / "host_device"), *super().include_paths()]

        def cxx_args(self):
            kernels = f'-DDS_XPU_CSRC="{sycl_kernel_include("csrc")}"'
            system = ("-isystem", str(runtime / "include"))
            quiet = "-DSYCL_DISABLE_FSYCL_SYCLHPP_WARNING"
            return ["-O1", "-std=c++20", "-fvisibility=hidden", "-ffp-contract=off", quiet, kernels, *system]

        def extra_ldflags(self):
            return [f"-L{runtime / 'lib'}", f"-Wl,-rpath,{runtime / 'lib'}"]

        def libraries_args(self):
            return ["sycl"]

    return OnHost


@pytest.fixture(scope="session")
def host_builders():
    """Builder name -> builder class whose operators take CPU tensors."""
    from ds_ext_xpu.op_builder import builders

    return {name: _on_host(kind) for name, kind in builders().items()}


@pytest.fixture(scope="session")
def ops(host_builders):
    """`torch.ops.ds_xpu`, with all operators in it."""
    return [kind().load() for kind in host_builders.values()][-1]


@pytest.fixture(scope="session")
def host_accelerator(host_builders):
    """An accelerator whose tensors lie in host memory and whose builders are this extension's."""
    from deepspeed.accelerator.plain import PlainAccelerator

    class Host(PlainAccelerator):
        def get_op_builder(self, class_name):
            return host_builders.get(class_name)

    return Host()


@pytest.fixture
def on_device(host_accelerator):
    """That accelerator is in force."""
    before = get_accelerator()
    set_accelerator(host_accelerator)
    registry.reset()
    yield
    set_accelerator(before)
    registry.reset()


class Close:
    """How far a kernel may be from its reference."""

    @staticmethod
    def numbers(count, dtype=torch.float32, *, seed=0, scale=1.0):
        """Random numbers that begin one element into their storage, so that nothing is aligned."""
        drawn = torch.randn(count + 1, generator=torch.Generator().manual_seed(seed)) * scale
        return drawn.to(dtype)[1:]

    @staticmethod
    def check(found, wanted, *, rtol=1e-6, atol=1e-6, share=0.99):
        """fp32 to the tolerances; what is rounded may fall on the other side of a tie, one unit in its last place.

        Of many rounded numbers a `share` is the same.
        """
        unit = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}[found.dtype]
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=rtol + unit, atol=atol, equal_nan=True)
        if unit and found.numel() > 1000:
            assert (found == wanted).float().mean() > share


@pytest.fixture(scope="session")
def close():
    return Close
