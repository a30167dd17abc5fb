"""A parameter unit by itself: what one rank has, the marks that libraries read, and the moves between its states.

Peers are played here by a backend whose all-gather finds their shards; ranks/test_param_units.py has real ones.
"""

import pytest
import torch
from deepspeed import comm
from deepspeed.errors import CommError, StateError
from deepspeed.zero import gather
from deepspeed.zero.gather import GatheredParameters
from deepspeed.zero.param_marks import ZeroParamStatus
from deepspeed.zero.param_unit import LiveNumel, ParamUnit, shape_of, unit_of, whole, whole_in_turn
from deepspeed.zero.redistribute import saved_part
from deepspeed.zero.unit_groups import UnitRanks
from torch.nn import Parameter

AVAILABLE, NOT_AVAILABLE, INFLIGHT = ZeroParamStatus
CPU = torch.device("cpu")


def make_params(dtype=torch.float32):
    return [
        Parameter(torch.arange(6.0).view(2, 3).to(dtype)),
        Parameter(torch.tensor(7.0, dtype=dtype)),
        Parameter(torch.tensor([8.0, 9.0], dtype=dtype)),
    ]


NAMES = ["net.weight", "net.gain", "net.bias"]


class Peers:
    """Rank 0 of two. `full` is what all shards together are."""

    rank, world_size, group = 0, 2, None

    def __init__(self):
        self.full, self.error, self.waits = None, None, 0

    def all_gather(self, full_N, shard_S, *, tag=None):
        if self.error == "launch":
            raise CommError("a peer left")
        self.tag = tag
        peers = self

        class Work:
            def wait(self):
                if peers.error == "wait":
                    raise CommError("a peer left")
                peers.waits += 1
                full_N[shard_S.numel() :].copy_(peers.full[shard_S.numel() :])
                full_N[: shard_S.numel()].copy_(shard_S)

        return Work()


@pytest.fixture
def peers():
    return Peers()


@pytest.fixture
def unit(peers, monkeypatch):
    monkeypatch.setattr(gather, "_on_any_rank", lambda values, ranks: values)
    params = make_params()
    peers.full = torch.cat([*(param.detach().reshape(-1) for param in params), torch.zeros(3)])
    return ParamUnit(params, NAMES, UnitRanks.over(peers), device=CPU)


def storage_bytes(unit):
    return unit._full_N.untyped_storage().nbytes()


# ---- one rank -------------------------------------------------------------------------------------------------------


def test_one_rank_has_whole_parameters_for_good(single_rank):
    params = make_params(torch.float32)
    unit = ParamUnit(params, NAMES, UnitRanks.over(comm.group_backend(None)), device=CPU, dtype=torch.bfloat16)
    assert not unit.is_sharded
    for _ in range(2):
        assert unit.status is AVAILABLE
        for param, before in zip(params, make_params()):
            assert torch.equal(param.detach(), before.bfloat16())
            assert param.untyped_storage().data_ptr() == unit.shard_S.untyped_storage().data_ptr()
        unit.release()
        unit.gather()
    assert unit.source_S.dtype is unit.source_dtype is torch.float32
    assert unit.num_gathers == 0
    with torch.no_grad():
        params[2].fill_(5.0)
    assert unit.shard_of(2).tolist() == [5.0, 5.0]


# ---- marks ----------------------------------------------------------------------------------------------------------


def test_the_marks_that_libraries_read(unit, peers):
    first, second, third = unit.params
    assert [shape_of(param) for param in unit.params] == [(2, 3), (), (2,)]
    assert [param.ds_numel for param in unit.params] == [6, 1, 2]
    assert [param.ds_tensor.tolist() for param in unit.params] == [[0, 1, 2, 3, 4, 5], [], []]
    assert [param.partition_numel() for param in unit.params] == [6, 0, 0]
    assert len({param.ds_id for param in unit.params}) == 3
    assert (first.ds_status, first.shape, unit_of(second)) == (NOT_AVAILABLE, (0,), unit)
    first.all_gather()
    assert third.ds_status is AVAILABLE
    assert second.ds_summary()["shape"] == ()
    with torch.no_grad():
        first.zero_()
    first.partition()
    assert unit.shard_S.tolist() == [0, 1, 2, 3, 4, 5], "a change is dropped"
    first.all_gather([third])
    with torch.no_grad():
        first.zero_()
    third.partition([first], has_been_updated=True)
    assert unit.shard_S.tolist() == [0] * 6
    assert first.ds_summary()["status"] == "NOT_AVAILABLE"


def test_a_plain_module_is_left_behind(unit):
    params = unit.params
    unit.restore_plain()
    for param, before in zip(params, make_params()):
        assert torch.equal(param, before)
        assert unit_of(param) is None
        assert not [name for name in vars(param) if name.startswith("ds_")]
        assert not {"all_gather", "partition", "partition_numel"} & vars(param).keys()
        assert param.untyped_storage().nbytes() == param.nbytes, "memory of its own"


def test_a_unit_of_units_keeps_their_names_and_values(unit, peers):
    """As `initialize` does it with what `zero.Init` sharded."""
    params = unit.params
    ids = [param.ds_id for param in params]
    again = ParamUnit(params[1:], NAMES[1:], UnitRanks.over(peers), device=CPU)
    assert again.source_S.tolist() == [7.0, 8.0]
    assert [param.ds_id for param in params] == ids
    assert unit_of(params[0]) is unit
    assert unit_of(params[1]) is again


# ---- moves ----------------------------------------------------------------------------------------------------------


def test_memory_is_there_between_gather_and_release(unit, peers):
    assert (unit.status, storage_bytes(unit)) == (NOT_AVAILABLE, 0)
    for count in (1, 2):
        unit.launch()
        assert (unit.status, storage_bytes(unit), peers.waits) == (INFLIGHT, 12 * 4, count - 1)
        assert peers.tag == "net.weight"
        unit.finish()
        assert (unit.status, unit.num_gathers, unit.live.numel) == (AVAILABLE, count, 12)
        for param, before in zip(unit.params, make_params()):
            assert torch.equal(param, before)
        unit.release()
        assert (unit.status, storage_bytes(unit), unit.live.numel) == (NOT_AVAILABLE, 0, 0)
        assert [param.numel() for param in unit.params] == [0, 0, 0]


def test_a_saved_view_is_valid_again_after_the_next_gather(unit):
    unit.gather()
    view = unit.params[0].detach().t()  # as autograd saves one
    unit.release()
    assert view.untyped_storage().nbytes() == 0
    unit.gather()
    assert torch.equal(view, make_params()[0].t())


def test_gather_and_release_are_idempotent(unit, peers):
    unit.gather()
    unit.gather()
    assert (unit.num_gathers, peers.waits) == (1, 1)
    unit.release()
    unit.release()
    assert unit.live == LiveNumel(0)


@pytest.mark.parametrize("source", list(ZeroParamStatus))
@pytest.mark.parametrize("target", list(ZeroParamStatus))
def test_illegal_moves_are_refused(unit, source, target):
    if source is not NOT_AVAILABLE:
        unit.launch()
    if source is AVAILABLE:
        unit.finish()
    legal = {NOT_AVAILABLE: INFLIGHT, INFLIGHT: AVAILABLE, AVAILABLE: NOT_AVAILABLE}
    if legal[source] is target:
        unit._move(target)
        assert {param.ds_status for param in unit.params} == {target}
    else:
        with pytest.raises(
            StateError, match=rf"net\.weight, net\.gain, net\.bias: {source.name} -> {target.name} is not a legal"
        ):
            unit._move(target)
        assert unit.status is source


def test_release_waits_for_the_all_gather(unit):
    unit.launch()
    with pytest.raises(StateError, match="INFLIGHT -> NOT_AVAILABLE"):
        unit.release()


def test_abandon_waits_for_nothing_and_gives_the_buffer_up(unit, peers):
    assert unit.abandon() is None
    unit.launch()
    former = unit._full_N
    ranks, work = unit.abandon()
    assert ranks is peers
    assert (unit.status, peers.waits, unit.live.numel) == (NOT_AVAILABLE, 0, 0)
    work.wait()  # what still arrives, arrives in the former buffer
    assert former.untyped_storage().nbytes() == 12 * 4
    assert storage_bytes(unit) == 0
    unit.gather()
    assert torch.equal(unit.params[0], make_params()[0])


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_failed_all_gather_names_the_parameters_and_can_be_abandoned(unit, peers, where):
    peers.error = where
    with pytest.raises(CommError, match=r"all-gather of the parameters net\.weight, net\.gain, net\.bias: a peer left"):
        unit.gather()
    unit.abandon()
    assert (unit.status, unit.live.numel, storage_bytes(unit)) == (NOT_AVAILABLE, 0, 0)


def test_a_value_that_was_put_in_while_sharded_is_refused(unit):
    unit.params[2].data = torch.ones(2)
    with pytest.raises(StateError, match=r"parameter net\.bias: found a value of shape \(2,\) that was put into it"):
        unit.launch()
    assert (unit.status, unit.params[2].numel()) == (NOT_AVAILABLE, 0)
    unit.launch()  # the change was refused; nothing else is in the way


def in_place(param):
    with torch.no_grad():
        param.mul_(2)


def through_a_view(param):
    param.detach().reshape(-1)[:1].fill_(-1.0)


def with_data(param):
    param.data = param.data * 2


def test_an_operation_on_data_is_refused_once_where_values_are_compared(unit):
    unit.gather()
    unit.refuse_changes(compares=True)
    unit.params[0].data.zero_()
    unit.refuse_changes()
    with pytest.raises(StateError, match=r"parameter net\.weight: found an in-place change outside"):
        unit.refuse_changes(compares=True)
    unit.release()
    unit.gather()
    unit.refuse_changes(compares=True)


@pytest.mark.parametrize(
    ("change", "is_whole"),
    [(in_place, True), (in_place, False), (through_a_view, True), (through_a_view, False), (with_data, True)],
)
def test_a_change_outside_of_the_context_is_refused_once(unit, is_whole, change):
    if is_whole:
        unit.gather()
    change(unit.params[0])
    with pytest.raises(StateError, match=r"parameter net\.weight: found .* outside of deepspeed\.zero\.Gathered"):
        unit.refuse_changes()
    unit.refuse_changes()


@torch.no_grad()
def set_to_itself(param):
    param.set_(param)


@torch.no_grad()
def times_one(param):
    param.mul_(1.0)


def copied(param):
    param.data = param.data.clone()


def emptied(param):
    param.data = torch.empty(0)


@pytest.mark.parametrize(
    ("change", "is_whole"),
    [
        (set_to_itself, True),
        (set_to_itself, False),
        (times_one, True),
        (copied, True),
        (copied, False),
        (emptied, True),
        (emptied, False),
    ],
)
def test_what_leaves_the_values_as_they_are_is_no_change(unit, change, is_whole):
    if is_whole:
        unit.gather()
    change(unit.params[0])
    unit.refuse_changes()
    expected = unit._views[0] if is_whole else unit.nothing
    assert unit.params[0].is_set_to(expected)
    unit.gather()
    assert torch.equal(unit.params[0], torch.arange(6.0).view(2, 3))


def test_a_change_inside_of_a_context_is_the_contexts(unit, monkeypatch):
    told = []

    def on_any_rank(values, ranks):
        told.append(values[0])  # whether a change was seen; the other one: whether the engine wrote
        return [False, False]

    monkeypatch.setattr(gather, "_on_any_rank", on_any_rank)
    with GatheredParameters(unit.params):
        in_place(unit.params[0])
        unit.refuse_changes()
        with GatheredParameters(unit.params):
            pass
    assert told == [True]
    with GatheredParameters(unit.params):
        set_to_itself(unit.params[0])
        unit.params[1].data.add_(1)
    assert told == [True, False]
    unit.gather()
    unit.refuse_changes()
    assert unit.changes() == {}
    unit.params[1].data.add_(1)
    assert unit.changes() == {"net.gain": False}
    unit.params[0].partition()
    in_place(unit.params[0])
    with pytest.raises(StateError), GatheredParameters(unit.params):
        pass


# ---- values ---------------------------------------------------------------------------------------------------------


def test_the_shard_is_taken_from_whole_values(unit):
    unit.set_shard_of(unit.params[0], torch.full((2, 3), 4.0))
    unit.set_shard_of(unit.params[2], torch.full((2,), 4.0))  # of which the other rank has all
    assert unit.shard_S.tolist() == [4.0] * 6
    unit.gather()
    unit._full_N.fill_(5.0)
    unit.take_from_full()
    assert unit.shard_S.tolist() == [5.0] * 6


def test_whole_values_one_unit_at_a_time(unit, peers):
    other_peers = Peers()
    other_peers.full = torch.tensor([1.0, 2.0, 3.0, 0.0])
    other = ParamUnit([Parameter(torch.tensor([1.0, 2.0, 3.0]))], ["other"], UnitRanks.over(other_peers), device=CPU)
    plain = Parameter(torch.ones(1))
    seen = []
    for param, value in whole_in_turn([*unit.params, plain, *other.params]):
        assert value.shape == shape_of(param)
        seen.append((unit.status is AVAILABLE, other.status is AVAILABLE))
    assert seen == [(True, False)] * 3 + [(False, False), (False, True)]
    assert (unit.status, other.status, unit.num_gathers) == (NOT_AVAILABLE, NOT_AVAILABLE, 1)


@pytest.mark.parametrize(
    ("is_exact", "num_users", "status"), [(True, 0, AVAILABLE), (False, 1, AVAILABLE), (False, 0, NOT_AVAILABLE)]
)
def test_what_was_whole_before_stays_whole_unless_it_was_rounded_and_nobody_uses_it(unit, is_exact, num_users, status):
    unit.gather()
    unit.is_exact, unit.num_users = is_exact, num_users
    with whole(unit.params[0]) as value:
        assert value.shape == (2, 3)
    for _ in whole_in_turn(unit.params):
        pass
    assert unit.status is status


def test_a_part_to_save_is_padded(unit):
    assert [saved_part(param).tolist() for param in unit.params] == [[0.0, 1.0, 2.0], [7.0], [8.0]]
    assert unit.status is NOT_AVAILABLE
    plain = Parameter(torch.ones(3))
    assert saved_part(plain).tolist() == [1.0] * 3


def test_an_open_context_holds_the_unit(unit):
    with GatheredParameters(unit.params):
        unit.release()
        assert unit.status is AVAILABLE
        with GatheredParameters(unit.params[0]):
            unit.release()
        assert unit.status is AVAILABLE
    assert (unit.status, unit.num_contexts) == (NOT_AVAILABLE, 0)


def test_a_context_that_cannot_be_entered_holds_nothing(unit, peers):
    other_peers = Peers()
    other = ParamUnit([Parameter(torch.ones(3))], ["other"], UnitRanks.over(other_peers), device=CPU)
    other_peers.error = "wait"
    with pytest.raises(CommError, match="other"), GatheredParameters([*unit.params, *other.params]):
        raise AssertionError("entered")
    assert (unit.status, unit.num_contexts, other.num_contexts) == (NOT_AVAILABLE, 0, 0)


def test_a_unit_that_a_running_module_uses_stays_whole_after_the_context(unit):
    unit.gather()
    unit.num_users = 1
    with GatheredParameters(unit.params):
        pass
    assert unit.status is AVAILABLE
