"""A store by its name: a plugin's, the built-in one, or a refusal that says what was asked."""

import errno
import os
import shutil

import pytest
from deepspeed.checkpoint import Checkpointer, TorchStore, create_store
from deepspeed.checkpoint.durable import disk_error
from deepspeed.errors import ConfigError
from deepspeed.plugins import FEATURES, hookimpl, plugin_manager


class SealedStore:
    """A store with files of its own kind: torch's bytes, each exclusive-ored with a key."""

    def __init__(self, key):
        self.key = key

    def create(self, folder):
        folder.with_suffix(".new").mkdir(parents=True)

    def save(self, state, folder, name):
        import io

        import torch

        buffer = io.BytesIO()
        torch.save(state, buffer)
        (folder.with_suffix(".new") / name).write_bytes(self._sealed(buffer.getvalue()))

    def wait(self):
        pass

    def commit(self, folder, sizes):
        assert set(sizes) == {path.name for path in folder.with_suffix(".new").iterdir()}
        os.rename(folder.with_suffix(".new"), folder)

    def discard(self, folder):
        shutil.rmtree(folder.with_suffix(".new"))

    def load(self, path, map_location="cpu", mmap=False):
        import io

        import torch

        return torch.load(io.BytesIO(self._sealed(path.read_bytes())), map_location, weights_only=True)

    def _sealed(self, content):
        return bytes(byte ^ self.key for byte in content)


class Plugin:
    """Knows the stores `sealed`, and two that are none."""

    @hookimpl
    def ds_checkpoint_store(self, name, arguments):
        stores = {"sealed": lambda: SealedStore(**arguments), "a class": lambda: SealedStore, "no store": object}
        return stores[name]() if name in stores else None


@pytest.fixture
def plugin():
    manager = plugin_manager()
    manager.register(Plugin(), "stores", FEATURES)
    manager.activate("stores", FEATURES)
    yield
    manager.unregister("stores", FEATURES)


@pytest.mark.usefixtures("plugin")
def test_a_plugins_store_keeps_a_checkpoint(tmp_path):
    checkpointer = Checkpointer(store=create_store("sealed", {"key": 7}))
    state = {"module": {"w": [1, 2]}, "dp_world_size": 1, "mp_world_size": 1}
    folder = checkpointer.save(tmp_path, "a", model_state=state, shard_state=None, client_state={"epoch": 3})
    (file,) = (path for path in folder.iterdir() if path.suffix == ".pt")
    assert not file.read_bytes().startswith(b"PK")
    assert checkpointer.load(tmp_path, load_shard=False).client_state == {"epoch": 3}


def test_the_built_in_store():
    assert type(create_store("torch", {})) is TorchStore
    with pytest.raises(ConfigError, match=r"checkpoint.store.params: found key, and the store 'torch' takes none"):
        create_store("torch", {"key": 7})


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nosuch", r"type: found 'nosuch', which no plugin knows \(asked: deepspeed.plugins:stores\); use 'torch'"),
        ("no store", "as the store 'no store'; it lacks create, save, wait, commit, discard, load"),
        ("a class", "an object is expected, not the class"),
    ],
)
def test_what_is_no_store_is_refused(name, message):
    with pytest.raises(ConfigError, match=f"checkpoint.store.*{message}"):
        create_store(name, {})


def test_without_plugins_the_refusal_says_that_none_has_stores():
    with pytest.raises(ConfigError, match="asked: none has stores"):
        create_store("nosuch", {})


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "Make room in that folder, then save again"),
        (errno.ENOENT, "Give all ranks one tag, and a folder that every rank sees, then"),
        (errno.ENOTDIR, "Give a folder, or a name that is not taken, then"),
        (errno.EACCES, "Correct the permissions of that folder"),
    ],
)
def test_a_disk_that_refuses_is_told_with_what_helps(tmp_path, code, advice):
    assert advice in str(disk_error("write", tmp_path / "x", OSError(code, os.strerror(code))))
