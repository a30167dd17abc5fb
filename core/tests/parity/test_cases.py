"""Models and training loops that are out of the ordinary: every stage against plain torch, on two ranks.

The reference is a loop anyone can read: plain `backward`, gradients averaged over ranks by hand, one torch optimizer.
A parameter that got no gradient on any rank keeps `grad = None`, as under `DistributedDataParallel`.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.errors import CommError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.zero.offload.host import HostPlacement
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

STAGES = (0, 1, 2, 3)
#: stage, and whether its optimizer is offloaded to host memory (forced: the accelerator is the host)
PLACES = [*((stage, False) for stage in STAGES), (1, True), (2, True), (3, True)]
NUM_STEPS = 6
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
BATCH, INPUTS, WIDTH, OUTPUTS = 4, 5, 7, 3


class Net(nn.Module):
    """Sizes that two does not divide, a scalar, and a block that cases use as they like."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x_BI):
        return self.last(torch.tanh(self.extra(torch.tanh(self.block(torch.tanh(self.first(x_BI)) * self.gain)))))


class UsedTwice(Net):
    def forward(self, x_BI):
        x = torch.tanh(self.first(x_BI)) * self.gain
        return self.last(torch.tanh(self.block(torch.tanh(self.block(x)))) + torch.tanh(self.extra(x)))


class Sometimes(Net):
    def forward(self, x_BI, with_extra):
        x = torch.tanh(self.block(torch.tanh(self.first(x_BI)) * self.gain))
        return self.last(torch.tanh(self.extra(x)) if with_extra else x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_B):
        return self.head(torch.tanh(self.block(self.tokens(tokens_B))))


class SparseEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH, sparse=True)
        self.last = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, tokens_B):
        return self.last(torch.tanh(self.tokens(tokens_B)))


class ManyOutputs(Net):
    def forward(self, x_BI):
        hidden = torch.tanh(self.block(torch.tanh(self.first(x_BI)) * self.gain))
        return {"logits": self.last(hidden), "parts": [hidden, (self.extra(hidden),)], "name": "x"}


class Checkpointed(Net):
    """The block runs in two checkpoints; reentrant ones run a backward of their own inside the backward."""

    use_reentrant = True

    def forward(self, x_BI):
        x = torch.tanh(self.first(x_BI))
        x = checkpoint(self.piece, x, use_reentrant=self.use_reentrant)
        return self.last(checkpoint(self.piece, x, use_reentrant=self.use_reentrant))

    def piece(self, x):
        return torch.tanh(self.extra(torch.tanh(self.block(x) * self.gain)))


class CheckpointedFlat(Checkpointed):
    use_reentrant = False


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.block.requires_grad_(False)


class ZeroSized(Net):
    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x_BI):
        return super().forward(x_BI) + self.nothing.sum()


class Transposed(Net):
    """A parameter whose memory is not contiguous."""

    def __init__(self):
        super().__init__()
        self.block.weight = nn.Parameter(self.block.weight.detach().t())


class Reparametrized(Net):
    """The weight of the block is computed again in each forward, from parameters of the block."""

    def __init__(self, reparametrize):
        super().__init__()
        reparametrize(self.block)


class Recurrent(Net):
    """The batch is a sequence."""

    def __init__(self, kind):
        super().__init__()
        self.block = kind(WIDTH, WIDTH, num_layers=2, bidirectional=True)
        self.extra = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x_BI):
        return self.last(torch.tanh(self.extra(self.block(torch.tanh(self.first(x_BI)) * self.gain)[0])))


class Spectral(Net):
    """A complex filter of frequencies."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x_BI):
        x = torch.tanh(self.first(x_BI)) * self.gain
        x = torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)
        return self.last(torch.tanh(self.extra(torch.tanh(self.block(x)))))


class TwoDtypes(Net):
    def __init__(self):
        super().__init__()
        self.block.double()

    def forward(self, x_BI):
        x = torch.tanh(self.block(torch.tanh(self.first(x_BI)).double())).float() * self.gain
        return self.last(self.extra(x))


Backward = Callable[..., Any]


def mse(output, batch):
    return (output - batch.target).square().mean()


def usual(model, batch, backward):
    backward(mse(model(batch.x), batch))


def on_tokens(model, batch, backward):
    backward(F.cross_entropy(model(batch.tokens), batch.tokens.flip(0).clamp(max=OUTPUTS - 1)))


def on_some_steps(model, batch, backward):
    backward(mse(model(batch.x, batch.step % 2 == 0), batch))


def on_some_ranks(model, batch, backward):
    backward(mse(model(batch.x, batch.step % 2 == dist.get_rank()), batch))


def two_backwards(model, batch, backward):
    output = model(batch.x)
    backward(mse(output, batch), retain_graph=True)
    backward(output.abs().mean())


def two_forwards_then_two_backwards(model, batch, backward):
    one, two = mse(model(batch.x), batch), mse(model(batch.x.flip(0)), batch)
    backward(two)
    backward(one)


def two_backwards_of_different_parts(model, batch, backward):
    outputs = model(batch.x)
    backward(mse(outputs["logits"], batch), retain_graph=True)
    backward(outputs["parts"][1][0].square().mean())


def one_sum(model, batch, backward):
    output = model(batch.x)
    backward(mse(output, batch) + output.abs().mean())


def plain(model, batch, backward):
    mse(model(batch.x), batch).backward()


def plain_many_outputs(model, batch, backward):
    outputs = model(batch.x)
    loss = mse(outputs["logits"], batch) + outputs["parts"][0].square().mean()
    (loss + outputs["parts"][1][0].mean()).backward()


def plain_twice(model, batch, backward):
    output = model(batch.x)
    mse(output, batch).backward(retain_graph=True)
    output.abs().mean().backward()


def plain_vector(model, batch, backward):
    model(batch.x).backward(batch.target)


def around_the_engine(model, batch, backward):
    inner = getattr(model, "module", model)
    mse(inner(batch.x), batch).backward()


def checkpoint_around(model, batch, backward, use_reentrant=True):
    """The engine's forward runs again inside the backward, and there (reentrant) a backward of its own."""
    x = batch.x.clone().requires_grad_()
    backward(mse(checkpoint(model, x, use_reentrant=use_reentrant), batch) + model(batch.x.flip(0)).square().mean())


def flat_checkpoint_around(model, batch, backward):
    checkpoint_around(model, batch, backward, use_reentrant=False)


def plain_checkpoint_around(model, batch, backward):
    checkpoint_around(model, batch, lambda loss: loss.backward())


def nested_checkpoints_around(model, batch, backward):
    def outer(x):
        return model(x) + checkpoint(model, x * 2, use_reentrant=True)

    x = batch.x.clone().requires_grad_()
    backward(mse(checkpoint(outer, x, use_reentrant=True), batch) + mse(model(x), batch))


def plain_nested_checkpoints_around(model, batch, backward):
    nested_checkpoints_around(model, batch, lambda loss: loss.backward())


def gradient_penalty(model, batch, backward):
    x = batch.x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    backward(mse(output, batch) + slope.square().mean())


def transforms(model, batch, backward):
    """Gradients, a Jacobian and a directional derivative with respect to the inputs, by `torch.func`."""

    def of_outputs(x):
        output = model(x)
        return output.sum(), output

    slope, output = torch.func.grad(of_outputs, has_aux=True)(batch.x)
    of_samples = torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(batch.x)
    jacobian = torch.func.jacrev(model)(batch.x[0])
    _, along = torch.func.jvp(model, (batch.x,), (torch.ones_like(batch.x),))
    terms = (slope, of_samples, jacobian, along)
    backward(mse(output, batch) + mse(model(batch.x), batch) + sum(term.square().mean() for term in terms))


def transforms_without_a_backward(model, batch, backward):
    """They come between a forward and its backward, and no gradient is asked for through them."""
    loss = mse(model(batch.x), batch)
    assert torch.func.grad(lambda x: model(x).sum())(batch.x).detach().isfinite().all()
    with torch.no_grad():
        assert torch.func.jacfwd(model)(batch.x[0]).isfinite().all()
    backward(loss)


def with_create_graph(model, batch, backward):
    backward(mse(model(batch.x), batch), create_graph=True)


def all_parameters(net):
    return [param for param in net.parameters() if param.requires_grad]


def groups_with_own_rates(net):
    return [
        {"params": [*net.first.parameters(), net.gain], "lr": 3e-3},
        {"params": list(net.last.parameters()), "weight_decay": 0.0},
        {"params": [*net.block.parameters(), *net.extra.parameters()]},
    ]


def without_extra(net):
    return [param for name, param in net.named_parameters() if not name.startswith("extra")]


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module] = Net
    backward: Callable[[Any, Any, Backward], None] = usual
    parameters: Callable[[Any], list[Any]] = all_parameters
    keys: dict[str, Any] = field(default_factory=dict)
    added_later: bool = False  # `extra` is an own group from step 2 on
    by_client: bool = False  # hand over torch's AdamW instead of naming it
    accumulation: int = 1
    tolerance: float = 1e-5
    same_way: bool = True  # all ranks take the same way through the model, as stage 3 needs


CASES = {
    "as usual": Case(),
    "buckets of few elements": Case(keys={"zero_optimization": {"reduce_bucket_size": 10}}),
    "no overlap": Case(keys={"zero_optimization": {"overlap_comm": False}}),
    "a module used twice": Case(UsedTwice),
    "a parameter that is never used": Case(ManyOutputs, lambda m, b, backward: backward(mse(m(b.x)["logits"], b))),
    "a parameter used on some steps": Case(Sometimes, on_some_steps),
    "a parameter used on some ranks": Case(Sometimes, on_some_ranks, same_way=False),
    "a parameter used on some ranks, accumulated": Case(Sometimes, on_some_ranks, accumulation=3, same_way=False),
    "tied weights": Case(Tied, on_tokens),
    "two backwards": Case(backward=two_backwards),
    "two backwards, accumulated": Case(backward=two_backwards, accumulation=3),
    "two backwards of different parts": Case(ManyOutputs, two_backwards_of_different_parts),
    "two forwards, then two backwards": Case(backward=two_forwards_then_two_backwards, accumulation=2),
    "a sum of two losses": Case(backward=one_sum),
    "plain backward": Case(backward=plain),
    "plain backward, accumulated": Case(backward=plain, accumulation=4),
    "plain backward, twice": Case(backward=plain_twice, accumulation=2),
    "plain backward of several outputs": Case(ManyOutputs, plain_many_outputs),
    "plain backward of a vector": Case(backward=plain_vector),
    "plain backward past the engine's forward": Case(backward=around_the_engine),
    "gradient penalty": Case(backward=gradient_penalty),
    "gradient penalty, weights released": Case(
        backward=gradient_penalty,
        keys={"zero_optimization": {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}},
    ),
    "transforms of torch.func": Case(backward=transforms, accumulation=2),
    "transforms of torch.func, weights released": Case(
        backward=transforms,
        keys={"zero_optimization": {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}},
    ),
    "transforms of torch.func, no backward": Case(backward=transforms_without_a_backward),
    "create_graph": Case(backward=with_create_graph),
    "reentrant checkpoints": Case(Checkpointed),
    "reentrant checkpoints, accumulated": Case(Checkpointed, accumulation=3),
    "reentrant checkpoints, tiny buckets": Case(
        Checkpointed, accumulation=2, keys={"zero_optimization": {"reduce_bucket_size": 1}}
    ),
    "reentrant checkpoints, two backwards": Case(Checkpointed, two_backwards),
    "reentrant checkpoints, plain": Case(Checkpointed, plain),
    "checkpoints": Case(CheckpointedFlat),
    "a checkpoint around the engine": Case(backward=checkpoint_around),
    "a checkpoint around the engine, accumulated": Case(backward=checkpoint_around, accumulation=2),
    "a checkpoint around the engine, plain": Case(backward=plain_checkpoint_around, accumulation=2),
    "a flat checkpoint around the engine": Case(backward=flat_checkpoint_around),
    "nested checkpoints around the engine": Case(Checkpointed, nested_checkpoints_around),
    "nested checkpoints around the engine, plain": Case(Checkpointed, plain_nested_checkpoints_around),
    "checkpoints, plain, accumulated": Case(CheckpointedFlat, plain, accumulation=2),
    "frozen parameters": Case(Frozen),
    "a zero-sized parameter": Case(ZeroSized),
    "a parameter that is not contiguous": Case(Transposed),
    "complex parameters": Case(Spectral, by_client=True),
    "complex parameters, accumulated": Case(Spectral, accumulation=2, keys={"gradient_clipping": 0.05}),
    "weight_norm": Case(partial(Reparametrized, parametrizations.weight_norm)),
    "weight_norm by a hook": Case(partial(Reparametrized, nn.utils.weight_norm)),
    "spectral_norm": Case(partial(Reparametrized, parametrizations.spectral_norm)),
    "spectral_norm by a hook": Case(partial(Reparametrized, nn.utils.spectral_norm)),
    "LSTM": Case(partial(Recurrent, nn.LSTM)),
    "GRU": Case(partial(Recurrent, nn.GRU)),
    "own rates": Case(parameters=groups_with_own_rates),
    "two dtypes": Case(TwoDtypes, by_client=True),
    "a subset of the parameters": Case(parameters=without_extra),
    "a group added later": Case(parameters=without_extra, added_later=True),
    "sparse embedding": Case(SparseEmbedding, on_tokens),
    "prescaled": Case(keys={"prescale_gradients": True, "gradient_predivide_factor": 4.0, "gradient_clipping": 0.05}),
    "clipped, accumulated": Case(accumulation=3, keys={"gradient_clipping": 0.05}),
    "autocast": Case(keys={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
}


def is_in_every_run(name, stage, is_offloaded):
    """Stages 0, 2 and 3 see every case. Stage 1, which reduces as stage 2 does but at the end, and offloaded
    gradients, which stage 2 hands over, see those in which gradients are added up, late, or of some ranks."""
    case = CASES[name]
    adds_up = case.accumulation > 1 or case.added_later or not case.same_way or bool(case.keys)
    return (stage, is_offloaded) in ((0, False), (2, False), (3, False), *[(1, False), (2, True)] * adds_up)


every_place = pytest.mark.parametrize(
    ("name", "stage", "is_offloaded"),
    swept([(name, *place) for name in CASES for place in PLACES], is_in_every_run),
    ids=lambda value: f"{value}",
)


@dataclass
class Batch:
    step: int
    x: torch.Tensor
    target: torch.Tensor
    tokens: torch.Tensor


def batches(case):
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    for step in range(NUM_STEPS):
        yield [
            Batch(
                step,
                torch.randn(BATCH, INPUTS, generator=generator),
                torch.randn(BATCH, OUTPUTS, generator=generator),
                torch.randint(11, (BATCH,), generator=generator),
            )
            for _ in range(case.accumulation)
        ]


def build(case):
    torch.manual_seed(3)
    return case.build()


def add_extra(case, step, net, optimizer):
    if case.added_later and step == 2:
        optimizer.add_param_group({"params": list(net.extra.parameters()), "lr": 2e-2})


def average_gradients(params):
    """Over ranks; None stays None where no rank has a gradient."""
    for param in params:
        has = torch.tensor(float(param.grad is not None))
        dist.all_reduce(has)
        if not has:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        if param.grad.is_sparse:
            param.grad = param.grad.to_dense()
        grad = param.grad.detach().contiguous()
        dist.all_reduce(grad)
        param.grad = grad / dist.get_world_size()


def train_plain(case):
    net = build(case)
    optimizer = torch.optim.AdamW(case.parameters(net), **ADAMW)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled="torch_autocast" in case.keys)
    norms = []
    model = InContext(net, autocast)
    for step, micro_batches in enumerate(batches(case)):
        add_extra(case, step, net, optimizer)
        for batch in micro_batches:
            case.backward(model, batch, lambda loss, **options: loss.backward(**options))
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:  # backwards summed, micro-batches averaged
            if param.grad is not None and case.accumulation > 1:
                param.grad = param.grad / case.accumulation
        average_gradients(params)
        norms.append(nn.utils.clip_grad_norm_(params, case.keys.get("gradient_clipping", float("inf"))))
        optimizer.step()
        net.zero_grad()
    return weights(net), torch.stack(norms)


class InContext(nn.Module):
    def __init__(self, module, context):
        super().__init__()
        self.module, self.context = module, context

    def forward(self, *args):
        with self.context:
            return self.module(*args)


def create_engine(case, stage, net, is_offloaded):
    keys = copy.deepcopy(case.keys)
    # weights are released after each use; offloaded, they stay whole until the step
    reuse = {} if is_offloaded else {"stage3_max_reuse_distance": 0}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 2, **reuse, **keys.pop("zero_optimization", {})}
    if is_offloaded:
        zero["offload_optimizer"] = {"device": "cpu"}
        keys["zero_force_ds_cpu_optimizer"] = not case.by_client
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "zero_optimization": zero,
        "gradient_clipping": 0,
        **keys,
    }
    if not case.by_client:
        config["optimizer"] = {"type": "AdamW", "params": ADAMW}
    client = torch.optim.AdamW(case.parameters(net), **ADAMW) if case.by_client else None
    engine, optimizer, *_ = deepspeed.initialize(
        model=net,
        optimizer=client,
        model_parameters=None if case.by_client else case.parameters(net),
        config=config,
    )
    assert engine.sharding.placement.is_offloaded is is_offloaded
    return engine, optimizer


def train_engine(case, stage, is_offloaded):
    net = build(case)
    with mock.patch.object(HostPlacement, "is_needed", return_value=True):
        engine, optimizer = create_engine(case, stage, net, is_offloaded)
    norms = []
    for step, micro_batches in enumerate(batches(case)):
        add_extra(case, step, net, optimizer)
        for batch in micro_batches:
            case.backward(engine, batch, engine.backward)
            engine.step()
        norms.append(torch.as_tensor(engine.get_global_grad_norm()))
    assert engine.global_steps == NUM_STEPS
    engine.destroy()
    return weights(net), torch.stack(norms).float()


def weights(net):
    real = {name: torch.view_as_real(param) if param.is_complex() else param for name, param in net.named_parameters()}
    return {name: param.detach().double().clone() for name, param in real.items()}


def case_job(name, *place):
    """Weights and norms of a stage and place; of the reference without one."""
    case = CASES[name]
    return train_engine(case, *place) if place else train_plain(case)


@functools.cache
def results_by_rank(name, *place):
    return run_ranks(2, case_job, name, *place)


def assert_close(found, expected, tolerance):
    """max |a - b| / max |b| of each tensor."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if value.numel():
            difference = (found[key] - value).abs().max() / value.abs().max().clamp(min=1e-30)
            assert difference <= tolerance, (key, difference.item())


@every_place
def test_equals_plain_torch(name, stage, is_offloaded):
    if stage == 3 and not CASES[name].same_way:
        with pytest.raises(
            CommError, match=r"all-gather of the parameters (extra|last)\.weight.*all ranks take the same"
        ):
            results_by_rank(name, stage, is_offloaded)
        return
    pairs = zip(results_by_rank(name), results_by_rank(name, stage, is_offloaded), strict=True)
    for (expected, expected_norms), (found, found_norms) in pairs:
        assert_close(found, expected, CASES[name].tolerance)
        assert_close({"norm": found_norms}, {"norm": expected_norms}, CASES[name].tolerance)


@every_place
def test_ranks_end_equal(name, stage, is_offloaded):
    if stage == 3 and not CASES[name].same_way:
        return  # it raises: see above
    (one, _), (two, _) = results_by_rank(name, stage, is_offloaded)
    is_trained = [key for key in one if name != "a subset of the parameters" or not key.startswith("extra")]
    assert all(torch.equal(one[key], two[key]) for key in is_trained)


def test_what_was_never_used_is_not_decayed():
    start = run_ranks(1, start_job)[0]
    for stage in STAGES:
        trained, _ = results_by_rank("a parameter that is never used", stage, False)[0]
        assert torch.equal(trained["extra.weight"], start["extra.weight"])
        assert not torch.equal(trained["last.weight"], start["last.weight"])


def start_job():
    torch.manual_seed(3)
    return weights(ManyOutputs())
