"""Where builders are looked for: the package beside the class or a parent, its modules; late, and None for the rest."""

import sys

import pytest
from deepspeed.accelerator import set_accelerator
from deepspeed.errors import PluginError
from deepspeed.log import warn_once

ACCELERATOR = """
from deepspeed.accelerator.plain import PlainAccelerator
class V_Accelerator(PlainAccelerator):
    pass
"""


@pytest.fixture
def vendor(tmp_path, monkeypatch, request):
    """Writes a vendor's package; returns an accelerator of it. Files: path within `op_builder` -> text."""

    def make(**files):
        name = "vendor_" + "".join(letter for letter in request.node.name if letter.isalnum())
        folder = tmp_path / name / "op_builder"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("")
        (folder.parent / "accelerator.py").write_text(ACCELERATOR)
        for path, text in {"__init__": "", **files}.items():
            (folder / f"{path}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        module = __import__(f"{name}.accelerator", fromlist=["V_Accelerator"])
        return module.V_Accelerator()

    yield make
    for name in [name for name in sys.modules if name.startswith("vendor_")]:
        del sys.modules[name]


def test_one_builder_per_file_under_an_empty_init(vendor):
    acc = vendor(adam="class FusedAdamBuilder:\n    pass", lamb="class FusedLambBuilder:\n    pass")
    assert acc.get_op_builder("FusedAdamBuilder").__name__ == "FusedAdamBuilder"
    assert type(acc.create_op_builder("FusedLambBuilder")).__name__ == "FusedLambBuilder"
    assert acc.create_op_builder("FusedLionBuilder") is None


def test_names_leave_out_the_base_builders(vendor):
    acc = vendor(
        builder="class XYZOpBuilder:\n    pass",
        adam="from .builder import XYZOpBuilder\nclass AdamBuilder(XYZOpBuilder): pass",
    )
    assert acc._builder_names() == ["AdamBuilder"]


def test_names_that_a_package_forwards_when_they_are_asked_for(vendor):
    acc = vendor(
        __init__="def __getattr__(name):\n"
        "    if name != 'AdamBuilder':\n        raise AttributeError(name)\n"
        "    return type(name, (), {})\n"
    )
    assert acc.get_op_builder("AdamBuilder").__name__ == "AdamBuilder"
    assert acc.get_op_builder("LambBuilder") is None


def test_a_module_that_cannot_be_imported_leaves_the_others(vendor, lines):
    warn_once.cache_clear()
    acc = vendor(adam="class AdamBuilder:\n    pass", broken="import a_library_that_is_not_there")
    assert acc.get_op_builder("AdamBuilder") is not None
    assert acc.get_op_builder("LambBuilder") is None
    ((tone, message),) = lines
    assert tone == "WARNING"
    assert "op_builder.broken are left out: ModuleNotFoundError" in message


def test_ops_that_a_wheel_brought_are_not_loaded_by_looking_for_builders(vendor, tmp_path, lines):
    warn_once.cache_clear()
    acc = vendor(adam="class FusedAdamBuilder:\n    pass")
    (folder,) = tmp_path.glob("vendor_*/op_builder")
    (folder / "fused_adam_op.so").write_bytes(b"loading this is an error")
    assert acc._builder_names() == ["FusedAdamBuilder"]
    assert acc.get_op_builder("FusedLionBuilder") is None
    assert lines == []


def test_a_package_that_cannot_be_imported_is_an_error_that_names_it(vendor):
    acc = vendor(__init__="raise OSError('libxyz.so is missing')")
    with pytest.raises(PluginError, match=r"V_Accelerator: its op builders are in .*op_builder, .*OSError: libxyz.so"):
        acc.get_op_builder("AdamBuilder")


def test_a_class_derived_in_a_script_finds_its_parents_builders(vendor):
    acc = vendor(__init__="class AdamBuilder:\n    pass")

    class Mine(type(acc)):
        pass

    assert Mine().get_op_builder("AdamBuilder") is acc.get_op_builder("AdamBuilder")


def test_a_package_that_binds_names_at_import_is_imported_when_it_is_asked(vendor, shelf):
    """As in DeepSpeed's own package: the names are made from whichever accelerator is current at that moment."""
    acc = vendor(
        __init__="from deepspeed.accelerator import get_accelerator\n"
        "AdamBuilder = type('AdamBuilder', (), {'bound_to': type(get_accelerator()).__name__})\n"
    )
    package = acc.op_builder_dir()
    set_accelerator(acc)
    assert package not in sys.modules
    assert acc.get_op_builder("AdamBuilder").bound_to == "V_Accelerator"


def test_a_plugins_hook_is_for_its_own_accelerator_only(shelf, vendor):
    from deepspeed.accelerator import building, get_accelerator
    from deepspeed.plugins import hookimpl

    class HookedBuilder:
        pass

    acc = vendor()
    shelf.put("xyz", build=lambda: acc)
    shelf.entries[0].load().ds_op_builders = hookimpl(lambda: {"HookedBuilder": HookedBuilder})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "plugin_manager", lambda: shelf.manager)
        assert get_accelerator() is acc
        assert acc.get_op_builder("HookedBuilder") is HookedBuilder
        assert acc._builder_names() == ["HookedBuilder"]
        set_accelerator(type(acc)())
        assert get_accelerator().get_op_builder("HookedBuilder") is None
