"""The example kernels in CUDA and SYCL, run on the host: the very sources, built by the C++ compiler.

CUDA's headers are those of ds-ext-cuda's emulation; `stand_ins/` has SYCL's, as far as the example needs, and what of
torch concerns devices. It shows indices, formula and rounding, and nothing that depends on a card.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.ops.op_builder import OpBuilder

HERE = Path(__file__).parent
EMULATED = HERE.parents[1] / "extensions/ds-ext-cuda/tests/emulated"
FILES = {"cuda": "lion.cu", "sycl": "lion_sycl.cpp"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

pytestmark = [
    pytest.mark.skipif(TORCH < (2, 10), reason="the kernels need torch 2.10"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler"),
]


class OnHost(OpBuilder):
    """The rendered sources in `csrc`, their operator registered for tensors of the cpu."""

    min_torch = "2.10"

    def __init__(self, csrc: Path, language: str) -> None:
        super().__init__(f"on_host_{language}")
        self.csrc, self.file, self.op_namespace = csrc, FILES[language], f"ds_{language}_on_host"

    def absolute_name(self):
        return f"template.{self.name}_op"

    def sources(self):
        return [
            str(self.csrc / "lion/fused_lion.cpp"),
            str(self.csrc / "lion" / self.file),
            str(HERE / "stand_ins/torch_devices.cpp"),
        ]

    def include_paths(self):
        return [str(HERE / "stand_ins"), str(EMULATED), str(self.csrc)]

    def cxx_args(self):
        return ["-O1", "-std=c++20", "-ffp-contract=off", "-x", "c++"]

    def extra_ldflags(self):
        return ["-ldl", "-Wl,-Bsymbolic"]


@pytest.fixture(scope="module")
def lion_step(language, tmp_path_factory):
    if language not in FILES:
        pytest.skip("its kernel runs on the simulated device")
    folder = tmp_path_factory.mktemp(language)
    config = folder / "cookiecutter.yaml"
    config.write_text(f"replay_dir: {folder / 'replay'}\ncookiecutters_dir: {folder / 'cloned'}\n")
    choices = [f"device_name={language}_on_host", f"kernel_language={language}"]
    words = ["--no-input", "--config-file", str(config), "-o", str(folder), str(HERE.parent), *choices]
    subprocess.run([sys.executable, "-m", "cookiecutter", *words], check=True, capture_output=True)
    (csrc,) = folder.glob("ds-ext-*/src/*/csrc")
    operator = csrc / "lion/fused_lion.cpp"
    text = operator.read_text()
    key = {"cuda": "CUDA", "sycl": "XPU"}[language]
    assert text.count(f", {key}, m)") == 1
    operator.write_text(text.replace(f", {key}, m)", ", CPU, m)"))
    return OnHost(csrc, language).load().lion_step_


@pytest.mark.parametrize("numel", [0, 1, 7, 1023, 65537])
@pytest.mark.parametrize("param_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("copy_dtype", [None, *DTYPES], ids=str)
def test_equals_the_formula(lion_step, numel, param_dtype, copy_dtype):
    generator = torch.Generator().manual_seed(numel)
    p, g, m = (torch.randn(numel, generator=generator) for _ in range(3))
    param, grad, exp_avg = p.to(param_dtype, copy=True), g.to(torch.bfloat16), m.clone()
    copies = [] if copy_dtype is None else [torch.zeros(numel, dtype=copy_dtype)]
    steps, numbers = [torch.tensor(0.0)], {"lr": 0.01, "beta1": 0.9, "beta2": 0.4, "weight_decay": 0.1}
    p, g = param.float().clone(), grad.float() * 0.5
    lion_step([param], [grad], [exp_avg], steps, copies, **numbers, grad_scale=0.5)
    p = p * (1 - 0.01 * 0.1) - 0.01 * torch.lerp(m, g, 1 - 0.9).sign()
    assert torch.equal(param, p.to(param_dtype))
    torch.testing.assert_close(exp_avg, m.lerp(g, 1 - 0.4))
    assert all(torch.equal(copy, p.to(copy_dtype)) for copy in copies)
    assert steps[0].item() == 1.0


def test_states_must_be_fp32(lion_step):
    half, step = torch.zeros(3, dtype=torch.float16), torch.tensor(0.0)
    numbers = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "grad_scale": 1.0}
    with pytest.raises(RuntimeError, match="exp_avgs must be float32"):
        lion_step([half], [half], [half], [step], [], **numbers)
    with pytest.raises(RuntimeError, match="params must be float32, bfloat16 or float16"):
        lion_step([half.int()], [half], [half], [step], [], **numbers)
