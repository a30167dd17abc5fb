"""Every instruction set that this machine has: the tests of the operators once more, forced to it.

The best one is what they run on anyway, so that forcing it is left to the sweep.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.testing.tiers import swept

# those that force nothing themselves
FILES = (
    "test_adam.py",
    "test_lion.py",
    "test_adagrad.py",
    "test_lamb.py",
    "test_quantizer.py",
    "test_norm.py",
    "test_activation.py",
    "test_rotary.py",
    "test_inference_core.py",
    "test_decode_attention.py",
    "test_decoder_layer.py",
)
CAPABILITIES = {"DEFAULT": ("scalar",), "AVX2": ("scalar", "avx2"), "AVX512": ("scalar", "avx2", "avx512")}
PRESENT = CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), ("scalar",))


def _run(isa, *arguments):
    environment = {**os.environ, "DS_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("isa", swept(["scalar", "avx2", "avx512"], lambda isa: isa != PRESENT[-1] or isa == "scalar"))
def test_operators_pass_their_tests_on(isa):
    if isa not in PRESENT:
        pytest.skip(f"this machine has no {isa}")
    here = Path(__file__).parent
    # schemas and what torch.compile makes of them are of no instruction set
    chosen = ("-k", "not opcheck and not compile")
    done = _run(isa, "-m", "pytest", "-q", "-x", *chosen, *(str(here / name) for name in FILES))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("isa", "message"),
    [
        ("sse9", "DS_CPU_ISA: found 'sse9', but it must be scalar, avx2 or avx512"),
        pytest.param(
            "avx512",
            "DS_CPU_ISA: found avx512, but the best that this machine has",
            marks=pytest.mark.skipif("avx512" in PRESENT, reason="this machine has it"),
        ),
    ],
)
def test_an_isa_that_is_not_there_is_refused(isa, message):
    code = (
        "import torch; from deepspeed.ops import registry;"
        "op = registry.require('cpu_lion').lion_step_; t = [torch.zeros(3)];"
        "op(t, t, t, [torch.tensor(0.)], [], lr=1., beta1=.9, beta2=.9, weight_decay=0., grad_scale=1.)"
    )
    done = _run(isa, "-c", code)
    assert done.returncode != 0
    assert message in done.stderr
