"""`deterministic`: losses that are bitwise the same for every number of ranks, stage, placement and accumulation."""

import copy
from contextlib import nullcontext
from functools import partial
from itertools import product
from unittest import mock

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.activation.rng import get_rng_tracker
from deepspeed.errors import ConfigError, StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from deepspeed.zero.offload.host import HostPlacement

MICRO, MICRO_BATCHES, STEPS = 2, 8, 3  # samples of a micro-batch, micro-batches of a step, steps
VOCABULARY, WIDTH = 37, 19  # WIDTH: no number of ranks divides it


class Block(torch.nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(torch.nn.Module):
    """An embedding that is used twice, and blocks with dropout, one of which may be used twice."""

    def __init__(self, dropout=0.1, twice=False):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        torch.nn.init.normal_(self.embedding.weight, std=0.2)
        self.blocks = torch.nn.ModuleList(Block(dropout) for _ in range(3))
        self.twice = twice

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        for _ in range(2 * self.twice):
            x = torch.utils.checkpoint.checkpoint(self.blocks[0], x, use_reentrant=True)
        logits = torch.nn.functional.linear(x, self.embedding.weight)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def create(stage=0, count=MICRO_BATCHES, *, precision="fp32", offload=False, twice=False, dropout=0.1, zero=(), **more):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": count // dist.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40, **dict(zero)},
        "deterministic": {"enabled": True, "seed": 5},
        **more,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return deepspeed.initialize(model=Model(dropout, twice), config=config)[0]


def batches(count=MICRO_BATCHES, steps=range(STEPS)):
    """This rank's micro-batches of each step: ranks take turns."""
    data = torch.Generator().manual_seed(3)
    whole = torch.randint(VOCABULARY, (2 * STEPS, count, MICRO, 12), generator=data)
    return [whole[step, dist.get_rank() :: dist.get_world_size()] for step in steps]


def by_engine(engine, losses):
    for loss in losses:
        engine.backward(loss)
        engine.step()


def by_autograd(engine, losses):
    for loss in losses:
        loss.backward()
        engine.step()


def by_optimizer(engine, losses):
    for loss in losses:
        engine.backward(loss)
    engine.optimizer.step()


def by_boundary(engine, losses):
    for number, loss in enumerate(losses):
        engine.set_gradient_accumulation_boundary(number + 1 == engine.gradient_accumulation_steps())
        engine.backward(loss)
    engine.step()


def coalesced(engine, losses):
    for loss in losses:
        with engine.coalesce_grad_reduction():
            engine.backward(0.5 * loss, retain_graph=True)
            engine.backward(0.5 * loss)
        engine.step()


def train(engine, data, call=by_engine):
    """The losses of all ranks in the order of the global batch, and the norms; as hexadecimals."""
    losses, norms = [], []
    for batch in data:
        own = []

        def forwards(batch=batch, own=own):
            for each in batch:
                own.append(engine(each))
                yield own[-1]

        call(engine, forwards())
        everyone = [None] * dist.get_world_size()
        torch.distributed.all_gather_object(everyone, [loss.item().hex() for loss in own])
        losses += [loss for turn in zip(*everyone, strict=True) for loss in turn]
        norms.append(float(engine.get_global_grad_norm()).hex())
    return losses, norms


def runs(cases, count=MICRO_BATCHES, call=by_engine):
    """The losses and norms of each case, and the sums of its weights."""
    found = []
    try:
        for case in cases:
            engine = create(count=count, **case)
            result = train(engine, batches(count), call)
            weights = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
            found.append((*result, [weight.double().sum().item().hex() for weight in weights]))
            engine.destroy()
    finally:
        torch.use_deterministic_algorithms(False)  # the ranks run other tests
    return found


PLACES = [{"stage": 0}, *({"stage": stage, "offload": offload} for stage in (1, 2, 3) for offload in (False, True))]


KEPT = (1, "fp32"), (2, "fp32"), (4, "fp32"), (2, "fp16"), (4, "bf16")


@pytest.mark.parametrize(
    ("world_size", "precision"),
    swept(product((1, 2, 4), ("fp32", "bf16", "fp16")), lambda *case: case in KEPT),
)
def test_every_world_stage_and_placement_has_the_same_losses_norms_and_weights(world_size, precision):
    cases = [{"precision": precision, **place} for place in PLACES]
    if world_size == 4:  # other buckets, other cuts of them
        cases = [{"zero": {"reduce_bucket_size": 3000, "sub_group_size": 1000}, **case} for case in cases]
    (alone,) = run_ranks(1, runs, [{"precision": precision}])[0]
    for case, found in zip(cases, run_ranks(world_size, runs, cases)[0], strict=True):
        assert found == alone, case


def apart(cases):
    """`runs` with a host memory of its own, to and from which every copy is made."""
    with mock.patch.object(HostPlacement, "is_needed", staticmethod(lambda device: True)):
        return runs(cases)


@pytest.mark.parametrize("world_size", swept([1, 2, 4], lambda world_size: world_size == 2))
def test_every_memory_of_the_optimizer_has_the_same_bits(tmp_path, world_size):
    disk = {"device": "nvme", "nvme_path": str(tmp_path), "pipeline_read": True, "pipeline_write": True}
    host, params = {"device": "cpu", "pin_memory": False}, {"offload_param": {"device": "cpu", "pin_memory": False}}
    alone = run_ranks(1, runs, [{"precision": "bf16"}])[0]
    cases = [{"precision": "bf16", "stage": stage} for stage in (1, 2, 3)]
    swapped = [{**case, "zero": {"offload_optimizer": disk, "sub_group_size": 2000}} for case in cases]
    copied = [{**case, "zero": {"offload_optimizer": host, **(params if case["stage"] == 3 else {})}} for case in cases]
    assert run_ranks(world_size, runs, swapped)[0] == alone * 3
    assert run_ranks(world_size, apart, copied)[0] == alone * 3


def test_without_it_losses_depend_on_the_number_of_ranks():
    off = [{"deterministic": {"enabled": False}, "dropout": 0.0}]
    assert run_ranks(1, runs, off)[0] != run_ranks(2, runs, off)[0]


def of_dtype(stage, dtype):
    """The gradients of a model of `dtype`, whole, and their norm; beside those that plain torch has of all samples."""
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 5, dtype=dtype)
    data = torch.randn(4, 2, 7, dtype=dtype)
    (expected,) = torch.autograd.grad(model(data).abs().square().mean(), model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // dist.get_world_size(),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "deterministic": {"enabled": True},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    for batch in data[dist.get_rank() :: dist.get_world_size()]:
        loss = engine(batch).abs().square().mean()
        engine.backward(loss)
        found = safe_get_full_grad(model.weight) if engine.is_gradient_accumulation_boundary() else None
        engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found, expected, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)
    return found, norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("stage", [0, 2])
def test_sums_of_fp64_and_of_complex_numbers_stay_in_them(stage, dtype):
    (one, norm), (other, other_norm) = (run_ranks(world_size, of_dtype, stage, dtype)[0] for world_size in (1, 2))
    assert torch.equal(one, other)
    assert norm == other_norm


def test_losses_are_those_of_plain_torch():
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    losses, norms, _ = run_ranks(2, runs, [{"dropout": 0.0, "stage": 2, "optimizer": sgd}])[0][0]
    expected = run_ranks(1, plain)[0]
    torch.testing.assert_close([float.fromhex(loss) for loss in losses], expected[0], rtol=1e-6, atol=0)
    torch.testing.assert_close([float.fromhex(norm) for norm in norms], expected[1], rtol=1e-6, atol=0)


def plain():
    torch.manual_seed(0)
    model = Model(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses, norms = [], []
    for batch in batches():
        for each in batch:
            loss = model(each)
            (loss / len(batch)).backward()
            losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@pytest.mark.parametrize("count", [6, 10])
def test_micro_batches_may_be_no_power_of_two(count):
    alone = run_ranks(1, runs, [{}], count)[0]
    assert run_ranks(2, runs, [{}, {"stage": 2}], count)[0] == alone * 2


@pytest.mark.parametrize("call", [by_autograd, by_optimizer, by_boundary, coalesced])
def test_every_way_to_step_has_the_same_order(call):
    alone, found = run_ranks(1, runs, [{}])[0], run_ranks(2, runs, [{"stage": 2}], MICRO_BATCHES, call)[0]
    if call is coalesced:  # halves of a loss are rounded: compare the worlds
        alone = run_ranks(1, runs, [{}], MICRO_BATCHES, call)[0]
    assert found == alone


@pytest.mark.parametrize("name", swept(["SGD", "Adagrad", "Lion", "Adam"], lambda name: name == "SGD"))
def test_elementwise_optimizers(name):
    case = {"optimizer": {"type": name, "params": {"lr": 1e-3}}}
    alone = run_ranks(1, runs, [case])[0]
    assert run_ranks(2, runs, [case, {"stage": 3, **case}])[0] == alone * 2


# ---- random numbers and samples -------------------------------------------------------------------------------------


def draws():
    """Random numbers in each forward, and those that the script draws between forwards."""
    engine = create()
    tokens = batches()[0][0]
    inside, outside = [], []
    engine.module.embedding.register_forward_hook(lambda *_: inside.append(torch.rand(2).tolist()))
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        outside.append(torch.rand(1).item())
        loss = engine(tokens)
        outside.append(torch.rand(1).item())
        engine(tokens)  # a second forward of the same micro-batch
        by_engine(engine, [loss])
    engine.destroy()
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(dist.get_rank())
    assert outside == [torch.rand(1).item() for _ in outside]
    return inside


def test_forwards_have_random_numbers_of_their_own():
    alone, both = run_ranks(1, draws)[0], run_ranks(2, draws)
    assert len(set(map(tuple, alone))) == 4
    assert both[0][:2] == alone[:2]  # micro-batch 0
    assert both[1][:2] == alone[2:]  # micro-batch 1 is the first one of rank 1
    assert both[0][2:] != alone[2:]


def noisy(engine, x):
    """A hook of the script draws in every backward."""
    if engine.global_steps == 0 and not engine.module.embedding.weight._backward_hooks:
        engine.module.embedding.weight.register_hook(lambda grad: grad + 1e-3 * torch.rand_like(grad))
    return engine(x)


def twin(engine, x):
    """A forward without gradients precedes the first one of a step on this rank."""
    if engine.is_first:
        with torch.no_grad():
            engine(x)
    return engine(x)


def partly_training(engine, x):
    engine.eval()
    engine.module.blocks[1].train()
    return engine(x)


def of_tracker(engine, x):
    if engine.global_steps == 0 and engine.is_first:
        deepspeed.checkpointing.model_parallel_cuda_manual_seed(3)
        engine.module.blocks[0].dropout = Forked(0.3)
    return engine(x)


class Forked(torch.nn.Dropout):
    def forward(self, x):
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            return super().forward(x)


def again(engine, x, **how):
    scale = torch.ones(1, requires_grad=True)  # a reentrant checkpoint asks for an input with a gradient
    return torch.utils.checkpoint.checkpoint(lambda x, scale: engine(x) * scale[0], x, scale, **how)


def past_compiled(engine, x):
    if engine.global_steps == 0 and engine.is_first:
        engine.compile(backend="eager")
    return engine.module(x)


FORWARDS = {
    "past the engine": (lambda engine, x: engine.module(x)),
    "past the engine that is compiled": past_compiled,
    "with a hook that draws": noisy,
    "with another one without gradients": twin,
    "with dropout in a part": partly_training,
    "with named states": of_tracker,
    "computed again": partial(again, use_reentrant=False),
    "computed again in the backward's own way": partial(again, use_reentrant=True),
    "computed again without their states": partial(again, use_reentrant=False, preserve_rng_state=False),
}


def forwards(stage):
    """The losses and norms with each of `FORWARDS`."""
    found = {}
    for name, forward in FORWARDS.items():
        torch.manual_seed(dist.get_rank())
        engine = create(stage)
        losses, norms = [], []
        for batch in batches(steps=range(2)):
            own = []
            for number, each in enumerate(batch):
                engine.is_first = number == 0
                own.append(forward(engine, each))
                by_engine(engine, own[-1:])
            everyone = [None] * dist.get_world_size()
            torch.distributed.all_gather_object(everyone, [loss.item().hex() for loss in own])
            losses += [loss for turn in zip(*everyone, strict=True) for loss in turn]
            norms.append(float(engine.get_global_grad_norm()).hex())
        engine.destroy()
        found[name] = losses, norms
    deepspeed.checkpointing.get_cuda_rng_tracker().reset()
    return found


def test_every_way_to_call_the_model_has_the_same_random_numbers():
    alone, both = run_ranks(1, forwards, 0)[0], run_ranks(2, forwards, 2)[0]
    for name in FORWARDS:
        assert both[name] == alone[name], name
    assert alone["past the engine that is compiled"] == alone["past the engine"]
    assert alone["computed again"] == alone["past the engine"]  # and its gradients are those of the same numbers


def divided(world_size):
    """Train in fp16 on losses that the script itself divides, by which small gradients would vanish."""
    engine = create(2, precision="fp16", fp16={"enabled": True, "loss_scale": 1})
    found = []
    for batch in batches(steps=range(2)):
        for each in batch:
            engine.backward(1e-3 * engine(each).float() / len(batch), scale_wrt_gas=False)
            engine.step()
        found.append(float(engine.get_global_grad_norm()).hex())
    engine.destroy()
    return found


def test_a_loss_that_the_script_divides_has_the_same_gradients_in_fp16():
    assert run_ranks(2, divided, 2)[0] == run_ranks(1, divided, 1)[0]


def engine_with_data(size, drops):
    """An engine of four micro-batches in a step, and its samples."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // dist.get_world_size(),
        "optimizer": {"type": "SGD"},
        "deterministic": {"enabled": True},
        "dataloader_drop_last": drops,
    }
    data = [torch.tensor([float(number)]) for number in range(size)]
    engine = deepspeed.initialize(model=torch.nn.Linear(1, 1), config=config, training_data=data)[0]
    return engine, data


def resumed(size, drops, num_steps):
    """The samples of this rank after so many steps, by the same loader and by one that begins there."""
    engine, data = engine_with_data(size, drops)
    other = engine.deepspeed_io(data)
    other.resume(8 * num_steps)
    found = []
    for loader, skipped in ((engine.training_dataloader, num_steps), (other, 0)):
        repeated = deepspeed.utils.RepeatingLoader(loader)
        batches = [next(repeated).flatten().tolist() for _ in range((skipped + 4) * 4 // dist.get_world_size())]
        found.append(batches[skipped * 4 // dist.get_world_size() :])
    engine.destroy()
    return found


@pytest.mark.parametrize(("size", "drops"), [(20, False), (20, True), (21, False)])
def test_a_loader_resumes_where_an_epoch_is_no_whole_step(size, drops):
    for world_size, num_steps in ((1, 3), (2, 2)):
        expected, found = run_ranks(world_size, resumed, size, drops, num_steps)[0]
        assert found == expected


def samples(size, drops):
    """The micro-batches of an epoch and of the beginning of the next, of all ranks in the order of the global batch."""
    torch.manual_seed(0)
    engine, _ = engine_with_data(size, drops)
    torch.use_deterministic_algorithms(False)
    loader = deepspeed.utils.RepeatingLoader(engine.training_dataloader)
    own = [next(loader).flatten().tolist() for _ in range(16 // dist.get_world_size())]
    place = engine.training_dataloader.state_dict()
    engine.destroy()
    everyone = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return [batch for turn in zip(*everyone, strict=True) for batch in turn], place


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("size", [24, 21])
def test_the_loader_deals_the_same_micro_batches(size, drops):
    alone = run_ranks(1, samples, size, drops)[0]
    assert run_ranks(2, samples, size, drops)[0] == alone
    assert run_ranks(4, samples, size, drops)[0] == alone
    epoch = alone[0][: size // 8 * 4]
    assert len({sample for batch in epoch for sample in batch}) == size // 8 * 8


class Failure(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("a planted failure")


def begin_again(stage):
    """A step of which a micro-batch has failed on every rank begins again."""
    engine = create(stage)
    for fails in (False, True):
        loss = engine(batches()[0][0])
        with pytest.raises(RuntimeError, match="planted") if fails else nullcontext():
            by_engine(engine, [Failure.apply(loss) if fails else loss])
    found = train(engine, batches())
    engine.destroy()
    torch.use_deterministic_algorithms(False)
    return found


def test_a_step_that_begins_again_has_the_same_bits():
    assert run_ranks(1, begin_again, 0)[0] == run_ranks(2, begin_again, 2)[0]


# ---- a checkpoint ---------------------------------------------------------------------------------------------------


def save(folder, stage):
    engine = create(stage)
    whole = train(engine, batches())
    engine.save_checkpoint(folder)
    rest = train(engine, batches(steps=range(STEPS, 2 * STEPS)))
    engine.destroy()
    torch.use_deterministic_algorithms(False)
    return whole, rest


def resume(folder, stage):
    engine = create(stage)
    engine.load_checkpoint(folder)
    rest = train(engine, batches(steps=range(STEPS, 2 * STEPS)))
    engine.destroy()
    torch.use_deterministic_algorithms(False)
    return rest


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_resumed_on_other_ranks_goes_on_bitwise(tmp_path, stage):
    _, rest = run_ranks(2, save, tmp_path, stage)[0]
    for world_size in (1, 4):
        assert run_ranks(world_size, resume, tmp_path, stage)[0] == rest


# ---- what is refused ------------------------------------------------------------------------------------------------


def refusals(cases):
    """What `create` with each case raises."""
    found = []
    for case in cases:
        model, client = case.pop("model", None), case.pop("client", None)
        config = {"train_batch_size": 4 * dist.get_world_size(), "deterministic": {"enabled": True}, **case}
        config.setdefault("optimizer", {"type": "AdamW"})
        try:
            deepspeed.initialize(model=model or torch.nn.Linear(4, 4), optimizer=client, config=config)[0].destroy()
        except ConfigError as error:
            found.append(str(error))
        else:
            found.append("nothing was refused")
        torch.use_deterministic_algorithms(False)
    return found


NAMED = {
    "the optimizer FusedLamb": {"optimizer": {"type": "Lamb"}},
    "the optimizer AdamW with fused=True": {"client": partial(torch.optim.AdamW, lr=0.1, fused=True)},
    "the optimizer OnebitAdam": {"optimizer": {"type": "OneBitAdam"}},
    "module 1, a BatchNorm1d": {"model": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))},
    "zero_optimization.zero_quantized_gradients": {
        "zero_optimization": {"stage": 2, "zero_quantized_gradients": True},
    },
    "zero_optimization.zero_quantized_weights": {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
    "communication_data_type": {"communication_data_type": "bf16"},
    "data_types.grad_accum_dtype": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "gradient_predivide_factor": {"gradient_predivide_factor": 3.0},
    "quantize_training": {
        "quantize_training": {
            "enabled": True,
            "quantize_bits": {"start_bits": 8, "target_bits": 4},
            "quantize_schedule": {"quantize_period": 10},
        },
        "fp16": {"enabled": True},
    },
}


def test_what_depends_on_the_number_of_ranks_is_refused_by_name():
    messages = run_ranks(1, refusals, list(NAMED.values()))[0]
    for name, message in zip(NAMED, messages, strict=True):
        assert message.startswith("deterministic.enabled: asked for losses that are bitwise the same"), (name, message)
        assert f"found the key {name}" in message or f"found {name}," in message, (name, message)
    assert "3 data-parallel ranks, which is no power of two" in run_ranks(3, refusals, [{}])[0][0]
    message = run_ranks(2, refusals, [{"mesh": {"tp": 2}, "zero_optimization": {"stage": 1}}])[0][0]
    assert "2 tensor-parallel ranks" in message


def misuse(name):
    engine = create(twice=name == "late", zero={"reduce_bucket_size": 500})
    loss = engine(batches()[0][0])
    try:
        if name == "two backwards":
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            engine.step()
        elif name == "no_sync":
            engine.no_sync()
        elif name == "read":
            engine.backward(loss)
            safe_get_full_grad(engine.module.embedding.weight)
            engine.step()
            engine.backward(engine(batches()[0][1]))
        elif name == "apart":
            losses = [loss, engine(batches()[0][1])]
            by_engine(engine, losses)
        elif name == "apart, at boundaries":
            by_boundary(engine, [loss, engine(batches()[0][1])])
        elif name == "again and again":
            by_engine(engine, [again(engine, batches()[0][1], use_reentrant=False)])
        elif name == "a part":
            engine.module.blocks[1].norm(torch.ones(2, WIDTH))  # which draws nothing
            by_engine(engine, [engine.module.blocks[1](torch.ones(2, WIDTH)).sum()])
        elif name == "a part with numbers of its own":
            tracker = get_rng_tracker()
            tracker.add("own", 7)
            part = engine.module.blocks[1]
            part.forward = partial(drawn, tracker)
            by_engine(engine, [part(torch.ones(2, WIDTH)).sum()])
        elif name == "a part of a copy":
            copy.deepcopy(engine.module).blocks[1](torch.ones(2, WIDTH))
        elif name == "late":
            by_engine(engine, [loss])
            safe_get_full_grad(engine.module.embedding.weight)
    except (ConfigError, StateError) as error:
        return str(error)
    finally:
        get_rng_tracker().reset()
        engine.destroy()
        torch.use_deterministic_algorithms(False)
    return "nothing was refused"


def drawn(tracker, x):
    with tracker.fork("own"):
        return x * torch.rand(())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("two backwards", "found 2 backwards in one micro-batch"),
        ("apart", "found a backward with no forward since the one before it"),
        ("apart, at boundaries", "found 2 backwards in one micro-batch"),
        ("again and again", "found a checkpoint around the engine after 2 forwards"),
        ("no_sync", "no_sync: deterministic.enabled is true"),
        ("read", "found a backward after the sums of its step were read"),
        ("late", "found a gradient that came after its bucket was sent"),
        ("a part", "found a forward of blocks.1, a Block, that the script calls past the model's"),
        ("a part with numbers of its own", "found a forward of blocks.1, a Block, that the script calls past"),
        ("a part of a copy", "nothing was refused"),
    ],
)
def test_a_micro_batch_that_is_no_summand_is_refused(name, expected):
    for message in run_ranks(2, misuse, name):
        assert expected in message


def written():
    """What a model says whose forward changes a buffer, from its first forward on and later, and one with a cache."""
    found = {}
    for persistent, begins_at in ((True, 0), (True, 2), (False, 0)):
        engine = deepspeed.initialize(
            model=Counting(persistent, begins_at),
            config={
                "train_batch_size": 4 * dist.get_world_size(),
                "optimizer": {"type": "AdamW"},
                "deterministic": {"enabled": True},
            },
        )[0]
        try:
            for _ in range(6):
                by_engine(engine, [engine(torch.ones(4, 3)).mean()])
        except ConfigError as error:
            found[persistent, begins_at] = engine.module.num_forwards, str(error)
        engine.destroy()
    return found


class Counting(torch.nn.Linear):
    def __init__(self, persistent, begins_at):
        super().__init__(3, 3)
        self.register_buffer("seen", torch.full((), torch.nan), persistent=persistent)
        self.num_forwards, self.begins_at = 0, begins_at

    def forward(self, x):
        self.num_forwards += 1
        if self.num_forwards == 1 and self.begins_at == 0:
            self.seen.data.nan_to_num_().add_(1)  # of which torch keeps no count
        elif self.num_forwards > self.begins_at:
            self.seen.nan_to_num_().add_(1)
        return super().forward(x)


def test_a_buffer_that_follows_the_micro_batches_of_a_rank_is_refused():
    found = run_ranks(2, written)[0]
    assert [(key, at) for key, (at, _) in found.items()] == [((True, 0), 1), ((True, 2), 4)]
    for _, message in found.values():
        assert "found the buffer seen of a Counting, which a forward has written" in message


def modes(before, warns):
    """Whether torch uses deterministic kernels, and whether others only warn, as engines come and go."""
    torch.use_deterministic_algorithms(before, warn_only=warns)

    def mode():
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    found, engines = [], [create(), create()]
    for engine in engines:
        found.append(mode())
        engine.destroy()
        engine.destroy()
    found.append(mode())
    with pytest.raises(ConfigError):
        create(zero={"offload_param": {"device": "cpu"}, "stage": 1}, optimizer={"type": "Lamb"})
    return [*found, mode()]


@pytest.mark.parametrize(("before", "warns"), [(False, False), (True, True), (True, False)])
def test_kernels_are_as_before_when_the_last_engine_ends(before, warns):
    on, was = (True, False), (before, warns)
    assert run_ranks(1, modes, before, warns)[0] == [on, on, was, was]


def test_blocks_that_run_twice_have_one_order_without_overlap():
    case = {"twice": True, "zero": {"overlap_comm": False, "reduce_bucket_size": 500}, "stage": 2}
    assert run_ranks(2, runs, [case])[0] == run_ranks(1, runs, [case])[0]
