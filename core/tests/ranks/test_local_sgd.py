"""Local SGD and DiLoCo on real ranks, against plain torch that trains all copies; what they send, and save."""

from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from deepspeed import log
from deepspeed.comm import comm
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

EVERY, ROUNDS, ACCUMULATION, CLIP = 3, 3, 2, 0.05
INNER = {"lr": 0.02, "weight_decay": 0.1, "betas": [0.9, 0.99], "eps": 1e-6}
OUTER = {
    "diloco": {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True},
    "heavy": {"outer_lr": 0.8, "outer_momentum": 0.5, "nesterov": False},
    "plain": {"outer_lr": 1.0, "outer_momentum": 0.0},
}


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5))
    net[2].weight.requires_grad_(False)
    return net


def loss_of(net, step, micro, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 5, generator=generator)
    return (net(x.to(next(net.parameters()).dtype)).float() - y).square().mean()


def create(kind="diloco", **keys):
    params = {"optimizer": {"type": "AdamW", "params": INNER}, "gradient_clipping": CLIP, **keys}
    section = {"enabled": True, "sync_every": EVERY, **OUTER[kind]}
    return make_engine(model(), 0, local_sgd=section, gradient_accumulation_steps=ACCUMULATION, **params)


def make_step(engine, step):
    for micro in range(ACCUMULATION):
        engine.backward(loss_of(engine.module, step, micro, dist.get_rank()))
        engine.step()


def train(engine, steps):
    """Weights after each step."""
    found = []
    for step in steps:
        make_step(engine, step)
        found.append(weights_of(engine))
    return found


def weights_of(engine):
    return [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters() if p.requires_grad]


def simulate(world_size, kind, num_steps):
    """By step and copy, the weights of copies that plain torch trains, and an outer SGD of torch averages."""
    nets = [model() for _ in range(world_size)]
    trained = [[param for param in net.parameters() if param.requires_grad] for net in nets]
    inner = [torch.optim.AdamW(params, **{**INNER, "betas": tuple(INNER["betas"])}) for params in trained]
    anchors = [param.detach().clone() for param in trained[0]]
    outer = torch.optim.SGD(anchors, **{key.removeprefix("outer_"): value for key, value in OUTER[kind].items()})
    found = []
    for step in range(num_steps):
        for rank, net in enumerate(nets):
            inner[rank].zero_grad()
            for micro in range(ACCUMULATION):
                (loss_of(net, step, micro, rank) / ACCUMULATION).backward()
            nn.utils.clip_grad_norm_(trained[rank], CLIP)
            inner[rank].step()
        if (step + 1) % EVERY == 0:
            for place, anchor in enumerate(anchors):
                anchor.grad = anchor - torch.stack([params[place].detach() for params in trained]).mean(0)
            outer.step()
            for params in trained:
                for param, anchor in zip(params, anchors, strict=True):
                    param.data.copy_(anchor)
        found.append([[param.detach().clone() for param in params] for params in trained])
    return found


def parity_job(kind):
    engine = create(kind)
    found = train(engine, range(EVERY * ROUNDS))
    engine.destroy()
    return found


@pytest.mark.parametrize(("world_size", "kind"), [(2, "diloco"), (2, "heavy"), (2, "plain"), (3, "diloco")])
def test_copies_train_as_plain_torch_trains_them(world_size, kind):
    expected = simulate(world_size, kind, EVERY * ROUNDS)
    for rank, by_step in enumerate(run_ranks(world_size, parity_job, kind)):
        for step, weights in enumerate(by_step):
            for found, value in zip(weights, expected[step][rank], strict=True):
                torch.testing.assert_close(
                    found, value, rtol=1e-6, atol=1e-6, msg=lambda text, at=step: f"{at}: {text}"
                )


def sent_job():
    """Bytes and collectives of each step, by operation."""
    engine = create(comms_logger={"enabled": True})
    sent = []
    try:
        for step in range(2 * EVERY):
            comm.comms_logger.reset()
            make_step(engine, step)
            figures = comm.comms_logger.figures()
            sent.append({op: sum(size * row["count"] for size, row in sizes.items()) for op, sizes in figures.items()})
    finally:
        comm.comms_logger.enabled = False
        comm.comms_logger.reset()
    numel = sum(param.numel() for param in engine.module.parameters() if param.requires_grad)
    engine.destroy()
    return sent, numel


def test_nothing_is_sent_between_two_averages():
    for sent, numel in run_ranks(2, sent_job):
        quiet = [{}] * (EVERY - 1)
        assert sent == [*quiet, {"all_reduce": 4 * numel}] * 2


def resume_job(folder, keys):
    engine = create(**keys)
    train(engine, range(EVERY + 1))  # the outer momentum is there, and a round has begun
    engine.save_checkpoint(folder)
    expected = train(engine, range(EVERY + 1, 3 * EVERY))
    engine.load_checkpoint(folder)  # over what came after
    again = train(engine, range(EVERY + 1, 3 * EVERY))
    engine.destroy()
    engine = create(**keys)
    engine.load_checkpoint(folder)
    found = train(engine, range(EVERY + 1, 3 * EVERY))
    engine.destroy()
    return expected, again, found


@pytest.mark.parametrize(
    "keys",
    [{}, {"bf16": {"enabled": True}, "checkpoint": {"async_save": True}}, {"fp16": {"enabled": True}}],
    ids=["fp32", "bf16, asynchronous", "fp16"],
)
def test_a_run_resumed_in_a_round_equals_one_that_was_not_broken(tmp_path, keys):
    by_rank = run_ranks(2, resume_job, str(tmp_path), keys)
    for expected, *others in by_rank:
        for found in others:
            for own, theirs in zip(found, expected, strict=True):
                assert all(map(torch.equal, own, theirs))
    (first, *_), (second, *_) = by_rank
    for step in range(EVERY + 1, 3 * EVERY):  # copies differ between averages, and not after them
        place = step - EVERY - 1
        assert all(map(torch.equal, first[place], second[place])) == ((step + 1) % EVERY == 0)


def save_job(folder):
    engine = create()
    train(engine, range(EVERY + 1))
    engine.save_checkpoint(folder)
    found = weights_of(engine)
    engine.destroy()
    return found


def load_job(folder, options):
    engine = create()
    engine.load_checkpoint(folder, **options)
    before = weights_of(engine)
    after = train(engine, range(EVERY + 1, 2 * EVERY))[-1]
    engine.destroy()
    return before, after


@pytest.mark.parametrize("options", [{}, {"load_optimizer_states": False}])
def test_another_number_of_ranks_goes_on_from_the_first_one(tmp_path, options):
    weights, others = run_ranks(2, save_job, str(tmp_path))
    assert not torch.equal(weights[0], others[0])
    loaded = run_ranks(3, load_job, str(tmp_path), options)
    for before, after in loaded:
        assert all(map(torch.equal, before, weights))
        assert all(map(torch.equal, after, loaded[0][1]))


def overflow_job():
    engine = create(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    skipped, weights = [], []
    for step in range(EVERY):
        for micro in range(ACCUMULATION):
            loss = loss_of(engine.module, step, micro, dist.get_rank())
            engine.backward(loss * float("inf") if dist.get_rank() == 1 and step == 1 else loss)
            engine.step()
        skipped.append(engine.skipped_steps)
        weights.append(weights_of(engine))
    scale = engine.optimizer.loss_scale
    engine.destroy()
    return skipped, scale, weights


def test_a_rank_whose_gradients_overflow_skips_its_own_step_alone():
    (none, scale, weights), (one, lower, others) = run_ranks(2, overflow_job)
    assert (none, one) == ([0, 0, 0], [0, 1, 1])
    assert (scale, lower) == (16, 8)
    assert all(map(torch.equal, others[0], others[1]))  # it made no step
    assert not torch.equal(weights[0][0], weights[1][0])
    assert all(map(torch.equal, weights[-1], others[-1]))  # and came to the average all the same


def failed_job():
    """One rank's backward fails within a round, and it repeats the step."""
    engine = create()
    for step in range(EVERY):
        if (dist.get_rank(), step) == (1, 1):
            loss = loss_of(engine.module, step, 0, 1)
            loss.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(loss)
        make_step(engine, step)
    found = weights_of(engine)
    make_step(engine, EVERY)
    engine.destroy()
    return found


def test_a_rank_that_repeats_a_failed_step_is_waited_for():
    expected = simulate(2, "diloco", EVERY)[-1]
    for rank, weights in enumerate(run_ranks(2, failed_job)):
        for found, value in zip(weights, expected[rank], strict=True):
            torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-6)


def added_job():
    """A parameter that is thawed within a round is averaged from there on."""
    engine = create()
    train(engine, [0])
    frozen = engine.module[2].weight
    frozen.requires_grad_(True)
    engine.optimizer.add_param_group({"params": [frozen], **INNER})
    before = frozen.detach().clone()
    train(engine, [1, 2])
    after = frozen.detach().clone()
    engine.destroy()
    return before, after


def test_a_parameter_that_is_added_is_averaged_too():
    (before, after), (same, equal) = run_ranks(2, added_job)
    assert torch.equal(before, same)
    assert torch.equal(after, equal)
    assert not torch.equal(before, after)


def apart_job(folder, num_steps):
    """Warnings of the calls that take or leave the weights of one rank."""
    log.warn_once.cache_clear()
    engine = create()
    train(engine, range(num_steps))
    with mock.patch.object(log.logger, "log") as logged:
        engine.save_checkpoint(folder / "tags")
        engine.save_16bit_model(folder / "weights")
        engine.destroy()
        engine.destroy()
    return [call.args[1] for call in logged.call_args_list if "local_sgd" in call.args[1]]


@pytest.mark.parametrize("num_steps", [EVERY + 1, EVERY])
def test_an_end_between_two_averages_is_said(tmp_path, num_steps):
    of_first, of_second = run_ranks(2, apart_job, tmp_path, num_steps)
    assert of_second == []  # one line for all ranks
    calls = ("save_checkpoint", "save_16bit_model", "destroy") if num_steps % EVERY else ()
    assert of_first == [
        f"local_sgd: {call}: found 1 step since the last average of the replicas, which have weights of their own now, "
        "and those of the other ranks are lost where only one rank's are taken; end at a multiple of sync_every (3) "
        "steps, or set local_sgd.sync_every to 2 for 4 steps"
        for call in calls
    ]
