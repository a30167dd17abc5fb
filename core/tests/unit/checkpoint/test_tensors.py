"""Mapping over nested tensors; storage that nobody asked for stays out of files."""

import collections
import io

import torch
from deepspeed.checkpoint.stores import clone_tensors_for_torch_save, compact, map_tensors

Pair = collections.namedtuple("Pair", "left right")


def saved_nbytes(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return len(buffer.getvalue())


def test_a_small_view_does_not_bring_its_whole_storage():
    flat = torch.arange(100_000.0)
    state = {"shard": flat[10:20], "meta": [flat[10:20]]}
    assert saved_nbytes(state) > 400_000
    compacted = compact(state)
    assert saved_nbytes(compacted) < 5_000
    assert torch.equal(compacted["shard"], flat[10:20])
    assert compacted["shard"] is compacted["meta"][0], "one tensor under two names stays one"


def test_views_that_cover_their_storage_are_not_copied():
    flat = torch.arange(1000.0)
    state = {"a": flat[:600], "b": [flat[600:990].view(39, 10)]}
    assert compact(state) is state


def test_tied_views_do_not_count_twice():
    flat = torch.arange(1000.0)
    compacted = compact({"a": flat[:500], "b": flat[:500]})
    assert compacted["a"].untyped_storage().nbytes() == 2000


def test_odd_tensors_pass():
    state = {
        "empty": torch.empty(0),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "strided": torch.arange(1000.0).view(100, 10).t()[0],
    }
    compacted = compact(state)
    assert torch.equal(compacted["strided"], state["strided"])
    assert compacted["sparse"] is state["sparse"]


def test_map_keeps_types():
    item = {"o": collections.OrderedDict(a=torch.ones(1)), "p": Pair(torch.ones(1), 2), "s": torch.Size([1]), "n": None}
    mapped = map_tensors(item, lambda t: t + 1)
    assert mapped["o"] == {"a": torch.tensor([2.0])}
    assert isinstance(mapped["o"], collections.OrderedDict)
    assert mapped["p"] == Pair(torch.tensor([2.0]), 2)
    assert mapped["s"] is item["s"]
    assert item["o"]["a"] == 1, "the original is left alone"


def test_map_keeps_what_is_shared_and_what_lies_in_itself():
    shared = [torch.ones(1)]
    state = {"a": shared, "b": (shared,)}
    state["whole"] = state
    mapped = map_tensors(state, lambda tensor: tensor + 1)
    assert mapped["whole"] is mapped
    assert mapped["b"][0] is mapped["a"]
    assert mapped["a"] == [torch.tensor([2.0])]
    assert state["a"] == [torch.tensor([1.0])]


def test_clone_for_torch_save_gives_own_storage():
    flat = torch.arange(10.0, requires_grad=True)
    module = torch.nn.Linear(2, 2)
    item = {"view": flat[2:4], "deep": [(flat[0:1],)], "plain": "x", "sd": module.state_dict()}
    cloned = clone_tensors_for_torch_save(item)
    assert cloned["view"].untyped_storage().nbytes() == 8
    assert not cloned["view"].requires_grad
    assert cloned["deep"][0][0].data_ptr() != flat.data_ptr()
    assert cloned["plain"] == "x"
    assert cloned["sd"]._metadata == module.state_dict()._metadata
    assert clone_tensors_for_torch_save(item, device=torch.device("meta"))["view"].device.type == "meta"


def test_clone_for_torch_save_takes_defaultdicts():
    item = collections.defaultdict(list, a=torch.ones(2))
    assert torch.equal(clone_tensors_for_torch_save(item)["a"], torch.ones(2))
