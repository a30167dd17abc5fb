"""Failures in successive batches: each of them costs all ranks one step, whenever a peer comes to hear of it.

The timeout of groups is half an hour, and nothing ends a rank that waits for one which is a step further: it hangs
until the limit of the pool.
"""

import uuid
from datetime import timedelta

import deepspeed
import pytest
import torch
from deepspeed.comm.failure import PeerFailed
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from torch import nn

from .test_give_up import fail, take_path

WIDTH = 8
LIMIT = timedelta(seconds=100)


class Net(nn.Module):
    """Fails where it is told to; the losses of two micro-batches differ in their gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fails_in = ""

    def forward(self, x):
        if self.fails_in in ("start", "evaluation"):
            fail()
        hidden = torch.tanh(self.first(x))
        if self.fails_in == "middle":  # of a backward, with gradients of the last layer in flight
            hidden.register_hook(fail)
        if self.fails_in == "forward":
            fail()
        hidden = self.last(hidden)
        if self.fails_in == "backward":
            hidden.register_hook(fail)
        return hidden.square().mean()


def create_net():
    torch.manual_seed(0)
    return Net()


def create_engine(path, stage, accumulation=1):
    take_path(path)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 80},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    }
    return deepspeed.initialize(model=create_net(), config=config)[0]


def batch(number, micro, rank):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * number + 10 * micro + rank))


def weights(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [param.detach().clone() for param in engine.module.parameters()]


class Turns:
    """When a rank begins a batch.

    Args:
        order: "as they come"; "late": rank 1 begins the first batch in which rank 0 fails when that one is through with
            all that it fails in then; "heard": rank 0 begins a batch when rank 1 is through with the one before.
        plan: of rank 0.
        name: of this job alone.
    """

    def __init__(self, order, plan, name):
        self._store = torch.distributed.distributed_c10d._get_default_store()
        self._name, self._order, self._rank = name, order, torch.distributed.get_rank()
        self._first = [bool(each) for each in plan].index(True)
        self._last = self._first + [bool(each) for each in (*plan[self._first :], "")].index(False) - 1

    def begin(self, number):
        if self._order == "late" and self._rank == 1 and number == self._first:
            self._wait_for(0, self._last)
        if self._order == "heard" and self._rank == 0 and number > 0:
            self._wait_for(1, number - 1)

    def _wait_for(self, rank, number):
        self._store.wait([f"{self._name}/{rank}/{number}"], LIMIT)

    def end(self, number):
        self._store.set(f"{self._name}/{self._rank}/{number}", "")


def name_of(error):
    return "peer" if isinstance(error, PeerFailed) else type(error).__name__


def train(path, stage, plans, order, accumulation, name):
    """What ended each batch on this rank, and the weights after all.

    Args:
        plans: by rank, where it fails in each batch; "": nowhere.
        name: of this job alone.
    """
    engine = create_engine(path, stage, accumulation)
    rank, found = torch.distributed.get_rank(), []
    turns, failing = Turns(order, plans[0], name), 0 if order == "late" else accumulation // 2
    for number, fails_in in enumerate(plans[rank]):
        turns.begin(number)
        try:
            if any(plan[number] == "evaluation" for plan in plans):
                engine.module.fails_in = fails_in
                with torch.no_grad():
                    engine(batch(number, 0, rank))
            else:
                for micro in range(accumulation):
                    engine.module.fails_in = fails_in if micro == failing else ""
                    engine.backward(engine(batch(number, micro, rank)))
                    engine.step()
            found.append("made")
        except Exception as error:  # noqa: BLE001
            found.append(name_of(error))
        turns.end(number)
    values, num_steps = weights(engine), engine.global_steps
    engine.destroy()
    return found, num_steps, values


def plain(plans, accumulation):
    """The weights after the batches in which no rank fails, without the engine."""
    net = create_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for number, fails_in in enumerate(zip(*plans, strict=True)):
        if not any(fails_in):
            micros = [(micro, rank) for micro in range(accumulation) for rank in range(len(plans))]
            for micro, rank in micros:
                (net(batch(number, micro, rank)) / len(micros)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach() for param in net.parameters()]


def check(path, stage, plans, order, accumulation):
    job = uuid.uuid4().hex
    results = run_ranks(len(plans), train, path, stage, plans, order, accumulation, job, timeout_s=60)
    expected = plain(plans, accumulation)
    for plan, (found, num_steps, values) in zip(plans, results, strict=True):
        wanted = []
        for own, all_of_them in zip(plan, zip(*plans, strict=True), strict=True):
            is_heard = any(all_of_them) and not (stage < 3 and "evaluation" in all_of_them)
            # of ranks that fail in the same batch one may hear of the other before it comes to its own failure
            own_or_peer = ("MemoryError", "peer") if all(all_of_them) else ("MemoryError",)
            wanted.append(own_or_peer if own else ("peer",) if is_heard else ("made",))
        assert all(each in allowed for each, allowed in zip(found, wanted, strict=True)), (found, wanted)
        assert num_steps == sum(not any(each) for each in zip(*plans, strict=True))
        for value, other in zip(values, expected, strict=True):
            torch.testing.assert_close(value, other)


PLANS = {
    "starts": ("start start start - -", "- - - - -"),
    "middles": ("middle middle - -", "- - - -"),
    "forwards": ("forward forward - -", "- - - -"),
    "forward and backward": ("forward backward - -", "- - - -"),
    "backward and forward": ("backward forward - -", "- - - -"),
    "backwards": ("backward backward - -", "- - - -"),
    "behind a step": ("- backward backward - -", "- - - - -"),
    "five": ("forward backward backward forward backward - -", "- - - - - - -"),
    "in turn": ("forward - backward - - -", "- backward - forward - -"),
    "in the same and alone": ("forward backward - - -", "forward - - backward -"),
    "all in the same": ("forward backward - -", "backward forward - -"),
    "evaluation between": ("forward evaluation backward - -", "- - - - -"),
    "a step between": ("forward - backward -", "- - - -"),
}
CASES = [
    (stage, plan, order, accumulation)
    for stage in range(4)
    for plan in PLANS
    for order in ("late", "as they come", "heard")
    for accumulation in (1, 3)
    # else rank 0 fails where it has waited for rank 1 before, which is late
    if order != "late" or plan == "starts" or (stage < 3 and plan != "middles")
]
IN_EVERY_RUN = {
    (0, "forwards", "late", 1),
    (1, "forward and backward", "as they come", 3),
    (2, "backwards", "late", 1),
    (3, "backward and forward", "heard", 3),
    (1, "five", "late", 1),
    (3, "in turn", "as they come", 1),
    (0, "in the same and alone", "as they come", 3),
    (2, "all in the same", "as they come", 1),
    (3, "starts", "late", 3),
    (2, "middles", "as they come", 1),
    (3, "evaluation between", "as they come", 1),
    (1, "a step between", "heard", 1),
}


@pytest.mark.parametrize(("stage", "plan", "order", "accumulation"), swept(CASES, lambda *case: case in IN_EVERY_RUN))
def test_each_failure_costs_all_ranks_one_step(path, stage, plan, order, accumulation):
    plans = [["" if word == "-" else word for word in words.split()] for words in PLANS[plan]]
    check(path, stage, plans, order, accumulation)


def train_by_micro_batch(path, stage, failing):
    """What ended each micro-batch, three of which are a step; each is caught by itself. Rank 0 fails in `failing`."""
    engine = create_engine(path, stage, 3)
    rank, found = torch.distributed.get_rank(), []
    while engine.global_steps == 0:
        number = len(found)
        engine.module.fails_in = "forward" if rank == 0 and number in failing else ""
        try:
            engine.backward(engine(batch(0, number, rank)))
            engine.step()
            found.append("made")
        except Exception as error:  # noqa: BLE001
            found.append(name_of(error))
    values = weights(engine)
    engine.destroy()
    return found, values


@pytest.mark.parametrize("stage", range(4))
def test_two_failures_within_one_accumulation_cost_two(path, stage):
    (failed, values), (peer, others) = run_ranks(2, train_by_micro_batch, path, stage, (0, 1), timeout_s=60)
    assert failed == ["MemoryError", "MemoryError", "made", "made", "made"]
    assert peer.count("peer") == 2
    assert peer[-3:] == ["made"] * 3
    if stage != 2:  # there, when it comes to wait for its peer
        until_heard = ["made", "made", "peer"] if stage < 2 else ["peer"]
        assert peer[:-3] == until_heard * 2
    for value, other in zip(values, others, strict=True):
        assert torch.equal(value, other)


class Layer(nn.Linear):
    fails = False

    def forward(self, x):
        if self.fails:
            fail()
        return torch.tanh(super().forward(x))


def create_pipeline(path):
    take_path(path)
    torch.manual_seed(0)
    module = PipelineModule(
        [LayerSpec(Layer, WIDTH, WIDTH) for _ in range(4)], num_stages=2, loss_fn=nn.functional.mse_loss
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return deepspeed.initialize(model=module, config=config)[0]


def train_pipeline(path, plans, order, skips, job):
    """What ended each batch on this rank: its name, or the loss. `skips`: all leave out the batches with a failure."""
    engine, rank, found = create_pipeline(path), torch.distributed.get_rank(), []
    turns = None if skips else Turns(order, plans[0], job)
    for number, fails in enumerate(plans[rank]):
        if skips and any(plan[number] for plan in plans):
            continue
        if turns is not None:
            turns.begin(number)
        Layer.fails = bool(fails)
        data = [(batch(number, micro, 0), batch(number, micro, 1)) for micro in range(2)]
        try:
            found.append(float(engine.train_batch(iter(data))))
        except Exception as error:  # noqa: BLE001
            found.append(name_of(error))
        Layer.fails = False
        if turns is not None:
            turns.end(number)
    engine.destroy()
    return found


@pytest.mark.parametrize(("num_failures", "order"), [(2, "as they come"), (3, "as they come"), (3, "heard")])
def test_each_failure_of_a_pipeline_costs_one_batch(path, order, num_failures):
    """Two stages of two replicas, of which one fails first."""
    plans = [["x"] * num_failures + ["", "", ""], *[[""] * (num_failures + 3)] * 3]
    plans[3] = [*[""] * (num_failures + 1), "x", ""]
    results = run_ranks(4, train_pipeline, path, plans, order, False, uuid.uuid4().hex, timeout_s=60)
    losses = run_ranks(4, train_pipeline, path, plans, "", True, "")[0]
    for plan, found in zip(plans, results, strict=True):
        others = zip(*plans, strict=True)
        wanted = ["MemoryError" if own else "peer" if any(each) else "" for own, each in zip(plan, others, strict=True)]
        assert [each if isinstance(each, str) else "" for each in found] == wanted
        assert [each for each in found if isinstance(each, float)] == losses


class DividedNet(nn.Module):
    """Has collectives of the model's own, of the ranks that share a sequence."""

    def __init__(self, group):
        super().__init__()
        self.net = Net()
        self.attention = DistributedAttention(nn.functional.scaled_dot_product_attention, group, 2, 1)

    def forward(self, x_BTD):
        if self.net.fails_in == "first":
            fail()
        heads_BTHK = x_BTD.unflatten(2, (2, WIDTH // 2))
        return self.net(self.attention(heads_BTHK, heads_BTHK, heads_BTHK).flatten(2))


def train_divided(path, stage, plans, order, job):
    """What ended each batch on this rank, and the weights; without `order` all leave out the batches with a failure."""
    take_path(path)
    group = deepspeed.utils.groups.set_mesh({"sp": 2}).group("sp")
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=DividedNet(group), config=config)[0]
    rank, found = torch.distributed.get_rank(), []
    turns = Turns(order, plans[0], job) if order else None
    for number, fails_in in enumerate(plans[rank]):
        if turns is None and any(plan[number] for plan in plans):
            continue
        if turns is not None:
            turns.begin(number)
        engine.module.net.fails_in = fails_in
        try:
            engine.backward(engine(batch(number, 0, rank).unsqueeze(1).expand(-1, 2, -1)))
            engine.step()
            found.append("made")
        except Exception as error:  # noqa: BLE001
            found.append(name_of(error))
        if turns is not None:
            turns.end(number)
    values = weights(engine)
    engine.destroy()
    return found, values


@pytest.mark.parametrize(
    ("stage", "failures", "order"),
    [
        (0, "first first", "late"),
        (1, "first backward", "as they come"),
        (2, "backward forward", "as they come"),
        (3, "first first", "late"),
        (3, "backward first", "heard"),
    ],
)
def test_each_failure_of_a_divided_sequence_costs_one_step(path, stage, failures, order):
    plans = [[*failures.split(), "", ""], ["", "", "", ""]]
    (failed, values), (peer, others) = run_ranks(2, train_divided, path, stage, plans, order, uuid.uuid4().hex)
    assert (failed, peer) == (["MemoryError"] * 2 + ["made"] * 2, ["peer"] * 2 + ["made"] * 2)
    expected = run_ranks(2, train_divided, path, stage, plans, "", "")[0][1]
    for value, other, wanted in zip(values, others, expected, strict=True):
        assert torch.equal(value, other)
        assert torch.equal(value, wanted)
