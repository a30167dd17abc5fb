"""Files of weights by range: each element is what was saved, whatever the form, and damage has one message."""

import json
import struct

import pytest
import torch
from deepspeed.checkpoint.tensors import open_weights
from deepspeed.errors import CheckpointError
from safetensors.torch import save_file


def tensors():
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(5, 7),
        "a.bias": torch.randn(5).bfloat16(),
        "count": torch.tensor(3),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(2, 3, 4).half(),
        "empty": torch.zeros(0, 4),
    }


def save_nested(state, path):
    torch.save({"module": state, "step": 3}, path)


def save_as_megatron(state, path):
    of_a = {name.partition(".")[2]: value for name, value in state.items() if name.startswith("a.")}
    rest = {name: value for name, value in state.items() if not name.startswith("a.")}
    torch.save({"model": {"a": of_a, **rest}, "args": None}, path)


def save_old(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("save", "name"),
    [
        (save_file, "w.safetensors"),
        (torch.save, "w.bin"),
        (save_nested, "w.pt"),
        (save_as_megatron, "w.pt"),
        (save_old, "w.bin"),
    ],
)
def test_every_range_is_what_was_saved(tmp_path, save, name):
    path = tmp_path / name
    save(tensors(), path)
    with open_weights(path) as file:
        assert file.tensors.keys() == tensors().keys()
        for key, value in tensors().items():
            stored = file.tensors[key]
            assert (stored.shape, stored.dtype) == (value.shape, value.dtype)
            for start in range(value.numel()):
                for numel in (1, value.numel() - start):
                    assert torch.equal(stored.read(start, numel), value.reshape(-1)[start : start + numel])


def test_a_view_is_read_through_its_strides(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    torch.save({"t": base.t(), "part": base[1:3, 2:4]}, tmp_path / "w.pt")
    with open_weights(tmp_path / "w.pt") as file:
        assert torch.equal(file.tensors["t"].whole(), base.t())
        assert torch.equal(file.tensors["t"].read(3, 6), base.t().reshape(-1)[3:9])
        assert torch.equal(file.tensors["part"].whole(), base[1:3, 2:4])


def test_a_view_is_read_from_the_file_once(tmp_path, monkeypatch):
    base = torch.arange(24.0).view(4, 6)
    torch.save({"t": base.t(), "other": base.flip(0).t()}, tmp_path / "w.pt")
    preads = []
    with open_weights(tmp_path / "w.pt") as file:
        pread = file.pread
        monkeypatch.setattr(file, "pread", lambda *args: preads.append(args) or pread(*args))
        rows = [file.tensors["t"].read(4 * row, 4) for row in range(6)]
        assert torch.equal(torch.stack(rows), base.t())
        assert len(preads) == 1
        assert torch.equal(file.tensors["other"].whole(), base.flip(0).t())
        file.release()
        assert torch.equal(file.tensors["t"].read(0, 4), base.t()[0])
        assert len(preads) == 3


@pytest.mark.parametrize(("save", "name"), [(save_file, "w.safetensors"), (torch.save, "w.bin"), (save_old, "old.bin")])
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path, save, name, kept):
    path = tmp_path / name
    save({"w": torch.randn(64, 64)}, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(CheckpointError, match=f"{name} is (cut short|neither)"):
        open_weights(path)


def test_a_file_that_loses_its_end_while_it_is_open(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.randn(64, 64)}, path)
    with open_weights(path) as file:
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(CheckpointError, match="w.safetensors is cut short: it ends at byte 5000"):
            file.tensors["w"].whole()


def header(**entry):
    text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(dtype="F9"), "its header is not understood"),
        (header(shape=[3]), "its header is not understood .*shape .3,. in 8 bytes"),
        (header(data_offsets=[8, 16]), "cut short: it has .* bytes, and its header speaks of"),
        (struct.pack("<Q", 2**50) + b"{}", "no safetensors file: its header would have"),
        (struct.pack("<Q", 4) + b"nope", "its header is not understood"),
    ],
)
def test_a_header_that_says_something_else(tmp_path, content, message):
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_weights(tmp_path / "w.safetensors")


def test_what_is_missing_or_no_file_of_weights(tmp_path):
    with pytest.raises(CheckpointError, match="w.bin is missing; check base_dir"):
        open_weights(tmp_path / "w.bin")
    (tmp_path / "w.bin").write_text("hello")
    with pytest.raises(CheckpointError, match="neither a safetensors file nor one of torch.save"):
        open_weights(tmp_path / "w.bin")
    torch.save([torch.ones(2)], tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="found list, and no dict of tensors by name"):
        open_weights(tmp_path / "w.pt")


class Evil:
    def __reduce__(self):
        return (print, ("code of the file ran",))


@pytest.mark.parametrize("new_form", [True, False])
def test_no_code_of_a_file_runs(tmp_path, new_form, capfd):
    torch.save({"w": torch.ones(2), "evil": Evil()}, tmp_path / "w.pt", _use_new_zipfile_serialization=new_form)
    if new_form:  # other objects are placeholders
        with open_weights(tmp_path / "w.pt") as file:
            assert list(file.tensors) == ["w"]
    else:
        with pytest.raises(CheckpointError, match="holds plain tensors"):
            open_weights(tmp_path / "w.pt")
    assert "ran" not in capfd.readouterr().out
