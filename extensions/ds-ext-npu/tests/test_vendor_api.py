"""vendor_api.json, what is read into it, and that the stand-in and the builders keep to it."""

import importlib.util
from pathlib import Path

import pytest
import torch
from ds_ext_npu.op_builder import builders

FOLDER = Path(__file__).parent


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


vendor_api = load(FOLDER / "vendor_api.py")
operators = load(FOLDER / "standin" / "torch_npu" / "operators.py")


@pytest.mark.parametrize("overload", vendor_api.OPERATORS)
def test_the_stand_ins_arguments_are_the_vendors(overload):
    schema = torch._C.parse_schema(f"npu::{operators.API['operators'][overload]}")
    function = getattr(operators, overload.replace(".", "_"))
    num_positional = sum(not argument.kwarg_only for argument in schema.arguments)
    code, names = function.__code__, [argument.name for argument in schema.arguments]
    assert code.co_argcount == num_positional
    assert list(code.co_varnames[: len(names)]) == names
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    given = dict(zip(reversed(names[:num_positional]), reversed(function.__defaults__ or ()), strict=False))
    assert given | (function.__kwdefaults__ or {}) == defaults


def test_the_builders_call_nothing_else():
    called = {name for kind in builders().values() for name in kind.calls}
    assert called == {name.split(".")[0] for name in operators.API["operators"]}


def test_schemas_are_read_from_the_text_of_a_library(tmp_path):
    for name, schema in operators.API["operators"].items():
        assert schema.startswith(f"{name}(")
    texts = [schema.encode() for schema in operators.API["operators"].values()]
    (tmp_path / "library.so").write_bytes(b"\x7fELF\0npu_gelu is no schema\0" + b"\0\x01\0".join(texts) + b"\0")
    assert vendor_api.read_schemas(tmp_path / "library.so") == operators.API["operators"]


def test_a_library_that_lacks_an_operator_is_an_error(tmp_path):
    (tmp_path / "library.so").write_bytes(b"\0npu_gelu(Tensor input) -> Tensor\0")
    with pytest.raises(ValueError, match="not enough values to unpack"):
        vendor_api.read_schemas(tmp_path / "library.so")


def test_signatures_are_read_from_sources(tmp_path):
    functions = [f"def {name}(device: int = None) -> None: pass\n" for name in vendor_api.FUNCTIONS if name.islower()]
    classes = "class Stream:\n    def __new__(cls, device=None, *, priority: int = 0): pass\n"
    (tmp_path / "a.py").write_text("".join(functions) + classes)
    (tmp_path / "b.py").write_text("class Event: pass\nclass NPUGraph:\n    x = 1\nraise AssertionError('was run')\n")
    found = vendor_api.read_signatures(tmp_path)
    assert found["synchronize"] == "(device=None)"
    assert found["Stream"] == "(device=None, *, priority=0)"
    assert found["Event"] == "()"
