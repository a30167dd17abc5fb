"""1-bit optimizers on real ranks, against plain torch that computes all of them; what they send, and what they save."""

import math
from pathlib import Path

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm.record import comms_logger
from deepspeed.errors import ConfigError
from deepspeed.optim import one_bit
from deepspeed.optim.zero_one_adam import is_sync_due, is_variance_due, num_variances
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine, tiny_gpt
from deepspeed.utils import (
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from torch import nn

LR, DECAY, BETA1, BETA2, EPS = 0.02, 0.1, 0.9, 0.99, 1e-6
PARAMS = {"lr": LR, "weight_decay": DECAY, "betas": [BETA1, BETA2], "eps": EPS, "bias_correction": True}
FREEZE = 8
KEYS = {
    "OneBitAdam": {"freeze_step": FREEZE},
    "OneBitLamb": {"freeze_step": FREEZE},
    "ZeroOneAdam": {
        **{"var_freeze_step": FREEZE, "var_update_scaler": 2},
        **{"local_step_scaler": 3, "local_step_clipper": 4},
    },
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 5, generator=generator)


def loss_of(net, step, rank):
    x, y = batch(step, rank)
    return (net(x.to(next(net.parameters()).dtype)).float() - y).square().mean()


def create(kind, net=None, extra=None, **keys):
    params = {**PARAMS, **KEYS[kind], **(extra or {})}
    return make_engine(net or model(), 0, optimizer={"type": kind, "params": params}, **keys)


def train(engine, steps):
    losses = []
    for step in steps:
        loss = loss_of(engine.module, step, dist.get_rank())
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def weights_of(engine):
    return [param.detach().clone() for param in engine.module.parameters()]


# ----- plain torch ---------------------------------------------------------------------------------------------------


def rounded(values):
    return values.norm() / math.sqrt(max(values.numel(), 1)) * torch.where(values >= 0, 1.0, -1.0)


class Averages:
    """The average over all ranks in one bit, of parameters by their number; algorithm 1 of arXiv 2102.02888."""

    def __init__(self):
        self.errors = {}

    def __call__(self, place, by_rank):
        world_size, numel = len(by_rank), by_rank[0].numel()
        worker, server = self.errors.setdefault(place, [torch.zeros(world_size, numel), torch.zeros(numel)])
        corrected = torch.stack([each.flatten() for each in by_rank]) + worker
        sent = torch.stack([rounded(each) for each in corrected])
        worker.copy_(corrected - sent)
        mean = sent.mean(0) + server
        result = torch.cat([rounded(part) for part in mean.split(8 * math.ceil(numel / (8 * world_size)))])
        server.copy_(mean - result)
        return result.view(by_rank[0].shape)


class Simulation:
    """All ranks of a run, with the weights of each."""

    def __init__(self, world_size):
        self.nets = [model() for _ in range(world_size)]
        self.average = Averages()
        shapes = [param.shape for param in self.nets[0].parameters()]
        self.m = [[torch.zeros(shape) for _ in self.nets] for shape in shapes]
        self.v = [torch.zeros(shape) for shape in shapes]

    def losses(self, step):
        """Of each rank; leaves the gradients, by parameter and rank, in `self.grads`."""
        found = []
        for rank, net in enumerate(self.nets):
            net.zero_grad()
            loss = loss_of(net, step, rank)
            loss.backward()
            found.append(loss.item())
        self.grads = list(zip(*[[param.grad for param in net.parameters()] for net in self.nets], strict=True))
        return found

    @torch.no_grad()
    def run(self, num_steps):
        losses = []
        for step in range(num_steps):
            with torch.enable_grad():
                losses.append(self.losses(step))
            for place, params in enumerate(zip(*[net.parameters() for net in self.nets], strict=True)):
                self.update(place, params, self.grads[place], step + 1)
        return losses, [param.detach() for param in self.nets[0].parameters()]

    def own_momenta(self, place, grads):
        return [BETA1 * m + (1 - BETA1) * grad for m, grad in zip(self.m[place], grads, strict=True)]

    def first_phase(self, place, grads):
        mean = sum(grads) / len(grads)
        self.m[place] = [BETA1 * m + (1 - BETA1) * mean for m in self.m[place]]
        self.v[place] = BETA2 * self.v[place] + (1 - BETA2) * mean**2

    def root(self, v, count):
        return (v / (1 - BETA2**count)).sqrt() + EPS


class PlainOneBitAdam(Simulation):
    def update(self, place, params, grads, t):
        if t <= FREEZE:
            self.first_phase(place, grads)
        else:
            self.m[place] = [self.average(place, self.own_momenta(place, grads))] * len(grads)
        for param, m in zip(params, self.m[place], strict=True):
            root = self.root(self.v[place], min(t, FREEZE))
            param.copy_(param * (1 - LR * DECAY) - LR * m / (1 - BETA1**t) / root)


class PlainOneBitLamb(Simulation):
    def update(self, place, params, grads, t):
        self.k, self.r, self.f = (vars(self).setdefault(name, {}) for name in ("k", "r", "f"))
        before = self.m[place][0]
        if t <= FREEZE:
            self.first_phase(place, grads)
            self.f[place] = self.v[place]
        else:
            self.m[place] = [self.average(place, self.own_momenta(place, grads))] * len(grads)
            grad = (self.m[place][0] - BETA1 * before) / (1 - BETA1)
            self.f[place] = BETA2 * self.f[place] + (1 - BETA2) * grad**2
        root = self.root(self.v[place], min(t, FREEZE))
        update = self.m[place][0] / (1 - BETA1**t) / root + DECAY * params[0]
        if t <= FREEZE:
            coeff = (params[0].norm() / update.norm()).clamp(0.01, 10.0)
            self.k[place] = 0.9 * self.k.get(place, 0.0) + 0.1 * coeff
        else:
            last = self.r.get(place, 1.0)
            factor = (root / self.root(self.f[place], t)).max().clamp(0.5, 4.0).item()
            self.r[place] = min(max(factor, last * 0.9), last * 1.1)
            coeff = self.r[place] * self.k[place]
        for param in params:
            param.copy_(param - LR * coeff * update)


class PlainZeroOneAdam(Simulation):
    def update(self, place, params, grads, t):
        self.local = vars(self).setdefault("local", {})
        rate, keeps = LR / (1 - BETA1**t), 1 - LR * DECAY
        if t <= FREEZE and is_variance_due(t, 2):
            self.first_phase(place, grads)
        else:
            self.m[place] = self.own_momenta(place, grads)
            if t <= FREEZE:
                self.m[place] = [self.average(place, self.m[place])] * len(grads)
        root = self.root(self.v[place], num_variances(min(t, FREEZE), 2))
        start, moved, weight = self.local.get(place, (params[0].clone(), [0.0] * len(grads), 0.0))
        moved = [each * keeps + rate * m for each, m in zip(moved, self.m[place], strict=True)]
        start, weight = start * keeps, weight * keeps + rate
        for param, m in zip(params, self.m[place], strict=True):
            param.copy_(param * keeps - rate * m / root)
        if t <= FREEZE:
            return
        self.local[place] = start, moved, weight
        if is_sync_due(t - FREEZE, 3, 4):
            self.m[place] = [self.average(place, [each / weight for each in moved])] * len(grads)
            for param, m in zip(params, self.m[place], strict=True):
                param.copy_(start - weight * m / root)
            del self.local[place]


PLAIN = {"OneBitAdam": PlainOneBitAdam, "OneBitLamb": PlainOneBitLamb, "ZeroOneAdam": PlainZeroOneAdam}


def parity_job(kind, num_steps):
    engine = create(kind)
    losses = train(engine, range(num_steps))
    weights = weights_of(engine)
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", KEYS)
def test_ranks_train_as_plain_torch_that_computes_them_all(kind, world_size):
    num_steps = 24  # the ranks of ZeroOneAdam meet after the last one
    found = run_ranks(world_size, parity_job, kind, num_steps)
    losses, weights = PLAIN[kind](world_size).run(num_steps)
    for rank, (own_losses, own_weights) in enumerate(found):
        assert own_losses == pytest.approx([each[rank] for each in losses], rel=1e-4)
        assert all(map(torch.equal, own_weights, found[0][1])), "all ranks have the same weights"
        for param, wanted in zip(own_weights, weights, strict=True):
            torch.testing.assert_close(param, wanted, rtol=1e-3, atol=1e-5)


# ----- what is sent --------------------------------------------------------------------------------------------------


def net_of_two_matrices():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))


def sent_bytes():
    """Bytes that this rank has sent, by the comms logger: of W ranks, parts of all-reduces go around twice."""
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    factors = {"all_reduce": 2 * share, "all_to_all": share, "all_gather": share}
    return sum(
        factors[name] * size * row[0] for name, sizes in comms_logger.comms_dict.items() for size, row in sizes.items()
    )


def bytes_job(kind, extra):
    """Bytes of each of some steps."""
    x = torch.randn(4, 256)
    engine = create(kind, net_of_two_matrices(), extra, comms_logger={"enabled": True})
    found = []
    for _ in range(10):
        comms_logger.reset()
        engine.backward(engine(x).square().mean())
        engine.step()
        found.append(sent_bytes())
    engine.destroy()
    comms_logger.configure(enabled=False)
    comms_logger.reset()
    return found


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb"])
def test_after_the_warm_up_a_32nd_of_the_bytes_is_sent(kind):
    numel = sum(param.numel() for param in net_of_two_matrices().parameters())
    for found in run_ranks(2, bytes_job, kind, {"freeze_step": 4}):
        assert all(4 * numel <= each < 4.1 * numel for each in found[:4]), "an fp32 all-reduce of 2 ranks"
        assert all(each <= 4 * numel / 30 for each in found[4:])


def test_local_steps_send_next_to_nothing():
    keys = {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4}
    numel = sum(param.numel() for param in net_of_two_matrices().parameters())
    for found in run_ranks(2, bytes_job, "ZeroOneAdam", keys):
        assert all(each >= 4 * numel for each in found[:2])
        meets = [index for index, each in enumerate(found[2:], 1) if each > numel / 100]
        assert meets == [local for local in range(1, 9) if is_sync_due(local, 1, 4)] == [1, 2, 4, 8]
        assert all(each <= 4 * numel / 30 for each in found[2:])


# ----- precisions, accumulation, clipping ----------------------------------------------------------------------------


def precision_job(kind, precision):
    keys = {precision: {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}}
    engine = create(kind, **keys)
    losses = train(engine, range(24))
    weights = weights_of(engine)
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_near_fp32(kind, precision):
    exact = run_ranks(2, parity_job, kind, 24)
    found = run_ranks(2, precision_job, kind, precision)
    for (losses, weights), (wanted, _) in zip(found, exact, strict=True):
        assert losses == pytest.approx(wanted, rel=0.05, abs=0.03)
        assert all(map(torch.equal, weights, found[0][1]))


def accumulation_job(num_parts):
    engine = create("OneBitAdam", gradient_accumulation_steps=num_parts, train_micro_batch_size_per_gpu=8 // num_parts)
    for step in range(16):
        x, y = batch(step, dist.get_rank())
        for x_part, y_part in zip(x.chunk(num_parts), y.chunk(num_parts), strict=True):
            engine.backward((engine(x_part) - y_part).square().mean())
            engine.step()
    weights = weights_of(engine)
    engine.destroy()
    return weights


def test_micro_batches_add_up():
    whole, parts = (run_ranks(2, accumulation_job, num)[0] for num in (1, 2))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def norm_job():
    engine = create("OneBitAdam", extra={"freeze_step": 1}, gradient_clipping=0.01)
    train(engine, range(2))
    norm = engine.get_global_grad_norm()
    loss = loss_of(engine.module, 2, dist.get_rank())
    own = torch.autograd.grad(loss, list(engine.module.parameters()))
    loss = loss_of(engine.module, 2, dist.get_rank())
    engine.backward(loss)
    shown = [param.grad for param in engine.module.parameters()]
    engine.step()
    squares = torch.stack([grad.square().sum() for grad in own]).sum()
    dist.all_reduce(squares)
    engine.destroy()
    return shown, norm, engine.get_global_grad_norm(), (squares / dist.get_world_size()).sqrt().item()


def test_the_norm_of_own_gradients_is_the_mean_of_the_ranks():
    for shown, _, found, wanted in run_ranks(2, norm_job):
        assert shown == [None] * 4, "what a rank has of its own is no average"
        assert found == pytest.approx(wanted, rel=1e-5)


def overflow_job():
    engine = create("OneBitAdam", extra={"freeze_step": 1}, fp16={"enabled": True, "initial_scale_power": 8})
    train(engine, range(3))
    before = weights_of(engine)
    loss = loss_of(engine.module, 3, dist.get_rank())
    engine.backward(loss * (float("inf") if dist.get_rank() == 1 else 1.0))
    engine.step()
    applied, after = engine.was_step_applied(), weights_of(engine)
    train(engine, range(4, 6))
    later = weights_of(engine)
    engine.destroy()
    return applied, all(map(torch.equal, before, after)), later


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    found = run_ranks(2, overflow_job)
    assert [each[:2] for each in found] == [(False, True)] * 2
    assert all(map(torch.equal, found[0][2], found[1][2]))


def two_backwards_job():
    """Two backwards reduce before one step: at a boundary, without micro-batches."""
    weights = []
    for splits in (False, True):
        engine = create("OneBitAdam", extra={"freeze_step": 1})
        train(engine, range(2))
        for step in range(2, 5):
            losses = [loss_of(engine.module, number, dist.get_rank()) for number in (step, step + 50)]
            for loss in losses if splits else [sum(losses)]:
                engine.backward(loss)
            engine.step()
        weights.append(weights_of(engine))
        engine.destroy()
    return weights


def test_two_backwards_before_a_step_add_up():
    for whole, parts in run_ranks(2, two_backwards_job):
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


# ----- between two meetings ------------------------------------------------------------------------------------------

#: the ranks meet after the updates 3, 4, 6 and 10
RARE = {"var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4}


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 5)])

    def forward(self, x, head):
        return self.heads[head](self.body(x).tanh())


def train_heads(engine, steps):
    """The second head has a gradient in all updates but the sixth, in which ranks meet."""
    for step in steps:
        x, y = batch(step, dist.get_rank())
        out = engine(x.to(next(engine.module.parameters()).dtype), int(step != 5))
        engine.backward((out.float() - y).square().mean())
        engine.step()


def heads_job(precision):
    engine = create("ZeroOneAdam", TwoHeads(), RARE, **({precision: {"enabled": True}} if precision else {}))
    train_heads(engine, range(5))
    before = weights_of(engine)
    train_heads(engine, range(5, 6))
    after, masters = weights_of(engine), [safe_get_local_fp32_param(each) for each in engine.module.parameters()]
    train_heads(engine, range(6, 10))
    later = weights_of(engine)
    engine.destroy()
    return before, after, masters, later


@pytest.mark.parametrize("precision", ["", "bf16"])
def test_ranks_meet_with_what_has_no_gradient_then(precision):
    (before, *first), (others, *second) = run_ranks(2, heads_job, precision)
    assert not any(map(torch.equal, before[4:], others[4:])), "the second head has moved on each rank by itself"
    for own, other in zip(first, second, strict=True):
        assert all(map(torch.equal, own, other))


def change(param, way):
    if way == "safe_set":
        safe_set_full_fp32_param(param, torch.full(param.shape, 3.0))
    elif way == "data":
        param.data.fill_(3.0)
    else:
        with torch.no_grad():
            param.fill_(3.0)


def changing_job(way, precision):
    engine = create("ZeroOneAdam", TwoHeads(), RARE, **({precision: {"enabled": True}} if precision else {}))
    train_heads(engine, range(5))
    params = list(engine.module.parameters())
    for place in (0, 4):
        change(params[place], way)
    train_heads(engine, range(5, 6))
    weights = weights_of(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize(("way", "precision"), [("safe_set", ""), ("data", ""), ("copy", ""), ("copy", "bf16")])
def test_a_meeting_keeps_a_weight_that_was_changed_before_it(way, precision):
    first, second = run_ranks(2, changing_job, way, precision)
    assert all(map(torch.equal, first, second))
    for place in (0, 4):
        assert (first[place].float() - 3).abs().median() < 0.1, "it has made one update since, and decay"


def gradient_job():
    engine = create("OneBitAdam", extra={"freeze_step": 1})
    train(engine, range(2))
    loss = loss_of(engine.module, 2, dist.get_rank())
    wanted = list(torch.autograd.grad(loss, list(engine.module.parameters())))
    engine.backward(loss_of(engine.module, 2, dist.get_rank()))
    params = list(engine.module.parameters())
    found = [(safe_get_full_grad(param), safe_get_local_grad(param).view(param.shape)) for param in params]
    safe_set_full_grad(params[0], torch.ones_like(params[0]))
    replaced = safe_get_full_grad(params[0])
    for grad in wanted:
        dist.all_reduce(grad)
        grad.div_(dist.get_world_size())
    engine.destroy()
    return wanted, found, replaced


def test_a_gradient_that_is_asked_for_is_the_average():
    for wanted, found, replaced in run_ranks(2, gradient_job):
        for grad, both in zip(wanted, found, strict=True):
            for each in both:
                torch.testing.assert_close(each, grad)
        assert bool((replaced == 1).all())


# ----- checkpoints ---------------------------------------------------------------------------------------------------


def saving_job(kind, folder, precision):
    keys = {precision: {"enabled": True}} if precision else {}
    engine = create(kind, **keys)
    train(engine, range(12))  # ZeroOneAdam: the ranks have met after 8 + 4
    engine.save_checkpoint(folder, tag="one")
    losses = train(engine, range(12, 16))
    weights = weights_of(engine)
    engine.destroy()
    return losses, weights


def loading_job(kind, folder, precision):
    keys = {precision: {"enabled": True}} if precision else {}
    engine = create(kind, **keys)
    train(engine, range(3))  # what it has of its own goes
    engine.load_checkpoint(folder, tag="one")
    losses = train(engine, range(12, 16))
    weights = weights_of(engine)
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("precision", ["", "bf16"])
def test_a_resumed_run_goes_on_as_it_was(kind, precision, tmp_path):
    first = run_ranks(2, saving_job, kind, str(tmp_path), precision)
    assert {path.name for path in Path(tmp_path, "one").iterdir()} >= {
        f"rounding_rank_{rank}_mp_rank_00_states.pt" for rank in range(2)
    }
    for (losses, weights), (wanted, others) in zip(
        run_ranks(2, loading_job, kind, str(tmp_path), precision), first, strict=True
    ):
        assert losses == wanted
        assert all(map(torch.equal, weights, others))


def warned_loading_job(folder):
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_bit, "warn_once", said.append)
        return *loading_job("OneBitAdam", folder, ""), said


class Wrapper(torch.optim.Optimizer):
    """As of Accelerate."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure=None):
        self.optimizer.step(closure)


def wrapped_job(wraps):
    net = model()
    optimizer = one_bit.OnebitAdam(net.parameters(), lr=LR, freeze_step=2)
    engine = make_engine(net, 0, arguments={"optimizer": Wrapper(optimizer) if wraps else optimizer})
    losses = train(engine, range(5))
    engine.destroy()
    return losses, optimizer.keeps_gradients


def test_an_optimizer_in_a_wrapper_sends_one_bit():
    found = run_ranks(2, wrapped_job, True)
    assert found == run_ranks(2, wrapped_job, False)
    assert all(keeps for _, keeps in found)


def test_other_ranks_begin_without_what_was_left_to_send(tmp_path):
    run_ranks(2, saving_job, "OneBitAdam", str(tmp_path), "")
    found = run_ranks(3, warned_loading_job, str(tmp_path))
    assert all(math.isfinite(loss) for losses, _, _ in found for loss in losses)
    assert all(map(torch.equal, found[0][1], found[2][1]))
    for *_, said in found:
        assert "found no rounding errors of 3 ranks in what was loaded, for 4 of 4 trained parameters" in said[-1]


def from_adam_job(folder, source, target):
    params = {"lr": LR, "betas": [BETA1, BETA2]}
    first = make_engine(model(), 0, optimizer={"type": source, "params": params})
    train(first, range(10))
    first.save_checkpoint(folder)
    first.destroy()
    engine = create(target)
    engine.load_checkpoint(folder)
    before = weights_of(engine)
    losses = train(engine, range(10, 14))
    moved = not any(map(torch.equal, before, weights_of(engine)))
    engine.destroy()
    return losses, moved


@pytest.mark.parametrize(("source", "target"), [("Adam", "OneBitAdam"), ("Lamb", "OneBitLamb")])
def test_a_run_of_adam_goes_on_in_one_bit(source, target, tmp_path):
    for losses, moved in run_ranks(2, from_adam_job, str(tmp_path), source, target):
        assert moved
        assert losses[-1] < 3


def options_job(folder):
    """Adam's bias correction, and a mask that this run's groups have."""
    first = make_engine(model(), 0, optimizer={"type": "Adam", "params": {"lr": LR}})
    train(first, range(3))
    first.save_checkpoint(folder, tag="adam")
    first.destroy()
    found = []
    for mask in (torch.ones(()), torch.zeros(())):
        net = model()
        optimizer = one_bit.OnebitAdam([{"params": list(net.parameters()), "exp_avg_mask": mask}], freeze_step=3)
        engine = make_engine(net, 0, arguments={"optimizer": optimizer})
        engine.load_checkpoint(folder, tag="one" if found else "adam")
        (group,) = optimizer.param_groups
        found.append((group["bias_correction"], group["exp_avg_mask"].item(), group["lr"]))
        train(engine, range(3, 5))
        engine.save_checkpoint(folder, tag="one")
        engine.destroy()
    return found


def test_a_load_leaves_the_mask_and_the_correction_as_this_run_has_them(tmp_path):
    assert run_ranks(2, options_job, str(tmp_path)) == [[(False, 1.0, LR), (False, 0.0, LR)]] * 2


def other_phases_job():
    kind, keys = "ZeroOneAdam", {"local_step_clipper": 2 + dist.get_rank()}
    with pytest.raises(ConfigError, match="the optimizer's settings.*local_step_clipper"):
        create(kind, extra=keys)


def test_ranks_that_would_meet_at_other_times_are_refused():
    run_ranks(2, other_phases_job)


# ----- pipelines -----------------------------------------------------------------------------------------------------


def tied_layers():
    def logits(module, x):
        return x @ module.weight.T

    ends = [TiedLayerSpec("ends", nn.Embedding, 11, 8), TiedLayerSpec("ends", nn.Embedding, 11, 8, forward_fn=logits)]
    return [ends[0], *[LayerSpec(nn.Linear, 8, 8) for _ in range(2)], ends[1]]


def pipeline_job(num_stages):
    net = PipelineModule(
        tied_layers(),
        num_stages=num_stages,
        loss_fn=lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        seed_layers=True,
        base_seed=7,
        partition_method="uniform",
    )
    optimizer = {"type": "OneBitAdam", "params": {**PARAMS, "freeze_step": 3}}
    engine = make_engine(net, 0, optimizer=optimizer, gradient_accumulation_steps=2, gradient_clipping=0.5)
    generator = torch.Generator().manual_seed(engine.mesh.rank("dp"))

    def batches():
        while True:
            tokens = torch.randint(11, (4, 5), generator=generator)
            yield tokens, tokens.roll(1, 1)

    data = batches()
    losses = [engine.train_batch(data).item() for _ in range(8)]
    weights = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    engine.destroy()
    return losses, weights


def test_stages_of_a_pipeline_train_as_one():
    (losses, whole), *_ = run_ranks(2, pipeline_job, 1)
    for own_losses, own in run_ranks(4, pipeline_job, 2):
        assert own_losses == pytest.approx(losses, rel=1e-4)
        for name, param in own.items():
            torch.testing.assert_close(param, whole[name], rtol=1e-3, atol=1e-5)


# ----- refusals ------------------------------------------------------------------------------------------------------


def refused_job(stage):
    with pytest.raises(ConfigError) as caught:
        make_engine(model(), stage, optimizer={"type": "OneBitAdam"}, zero_allow_untested_optimizer=True)
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_is_refused(stage):
    for message in run_ranks(2, refused_job, stage):
        assert message.startswith(f"zero_optimization.stage: found {stage} with OnebitAdam, whose ranks average")


# ----- convergence ---------------------------------------------------------------------------------------------------


def text_job(text, optimizer):
    torch.manual_seed(0)
    engine = make_engine(tiny_gpt(sequence_length=32), 0, optimizer=optimizer)
    codes = torch.tensor([ord(letter.upper()) % 64 for letter in text])
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(200):
        starts = torch.randint(len(codes) - 33, (8, 1), generator=generator)
        tokens = codes[starts + torch.arange(33)]
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return sum(losses[-40:]) / 40


@pytest.mark.sweep  # minutes, where the processor is shared
@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("OneBitAdam", {"freeze_step": 80}),
        ("ZeroOneAdam", {"var_freeze_step": 120, "local_step_scaler": 40, "local_step_clipper": 4}),
    ],
)
def test_a_gpt_learns_a_text_as_well_as_with_adam(kind, extra):
    text = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    params = {"lr": 2e-3, "betas": [0.9, 0.99]}
    adam = run_ranks(2, text_job, text, {"type": "Adam", "params": params})
    found = run_ranks(2, text_job, text, {"type": kind, "params": {**params, **extra}})
    assert sum(found) < 1.02 * sum(adam)
