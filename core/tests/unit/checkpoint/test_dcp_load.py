"""A checkpoint of torch.distributed.checkpoint that is damaged, hostile or lacks something is refused by name."""

import dataclasses
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.checkpoint import Checkpointer, reader
from deepspeed.checkpoint.dcp_file import DcpTensor
from deepspeed.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WEIGHTS = {"w": torch.arange(6.0).view(2, 3), "scale": torch.tensor(2.0)}
OPTIM = {
    "state": {name: {"exp_avg": value / 2, "step": torch.tensor(4.0)} for name, value in WEIGHTS.items()},
    "param_groups": [{"lr": 0.1, "params": ["scale", "w"], "fused": None}],
}


def save(folder, state):
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def test_weights_states_groups_and_the_rest(tmp_path):
    save(tmp_path / "run", {"train": {"model": WEIGHTS, "optim": OPTIM}, "epoch": 3, "rng": {"seed": torch.ones(2)}})
    found = Checkpointer().load(tmp_path / "run", needs_states=True)
    assert {name: value.whole().tolist() for name, value in found.stored.items()} == {
        name: value.tolist() for name, value in WEIGHTS.items()
    }
    optimizer = found.model_state["optimizer"]
    assert optimizer["param_names"] == [["scale", "w"]]
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": [0, 1]}]
    assert torch.equal(optimizer["state"][1]["exp_avg"].whole(), WEIGHTS["w"] / 2)
    assert found.model_state["global_steps"] == 4
    assert found.client_state["epoch"] == 3
    assert torch.equal(found.client_state["rng"]["seed"], torch.ones(2))


def test_a_folder_is_found_by_its_tag_too(tmp_path):
    save(tmp_path / "step-4", {"model": WEIGHTS})
    found = Checkpointer().load(tmp_path, "step-4")
    assert set(found.stored) == set(WEIGHTS)
    assert found.model_state["optimizer"] is None


def damage(folder, what):
    files = sorted(folder.glob("*.distcp"))
    if what == "missing file":
        files[0].unlink()
    elif what == "FIFO":
        files[0].unlink()
        os.mkfifo(files[0])
    elif what == "cut short":
        files[0].write_bytes(files[0].read_bytes()[:-200])
    elif what == "cut to 100 bytes":
        files[0].write_bytes(files[0].read_bytes()[:100])
    elif what == "zeros":
        files[0].write_bytes(b"\0" * files[0].stat().st_size)
    elif what == "metadata cut short":
        (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-20])
    elif what == "code":
        (folder / ".metadata").write_bytes(pickle.dumps(Code()))


class Code:
    def __reduce__(self):
        return pytest.fail, ("code of a checkpoint was run",)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing file", r"__0_0\.distcp is missing"),
        ("FIFO", r"__0_0\.distcp is a FIFO"),
        ("cut short", r"__0_0\.distcp is cut short: it has \d+ bytes"),
        ("zeros", r"optim\.param_groups\.0\.\w+ in .* cannot be read"),
        ("metadata cut short", r"\.metadata cannot be read"),
        ("code", r"\.metadata was refused.*it asks for _pytest\.outcomes"),
    ],
)
def test_damage_is_named(tmp_path, what, words):
    save(tmp_path / "run", {"model": WEIGHTS, "optim": OPTIM})
    damage(tmp_path / "run", what)
    with pytest.raises(CheckpointError, match=words):
        {name: value.whole() for name, value in Checkpointer().load(tmp_path / "run").stored.items()}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing file", r"__0_0\.distcp is missing"),
        ("cut to 100 bytes", r"__0_0\.distcp is cut short: it has 100 bytes, and extra\.\w ends"),
        ("zeros", r"extra\.\w in .* cannot be read: .*it is damaged"),
    ],
)
@pytest.mark.parametrize("extra", [{"n": 3}, {"t": torch.ones(2)}], ids=["value", "tensor"])
def test_damage_of_client_state_is_named(tmp_path, what, words, extra):
    save(tmp_path / "run", {"model": WEIGHTS, "extra": extra})
    damage(tmp_path / "run", what)
    with pytest.raises(CheckpointError, match=words):
        Checkpointer().load(tmp_path / "run")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"model": WEIGHTS}, "holds no optimizer state"),
        ({"optim": OPTIM}, r"no weights of the parameters that its optimizer has \(scale, w\)"),
        ({"model": WEIGHTS, "one": OPTIM, "two": OPTIM}, r"the states of 2 optimizers \(one\., two\.\)"),
    ],
)
def test_what_is_missing_is_named(tmp_path, state, words):
    save(tmp_path / "run", state)
    with pytest.raises(CheckpointError, match=words):
        Checkpointer().load(tmp_path / "run", needs_states=True)


@pytest.mark.parametrize(
    ("option", "value"), [("params", 7), ("params", [["scale"], "w"]), ("lr", torch.ones(2))], ids=str
)
def test_groups_of_another_form_are_refused(tmp_path, option, value):
    optim = {**OPTIM, "param_groups": [{**OPTIM["param_groups"][0], option: value}]}
    save(tmp_path / "run", {"model": WEIGHTS, "optim": optim})
    with pytest.raises(CheckpointError, match=r"run: the optimizer's groups and steps, or other values, are not of"):
        Checkpointer().load(tmp_path / "run", needs_states=True)


@pytest.mark.parametrize("step", [torch.ones(3), torch.tensor(float("nan")), torch.tensor(float("inf"))], ids=str)
def test_steps_of_another_form_are_refused(tmp_path, step):
    optim = {**OPTIM, "state": {**OPTIM["state"], "w": {"exp_avg": WEIGHTS["w"], "step": step}}}
    save(tmp_path / "run", {"model": WEIGHTS, "optim": optim})
    with pytest.raises(CheckpointError, match=r"run: the optimizer's groups and steps, or other values, are not of"):
        Checkpointer().load(tmp_path / "run", needs_states=True)


def test_keys_that_lead_into_a_value_are_refused(tmp_path):
    save(tmp_path / "run", {"model": WEIGHTS, "extra": {"a": 1, "b": {"c": 2}}})
    change_metadata(tmp_path / "run", lambda found: found.planner_data.update({"extra.a": ("extra",)}))
    with pytest.raises(CheckpointError, match=r"run: .* are not of the form"):
        Checkpointer().load(tmp_path / "run")


def test_pieces_that_overlap_are_refused(tmp_path):
    """Their elements are as many as the tensor's, and one of the tensor's is in no piece."""
    save(tmp_path / "run", {"model": {"w": torch.arange(2.0), "rest": torch.ones(1)}})

    def overlap(found):
        entries, places = found.state_dict_metadata, found.storage_data
        whole, rest = entries["model.w"], entries.pop("model.rest")
        whole.size = torch.Size([3])
        whole.chunks.append(dataclasses.replace(rest.chunks[0], offsets=torch.Size([1])))
        moved = next(index for index in places if index.fqn == "model.rest")
        places[dataclasses.replace(moved, fqn="model.w", offset=torch.Size([1]))] = places.pop(moved)

    change_metadata(tmp_path / "run", overlap)
    with pytest.raises(CheckpointError, match=r"of model\.w the pieces \[0:2\] and \[1:2\] share elements"):
        Checkpointer().load(tmp_path / "run")


def change_metadata(folder, change):
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def test_model_parallel_ranks_are_refused(tmp_path):
    save(tmp_path / "run", {"model": WEIGHTS})
    with pytest.raises(CheckpointError, match="has 2 model parallel ranks and did not say which part"):
        Checkpointer(mp_world_size=2, gather=lambda text: [text, text]).load(tmp_path / "run")


def test_what_is_not_plain_data_is_left_and_named(tmp_path, caplog):
    save(tmp_path / "run", {"model": WEIGHTS, "loader": Code(), "epoch": 3})
    assert Checkpointer().load(tmp_path / "run").client_state == {"epoch": 3}
    assert "not plain data: loader" in caplog.text


def test_another_model_is_left_and_named(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(reader, "_CLIENT_BYTES", 64)
    other = {"average": {"w": torch.ones(100)}, "rng": {"seed": torch.ones(2)}, "scale": torch.ones(1)}
    save(tmp_path / "run", {"model": WEIGHTS, **other})
    read = []
    monkeypatch.setattr(DcpTensor, "read", lambda tensor, start, numel: read.append(numel) or torch.ones(numel))
    assert set(Checkpointer().load(tmp_path / "run").client_state) == {"rng", "scale"}
    assert sorted(read) == [1, 2]
    assert "every rank would hold 0.0 MiB of tensors in average." in caplog.text


def test_files_may_be_links(tmp_path):
    """As in the cache of Hugging Face, and in folders of data under version control."""
    save(tmp_path / "run", {"model": WEIGHTS})
    (tmp_path / "blobs").mkdir()
    (tmp_path / "run" / "__0_0.distcp").rename(tmp_path / "blobs" / "1f")
    (tmp_path / "run" / "__0_0.distcp").symlink_to("../blobs/1f")
    assert torch.equal(Checkpointer().load(tmp_path / "run").stored["w"].whole(), WEIGHTS["w"])


@pytest.mark.parametrize("name", ["../outside", "/outside", "inner/file"])
def test_a_file_elsewhere_is_refused(tmp_path, name):
    save(tmp_path / "run", {"model": WEIGHTS})

    def move(found):
        for info in found.storage_data.values():
            info.relative_path = name

    change_metadata(tmp_path / "run", move)
    with pytest.raises(CheckpointError, match=f"names '{name}', which is not beside it"):
        Checkpointer().load(tmp_path / "run").stored["w"].whole()
