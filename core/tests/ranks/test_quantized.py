"""ZeRO++ on real ranks: what modules see, what is reduced, what is sent, and what stays exact.

Bounds are those of the rounding: half a scale per element that was sent, where a scale is the largest element of a
block over 127 (int8) or 7 (int4). unit/zero/test_quantized.py has the blocks themselves.
"""

import contextlib
import gc
import os
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm.torch_group import forget
from deepspeed.errors import ConfigError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine, tiny_gpt
from deepspeed.testing.tiers import swept
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.zero import GatheredParameters, quantized
from deepspeed.zero.param_unit import unit_of
from torch import nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
BOTH = {**WEIGHTS, **GRADIENTS}
LOCO = {**GRADIENTS, "zeropp_loco_param": {"err_beta": 0.75, "reset_T": 4}}
#: copies of the shards, or of the weights, in groups of two ranks
MICS, HPZ = {"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}
#: nothing stays whole between forward and backward, so that hpZ gathers from its copy
SMALLEST = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
#: half a scale, and what fp32 adds to it; per largest element of a block
INT8, INT4 = (0.5 + 2**-15) / 127, (0.5 + 2**-15) / 7


def values_of(rank, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def collectives_job(transport):
    os.environ["DS_COMM_DIRECT"] = "1" if transport == "direct" else "0"  # put back after the job
    forget()
    backend = dist.group_backend()
    backend.connect()
    world_size, rank = backend.world_size, backend.rank
    gathered = []
    for numel in (1, 255, 256, 1025):
        own = slice(rank * numel, (rank + 1) * numel)
        for dtype in DTYPES:
            rounding = torch.finfo(dtype).eps
            shards = [values_of(r, numel, dtype) for r in range(world_size)]
            full, shard = torch.empty(world_size * numel, dtype=dtype), shards[rank].clone()
            work = quantized.all_gather(backend, full, shard)
            shard.zero_()  # it was copied
            work.wait()
            exact = torch.cat(shards).float()
            error = (full.float() - exact).abs().view(world_size, numel)
            largest = exact.abs().view(world_size, numel).amax(1, keepdim=True)
            assert bool((error <= largest * (INT8 + rounding)).all())
            gathered.append(full)

            fulls = [values_of(r, world_size * numel, dtype) for r in range(world_size)]
            full = fulls[rank].clone()
            quantized.reduce_scatter(backend, full[own], full).wait()
            exact = sum(each[own].double() for each in fulls)
            allowed = sum(each[own].double().abs().max() for each in fulls) * INT4
            assert bool(((full[own] - exact).abs() <= allowed + rounding * (exact.abs() + allowed)).all())
    for dtype in (torch.float64, torch.int64):  # as they are
        full, shard = torch.empty(world_size, dtype=dtype), torch.tensor([10**9 + rank], dtype=dtype)
        quantized.all_gather(backend, full, shard).wait()
        assert full.tolist() == [10**9 + r for r in range(world_size)]
    quantized.all_gather(backend, torch.empty(0), torch.empty(0)).wait()
    backend.abandon([quantized.reduce_scatter(backend, torch.empty(9), torch.ones(9 * world_size))], failed=False)
    return gathered


@pytest.mark.parametrize(("transport", "world_size"), [("direct", 3), ("messages", 2), ("messages", 3)])
def test_collectives_are_within_the_rounding_and_equal_on_all_ranks(transport, world_size, request):
    if transport == "direct":
        request.getfixturevalue("direct")
    first, *others = run_ranks(world_size, collectives_job, transport)
    for other in others:
        assert all(map(torch.equal, first, other))


# ----- engines -------------------------------------------------------------------------------------------------------


def create_engine(model=None, zero=BOTH, **keys):
    torch.manual_seed(0)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 100, **zero}
    return make_engine(tiny_gpt() if model is None else model, zero_optimization=zero, **keys)


def batch(step=0):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(64, (2, 16), generator=generator)


def train(engine, num_steps):
    losses = []
    for step in range(num_steps):
        tokens = batch(step % 2)
        loss = engine(tokens, tokens)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def training_job(zero, precision):
    keys = {precision: {"enabled": True}} if precision else {}
    engine = create_engine(zero=zero, **keys)
    losses = train(engine, 20)
    with GatheredParameters(engine.module.parameters()):
        weights = [param.detach().clone() for param in engine.module.parameters()]
    left = [each.shape for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.dtype is torch.int8]
    engine.destroy()
    return losses, weights, left


@pytest.mark.parametrize(
    ("world_size", "precision", "keys", "quantizes"),
    swept(
        [
            (2, "bf16", {}, BOTH),
            (3, "", {}, BOTH),
            (4, "", {**MICS, **SMALLEST}, BOTH),
            (3, "", {"stage": 1}, GRADIENTS),
            (2, "bf16", {"stage": 2}, LOCO),
        ],
        lambda *case: case != (3, "", {}, BOTH),
    ),
)
def test_training_is_near_the_exact_one_and_ranks_stay_equal(world_size, precision, keys, quantizes):
    exact = run_ranks(world_size, training_job, keys, precision)
    found = run_ranks(world_size, training_job, {**quantizes, **keys}, precision)
    assert found[0][0] != exact[0][0], "something is quantized"
    for (losses, weights, left), (exact_losses, _, _) in zip(found, exact, strict=True):
        assert losses[0] - losses[-1] > 0.9 * (exact_losses[0] - exact_losses[-1]) > 0
        assert all(map(torch.equal, weights, found[0][1]))
        assert left == [], "no memory of int8 outlives its use"


def seen_job(keys):
    """Weights inside forwards against the master weights, and reduced gradients against the mean of plain torch's."""
    engine = create_engine(zero={**BOTH, **keys})
    module = engine.module
    seen = {}
    for each in module.modules():
        each.register_forward_hook(
            lambda owner, args, output: seen.update({p: p.detach().clone() for p in owner.parameters(recurse=False)}),
            prepend=True,  # before the engine's hook releases them
        )
    tokens = batch()
    loss = engine(tokens, tokens)
    num_rounded = 0
    for param, weight in seen.items():
        master = safe_get_full_fp32_param(param)
        unit = unit_of(param)
        largest = 0 if unit is None else max(safe_get_full_fp32_param(p).abs().max() for p in unit.params)
        assert bool(((weight - master).abs() <= largest * INT8).all())
        num_rounded += not torch.equal(weight, master)
    engine.backward(loss)
    reduced = {param: safe_get_full_grad(param) for param in module.parameters()}

    plain = tiny_gpt()
    with torch.no_grad():
        for param, own in zip(plain.parameters(), module.parameters(), strict=True):
            param.copy_(seen[own])
    plain(tokens, tokens).backward()
    gradient_of = dict(zip(module.parameters(), (param.grad for param in plain.parameters()), strict=True))
    for param, found in reduced.items():
        unit, exact = unit_of(param), gradient_of[param].clone()
        largest = torch.tensor(0.0) if unit is None else max(gradient_of[p].abs().max() for p in unit.params)
        for value in (exact, largest):
            torch.distributed.all_reduce(value)
        allowed = largest / dist.get_world_size() * INT4 + 1e-6
        assert bool(((found - exact / dist.get_world_size()).abs() <= allowed).all())
    return num_rounded


@pytest.mark.parametrize(
    ("world_size", "keys"), [(2, {}), (4, {**MICS, **SMALLEST}), (4, {**HPZ, **SMALLEST})], ids=["", "mics", "hpz"]
)
def test_modules_see_weights_and_the_step_sees_gradients_within_half_a_scale(world_size, keys):
    assert min(run_ranks(world_size, seen_job, keys)) > 5


def exact_job(folder):
    """All ways to read whole weights, while units are whole in int8 for modules."""
    engine = create_engine()
    train(engine, 2)
    module = engine.module
    masters = {name: safe_get_full_fp32_param(param) for name, param in module.named_parameters()}

    def evaluate():
        with torch.no_grad():
            engine(batch(), batch())
        assert not all(unit.is_exact for unit in engine.sharding.units.modules.all)

    evaluate()
    with GatheredParameters(module.parameters()):
        assert all(torch.equal(param, masters[name]) for name, param in module.named_parameters())
    evaluate()
    changed = next(param for param in module.parameters() if unit_of(param) is not None)
    with GatheredParameters([changed], modifier_rank=0), torch.no_grad():
        changed.mul_(2)
    for name, param in module.named_parameters():
        assert torch.equal(safe_get_full_fp32_param(param), masters[name] * (2 if param is changed else 1))
        masters[name] = safe_get_full_fp32_param(param)
    evaluate()
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    assert consolidated is None or all(torch.equal(consolidated[name], master) for name, master in masters.items())
    evaluate()
    engine.save_checkpoint(folder)
    evaluate()
    engine.destroy()
    assert all(torch.equal(param, masters[name]) for name, param in module.named_parameters())
    return masters


def test_what_is_read_saved_or_changed_is_exact(tmp_path):
    masters = run_ranks(2, exact_job, str(tmp_path))[0]
    saved = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert all(torch.equal(saved[name], master) for name, master in masters.items())


@contextlib.contextmanager
def counted_bytes(backend):
    """Inside, bytes of full buffers by collective; small ones, those of parameters that are not sharded, apart."""
    counts = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), 0)

    def counting(name, call):
        def counted(self, first, second, *args, **kwargs):
            counts[name] += max(first.nbytes, second.nbytes)
            return call(self, first, second, *args, **kwargs)

        return counted

    with contextlib.ExitStack() as stack:
        for name in counts:
            stack.enter_context(mock.patch.object(type(backend), name, counting(name, getattr(type(backend), name))))
        yield counts


def linears():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(3)])


def bytes_job(zero):
    engine = create_engine(linears(), zero)
    engine.backward(engine(torch.ones(4, 128)).square().mean())
    engine.step()
    with counted_bytes(engine.sharding.backend) as counts:
        engine.backward(engine(torch.ones(4, 128)).square().mean())
        engine.step()
    engine.destroy()
    return counts


@pytest.mark.parametrize("stage", [1, 2])
def test_an_eighth_of_the_bytes_is_sent_to_owners(stage):
    exact, found, loco = (run_ranks(2, bytes_job, {"stage": stage, **zero})[0] for zero in ({}, GRADIENTS, LOCO))
    assert found == loco, "errors are sent with gradients"
    assert found["all_to_all"] / exact["reduce_scatter"] == pytest.approx(1 / 8 + 1 / 256)
    assert (found["reduce_scatter"], found["all_gather"]) == (0, exact["all_gather"])


def test_a_quarter_and_an_eighth_of_the_bytes_are_sent():
    exact, found, loco = (run_ranks(2, bytes_job, zero)[0] for zero in ({}, BOTH, {**BOTH, **LOCO}))
    assert found == loco, "errors are sent with gradients"
    scales = 1 / 256  # one per block of 256, of fp32
    assert found["all_gather"] / exact["all_gather"] == pytest.approx(1 / 4 + scales)
    assert found["all_to_all"] / exact["reduce_scatter"] == pytest.approx(1 / 8 + scales)
    assert found["reduce_scatter"] == 0


def overflow_job():
    engine = create_engine(fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1})
    before = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    train(engine, 1)
    after = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    return engine.was_step_applied(), engine.optimizer.cur_scale, all(map(torch.equal, before, after))


def test_an_overflow_of_quantized_gradients_skips_the_step():
    assert run_ranks(2, overflow_job) == [(False, 2.0**39, True)] * 2


def different_job():
    rank = dist.get_rank()
    with pytest.raises(ConfigError) as caught:
        create_engine(zero={"zero_quantized_gradients": rank == 1})
    return str(caught.value)


def test_ranks_that_differ_are_named():
    for message in run_ranks(2, different_job):
        assert "zero_quantized_gradients must be the same on all ranks, and rank 1 differs" in message


def frozen_job(folder, precision, keys):
    """A frozen layer between two that train. Shards are halves."""
    net = linears()
    net[1].requires_grad_(False)
    frozen, plain = net[1].weight, net[1].weight.detach().clone()
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config |= {precision: {"enabled": True}} if precision else {}
    engine = create_engine(net, {"zero_quantized_nontrainable_weights": True, **keys}, **config)
    rounding = torch.finfo(engine.module[0].weight.dtype).eps
    allowed = plain.abs().max() * (INT8 + rounding)

    def read():
        with GatheredParameters(frozen):
            return frozen.detach().clone()

    unit = unit_of(frozen)
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in vars(unit).values() if isinstance(each, torch.Tensor)}  # fmt: skip
    assert sum(held.values()) == frozen.numel() + 128 * 128 // 2 * (1 + 4 / 256)
    assert (frozen.ds_tensor.dtype, frozen.ds_tensor.numel()) == (torch.int8, 128 * 128 // 2)
    x = torch.ones(4, 128, dtype=engine.module[0].weight.dtype)
    losses = []
    for _ in range(3):
        loss = engine(x).float().square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    first = read()
    assert not torch.equal(first, plain.to(first.dtype))
    assert bool(((first - plain).abs() <= allowed).all())
    engine.save_checkpoint(folder)
    with GatheredParameters(frozen, modifier_rank=0), torch.no_grad():
        frozen.mul_(-1 if dist.get_rank() == 0 else 5)
    assert bool(((read() + first).abs() <= allowed).all()), "the values of rank 0, rounded"
    engine.load_checkpoint(folder)
    last = read()
    assert torch.equal(last, first), "a load rounds nothing again"
    engine.destroy()
    assert torch.equal(frozen, last)
    return losses, last


@pytest.mark.parametrize(("world_size", "precision", "keys"), [(2, "", {}), (2, "bf16", {}), (4, "", {**MICS, **BOTH})])
def test_frozen_weights_rest_in_int8(world_size, precision, keys, tmp_path):
    (losses, weights), *others = run_ranks(world_size, frozen_job, str(tmp_path), precision, keys)
    assert losses[-1] < losses[0]
    assert all(torch.equal(weights, other_weights) for _, other_weights in others)


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("bomb")


def abandon_job(fails, zero):
    """A backward fails on all ranks with quantized collectives in flight, which the comms logger records."""
    engine = create_engine(linears(), zero, comms_logger={"enabled": True})
    x = torch.ones(4, 128)
    if fails:
        handle = engine.module[0].register_forward_hook(lambda module, args, output: Bomb.apply(output))
        with pytest.raises(ArithmeticError, match="bomb"):
            engine.backward(engine(x).square().mean())
        handle.remove()
    losses = []
    for _ in range(2):
        loss = engine(x).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("zero", [BOTH, LOCO], ids=["both", "loco"])
def test_training_goes_on_after_a_backward_that_failed(zero):
    assert run_ranks(2, abandon_job, True, zero) == run_ranks(2, abandon_job, False, zero)
