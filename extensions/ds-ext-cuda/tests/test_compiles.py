"""Every kernel compiles for the GPUs that we promise; the library loads beside a torch without CUDA.

Once for each state of the sources: later runs find the libraries in the cache of ops. Every run compiles one kernel;
the others take minutes, and the host compiler sees them all in the emulation.
"""

import re
import subprocess
import sys

import pytest
from deepspeed.errors import OpUnavailable
from deepspeed.testing.tiers import swept
from ds_ext_cuda import op_builder
from ds_ext_cuda.op_builder.toolkit import find_toolkit

NAMES = list(op_builder._MODULES)
# loads a library in a process of its own, since the emulation has registered the same names in this one
LOAD = """
import sys
import torch

torch.ops.load_library(sys.argv[1])
names = [schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("ds_cuda::")]
assert names, "it registers nothing"
print(*sorted(names))
for name in names:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(name, "CUDA") or has(name, "CompositeImplicitAutograd"), f"{name} has no kernel for CUDA"
"""


@pytest.fixture
def promised(monkeypatch):
    """The list of GPUs that libraries are built for when nobody says anything else."""
    try:
        codes = find_toolkit().codes
    except OpUnavailable as error:
        pytest.skip(str(error))
    if not {80, 90, 100} <= codes:
        pytest.skip(f"this toolkit compiles for {sorted(codes)} only")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)


@pytest.mark.usefixtures("promised")
@pytest.mark.parametrize("name", swept(NAMES, lambda name: name == "FusedLionBuilder"))
def test_it_compiles_and_loads_beside_this_torch(name):
    library = getattr(op_builder, name)().compile_only()
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(library)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert all(name.startswith("ds_cuda::") for name in done.stdout.split())
    commands = (library.parent / "manifest.json").read_text()
    assert re.findall(r",code=(\w+)", commands) == ["sm_80", "sm_90", "sm_100", "compute_100"]


@pytest.mark.usefixtures("promised")
def test_a_tensor_of_the_host_is_refused_cleanly():
    library = op_builder.FusedLionBuilder().compile_only()
    code = (
        "import sys, torch; torch.ops.load_library(sys.argv[1]); one = [torch.zeros(3)];"
        "torch.ops.ds_cuda.lion_step_(one, one, one, [torch.tensor(0.0)], [], lr=0.1, beta1=0.9, beta2=0.9,"
        " weight_decay=0.0, grad_scale=1.0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(library)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"^NotImplementedError: Could not run 'ds_cuda::lion_step_' .*'CPU' backend", done.stderr, re.M)
