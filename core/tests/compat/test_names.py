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
from deepspeed.compatibility import FEATURES, feature_of, upstream_names
from deepspeed.errors import ConfigError

DETAILS = json.loads((Path(__file__).parent / "deepspeed_names.json").read_text(encoding="utf-8"))


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


def test_importing_what_is_not_here_loads_no_torch():
    program = (
        "import sys, deepspeed\nfrom deepspeed.compression.utils import TopKBinarizer\n"
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
