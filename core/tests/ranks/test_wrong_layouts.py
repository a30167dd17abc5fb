"""Wrong layouts and wrong pipelines: one message on every rank, and none waits. Others stand in test_agreement.py,
test_mesh.py, test_mpu.py, test_moe_layer.py, test_tensor_parallel.py and test_pipeline_uses.py.
"""

import contextlib
import re
import threading

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.comm.failure import PeerFailed
from deepspeed.errors import CommError, ConfigError
from deepspeed.moe.layer import MoE
from deepspeed.parallel import groups
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.sequence.hugging_face import sequence_parallel_unit
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.testing.distributed import run_ranks
from torch import nn

WIDTH = 4


def create(model, **keys):
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **keys}
    return deepspeed.initialize(model=model, config=config)[0]


def outcome(call):
    """What this rank raised; then the ranks go on together."""
    try:
        call()
        found = "nothing", ""
    except Exception as error:  # noqa: BLE001 - whatever it is
        found = type(error).__name__, str(error)
    groups.reset()
    engine = create(nn.Linear(WIDTH, WIDTH))
    engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
    engine.step()
    engine.destroy()
    return found


# ---- layouts --------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self, num_experts, ep_size, k=1):
        super().__init__()
        self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts, ep_size=ep_size, k=k)

    def forward(self, x):
        return self.moe(x)[0]


def attend(num_heads, length):
    groups.set_mesh({"dp": 1, "sp": 2})
    attention = DistributedAttention(lambda q, k, v: q, groups._get_sequence_parallel_group(), 2, 1)
    heads = torch.ones(2, length, num_heads, 2)
    attention(heads, heads, heads)


def one_fails():
    create(nn.Linear(WIDTH, WIDTH) if dist.get_rank() == 0 else "net")


def one_fails_late():
    """After the ranks have agreed on much."""

    def optimizer(params):
        if dist.get_rank() == 1:
            raise MemoryError("no room for moments")
        return torch.optim.SGD(params, lr=0.1)

    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    deepspeed.initialize(model=nn.Linear(WIDTH, WIDTH), config=config, optimizer=optimizer)


def linear(**keys):
    create(nn.Linear(WIDTH, WIDTH), **keys)


LAYOUTS = {
    "experts over ranks": (
        lambda: create(Experts(3, 2)),
        "ConfigError: MoE: found num_experts 3 with ep_size 2; give an ep_size that divides the experts",
    ),
    "experts of a token": (lambda: create(Experts(2, 1, k=3)), "ConfigError: MoE: found k 3 with num_experts 2"),
    "experts of other sizes": (
        lambda: create(Experts(2, 1 + dist.get_rank())),
        "ConfigError: .*the parameters of experts, .* must be the same on all ranks, and rank 1 differs",
    ),
    "tensors over more ranks": (
        lambda: linear(tensor_parallel={"autotp_size": 3}),
        "ConfigError: tensor_parallel.autotp_size: .* tp 3 = 3, but the world has 2 ranks",
    ),
    "tensors beside data": (
        lambda: linear(tensor_parallel={"autotp_size": 2}, mesh={"dp": 2}),
        "ConfigError: mesh.dp, tensor_parallel.autotp_size: .* = 4, but the world has 2 ranks",
    ),
    "tensors against the mesh": (
        lambda: linear(tensor_parallel={"autotp_size": 2}, mesh={"tp": 1}),
        "ConfigError: tensor_parallel.autotp_size: found 2, but mesh.tp is 1",
    ),
    "tensors on one rank": (
        lambda: linear(tensor_parallel={"autotp_size": 1 + dist.get_rank()}),
        "ConfigError: mesh: rank 0 asks for all ranks data parallel, and rank 1 for tensor_parallel.autotp_size",
    ),
    "sequences over more ranks": (
        lambda: linear(sequence_parallel_size=3),
        "ConfigError: sequence_parallel_size: .* sp 3 x tp 1 = 3, but the world has 2 ranks",
    ),
    "data over fewer ranks": (
        lambda: linear(data_parallel_size=1),
        "ConfigError: data_parallel_size: .* = 1, but the world has 2 ranks",
    ),
    "stages": (
        lambda: PipelineModule([nn.Linear(WIDTH, WIDTH)] * 3, num_stages=3),
        "ConfigError: PipelineModule: found 3 stages for 2 ranks, which must divide evenly among them; use 1 or 2",
    ),
    "sequences over more ranks by a call": (
        lambda: sequence_parallel_unit(3),
        "ConfigError: sequence_parallel_size: found 3 for 2 ranks; give 1 or 2",
    ),
    "heads": (lambda: attend(1, 4), "ValueError: .*found 1 attention head for 2 ranks"),
    "sequences of other lengths": (
        lambda: attend(2, 3 + dist.get_rank()),
        "ValueError: .* the ranks of one sequence brought different shapes .*give every rank an equal part",
    ),
    "copies": (
        lambda: linear(zero_optimization={"stage": 3, "mics_shard_size": 3}),
        "ConfigError: zero_optimization.mics_shard_size: found 3, .* divide evenly into groups of 1 or 2",
    ),
    "batch": (lambda: linear(train_batch_size=3), "ConfigError: train_batch_size: found 3, which is not a multiple"),
    "precision": (
        lambda: linear(bf16={"enabled": dist.get_rank() == 0}),
        "ConfigError: initialize: bf16 must be the same on all ranks",
    ),
    "no model on one rank": (one_fails, "(ConfigError|HeardFailure: .*rank 1 failed in .*): initialize: model is str"),
    "no optimizer on one rank": (
        one_fails_late,
        "(|HeardFailure: .*rank 1 failed in initialize with )MemoryError: no room for moments",
    ),
}


def layout_job(name):
    return outcome(LAYOUTS[name][0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_wrong_layout_is_named_on_every_rank(name):
    for kind, text in run_ranks(2, layout_job, name, timeout_s=60):
        assert re.match(LAYOUTS[name][1], f"{kind}: {text}"), f"{kind}: {text}"


# ---- pipelines ------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self, num_rows, more=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_rows, WIDTH))
        self.more = nn.Parameter(torch.zeros(1)) if more else None

    def forward(self, x):
        return x


class TooLarge(nn.Module):
    def __init__(self):
        super().__init__()
        raise MemoryError("no room for a layer")


def linears(*more):
    return [LayerSpec(nn.Linear, WIDTH, WIDTH), *more, LayerSpec(nn.Linear, WIDTH, WIDTH)]


def pipeline(layers=None, **keys):
    keys = {"num_stages": 2, "loss_fn": F.mse_loss, "partition_method": "uniform", **keys}
    return PipelineModule(linears() if layers is None else layers, **keys)


def tied(first, second):
    create(pipeline([TiedLayerSpec("e", *first), *linears(), TiedLayerSpec("e", *second)]))


def train(model=None, loss=None, **keys):
    engine = create(model or pipeline(**({"loss_fn": loss} if loss else {})), **keys)
    engine.train_batch(iter([(torch.ones(2, WIDTH), torch.ones(2, WIDTH))] * 4))


def returning(function):
    """A first stage that ends with `function`."""
    return lambda: train(pipeline([LayerSpec(nn.Linear, WIDTH, WIDTH), function, *linears()]))


def mixed_batch(engine):
    shapes = [(2, WIDTH), (2, WIDTH)] if engine.is_first_stage() else [(2, WIDTH), (1, WIDTH)]
    engine.train_batch(iter([(torch.ones(2, WIDTH), torch.ones(shape)) for shape in shapes]))


FAILED = r"(|PeerFailed: .*rank \d failed with |PeerLeft: .*rank \d failed with )"
PIPELINES = {
    "a stage that cannot be built": (
        lambda: train(pipeline([LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(TooLarge)])),
        r"(|HeardFailure: .*rank 1 failed in PipelineModule\(num_stages=2\) with )MemoryError: no room for a layer",
    ),
    "numbers of stages": (
        lambda: train(pipeline(num_stages=1 + dist.get_rank())),
        r"RanksParted: rank 1 called PipelineModule\(num_stages=2\), and rank 0 called initialize|"
        r"RanksParted: rank 0 called initialize, and rank 1 called PipelineModule\(num_stages=2\)",
    ),
    "a shared module of two shapes": (
        lambda: tied((Table, 4), (Table, 5)),
        r"ConfigError: .*the modules that the stages 0, 1 share must be .* tied_modules.e.weight \([45], 4\)",
    ),
    "a shared module of two kinds": (
        lambda: tied((Table, 4), (Table, 4, True)),
        "ConfigError: .*the modules that the stages 0, 1 share must be the same",
    ),
    "a key of a shared module": (
        lambda: TiedLayerSpec(7, Table, 4),
        "ConfigError: TiedLayerSpec: found the key 7; give a name without dots",
    ),
    "a dict between stages": (
        returning(lambda x: {"x": x}),
        f"{FAILED}ConfigError: PipelineModule: the last layer of stage 0 returned dict; .* a tensor or a tuple",
    ),
    "nothing between stages": (returning(lambda x: None), f"{FAILED}ConfigError: .* stage 0 returned NoneType"),
    "a loss that is no function": (lambda: pipeline(loss_fn="mse"), "ConfigError: PipelineModule: loss_fn is str"),
    "a loss of no gradient": (
        lambda: train(loss=lambda x, y: F.mse_loss(x, y).detach()),
        f"{FAILED}ConfigError: PipelineModule: the loss of a micro-batch has no gradient",
    ),
    "labels of another shape on the last stage": (
        lambda: mixed_batch(create(pipeline(), gradient_accumulation_steps=2)),
        r"ConfigError: train_batch: micro-batch 1 has labels of shape \[2, 4\] on stage 0 and \[1, 4\] on stage 1",
    ),
    "an iterator that ends early": (
        lambda: train(gradient_accumulation_steps=5),
        r"StateError: train_batch: the data iterator of rank 0 \(stage 0\) ended after 4 of 5 micro-batches",
    ),
    "no micro-batches": (
        lambda: create(pipeline()).eval_batch(iter([]), num_micro_batches=0),
        "ConfigError: eval_batch: found num_micro_batches 0; give 1 or more",
    ),
    "an evaluation without samples": (
        lambda: create(pipeline()).eval_batch(),
        r"ConfigError: eval_batch: the data iterator of rank 0 \(stage 0\) is missing; pass an iterator of the samples",
    ),
    "micro-batches of interleaved stages": (
        lambda: train(
            pipeline([*linears(), *linears()], interleave=2),
            gradient_accumulation_steps=3,
            pipeline={"schedule": "interleaved"},
        ),
        "ConfigError: .*found 3 micro-batches on 2 stages; .* a multiple of 2",
    ),
    "accumulation that differs": (
        lambda: train(gradient_accumulation_steps=1 + dist.get_rank()),
        "ConfigError: .*gradient_accumulation_steps must be the same on all ranks",
    ),
    "schedules that differ": (
        lambda: train(pipeline={"schedule": "zero_bubble" if dist.get_rank() else "1f1b"}),
        "ConfigError: initialize: pipeline must be the same on all ranks",
    ),
    "layers to recompute": (
        lambda: pipeline(activation_checkpoint_interval=1, checkpointable_layers=["Lineal"]),
        r"ConfigError: .* found checkpointable_layers \['Lineal'\], and no layer is one of them; the layers are Linear",
    ),
    "a name of a layer to recompute": (
        lambda: pipeline(checkpointable_layers="Linear"),
        "ConfigError: .* found checkpointable_layers 'Linear'; give a list",
    ),
    "intervals": (
        lambda: pipeline(activation_checkpoint_interval=-1),
        "ConfigError: .* found activation_checkpoint_interval -1; give a number of layers, or 0",
    ),
    "a method": (lambda: pipeline(partition_method=None), "ConfigError: partition_method: found None; use one of"),
}


def pipeline_job(name):
    return outcome(PIPELINES[name][0])


@pytest.mark.parametrize("name", PIPELINES)
def test_a_wrong_pipeline_is_named_on_every_rank(name):
    for kind, text in run_ranks(2, pipeline_job, name, timeout_s=60):
        assert re.match(PIPELINES[name][1], f"{kind}: {text}"), f"{kind}: {text}"


def caught_job(late_s):
    """A program that catches the error of one rank trains on, beside an engine that was there before."""
    torch.manual_seed(0)
    before = create(nn.Linear(WIDTH, WIDTH), zero_optimization={"stage": 1})
    if dist.get_rank() == 0:
        threading.Event().wait(late_s)
    with pytest.raises((ConfigError, PeerFailed)):
        one_fails()
    with pytest.raises((MemoryError, PeerFailed)):
        one_fails_late()
    before.backward(before(torch.ones(2, WIDTH)).square().mean())
    before.step()
    weight = before.module.weight.detach().clone()
    before.destroy()
    return weight


@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_an_engine_outlives_the_failure_of_another_one_to_be_built(late_s):
    """Also where the peer comes late, when the rank that failed has left its groups."""
    first, last = run_ranks(2, caught_job, late_s, timeout_s=60)
    assert torch.equal(first, last)


def failed_update_job():
    """One rank fails where its peers do not: they hear of it when the next engine is built."""
    engine = create(nn.Linear(WIDTH, WIDTH), zero_optimization={"stage": 0})
    if dist.get_rank() == 1:
        engine.basic_optimizer.step = lambda: 1 / 0
    engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
    with contextlib.suppress(ZeroDivisionError, CommError):
        engine.step()
    engine.destroy()
    return outcome(lambda: None)


def test_the_next_engine_works_after_an_update_that_failed_on_one_rank():
    assert run_ranks(2, failed_update_job, timeout_s=60) == [("nothing", "")] * 2
