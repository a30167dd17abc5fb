"""How files and folders are written, replaced and read."""

import os
import pickle
import resource
import signal
import threading

import pytest
import torch
from deepspeed.checkpoint import TorchStore, layout, save_state_dict_file
from deepspeed.errors import CheckpointError

NAME = layout.model_file(0)


def save_version(folder, value, extra=(), store=None):
    store = store or TorchStore()
    store.create(folder)
    sizes = {name: store.save({"module": value}, folder, name) for name in (NAME, *extra)}
    store.wait()
    store.commit(folder, sizes)


def value_in(folder):
    return TorchStore().load(layout.whole_folder(folder) / NAME)["module"]


def test_a_version_is_invisible_until_it_is_committed(tmp_path):
    folder, store = tmp_path / "deep" / "tag", TorchStore()
    store.create(folder)
    store.save({"module": 1}, folder, NAME)
    assert layout.whole_folder(folder) is None
    store.commit(folder, {})
    assert value_in(folder) == 1
    assert [p.name for p in folder.parent.iterdir()] == ["tag"]


def test_replacing_drops_old_shards_and_keeps_foreign_files(tmp_path):
    folder = tmp_path / "tag"
    save_version(folder, 1, extra=[layout.shard_file(7, 0)])
    (folder / "notes.txt").write_text("mine")
    save_version(folder, 2)
    assert value_in(folder) == 2
    assert sorted(p.name for p in folder.iterdir()) == [NAME, "notes.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["tag"]


class Killed(Exception):
    pass


@pytest.mark.parametrize("moment", range(1, 4))
def test_a_commit_that_stops_at_a_rename_leaves_a_whole_version(tmp_path, monkeypatch, moment):
    folder = tmp_path / "tag"
    save_version(folder, 1)
    (folder / "notes.txt").write_text("mine")
    calls, store = 0, TorchStore()
    rename = os.rename

    def stop(*args):
        nonlocal calls
        calls += 1
        if calls == moment:
            raise Killed
        rename(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", stop)
        with pytest.raises(Killed):
            save_version(folder, 2, store=store)
    os.close(store._claim._descriptor)  # as the system does when a process is killed
    assert value_in(folder) == (1 if moment < 3 else 2)
    TorchStore().create(tmp_path / "other")  # the next save puts all in order
    assert folder.is_dir()
    assert value_in(folder) == (1 if moment < 3 else 2)
    assert (folder / "notes.txt").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.lock", ".other.staging", "tag"]


def test_a_full_disk_names_the_file_and_leaves_the_former_version(tmp_path):
    folder, store = tmp_path / "tag", TorchStore()
    save_version(folder, 1)
    store.create(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(CheckpointError) as caught:
            store.save({"module": torch.zeros(1 << 20)}, folder, NAME)
        with pytest.raises(CheckpointError, match="File too large"):
            save_state_dict_file({"w": torch.zeros(1 << 20)}, tmp_path / "w.bin")
    finally:
        signal.signal(signal.SIGXFSZ, former)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in str(caught.value)
    assert f"{layout.staging_folder(folder) / NAME}" in str(caught.value)
    assert "MiB are free" in str(caught.value)
    assert value_in(folder) == 1
    assert not list(layout.staging_folder(folder).iterdir()), "no half file is left"
    assert not (tmp_path / "w.bin").exists()


def test_the_process_wide_checksum_option_is_put_back(tmp_path):
    assert torch.serialization.get_crc32_options()
    save_version(tmp_path / "tag", 1)
    assert torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save_version(tmp_path / "tag", 2)
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert value_in(tmp_path / "tag") == 2


def test_threads_that_save_at_once_compute_no_checksums(tmp_path, monkeypatch):
    """The option is one per thread in torch: a second saver sets its own."""
    computed, both_save, save = [], threading.Barrier(2, timeout=60), torch.save

    def note(state, file):
        computed.append(torch.serialization.get_crc32_options())
        both_save.wait()
        save(state, file)

    monkeypatch.setattr(torch, "save", note)
    threads = [threading.Thread(target=save_version, args=(tmp_path / name, 1)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert computed == [False, False]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot prepare .*file/tag"):
        TorchStore().create(tmp_path / "file" / "tag")


def test_every_file_is_synced_before_the_rename(tmp_path, monkeypatch):
    events = []
    for name in ("fsync", "replace", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _n=name, _r=real: (events.append(_n), _r(*a))[1])
    save_version(tmp_path / "tag", 1)
    # the file, its name in the staging folder, the folder's name in the directory
    assert events == ["fsync", "replace", "fsync", "rename", "fsync"]


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("how", ["zip", "pickle"])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, how, mmap):
    path, trap = tmp_path / NAME, tmp_path / "sprung"
    if how == "zip":
        torch.save({"module": Bomb(trap)}, path)
    else:
        path.write_bytes(pickle.dumps({"module": Bomb(trap)}, protocol=2))
    with pytest.raises(CheckpointError) as caught:
        TorchStore().load(path, mmap=mmap)
    assert str(path) in str(caught.value)
    if how == "zip":
        assert "posix.mkdir" in str(caught.value)
        assert "Nothing of it was run" in str(caught.value)
    assert not trap.exists()


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(tmp_path, kept, mmap):
    path = tmp_path / NAME
    torch.save({"module": torch.zeros(10_000)}, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(CheckpointError, match=r"model_states\.pt"):
        TorchStore().load(path, mmap=mmap)


def test_a_missing_file_says_what_is_there(tmp_path):
    (tmp_path / "something.pt").touch()
    with pytest.raises(CheckpointError, match=r"missing.*something\.pt"):
        TorchStore().load(tmp_path / NAME)
    with pytest.raises(CheckpointError, match="does not exist either"):
        TorchStore().load(tmp_path / "absent" / NAME)


def test_state_dict_file(tmp_path):
    path = tmp_path / "new" / "pytorch_model.bin"
    flat = torch.arange(100_000.0)
    save_state_dict_file({"w": flat[:4], "tied": flat[:4]}, path)
    assert path.stat().st_size < 5_000
    assert torch.equal(torch.load(path, weights_only=True)["w"], flat[:4])
    assert [p.name for p in path.parent.iterdir()] == ["pytorch_model.bin"]
