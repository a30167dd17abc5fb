"""Training loops that differ from forward, backward, step: every stage, on two ranks and on three.

Fp16 with overflows, gradients that wait on a rank, boundaries by hand, a backward that fails, an engine that
only evaluates, two engines that train against each other, ranks that own nothing.
"""

import weakref

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.errors import ConfigError, StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine
from deepspeed.testing.tiers import swept
from torch import nn

STAGES = (0, 1, 2)
every_stage = pytest.mark.parametrize("stage", STAGES)
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def create_net(inputs=5, width=7):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def create_engine(stage, net=None, optimizer="AdamW", **keys):
    section = {"type": optimizer, "params": ADAMW} if optimizer else None
    return make_engine(net or create_net(), stage, optimizer=section, **keys)


def inputs(step, inputs=5):
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(4, inputs, generator=generator)


def loss_of(output):
    return (output.float() - 1.0).square().mean()


def copies(module):
    return [param.detach().clone() for param in module.parameters()]


def assert_close(found, expected, tolerance):
    """max |a - b| / max |b| of each tensor."""
    for one, other in zip(found, expected, strict=True):
        difference = (one.float() - other.float()).abs().max() / other.float().abs().max()
        assert difference <= tolerance, difference.item()


def average(params):
    for param in params:
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


# ---- fp16 ---------------------------------------------------------------------------------------------------------

FP16 = {"enabled": True, "initial_scale_power": 9, "loss_scale_window": 3, "hysteresis": 2, "min_loss_scale": 1}
OVERFLOWS = {(4, 1), (5, 0), (6, 1), (11, 0)}  # (step, rank) at which one rank's loss is too large for fp16
FP16_STEPS = 16


def fp16_batch(step):
    factor = 2.0**13 if (step, dist.get_rank()) in OVERFLOWS else 1.0
    return inputs(step).half(), factor


def train_fp16_by_hand(clip):
    """Dynamic loss scaling in plain torch: an fp16 model, fp32 masters, a scale that follows overflows."""
    net = create_net()
    masters = [param.detach().clone().requires_grad_() for param in net.parameters()]
    net.half()
    optimizer = torch.optim.AdamW(masters, **ADAMW)
    scale, left, last, trace = 2.0 ** FP16["initial_scale_power"], FP16["hysteresis"], -1, []
    for step in range(FP16_STEPS):
        x, factor = fp16_batch(step)
        gradients = torch.autograd.grad(loss_of(net(x)) * factor * scale, list(net.parameters()))
        for master, gradient in zip(masters, gradients, strict=True):
            total = (gradient / dist.get_world_size()).float()
            dist.all_reduce(total)
            master.grad = total.half().float() / scale
        overflow = any(not master.grad.isfinite().all() for master in masters)
        if not overflow:
            nn.utils.clip_grad_norm_(masters, clip)
            optimizer.step()
            with torch.no_grad():
                for param, master in zip(net.parameters(), masters, strict=True):
                    param.copy_(master)
        trace.append((scale, overflow))
        if overflow:
            last = step
            if left == 1:
                scale /= 2
            else:
                left -= 1
        elif (step - last) % FP16["loss_scale_window"] == 0:
            scale, left = scale * 2, FP16["hysteresis"]
    return copies(net), trace


def train_fp16_engine(stage, clip):
    engine = create_engine(stage, fp16=FP16, gradient_clipping=clip)
    scheduler = torch.optim.lr_scheduler.LambdaLR(engine.basic_optimizer, lambda count: 1.0)
    engine.lr_scheduler = scheduler
    trace = []
    for step in range(FP16_STEPS):
        x, factor = fp16_batch(step)
        scale = engine.loss_scale()
        engine.backward(loss_of(engine(x)) * factor)
        engine.step()
        trace.append((scale, engine.optimizer.overflow))
        assert engine.was_step_applied() is not engine.optimizer.overflow
    assert engine.skipped_steps == sum(overflow for _, overflow in trace)
    assert scheduler.last_epoch == FP16_STEPS - engine.skipped_steps
    weights = copies(engine.module)
    engine.destroy()
    return weights, trace


def fp16_job():
    expected, expected_trace = train_fp16_by_hand(clip=0.5)
    assert sum(overflow for _, overflow in expected_trace) == len(OVERFLOWS)
    for stage in STAGES:
        weights, trace = train_fp16_engine(stage, clip=0.5)
        assert trace == expected_trace, stage
        assert_close(weights, expected, 1e-3)


def test_fp16_with_overflows_in_the_middle():
    run_ranks(2, fp16_job)


def fp16_plain_backward_job(stage):
    engine = create_engine(stage, fp16=FP16)
    before = copies(engine.module)
    with pytest.raises(StateError, match="loss scale is 512"):
        loss_of(engine(inputs(0).half())).backward()
    engine.scale(loss_of(engine(inputs(0).half()))).backward()
    engine.step()
    other = create_engine(stage, fp16=FP16)
    other.backward(loss_of(other(inputs(0).half())))
    other.step()
    assert not torch.equal(copies(engine.module)[0], before[0])
    assert all(map(torch.equal, copies(engine.module), copies(other.module)))


@every_stage
def test_fp16_plain_backward_wants_a_scaled_loss(stage):
    run_ranks(2, fp16_plain_backward_job, stage)


# ---- gradient accumulation ----------------------------------------------------------------------------------------


def train_accumulated_by_hand(num_steps, accumulation):
    net = create_net()
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    for step in range(num_steps):
        for micro in range(accumulation):
            (loss_of(net(inputs(step * accumulation + micro))) / accumulation).backward()
        average(net.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return copies(net)


def no_sync_job(stage):
    engine = create_engine(stage)
    for step in range(4):
        with engine.no_sync():
            for micro in range(2):
                engine.backward(loss_of(engine(inputs(3 * step + micro))) / 3)
            with pytest.raises(StateError, match="no_sync"):
                engine.step()
        engine.backward(loss_of(engine(inputs(3 * step + 2))) / 3)
        engine.step()
    assert_close(copies(engine.module), train_accumulated_by_hand(4, 3), 1e-5)


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync(stage):
    run_ranks(2, no_sync_job, stage)


def no_sync_refused_job():
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage is 2"):
        create_engine(2).no_sync()


def test_no_sync_is_refused_with_sharded_gradients():
    run_ranks(2, no_sync_refused_job)


def only_no_sync_job(stage):
    """Every backward waits, and the step itself finds that nothing was reduced."""
    engine = create_engine(stage)
    for step in range(4):
        with engine.no_sync():
            for micro in range(2):
                engine.backward(loss_of(engine(inputs(2 * step + micro))) / 2)
        engine.step()
    assert_close(copies(engine.module), train_accumulated_by_hand(4, 2), 1e-5)


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_waited_are_reduced_by_the_step(stage):
    run_ranks(2, only_no_sync_job, stage)


def own_step_job(stage):
    """The optimizer's step instead of the engine's, as under Lightning's Fabric; whole accumulations or parts."""
    for num_backwards, accumulation in ((2, 2), (2, 3), (1, 1)):
        engine = create_engine(stage, gradient_accumulation_steps=accumulation)
        for step in range(4):
            for micro in range(num_backwards):
                loss = loss_of(engine(inputs(num_backwards * step + micro)))
                engine.backward(loss * accumulation / num_backwards)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.backward(loss_of(engine(inputs(0))))
        engine.optimizer.zero_grad()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            assert_close(copies(engine.module), train_accumulated_by_hand(4, num_backwards), 1e-5)
        engine.destroy()


@pytest.mark.parametrize("stage", swept([0, 1, 3], lambda stage: stage == 0))
def test_steps_of_the_optimizer(stage):
    run_ranks(2, own_step_job, stage)


def coalesced_job(stage, by_user, accumulation):
    """Several losses of one step, whose sum is reduced once."""
    engine = create_engine(stage, gradient_accumulation_steps=accumulation)
    reduction = engine.sharding.gradients.reduction
    for step in range(4):
        for part in range(accumulation):
            before = reduction.num_issued
            with engine.coalesce_grad_reduction():
                for micro in range(2):
                    loss = loss_of(engine(inputs((accumulation * step + part) * 2 + micro))) / 2
                    loss.backward() if by_user else engine.backward(loss)
                with pytest.raises(StateError, match="coalesce_grad_reduction"):
                    engine.step()
                with pytest.raises(StateError, match="another"), engine.coalesce_grad_reduction():
                    raise AssertionError
                assert reduction.num_issued == before
            is_reduced = stage > 1 or part == accumulation - 1
            assert reduction.num_issued - before == is_reduced * len(engine.sharding.gradients.memory.buckets)
            engine.step()
    assert engine.global_steps == 4
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        assert_close(copies(engine.module), train_accumulated_by_hand(4, 2 * accumulation), 1e-5)


@pytest.mark.parametrize("by_user", [False, True])
@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_several_backwards_are_reduced_once(stage, accumulation, by_user):
    run_ranks(2, coalesced_job, stage, by_user, accumulation)


def boundary_job(stage, told_late):
    """As Accelerate does it: the loss is divided outside, the boundary is said by hand; also after the backward."""
    engine = create_engine(stage)
    for step in range(4):
        for micro in range(3):
            is_last = micro == 2
            engine.set_gradient_accumulation_boundary(is_boundary=is_last and not told_late)
            engine.backward(loss_of(engine(inputs(3 * step + micro))) / 3, scale_wrt_gas=False)
            if is_last:
                engine.set_gradient_accumulation_boundary(is_boundary=True)
            engine.step()
    assert engine.global_steps == 4
    assert_close(copies(engine.module), train_accumulated_by_hand(4, 3), 1e-5)


@pytest.mark.parametrize("told_late", [False, True])
@every_stage
def test_boundaries_by_hand(stage, told_late):
    run_ranks(2, boundary_job, stage, told_late)


# ---- low precision on the wire ------------------------------------------------------------------------------------


def wire_job(keys):
    results = []
    for stage in STAGES:
        engine = create_engine(stage, bf16={"enabled": True}, gradient_clipping=0.1, **keys)
        for step in range(6):
            engine.backward(loss_of(engine(inputs(step).bfloat16())))
            engine.step()
        results.append(copies(engine.module))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    assert_close(results[0], train_masters_by_hand(6, clip=0.1), 1e-2)


def train_masters_by_hand(num_steps, clip):
    """A bf16 model whose gradients are averaged in fp32 and update fp32 masters."""
    net = create_net()
    masters = [param.detach().clone().requires_grad_() for param in net.parameters()]
    net.bfloat16()
    optimizer = torch.optim.AdamW(masters, **ADAMW)
    for step in range(num_steps):
        gradients = torch.autograd.grad(loss_of(net(inputs(step).bfloat16())), list(net.parameters()))
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.float()
        average(masters)
        nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(net.parameters(), masters, strict=True):
                param.copy_(master)
    return copies(net)


@pytest.mark.parametrize("world_size", swept([2, 3], lambda world: world == 3))
@pytest.mark.parametrize(
    "keys",
    [
        {"communication_data_type": "fp32"},
        {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}},
        {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
    ],
    ids=str,
)
def test_bf16_with_other_dtypes_on_the_wire_is_the_same_in_every_stage(keys, world_size):
    run_ranks(world_size, wire_job, keys)


# ---- failures and evaluation --------------------------------------------------------------------------------------


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("bomb")


def failing_backward_job(stage, by_engine):
    """The layers above the bomb have their gradients, and perhaps their reduction, when it goes off."""
    net = create_net()
    engine = create_engine(stage, net)
    handle = None
    for step in range(5):
        if step == 2:
            handle = net[1].register_forward_hook(lambda module, args, output: Bomb.apply(output))
            with pytest.raises(ArithmeticError, match="bomb"):
                backward(engine, loss_of(engine(inputs(77))), by_engine)
            handle.remove()
        backward(engine, loss_of(engine(inputs(step))), by_engine)
        engine.step()
    assert_close(copies(net), train_accumulated_by_hand(5, 1), 1e-5)


def backward(engine, loss, by_engine):
    if by_engine:
        engine.backward(loss)
    else:
        loss.backward()


@pytest.mark.parametrize("by_engine", [True, False])
@every_stage
def test_training_goes_on_after_a_failed_backward(stage, by_engine):
    run_ranks(2, failing_backward_job, stage, by_engine)


def evaluation_job(stage):
    """Evaluating between steps, with and without gradients, changes nothing."""
    engine = create_engine(stage, nn.Sequential(create_net(), nn.Dropout(0.0)))
    assert engine.training
    for step in range(5):
        engine.eval()
        assert not engine.module.training
        with torch.no_grad():
            assert not engine(inputs(99)).requires_grad
        engine(inputs(98))  # a graph that nobody walks
        engine.train()
        engine.backward(loss_of(engine(inputs(step))))
        with torch.no_grad():
            engine(inputs(97))
        engine.step()
    assert_close(copies(engine.module), train_accumulated_by_hand(5, 1), 1e-5)


@every_stage
def test_evaluation_in_between(stage):
    run_ranks(2, evaluation_job, stage)


def no_optimizer_job(stage):
    net = create_net()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=net, config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    )
    assert (optimizer, loader, scheduler) == (None, None, None)
    assert_close([engine(inputs(0))], [create_net()(inputs(0))], 0.0)
    engine.backward(loss_of(engine(inputs(0))))
    with pytest.raises(StateError, match="no optimizer"):
        engine.step()


@every_stage
def test_without_an_optimizer_the_engine_evaluates_and_step_says_why_not(stage):
    run_ranks(2, no_optimizer_job, stage)


# ---- two engines --------------------------------------------------------------------------------------------------


def train_gan_by_hand(num_steps):
    generator, critic = create_net(5, 7), create_net(3, 6)
    optimizers = [torch.optim.AdamW(net.parameters(), **ADAMW) for net in (generator, critic)]
    for step in range(num_steps):
        for net, optimizer, loss in (
            (generator, optimizers[0], lambda: critic(generator(inputs(step))).mean()),
            (critic, optimizers[1], lambda: critic(generator(inputs(step)).detach()).square().mean()),
        ):
            generator.zero_grad(), critic.zero_grad()
            loss().backward()
            average(net.parameters())
            optimizer.step()
    return copies(generator), copies(critic)


def gan_job(stage):
    """A backward of the generator's loss runs through the critic, whose gradients are then thrown away."""
    generator, critic = create_engine(stage, create_net(5, 7)), create_engine(stage, create_net(3, 6))
    for step in range(4):
        generator.backward(critic(generator(inputs(step))).mean())
        generator.step()
        critic.zero_grad()
        critic.backward(critic(generator(inputs(step)).detach()).square().mean())
        critic.step()
    expected = train_gan_by_hand(4)
    assert_close(copies(generator.module), expected[0], 1e-5)
    assert_close(copies(critic.module), expected[1], 1e-5)


@every_stage
def test_two_engines_whose_graphs_meet(stage):
    run_ranks(2, gan_job, stage)


# ---- ranks that own nothing ---------------------------------------------------------------------------------------


def tiny_job(stage, keys):
    """Two parameters of four elements on three ranks: the partitions are padded, the last rank owns only padding."""
    torch.manual_seed(3)
    net = nn.Linear(3, 1, bias=False)
    net.gain = nn.Parameter(torch.tensor(1.0))
    start = copies(net)
    engine = create_engine(stage, net, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}}, **keys)
    for step in range(5):
        x = inputs(step, 3).to(net.weight.dtype)
        engine.backward(loss_of(engine(x) * net.gain))
        engine.step()
    assert all(not torch.equal(one, two) for one, two in zip(copies(net), start, strict=True) if one.dim() < 2)
    return copies(net), engine.get_global_grad_norm(), engine.get_lr()


@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}, {"gradient_clipping": 0.01}], ids=str)
def test_more_ranks_than_parameters(keys):
    results = {stage: run_ranks(3, tiny_job, stage, keys) for stage in STAGES}
    expected, expected_norm, expected_lr = results[0][0]
    for per_rank in results.values():
        for weights, norm, lr in per_rank:
            assert_close(weights, expected, 1e-6)
            assert norm == pytest.approx(expected_norm, rel=1e-6)
            assert lr == expected_lr


# ---- at the edges of a step ---------------------------------------------------------------------------------------


def empty_step_job(stage):
    """A step without a backward changes nothing, and sees nothing of the gradients of the step before."""
    engine = create_engine(stage, fp16=FP16)
    engine.backward(loss_of(engine(inputs(0).half())) * 1e9)
    engine.step()
    assert engine.optimizer.overflow
    before, scale = copies(engine.module), engine.loss_scale()
    for _ in range(2):
        engine.step()
        assert engine.get_global_grad_norm() == 0.0
        assert not engine.optimizer.overflow
    assert engine.loss_scale() >= scale
    assert all(map(torch.equal, copies(engine.module), before))


@every_stage
def test_a_step_without_a_backward(stage):
    run_ranks(2, empty_step_job, stage)


def second_engine_job(stage, is_destroyed):
    """As in a notebook: initialize again over the same module, and go on with the new engine."""
    net = create_net()
    former = create_engine(stage, net)
    former.backward(loss_of(former(inputs(50))))
    with pytest.raises(ConfigError, match=r"'0.weight', that another engine trains; call destroy\(\)"):
        create_engine(stage, net)
    memory, sharding = weakref.ref(former.sharding.gradients.memory.by_unit[0]), weakref.ref(former.sharding)
    if is_destroyed:
        former.destroy()
        former.destroy()
    else:
        del former
    engine = create_engine(stage, net)
    assert is_destroyed or sharding() is None, "nothing kept the dropped engine alive"
    for step in range(5):
        engine.backward(loss_of(engine(inputs(step))))
        engine.step()
    assert memory() is None, "its buffers are released when no peer can read them any more"
    assert_close(copies(net), train_accumulated_by_hand(5, 1), 1e-5)


@pytest.mark.parametrize("is_destroyed", [True, False], ids=["destroyed", "dropped"])
@every_stage
def test_a_module_is_in_one_engine_at_a_time(stage, is_destroyed):
    run_ranks(2, second_engine_job, stage, is_destroyed)


def evaluating_engine_job(stage):
    """A second engine without an optimizer may evaluate what the first one trains, in the same precision."""
    net = create_net()
    engine = create_engine(stage, net)
    critic = create_engine(0, net, optimizer=None)
    with pytest.raises(ConfigError, match="same precision"):
        create_engine(0, net, optimizer=None, bf16={"enabled": True})
    for step in range(5):
        with torch.no_grad():
            critic(inputs(90 + step))
        engine.backward(loss_of(engine(inputs(step))))
        engine.step()
    critic.destroy()
    assert_close(copies(net), train_accumulated_by_hand(5, 1), 1e-5)


@every_stage
def test_an_engine_that_evaluates_shares_the_module(stage):
    run_ranks(2, evaluating_engine_job, stage)


def evaluate_then_train_job(stage):
    """The reference of preference optimization: evaluated before the training, whose start it is, and kept."""
    net = create_net()
    evaluator = create_engine(0, net, optimizer=None)
    with torch.no_grad():
        before = evaluator(inputs(0))
    engine = create_engine(stage, net)
    for step in range(5):
        engine.backward(loss_of(engine(inputs(step))))
        engine.step()
        with torch.no_grad():
            assert torch.equal(evaluator(inputs(step)), engine(inputs(step)))
    assert not torch.equal(evaluator(inputs(0)), before)
    evaluator.destroy()  # takes nothing from the engine that trains
    engine.backward(loss_of(engine(inputs(5))))
    engine.step()
    assert_close(copies(net), train_accumulated_by_hand(6, 1), 1e-5)


@every_stage
def test_an_evaluating_engine_leaves_its_parameters_to_one_that_trains(stage):
    run_ranks(2, evaluate_then_train_job, stage)


def shared_backbone_job(stage):
    """Two engines over different modules: a frozen part may be shared, a trained one may not."""
    backbone = nn.Linear(5, 5).requires_grad_(False)
    engines = [create_engine(stage, nn.Sequential(backbone, create_net())) for _ in range(2)]
    for engine in engines:
        engine.backward(loss_of(engine(inputs(0))))
        engine.step()
    assert_close(copies(engines[0].module), copies(engines[1].module), 1e-6)
    with pytest.raises(ConfigError, match="'1.0.weight', that another engine trains"):
        create_engine(stage, nn.Sequential(create_net(), engines[0].module[1]))


@every_stage
def test_engines_share_what_is_frozen(stage):
    run_ranks(2, shared_backbone_job, stage)
