"""What a torch was built for, from memory and from its files."""

import importlib.machinery
import sys
import types

import pytest
from deepspeed.plugins.hookspecs import torch_build, torch_name


def install(monkeypatch, folder, version):
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise AssertionError('was imported')")
    if version is not None:
        (folder / "torch" / "version.py").write_text(version)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(folder)])


def test_memory_and_disk_say_the_same(monkeypatch):
    import torch

    loaded = torch_build()
    assert loaded["__version__"] == torch.__version__
    monkeypatch.delitem(sys.modules, "torch")
    on_disk = torch_build()
    assert on_disk["__version__"] == loaded["__version__"]
    assert on_disk.items() <= loaded.items()


@pytest.mark.parametrize(
    ("version", "build", "name"),
    [
        (
            "__version__ = '2.13.0+x'\ndebug = False\none: Optional[str] = '13.0'\ntwo: Optional[str] = None\n",
            {"__version__": "2.13.0+x", "one": "13.0", "two": None},
            "torch 2.13.0+x",
        ),
        ('__version__ = "2.6.0"\n', {"__version__": "2.6.0"}, "torch 2.6.0"),
        (None, {"__version__": None}, "torch of an unknown version"),
    ],
)
def test_a_torch_on_disk_is_read_and_not_imported(monkeypatch, tmp_path, version, build, name):
    install(monkeypatch, tmp_path, version)
    assert torch_build() == build
    assert torch_name(torch_build()) == name


def test_a_torch_that_another_thread_is_importing_is_read_from_disk(monkeypatch):
    whole = torch_build()
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    sys.modules["torch"].__spec__ = importlib.machinery.PathFinder.find_spec("torch")
    assert torch_build()["__version__"] == whole["__version__"]


def test_no_torch(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert torch_build() == {}
    assert torch_name({}) == "torch is not installed"
