"""Every module and public name of DeepSpeed 0.19.6 and 0.19.8: it is here, or imports and refuses with its reason.

The names are those of its sdists, which `docs/generate/deepspeed_names.py` has read into two files: the package's own
(`compatibility/names.json`), and `deepspeed_names.json` here, with signatures.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed._absent import is_absent
from deepspeed._address import resolve
from deepspeed.compatibility import FEATURES, feature_of, upstream_names
from deepspeed.errors import ConfigError

DETAILS = json.loads((Path(__file__).parent / "deepspeed_names.json").read_text(encoding="utf-8"))
# DeepSpeed has something else under these names of submodules, which here are the submodules once they are imported.
HIDDEN_BY_SUBMODULES = {
    ("deepspeed.comm", "utils"),
    ("deepspeed.utils", "tensor_fragment"),
    ("deepspeed.utils", "z3_leaf_module"),
}


def reexports():
    """Package, name, and the address in DeepSpeed of what the package takes from there."""
    for package, names in upstream_names().items():
        for name, kind in names.items():
            if kind.startswith("deepspeed") and (package, name) not in HIDDEN_BY_SUBMODULES:
                yield package, name, kind


def test_every_module_imports_and_has_every_name():
    for module, names in upstream_names().items():
        found = importlib.import_module(module)
        for name in names:
            getattr(found, name)


def test_what_is_not_here_refuses_with_the_sentence_of_its_feature():
    checked = 0
    for module, names in upstream_names().items():
        for name in names:
            thing = getattr(importlib.import_module(module), name)
            if is_absent(thing):
                with pytest.raises(ConfigError, match=r" is not in this version of ds-core; .+"):
                    thing()
                checked += 1
    assert checked > 1000
    assert all(feature_of(module) in FEATURES.values() for module in upstream_names())


def test_what_a_package_takes_from_elsewhere_is_what_is_there():
    differing, checked = [], 0
    for module in upstream_names():  # whatever other tests have imported
        importlib.import_module(module)
    for package, name, address in reexports():
        found, there = getattr(importlib.import_module(package), name), resolve(address)
        names = upstream_names()[address] if found is not there and ":" not in address else ()
        same = bool(names) and all(getattr(found, each) is getattr(there, each) for each in names)
        if found is not there and not same:  # another package may stand for it, which has the same names
            differing.append(f"{package}.{name}: {found!r}, and {address}: {there!r}")
        checked += 1
    assert differing == []
    assert checked > 1500


def test_submodules_that_come_with_a_package_need_no_import_of_their_own():
    submodules = [(package, name) for package, name, address in reexports() if address == f"{package}.{name}"]
    program = "import importlib, sys\nfor package, name in {}:\n    getattr(importlib.import_module(package), name)"
    done = subprocess.run(
        [sys.executable, "-c", program.format(submodules)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(submodules) > 500


ADDRESSES = [
    *("comm.mpi_discovery", "runtime.ZeROOptimizer", "runtime.zero.partition_parameters.ZeroParamStatus"),
    *("utils.get_accelerator", "zero.partition_parameters.Init", "zero.stage3.DeepSpeedZeroOptimizer_Stage3"),
]
# Each in a process that has imported torch alone: its import takes 2 s of a core.
FIND_EACH = """
import gc, os, sys
import torch
gc.freeze()
for address in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        assert "deepspeed" not in sys.modules
        import deepspeed
        print(address, eval(f"deepspeed.{address}"), flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, address
"""


def test_addresses_that_users_write_work_after_importing_deepspeed_alone():
    done = subprocess.run([sys.executable, "-c", FIND_EACH, *ADDRESSES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ADDRESSES


def test_importing_what_is_not_here_loads_no_torch():
    program = (
        "import sys, deepspeed\nfrom deepspeed.model_implementations import DeepSpeedTransformerInference\n"
        "import deepspeed.inference.v2.ragged.kv_cache, deepspeed.runtime.zenflow.zenflow_stage_1_and_2\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["deepspeed.nonsense", "deepspeed.compression.nonsense", "deepspeed.utils.nonsense"])
def test_what_deepspeed_does_not_have_is_no_module(name):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)


@pytest.mark.parametrize("module", ["deepspeed", "deepspeed.comm.comm", "deepspeed.runtime.utils", "deepspeed.io"])
def test_a_mistyped_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        importlib.import_module(module).nonsense


def test_errors_that_are_not_here_can_be_caught():
    from deepspeed.ops.op_builder.builder import MissingCUDAException

    assert issubclass(MissingCUDAException, Exception)


def test_the_two_files_of_names_are_of_one_walk():
    both = {module for version in DETAILS.values() for module in version["modules"]}
    assert both == set(upstream_names())
