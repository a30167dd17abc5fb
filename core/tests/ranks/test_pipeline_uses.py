"""Pipelines beyond the plain loop: evaluation, precision, loaders, and wrong uses, which raise on every rank."""

import re
from functools import partial

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.comm.failure import PeerFailed
from deepspeed.errors import ConfigError, DeepSpeedError
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.testing.distributed import run_ranks
from torch import nn

IN, HIDDEN, OUT, MICRO_BATCH, MICROS = 4, 8, 3, 2, 2


def mlp(**keys):
    layers = [LayerSpec(nn.Linear, IN, HIDDEN), torch.tanh, LayerSpec(nn.Linear, HIDDEN, HIDDEN), torch.tanh]
    layers += [LayerSpec(nn.Linear, HIDDEN, OUT)]
    keys = {"num_stages": 2, "loss_fn": F.cross_entropy, "seed_layers": True, **keys}
    return PipelineModule(keys.pop("layers", layers), **keys)


def whole():
    layers = []
    for index, layer in enumerate([(IN, HIDDEN), None, (HIDDEN, HIDDEN), None, (HIDDEN, OUT)]):
        torch.manual_seed(1234 + index)
        layers.append(nn.Linear(*layer) if layer else nn.Tanh())
    return nn.Sequential(*layers)


def create(model=None, initialize=None, **keys):
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICROS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        **keys,
    }
    return deepspeed.initialize(model=model or mlp(), config=config, **(initialize or {}))[0]


def samples(seed=0, count=100, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        inputs = torch.randn(MICRO_BATCH, IN, generator=generator).to(dtype)
        yield inputs, torch.randint(0, OUT, (MICRO_BATCH,), generator=generator)


# ---- evaluation -----------------------------------------------------------------------------------------------------


def eval_job(interleave):
    keys = {"pipeline": {"schedule": "interleaved"}} if interleave > 1 else {}
    engine = create(mlp(interleave=interleave), **keys)
    assert engine.pipeline_parallelism  # what `CheckOverflow` asks
    last = engine.is_last_stage()
    found = {
        "loss": engine.eval_batch(samples()).item(),
        "own": engine.eval_batch(samples(), bcast_loss=False),
        "list": [loss.item() for loss in engine.eval_batch(samples(), reduce_output=None)],
        "with logits": engine.eval_batch(samples(), return_logits=True),
        "outputs": engine.eval_batch(samples(), compute_loss=False, reduce_output=None),
        "three": engine.eval_batch(samples(), num_micro_batches=3).item(),
        "steps": engine.global_steps,
        "training": engine.module.training,
    }
    trained = engine.train_batch(samples()).item()
    engine.destroy()
    return last, found, trained


@pytest.mark.parametrize("interleave", [1, 2])
def test_evaluation_is_that_of_the_whole_model(interleave):
    model = whole()
    data = [(inputs, labels) for inputs, labels in samples(count=3)]
    losses = [F.cross_entropy(model(inputs), labels).item() for inputs, labels in data]
    outputs = [model(inputs).detach() for inputs, _ in data[:2]]
    for last, found, trained in run_ranks(2, eval_job, interleave):
        assert found["loss"] == trained == pytest.approx(sum(losses[:2]) / 2, rel=1e-6)
        assert found["list"] == pytest.approx(losses[:2], rel=1e-6)
        assert found["three"] == pytest.approx(sum(losses) / 3, rel=1e-6)
        assert (found["steps"], found["training"]) == (0, True)
        loss, logits = found["with logits"]
        assert loss.item() == found["loss"]
        if last:
            assert found["own"].item() == found["loss"]
            for own, each, want in zip(logits, found["outputs"], outputs, strict=True):
                torch.testing.assert_close(own, want)
                torch.testing.assert_close(each, want)
        else:
            assert (found["own"], logits, found["outputs"]) == (None, None, None)


def frozen_job():
    model = mlp()
    if model.stage_id == 0:
        model.requires_grad_(False)
    engine = create(model, optimizer=None)
    loss = engine.eval_batch(samples()).item()
    engine.destroy()
    return loss


def test_stages_without_an_optimizer_may_have_nothing_to_train():
    model = whole()
    data = [(inputs, labels) for inputs, labels in samples(count=MICROS)]
    wanted = sum(F.cross_entropy(model(inputs), labels).item() for inputs, labels in data) / MICROS
    assert run_ranks(2, frozen_job) == pytest.approx([wanted] * 2, rel=1e-6)


# ---- precision ------------------------------------------------------------------------------------------------------


def fp16_job():
    fp16 = {"enabled": True, "initial_scale_power": 8, "auto_cast": True}
    engine = create(fp16=fp16, zero_optimization={"stage": 2})
    data = samples()
    losses = [engine.train_batch(data).item() for _ in range(6)]
    dtypes = {param.dtype for param in engine.module.parameters()}
    engine.destroy()
    return losses, dtypes


def test_fp16_stays_near_fp32():
    """bf16: test_pipeline_precision.py."""
    model = whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, wanted = samples(), []
    for _ in range(6):
        total = 0.0
        for _ in range(MICROS):
            inputs, labels = next(data)
            loss = F.cross_entropy(model(inputs), labels) / MICROS
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(total)
    for losses, dtypes in run_ranks(2, fp16_job):
        assert losses == pytest.approx(wanted, rel=0.02)
        assert dtypes == {torch.float16}


def overflow_job():
    engine = create(fp16={"enabled": True, "initial_scale_power": 8, "auto_cast": True})
    before = [param.detach().clone() for param in engine.module.parameters()]

    def data():
        for inputs, labels in samples():
            yield inputs * float("inf"), labels

    engine.train_batch(data())
    same = all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    skipped = engine.skipped_steps
    engine.train_batch(samples())
    moved = not all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    result = same, skipped, moved, engine.skipped_steps
    engine.destroy()
    return result


def test_all_stages_skip_a_step_that_overflows():
    assert run_ranks(2, overflow_job) == [(True, 1, True, 1)] * 2


# ---- data, grid, checkpoint -----------------------------------------------------------------------------------------


def loader_job():
    dataset = [sample for inputs, labels in samples(count=4) for sample in zip(inputs, labels, strict=True)]
    engine = create(initialize={"training_data": dataset})
    assert list(engine.training_dataloader.data_sampler) == list(range(len(dataset)))  # not shuffled
    first = [engine.train_batch().item() for _ in range(4)]  # two epochs
    engine.set_batch_fn(lambda pair: (pair["x"], pair["y"]))
    for call, value, told in (
        ("set_dataiterator", [1], r"found a list, no iterator; give iter\(\) of it, or set_dataloader"),
        ("set_dataiterator", 3, "found a int, no iterator; give an iterator"),
        ("set_dataloader", 3, "found a int; give an iterable of micro-batches"),
        ("set_batch_fn", "x", "found a str; give a function"),
    ):
        with pytest.raises(ConfigError, match=f"^{call}: {told}"):
            getattr(engine, call)(value)
    engine.set_dataiterator({"x": x, "y": y} for x, y in samples())
    second = engine.train_batch().item()
    engine.set_batch_fn(lambda pair: pair)
    third = [engine.eval_batch(each).item() for each in (samples(), in_one_memory(samples()))]
    engine.destroy()
    return first, second, third


def in_one_memory(pairs):
    """A loader that overwrites each micro-batch with the next one."""
    memory = None
    for pair in pairs:
        memory = tuple(map(torch.clone, pair)) if memory is None else memory
        for tensor, new in zip(memory, pair, strict=True):
            tensor.copy_(new)
        yield memory


def test_loaders_start_again_and_batches_are_made_by_a_function():
    (first, second, third), other = run_ranks(2, loader_job)
    assert (first, second, third) == other
    assert first[2] < first[0]
    assert third[0] == third[1]


def grid_job():
    model = mlp(topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1), num_stages=None)
    engine = create(model)
    grid = model.mpu()
    assert isinstance(grid, PipelineParallelGrid)
    found = (
        grid.get_stage_id(),
        grid.get_pipe_parallel_world_size(),
        grid.get_slice_parallel_rank(),
        grid.get_data_parallel_world_size(),
        grid.get_model_parallel_world_size(),
        [grid.stage_to_global(stage) for stage in range(2)],
        dist.get_all_ranks_from_group(grid.get_pipe_parallel_group()),
        grid.get_global_rank(),
    )
    loss = engine.train_batch(samples()).item()
    engine.destroy()
    return found, loss


def test_a_grid_with_tensor_parallel_ranks():
    found = run_ranks(4, grid_job)
    for rank, (place, _) in enumerate(found):
        stage, slice_rank = divmod(rank, 2)
        peers = [slice_rank, slice_rank + 2]
        assert place == (stage, 2, slice_rank, 1, 4, peers, peers, rank)
    assert len({loss for _, loss in found}) == 1


def resume_job(folder, stage):
    engine = create(zero_optimization={"stage": stage})
    data = samples()
    engine.train_batch(data)
    engine.save_checkpoint(folder)
    going_on = [engine.train_batch(data).item() for _ in range(3)]
    engine.destroy()
    engine = create(mlp(base_seed=5), zero_optimization={"stage": stage})
    engine.load_checkpoint(folder)
    data = samples()
    for _ in range(MICROS):
        next(data)
    resumed = [engine.train_batch(data).item() for _ in range(3)]
    engine.destroy()
    return going_on, resumed


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.sweep), 2])
def test_a_checkpoint_resumes(tmp_path, stage):
    for going_on, resumed in run_ranks(2, resume_job, str(tmp_path), stage):
        assert resumed == going_on


class WeighedLoss(nn.Module):
    """The loss has a parameter that trains, and a buffer."""

    def __init__(self, part=None):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("weights", torch.linspace(0.5, 1.5, OUT))
        self.part = part

    def forward(self, outputs, labels):
        return F.cross_entropy(outputs * self.scale, labels, weight=self.weights)


def loss_module_job(folder):
    engine = create(mlp(loss_fn=WeighedLoss()), gradient_clipping=0.0)
    names = [name for name, _ in engine.module.named_parameters() if "loss" in name]
    data = samples()
    losses = [engine.train_batch(data).item() for _ in range(3)]
    engine.save_checkpoint(folder)
    losses += [engine.train_batch(data).item() for _ in range(3)]
    engine.destroy()
    resumed = []
    for num_stages in (2, 1):
        engine = create(mlp(loss_fn=WeighedLoss(), num_stages=num_stages), gradient_clipping=0.0)
        engine.load_checkpoint(folder)
        data = samples()
        for _ in range(3 * MICROS):
            next(data)
        resumed.append([engine.train_batch(data).item() for _ in range(3)])
        engine.destroy()
    return names, losses, resumed


def test_a_loss_with_parameters_trains_and_is_saved_on_the_last_stage(tmp_path):
    model, loss_fn = whole(), WeighedLoss()
    optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], lr=0.1)
    data, wanted = samples(), []
    for _ in range(6):
        total = 0.0
        for _ in range(MICROS):
            inputs, labels = next(data)
            loss = loss_fn(model(inputs), labels) / MICROS
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(total)
    found = run_ranks(2, loss_module_job, str(tmp_path))
    assert [names for names, _, _ in found] == [[], ["loss_fn.scale"]]
    for _, losses, resumed in found:
        assert losses == pytest.approx(wanted, rel=1e-5)
        for each in resumed:
            assert each == pytest.approx(losses[3:], rel=1e-6)


def reentrant_job():
    engine = create(mlp(activation_checkpoint_interval=1, activation_checkpoint_func=torch.utils.checkpoint.checkpoint))
    result = outcome(lambda: engine.train_batch(samples()))
    engine.destroy()
    return result


@pytest.mark.filterwarnings("ignore:.*use_reentrant", "ignore:None of the inputs")
def test_a_checkpoint_function_that_drops_gradients_is_named():
    *_, (kind, text) = run_ranks(2, reentrant_job)
    assert kind == "ConfigError"
    assert re.search(r"no gradient.*activation_checkpoint_func \(checkpoint\) is reentrant.*use_reentrant=False", text)


# ---- wrong uses -----------------------------------------------------------------------------------------------------


def outcome(call):
    """What this rank raised."""
    try:
        call()
    except DeepSpeedError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def with_weight_of(linear):
    other = nn.Linear(IN, IN)
    other.weight = linear.weight
    return other


def wrong_module_job(name):
    shared = nn.Linear(IN, IN)
    cases = {
        "stages over layers": lambda: mlp(layers=[LayerSpec(nn.Linear, IN, OUT)]),
        "stages over ranks": lambda: mlp(num_stages=3),
        "method": lambda: mlp(partition_method="best"),
        "type": lambda: mlp(partition_method="type:conv"),
        "profile": lambda: mlp(partition_method="profile"),
        "neither": lambda: mlp(num_stages=None),
        "topology": lambda: mlp(num_stages=None, topology=PipeDataParallelTopology(2, 2)),
        "interleave": lambda: create(pipeline={"schedule": "interleaved"}),
        "split": lambda: create(pipeline={"schedule": "zero_bubble"}, zero_optimization={"stage": 3}),
        "mesh": lambda: create(initialize={"mesh_param": {"pp": 1, "dp": 2}}),
        "idle": lambda: create(mlp(layers=[LayerSpec(nn.Linear, IN, OUT), torch.tanh], partition_method="uniform")),
        "attribute": lambda: mlp(layers=[TiedLayerSpec("e", nn.Linear, IN, IN, tied_weight_attr="wait")] * 2),
        "layer": lambda: mlp(layers=[3, 4]),
        "module twice": lambda: mlp(layers=[shared, torch.tanh, shared], partition_method="uniform"),
        "tied by hand": lambda: mlp(layers=nn.Sequential(nn.Linear(IN, IN), shared, with_weight_of(shared))),
        "in an argument": lambda: mlp(layers=[LayerSpec(nn.Sequential, shared), torch.tanh, shared]),
        "in the loss": lambda: mlp(layers=[shared, torch.tanh, nn.Linear(IN, OUT)], loss_fn=WeighedLoss(shared)),
        "inside": lambda: create(nn.ModuleDict({"text": mlp(), "head": nn.Linear(OUT, OUT)})),
        "nothing trains": lambda: create(mlp().requires_grad_(False)),
        "schedule": lambda: create(pipeline={"schedule": "gpipe"}),
    }
    return outcome(cases[name])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stages over layers", "found 2 stages for 1 layer;.*use at most 1 stage"),
        ("stages over ranks", "found 3 stages for 2 ranks.*use 1 or 2"),
        ("method", "found 'best'; use one of parameters, uniform, type:REGEX, profile"),
        ("type", "'type:conv' matches 0 of the layers Linear, tanh.*there are 2 parts"),
        ("profile", "pass sample_inputs="),
        ("neither", "neither num_stages nor topology"),
        ("topology", "pipe 2 x data 2 = 4, but the world has 2 ranks"),
        ("interleave", "built with interleave=1"),
        ("split", 'zero_bubble" with zero_optimization.stage 3.*use "1f1b"'),
        ("mesh", "found 2, but .* has pp 1"),
        ("idle", "no parameters that train on stage 1; its cuts are .0, 1, 2."),
        ("attribute", "Linear has no tensor 'wait'; its parameters are weight, bias"),
        ("layer", "layer 0 is int"),
        (
            "module twice",
            r"shape \[4, 4\] in layer 0 \(Linear, stage 0\) and in layer 2 \(Linear, stage 1\).*TiedLayerSpec",
        ),
        ("tied by hand", r"in layer 1 \(Linear, stage 0\) and in layer 2 \(Linear, stage 1\)"),
        ("in an argument", r"in layer 0 \(Sequential, stage 0\) and in layer 2 \(Linear, stage 1\)"),
        ("in the loss", r"in layer 0 \(Linear, stage 0\) and in loss_fn \(WeighedLoss, stage 1\)"),
        ("inside", r"'text' of the model \(ModuleDict\) is a PipelineModule of 2 stages.*pass it alone"),
        ("nothing trains", "no parameters that train on any stage; to evaluate only, leave the optimizer out"),
        ("schedule", "pipeline.schedule"),
    ],
)
def test_wrong_modules_are_refused_on_every_rank(name, message):
    for kind, text in run_ranks(2, wrong_module_job, name):
        assert kind == "ConfigError", text
        assert re.search(message, text), text


def sharing_job():
    shared = nn.Linear(IN, IN)
    layers = [shared, shared, nn.Linear(IN, OUT), torch.tanh]
    engine = create(mlp(layers=layers, partition_method="uniform"))
    frozen = nn.Linear(IN, IN).requires_grad_(False)
    mlp(layers=[frozen, nn.Linear(IN, OUT), frozen, nn.Linear(IN, OUT)], partition_method="uniform")
    loss = engine.train_batch(samples()).item()
    engine.destroy()
    return loss


def test_layers_of_one_stage_and_frozen_ones_may_share_parameters():
    first, second = run_ranks(2, sharing_job)
    assert first == second


def wrong_batch_job(name):
    engine = create()
    first = engine.is_first_stage()
    short = samples(count=1)
    batches = {
        "ends on the first stage": short if first else samples(),
        "ends on the last stage": samples() if first else short,
        "absent": None,
        "no pairs": (inputs for inputs, _ in samples()),
        "other shapes": samples() if first else ((x[:1], y[:1]) for x, y in samples()),
    }
    result = outcome(lambda: engine.train_batch(batches[name]))
    loss = engine.train_batch(samples()).item()  # nothing was computed, so the engine goes on
    engine.destroy()
    return result, loss


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("ends on the first stage", "StateError", r"rank 0 \(stage 0\) ended after 1 of 2 micro-batches"),
        ("ends on the last stage", "StateError", r"rank 1 \(stage 1\) ended after 1 of 2 micro-batches"),
        ("absent", "ConfigError", r"rank 0 \(stage 0\) is missing; pass an iterator"),
        ("no pairs", "ConfigError", r"gave a Tensor; a micro-batch is a pair \(inputs, labels\)"),
        ("other shapes", "ConfigError", r"inputs of shape \[2, 4\] on stage 0 and \[1, 4\] on stage 1"),
    ],
)
def test_wrong_batches_are_refused_on_every_rank_before_they_run(name, kind, message):
    found = run_ranks(2, wrong_batch_job, name)
    for (raised, text), loss in found:
        assert raised == kind, text
        assert re.search(message, text), text
        assert loss == found[0][1]


def failing_data_job(call, stages, by_batch_fn):
    engine = create()
    fails = engine.stage_id in stages
    own = ValueError(f"no such picture on stage {engine.stage_id}")

    def failing():
        yield next(samples())
        raise own

    def refusing(batch):
        raise own

    if fails and by_batch_fn:
        engine.set_batch_fn(refusing)
    data = failing() if fails and not by_batch_fn else samples()
    with pytest.raises(ValueError if fails else PeerFailed) as caught:
        getattr(engine, call)(data)
    told = str(caught.value)
    assert (caught.value is own) == fails
    assert not fails or (caught.value.__context__, caught.value.__cause__) == (None, None)
    engine.set_batch_fn(None)
    loss = engine.train_batch(samples()).item()  # nothing was computed, so the engine goes on
    engine.destroy()
    return told, loss


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
@pytest.mark.parametrize("stage", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize("by_batch_fn", [False, True], ids=["iterator", "batch_fn"])
def test_an_exception_of_the_data_is_the_own_one_of_its_rank(call, stage, by_batch_fn):
    found = run_ranks(2, failing_data_job, call, [stage], by_batch_fn)
    own, peer = f"no such picture on stage {stage}", found[1 - stage][0]
    assert found[stage][0] == own
    assert f"{call}: the data iterator of rank {stage} (stage {stage}) failed at micro-batch" in peer
    assert f"{1 - by_batch_fn}: ValueError: {own}" in peer
    assert found[0][1] == found[1][1]


def test_exceptions_of_the_data_on_two_ranks_are_their_own():
    found = run_ranks(2, failing_data_job, "train_batch", [0, 1], False)
    assert [told for told, _ in found] == ["no such picture on stage 0", "no such picture on stage 1"]
    assert found[0][1] == found[1][1]


def different_calls_job():
    engine = create()
    first = engine.is_first_stage()
    found = [
        outcome(lambda: (engine.train_batch if first else engine.eval_batch)(samples())),
        outcome(lambda: engine.eval_batch(samples(), num_micro_batches=2 + first)),
        outcome(lambda: engine.eval_batch(samples(), reduce_output=None if first else "avg")),
    ]
    loss = engine.train_batch(samples()).item()
    engine.destroy()
    return found, loss


def test_different_calls_are_refused_on_every_rank():
    for (training, count, reduction), loss in run_ranks(2, different_calls_job):
        options = "with compute_loss=True, reduce_output='avg', bcast_loss=True"
        assert "rank 0 asks for train_batch of 2 micro-batches, and rank 1 for eval_batch of 2" in training[1]
        assert f"rank 0 asks for eval_batch of 3 micro-batches {options}, and rank 1 for eval_batch of 2" in count[1]
        assert "reduce_output=None" in reduction[1]
        assert {training[0], count[0], reduction[0]} == {"ConfigError"}
        assert loss > 0


def other_layers_job():
    layers = [LayerSpec(nn.Linear, IN, IN) for _ in range(2 + 2 * dist.get_rank())]
    return outcome(lambda: create(mlp(layers=layers)))


def test_layers_that_differ_from_rank_to_rank_are_refused_on_every_rank():
    for kind, text in run_ranks(2, other_layers_job):
        assert kind == "ConfigError"
        assert "rank 0 cuts its 2 layers at [0, 1, 2], and rank 1 its 4 layers at [0, 2, 4]" in text


def in_place_job(stages):
    layers = [LayerSpec(nn.Linear, IN, OUT), LayerSpec(nn.Linear, OUT, OUT)]
    layers += [nn.ReLU(inplace=True), LayerSpec(nn.Linear, OUT, OUT)]
    model = mlp(layers=layers, num_stages=stages, partition_method="uniform")
    engine = create(model)
    losses = [engine.train_batch(samples(step)).item() for step in range(3)]
    engine.destroy()
    return model.parts, losses


def test_the_first_layer_of_a_stage_may_overwrite_its_input():
    ((_, expected),) = run_ranks(1, in_place_job, 1)
    for parts, losses in run_ranks(2, in_place_job, 2):
        assert parts == [0, 2, 4]
        assert losses == pytest.approx(expected, abs=1e-6)


def failing_stage_job(name):
    def fails(x):
        raise ValueError("no such layer")

    models = {
        "layer": lambda: mlp(layers=[LayerSpec(nn.Linear, IN, IN), LayerSpec(nn.Linear, IN, OUT), fails]),
        "loss": lambda: mlp(loss_fn=None),
        "losses": lambda: mlp(loss_fn=partial(F.cross_entropy, reduction="none")),
        "value": lambda: mlp(
            layers=[LayerSpec(nn.Linear, IN, IN), lambda x: {"x": x}, LayerSpec(nn.Linear, IN, OUT)],
            partition_method="type:linear|lambda",
        ),
    }
    engine = create(models[name]())
    try:
        engine.train_batch(samples())
    except (DeepSpeedError, ValueError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    ("name", "failed", "message"),
    [
        ("layer", "ValueError", "no such layer"),
        ("loss", "ConfigError", r"loss_fn is missing, and the last layer returned a tensor of shape \[2, 3\]"),
        ("losses", "ConfigError", r"loss_fn returned a tensor of shape \[2\], which is no loss"),
    ],
)
def test_a_stage_that_fails_is_named_by_the_others(name, failed, message):
    first, last = run_ranks(2, failing_stage_job, name)
    assert last[0] == failed
    assert re.search(message, last[1]), last
    assert first[0] == "PeerFailed"
    assert re.search(f"rank 1 failed with {failed}: .*{message}", first[1]), first


def refused_calls_job():
    engine = create()
    calls = {
        "forward": lambda: engine(torch.zeros(2, IN)),
        "backward": lambda: engine.backward(torch.zeros(1)),
        "step": engine.step,
        "no_sync": engine.no_sync,
        "coalesce_grad_reduction": engine.coalesce_grad_reduction,
    }
    found = {name: outcome(call) for name, call in calls.items()}
    with torch.no_grad():
        found["train_batch"] = outcome(lambda: engine.train_batch(samples()))
    engine.destroy()
    return found


def test_calls_that_a_pipeline_cannot_answer():
    for found in run_ranks(2, refused_calls_job):
        for name in ("forward", "backward", "step", "no_sync", "coalesce_grad_reduction"):
            assert found[name][0] == "PipelineError"
            assert found[name][1].startswith(f"{name}: this rank has stage ")
        assert found["train_batch"] == (
            "PipelineError", "train_batch: found gradients disabled; call it outside of torch.no_grad()"
        )  # fmt: skip


def zero_init_job():
    deepspeed.init_distributed()
    with pytest.raises(DeepSpeedError) as caught, deepspeed.zero.Init():
        mlp()
    return str(caught.value)


def test_zero_init_around_a_pipeline_is_refused():
    assert all("found zero.Init around it" in told for told in run_ranks(2, zero_init_job))


# ---- the profile of a step ------------------------------------------------------------------------------------------


def profile_job(path):
    engine = create(flops_profiler={"enabled": True, "profile_step": 1, "output_file": path})
    batches = samples()
    losses = [engine.train_batch(batches).item() for _ in range(3)]
    engine.destroy()
    return losses


def unprofiled_job():
    engine = create()
    batches = samples()
    losses = [engine.train_batch(batches).item() for _ in range(3)]
    engine.destroy()
    return losses


def test_profile_counts_the_stage_of_rank_0(tmp_path):
    path = tmp_path / "profile.txt"
    assert run_ranks(2, profile_job, str(path)) == run_ranks(2, unprofiled_job)
    lines = [line.strip() for line in path.read_text().splitlines()]
    figures = dict(line.split(":", 1) for line in lines if ":" in line)
    assert figures["ranks of one model"].strip() == "2 (2 stages x 1 tensor-parallel)"
    macs = MICROS * MICRO_BATCH * IN * HIDDEN  # the first stage is the first layer, whose input needs no gradient
    assert (figures["forward MACs"].strip(), figures["backward FLOPs"].strip()) == (f"{macs} MACs", str(2 * macs))
