"""The types of errors: what each is besides a DeepSpeedError, so that old `except` clauses still catch it."""

import pytest
from deepspeed import errors

ALSO = {
    "ConfigError": ValueError,
    "PluginError": RuntimeError,
    "OpUnavailable": RuntimeError,
    "CommError": RuntimeError,
    "CheckpointError": RuntimeError,
    "StateError": RuntimeError,
    "PipelineError": RuntimeError,
    "AbsentMemberError": AttributeError,
}


@pytest.mark.parametrize("name", ALSO)
def test_each_is_a_builtin_kind_too(name):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.DeepSpeedError)
    assert issubclass(kind, ALSO[name])
    with pytest.raises(ALSO[name], match="^found 3$"):
        raise kind("found 3")


def test_the_tree_in_the_docstring_is_complete():
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type)} - {"DeepSpeedError"}
    assert kinds == set(ALSO)
    assert all(f"── {name} " in errors.__doc__ for name in kinds)
