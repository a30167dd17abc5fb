"""A step that fails on one rank ends on all of them, whatever group each waits in, and all can go on afterwards.

The ranks stay alive, as those of a program that catches the error do, and the timeout of groups is half an hour: a rank
that nobody tells hangs until the limit of the pool.
"""

import inspect
import os
import re

import deepspeed
import pytest
import torch
from deepspeed.comm.failure import PeerFailed
from deepspeed.comm.torch_group import forget
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.sequence.loss import mean_over_sequence
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from torch import nn

WIDTH = 8
CAUSE = "rank 1 failed with MemoryError: no memory"


class Net(nn.Module):
    """Fails in its last layer: before the reduction of gradients, and between collectives of the model's own."""

    def __init__(self, *, has_experts):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        experts = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2, drop_tokens=False)
        self.experts = experts if has_experts else None
        self.fails_in = ""

    def forward(self, x):
        hidden = self.first(x)
        if self.fails_in == "forward":
            fail()
        if self.experts is not None:
            hidden, _, _ = self.experts(hidden)
        hidden = self.last(hidden)
        if self.fails_in == "backward":
            hidden.register_hook(fail)
        return hidden.square().mean()


def fail(*_):
    raise MemoryError("no memory")


def create_engine(stage, *, has_experts=False, **sections):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **sections,
    }
    return deepspeed.initialize(model=Net(has_experts=has_experts), config=config)[0]


def take_path(path):
    """Put back after the job."""
    os.environ["DS_COMM_DIRECT"] = "1" if path == "direct" else "0"
    forget()


def train_step(engine):
    engine.backward(engine(torch.full((2, WIDTH), 1.0 + torch.distributed.get_rank())))
    engine.step()


def sums(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        names = ("first", "last")
        return [float(getattr(engine.module, name).weight.detach().double().sum()) for name in names]


def fail_and_go_on(path, stage, where, after, has_experts):
    """What the failed step raised here, and the weights after steps that follow it."""
    take_path(path)
    rank = torch.distributed.get_rank()
    engine = create_engine(stage, has_experts=has_experts)
    train_step(engine)
    engine.module.fails_in = where if rank == 1 else ""
    try:
        train_step(engine)
        found = "no error"
    except Exception as error:  # noqa: BLE001
        found = f"{type(error).__name__}: {error}"
        if after == "destroy":
            engine.destroy()
            engine = create_engine(stage, has_experts=has_experts)
            train_step(engine)
    engine.module.fails_in = ""
    train_step(engine)
    weights = sums(engine)
    engine.destroy()
    return found, weights


def check(results):
    failed, peer = results[1][0], results[0][0]
    assert failed == "MemoryError: no memory"
    assert CAUSE in peer, peer
    weights = [weights for _, weights in results]
    assert weights[0] == weights[1]


CASES = [
    (stage, where, experts) for stage in range(4) for where in ("forward", "backward") for experts in (False, True)
]
IN_EVERY_RUN = {(1, "forward", False), (1, "backward", True), (2, "forward", True), (3, "backward", False)}


@pytest.mark.parametrize(("stage", "where", "has_experts"), swept(CASES, lambda *case: case in IN_EVERY_RUN))
@pytest.mark.parametrize("after", ["next step", "destroy"])
def test_all_ranks_leave_a_failed_step_and_go_on(path, stage, where, after, has_experts):
    check(run_ranks(2, fail_and_go_on, path, stage, where, after, has_experts))


def fail_plainly(path, stage, where, has_experts):
    """Rank 1 fails in `loss.backward()`, and calls nothing until its peer has heard of it."""
    take_path(path)
    rank, store = torch.distributed.get_rank(), torch.distributed.distributed_c10d._get_default_store()
    engine = create_engine(stage, has_experts=has_experts)

    def step(fails=False):
        engine.module.fails_in = where if fails else ""
        loss = engine(torch.full((2, WIDTH), 1.0 + rank))
        if fails and where == "loss":
            loss = loss.clone()
            loss.register_hook(fail)
        loss.backward()
        engine.step()

    step()
    try:
        step(fails=rank == 1)
        found = "no error"
    except Exception as error:  # noqa: BLE001
        found = f"{type(error).__name__}: {error}"
        if rank == 0:
            store.set(f"heard/{engine.global_steps}", found)
        else:
            store.wait([f"heard/{engine.global_steps}"])
    step()
    weights = sums(engine)
    engine.destroy()
    store.delete_key("heard/1")
    return found, weights


@pytest.mark.parametrize(
    ("stage", "where", "has_experts"),
    swept(
        [(stage, where, experts) for stage in range(4) for where in ("loss", "backward") for experts in (False, True)],
        lambda *case: case in {(0, "loss", True), (1, "backward", True), (2, "loss", False), (3, "backward", False)},
    ),
)
def test_a_plain_backward_that_fails_is_told_as_it_fails(path, stage, where, has_experts):
    check(run_ranks(2, fail_plainly, path, stage, where, has_experts))


def fail_twice(path):
    """Rank 1 fails two times before rank 0 looks; both retry until a step is made."""
    take_path(path)
    engine = create_engine(1)
    train_step(engine)
    found = []
    failures = 2 if torch.distributed.get_rank() == 1 else 0
    for attempt in range(6):
        engine.module.fails_in = "forward" if attempt < failures else ""
        try:
            train_step(engine)
            break
        except (MemoryError, PeerFailed) as error:
            found.append(type(error).__name__)
    weights = sums(engine)
    engine.destroy()
    return found, weights


def test_a_rank_may_fail_more_often_than_its_peer_has_heard(path):
    (peer, weights), (failed, others) = run_ranks(2, fail_twice, path)
    assert failed == ["MemoryError"] * 2
    assert peer == ["PeerFailed" if path == "messages" else "PeerLeft"] * 2
    assert weights == others


def fail_on_all(path, where):
    """All ranks fail alike, as for want of memory, and then nothing is in anyone's way."""
    take_path(path)
    engine = create_engine(2)
    for fails_in in (where, where, "", where, ""):
        engine.module.fails_in = fails_in
        try:
            train_step(engine)
        except MemoryError:
            engine.zero_grad()
    weights = sums(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_all_ranks_may_fail_by_themselves(path, where):
    first, second = run_ranks(2, fail_on_all, path, where)
    assert first == second


def repeat_what_fails(stage, fails_in):
    """The weights after two steps of three micro-batches. Rank 0 has no memory for the second one of the second step;
    each rank that fails repeats the step."""
    engine = create_engine(stage, gradient_accumulation_steps=3)
    rank, found = torch.distributed.get_rank(), []
    while engine.global_steps < 2:
        try:
            for micro in range(3):
                fails = rank == 0 and engine.global_steps == 1 and micro == 1 and not found
                engine.module.fails_in = fails_in if fails else ""
                engine.backward(engine(torch.full((2, WIDTH), 1.0 + micro + rank)))
                engine.step()
        except (MemoryError, PeerFailed) as error:
            found.append("of a peer" if isinstance(error, PeerFailed) else type(error).__name__)
    weights = sums(engine)
    engine.destroy()
    return found, weights


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 2])
def test_a_forward_that_fails_costs_the_gradients_of_its_step_in_every_world(world, stage):
    expected = run_ranks(world, repeat_what_fails, stage, "")
    for fails_in in ("forward", "backward"):
        results = run_ranks(world, repeat_what_fails, stage, fails_in)
        assert [found for found, _ in results] == [["MemoryError"], ["of a peer"]][:world]
        assert [weights for _, weights in results] == [weights for _, weights in expected]


def evaluate_and_fail():
    """Without gradients nobody waits: a sample that cannot be evaluated is the affair of one rank."""
    engine = create_engine(1)
    engine.module.fails_in = "forward" if torch.distributed.get_rank() == 1 else ""
    with torch.no_grad():
        try:
            engine(torch.ones(2, WIDTH))
        except MemoryError:
            engine.module.fails_in = ""
    train_step(engine)
    weights = sums(engine)
    engine.destroy()
    return weights


def test_an_evaluation_that_fails_is_told_to_nobody():
    first, second = run_ranks(2, evaluate_and_fail)
    assert first == second


class DividedNet(Net):
    """Its attention has the first collective of the ranks that share a sequence."""

    def __init__(self, group):
        super().__init__(has_experts=False)
        self.attention = DistributedAttention(nn.functional.scaled_dot_product_attention, group, 2, 1)

    def forward(self, x_BTD):
        heads_BTHK = x_BTD.unflatten(2, (2, WIDTH // 2))
        if self.fails_in == "forward":
            fail()
        context_BTD = self.attention(heads_BTHK, heads_BTHK, heads_BTHK).flatten(2)
        if self.fails_in == "head":
            fail()
        return super().forward(context_BTD)


def create_divided(path, stage):
    take_path(path)
    mesh = deepspeed.utils.groups.set_mesh({"sp": 2})
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    model = DividedNet(mesh.group("sp"))
    return model, deepspeed.initialize(model=model, config={**config, "zero_optimization": zero})[0], mesh.group("sp")


def evaluate_divided_and_fail(path, stage, num_evaluations):
    """What ended each evaluation, and the weights after two steps."""
    model, engine, _ = create_divided(path, stage)
    tokens, found = torch.full((2, 4, WIDTH), 1.0 + torch.distributed.get_rank()), []
    for number in range(num_evaluations):
        model.fails_in = "forward" if number == 0 and torch.distributed.get_rank() == 1 else ""
        try:
            with torch.no_grad():
                found.append(float(engine(tokens * (1 + number))))
        except Exception as error:  # noqa: BLE001
            found.append(f"{type(error).__name__}: {error}")
    model.fails_in = ""
    for _ in range(2):
        engine.backward(engine(tokens))
        engine.step()
    weights = sums(engine)
    engine.destroy()
    return found, weights


@pytest.mark.parametrize(("stage", "num_evaluations"), [(0, 1), (1, 2), (3, 1)])
def test_an_evaluation_that_fails_before_the_first_collective_of_a_sequence(path, stage, num_evaluations):
    (peer, weights), (failed, others) = run_ranks(2, evaluate_divided_and_fail, path, stage, num_evaluations)
    assert failed[0] == "MemoryError: no memory"
    assert re.match(f"PeerFailed: .*{CAUSE}", peer[0]), peer
    assert len(peer) == len(failed) == num_evaluations
    assert all(isinstance(each, float) for each in (*peer[1:], *failed[1:]))
    assert weights == others


def train_divided(path, stage, fails, skipped):
    """What ended each of four steps, and the weights after them. In the second one rank 1 `fails` behind the last
    collective of its forward, while the other one computes the loss of both; or all leave out the step `skipped`."""
    model, engine, group = create_divided(path, stage)
    found = {}
    for number in range(4):
        if number == skipped:
            continue
        model.fails_in = "head" if fails and number == 1 and torch.distributed.get_rank() == 1 else ""
        try:
            loss = engine(torch.full((2, 4, WIDTH), 1.0 + number + 0.5 * torch.distributed.get_rank()))
            loss = mean_over_sequence(loss=loss, num_tokens=4, group=group)
            engine.backward(loss)
            engine.step()
            found[number] = float(loss)
        except Exception as error:  # noqa: BLE001
            found[number] = f"{type(error).__name__}: {error}"
    weights = sums(engine)
    engine.destroy()
    return found, weights


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_of_a_sequence_whose_peer_failed_costs_one_step(path, stage):
    (peer, weights), (failed, others) = run_ranks(2, train_divided, path, stage, True, None)
    assert failed.pop(1) == "MemoryError: no memory"
    assert re.match(f"Peer(Left|Failed): .*{CAUSE}", peer[1]), peer
    del peer[1]
    assert (peer, weights) == (failed, others)
    assert run_ranks(2, train_divided, path, stage, False, 1) == [(peer, weights)] * 2


class Layer(nn.Linear):
    fails = False

    def forward(self, x):
        if self.fails:
            fail()
        return torch.tanh(super().forward(x))


def fail_in_a_pipeline(path, stage, schedule, failing_rank):
    take_path(path)
    torch.manual_seed(0)
    model = PipelineModule(
        [LayerSpec(Layer, WIDTH, WIDTH) for _ in range(4)], num_stages=2, loss_fn=nn.functional.mse_loss
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": stage},
        "pipeline": {"schedule": schedule},
    }
    engine = deepspeed.initialize(model=model, config=config, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))[
        0
    ]
    batch = [(torch.randn(2, WIDTH), torch.randn(2, WIDTH)) for _ in range(3)]
    losses = [float(engine.train_batch(iter(batch)))]
    found = []
    for call in (engine.train_batch, engine.eval_batch):
        Layer.fails = torch.distributed.get_rank() == failing_rank
        try:
            call(iter(batch))
            found.append("no error")
        except Exception as error:  # noqa: BLE001
            found.append(f"{type(error).__name__}: {error}")
        Layer.fails = False
        losses.append(float(engine.train_batch(iter(batch))))
    assert engine.module.training
    engine.destroy()
    return found, losses


@pytest.mark.parametrize(
    ("stage", "schedule", "failing_rank"),
    swept(
        [(stage, schedule, rank) for stage in (0, 1) for schedule in ("1f1b", "zero_bubble") for rank in (0, 3)],
        lambda *case: case in {(1, "1f1b", 0), (0, "zero_bubble", 3)},
    ),
)
def test_all_replicas_of_a_pipeline_leave_a_failed_batch_and_go_on(path, stage, schedule, failing_rank):
    results = run_ranks(4, fail_in_a_pipeline, path, stage, schedule, failing_rank)
    for rank, (found, losses) in enumerate(results):
        assert losses == results[0][1]
        for each in found:
            if rank == failing_rank:
                assert each == "MemoryError: no memory"
            else:
                assert re.search(f"rank {failing_rank} failed with MemoryError: no memory", each), (rank, found)
    assert results[0][1][0] > results[0][1][1] > results[0][1][2]


class ReadingNet(nn.Module):
    """Reads a weight of a module that is not running, at last."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x):
        hidden = self.second(self.first(x))
        if self.fails:
            fail()
        return nn.functional.linear(hidden, self.first.weight).square().mean()


def read_after_a_failure(path):
    take_path(path)
    torch.manual_seed(0)
    net = ReadingNet()
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=net, config=config)
    net.fails = torch.distributed.get_rank() == 1
    with pytest.raises((MemoryError, PeerFailed)):
        train_step(engine)
    net.fails = False
    train_step(engine)
    engine.destroy()


def test_what_one_rank_alone_has_seen_being_read_is_forgotten_after_a_failure(path):
    run_ranks(2, read_after_a_failure, path, timeout_s=60)


def other_numbers_of_failures_job():
    """Rank 0 hears of the first of two failures of rank 1, and then fails once by itself: they failed as often, and are
    in the same epoch of their groups."""
    engine = create_engine(1)
    rank = torch.distributed.get_rank()

    def fails():
        engine.module.fails_in = "forward"
        with pytest.raises(MemoryError):
            engine(torch.ones(2, WIDTH))
        engine.module.fails_in = ""

    if rank == 1:
        fails()
        fails()
        torch.distributed.barrier()
    else:
        torch.distributed.barrier()
        engine.backward(engine(torch.ones(2, WIDTH)))
        with pytest.raises(PeerFailed):
            engine.step()
        fails()
    engine.destroy()
    engine = create_engine(1)
    engine.backward(engine(torch.ones(2, WIDTH)))
    engine.step()
    return engine.global_steps


@pytest.mark.parametrize("direct", ["1", "0"])
def test_ranks_that_heard_of_other_failures_begin_together(direct):
    assert run_ranks(2, other_numbers_of_failures_job, environment={"DS_COMM_DIRECT": direct}) == [1, 1]


class GeneratingNet(Net):
    """Fails in a forward of a generation, or between two, as a processor of logits does."""

    def generate(self, x, num_tokens=3):
        with torch.no_grad():
            for _ in range(num_tokens):
                x = x + self(x)
                if self.fails_in == "between":
                    fail()
        return x


def fail_in_a_generation(path, where, has_experts, has_hybrid_engine):
    """What the generation raised here; the ones before and after it, and a step, work on all ranks."""
    take_path(path)
    torch.manual_seed(0)
    zero = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1 if has_experts else 3, **zero},  # peers need the next layer of all ranks
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "hybrid_engine": {"enabled": has_hybrid_engine, "pin_parameters": False},
    }
    module = GeneratingNet(has_experts=has_experts)
    engine, *_ = deepspeed.initialize(model=module, config=config)
    x = torch.ones(2, WIDTH)
    assert inspect.signature(module.generate) == inspect.signature(type(module).generate.__get__(module))
    before = module.generate(x)
    module.fails_in = where if torch.distributed.get_rank() == 1 else ""
    try:
        engine.generate(x)
        found = "no error"
    except Exception as error:  # noqa: BLE001
        found = f"{type(error).__name__}: {error}"
    module.fails_in = ""
    assert torch.equal(module.generate(x), before)
    train_step(engine)
    engine.destroy()
    assert "generate" not in vars(module)
    return found


@pytest.mark.parametrize(
    ("where", "has_experts", "has_hybrid_engine"),
    [("forward", False, False), ("between", False, False), ("between", False, True), ("between", True, False)],
)
def test_a_generation_that_fails_on_one_rank_fails_on_all(path, where, has_experts, has_hybrid_engine):
    peer, failed = run_ranks(2, fail_in_a_generation, path, where, has_experts, has_hybrid_engine, timeout_s=40)
    assert failed == "MemoryError: no memory"
    assert CAUSE in peer, peer
