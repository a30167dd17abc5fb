"""Pipelines train as one rank with the whole model does in plain torch: fp32, 1e-5 after 20 steps."""

from functools import partial
from unittest.mock import patch

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.comm.point_to_point import PointToPoint
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.pipe.topology import PipeModelDataParallelTopology
from deepspeed.testing.distributed import run_ranks
from deepspeed.utils import groups
from torch import nn

VOCABULARY, WIDTH, LENGTH = 11, 8, 5
STEPS, MICROS, MICRO_BATCH, LR = 20, 4, 2, 0.02
SEED = 7


class Block(nn.Module):
    """(hidden, mask) -> (hidden, mask): a float with a gradient, and a boolean without."""

    def __init__(self, scale):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = scale

    def forward(self, inputs):
        hidden, mask = inputs
        update = self.second(F.gelu(self.first(self.norm(hidden))))
        return hidden + self.scale * update * mask.unsqueeze(-1), mask


class Embedding(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens), tokens > 0


def drop_mask(inputs):
    return inputs[0]


def as_logits(embedding, inputs):
    return inputs[0] @ embedding.weight.T


def embed(embedding, tokens):
    return embedding(tokens)


def as_numbers(tokens):
    return F.one_hot(tokens, VOCABULARY).float()


def uneven_layers():
    """Parts that send different widths, the first one without a gradient, and layers that overwrite products."""
    return [
        as_numbers,
        torch.sin,
        *(LayerSpec(nn.Linear, VOCABULARY, 12), LayerSpec(nn.ReLU, inplace=True)),
        *(LayerSpec(nn.Linear, 12, 5), LayerSpec(nn.ReLU, inplace=True)),
        *(LayerSpec(nn.Linear, 5, 9), LayerSpec(nn.Linear, 9, VOCABULARY)),
    ]


def layers_of(kind):
    if kind == "uneven":
        return uneven_layers()
    blocks = [LayerSpec(Block, 0.5 + 0.1 * at) for at in range(6)]
    if kind == "tied":
        tied = partial(TiedLayerSpec, "embed", Embedding, VOCABULARY, WIDTH, tied_weight_attr="weight")
        return [tied(), *blocks, tied(forward_fn=as_logits)]
    return [LayerSpec(Embedding, VOCABULARY, WIDTH), *blocks, drop_mask, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]


def loss_fn(logits, tokens):
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def batches(dp_rank, *, varies=False, steps=STEPS):
    """Micro-batches of one data-parallel rank."""
    generator = torch.Generator().manual_seed(100 + dp_rank)
    for number in range(steps * MICROS):
        length = LENGTH + number % 3 if varies else LENGTH
        tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, length), generator=generator)
        yield tokens, tokens.roll(1, 1)


class Whole(nn.Module):
    """All layers on one rank; shared modules are one module."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.tied = nn.ModuleDict(), nn.ModuleDict()
        self.calls = []
        for index, spec in enumerate(layers):
            torch.manual_seed(SEED + index)
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in self.tied:
                    self.tied[spec.key] = spec.build()
                module = self.tied[spec.key]
                self.calls.append(partial(spec.forward_fn, module) if spec.forward_fn else module)
            elif isinstance(spec, LayerSpec):
                self.layers[str(index)] = spec.build()
                self.calls.append(self.layers[str(index)])
            else:
                self.calls.append(spec)

    def forward(self, inputs):
        for call in self.calls:
            inputs = call(inputs)
        return inputs

    def named(self):
        yield from self.layers.named_parameters()
        yield from self.tied.named_parameters(prefix="tied_modules")


def halve(grad):
    return grad / 2


def halve_in_place(param):
    param.grad.div_(2)


def reference(kind, dp, *, clip=0.0, varies=False, hooked=False):
    """Losses of the steps, the last norm, and weights by the names of PipelineModule."""
    model = Whole(layers_of(kind))
    for param in model.parameters() if hooked else ():
        param.register_hook(halve)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    data = [batches(rank, varies=varies) for rank in range(dp)]
    losses, norm = [], None
    for _ in range(STEPS):
        total = 0.0
        for _ in range(MICROS):
            for each in data:
                tokens, labels = next(each)
                loss = loss_fn(model(tokens), labels) / (MICROS * dp)
                loss.backward()
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norm.item(), {name: param.detach() for name, param in model.named()}


def config_of(stage, **keys):
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICROS,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        **keys,
    }


def create(kind, stages, stage, module_keys=None, **keys):
    model = PipelineModule(
        layers_of(kind),
        num_stages=stages,
        loss_fn=loss_fn,
        seed_layers=True,
        **{"base_seed": SEED, **(module_keys or {})},
    )
    return deepspeed.initialize(model=model, config=config_of(stage, **keys))[0]


def train_job(kind, stages, stage, varies, module_keys, hooked, keys):
    engine = create(kind, stages, stage, module_keys, **keys)
    for param in engine.module.parameters() if hooked else ():
        if hooked == "after":
            param.register_post_accumulate_grad_hook(halve_in_place)
        else:
            param.register_hook(halve)
    data = batches(engine.mesh.rank("dp"), varies=varies)
    ends = engine.is_first_stage() or engine.is_last_stage()
    losses = [engine.train_batch(data if ends else None).item() for _ in range(STEPS)]
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    weights = {name: param.detach().clone().float() for name, param in engine.module.named_parameters()}
    return losses, norm, weights, engine.global_steps, engine.micro_steps


def check(
    world, kind, stages, stage, *, varies=False, module_keys=None, clip=0.0, tolerance=1e-5, hooked=False, **keys
):
    keys["gradient_clipping"] = clip
    losses, norm, weights = reference(kind, world // stages, clip=clip, varies=varies, hooked=hooked)
    found = run_ranks(world, train_job, kind, stages, stage, varies, module_keys, hooked, keys)
    for own_losses, own_norm, own, steps, micro_steps in found:
        assert own_losses == pytest.approx(losses, abs=tolerance, rel=tolerance)
        assert own_norm == pytest.approx(norm, rel=10 * tolerance)
        for name, weight in own.items():
            torch.testing.assert_close(weight, weights[name], atol=tolerance, rtol=tolerance)
        assert (steps, micro_steps) == (STEPS, STEPS * MICROS)
    assert {name for _, _, own, _, _ in found for name in own} == set(weights)


sweep = partial(pytest.param, marks=pytest.mark.sweep)
SPLIT = {"pipeline": {"schedule": "zero_bubble"}}
INTERLEAVED = {"pipeline": {"schedule": "interleaved"}}
TWICE = {"interleave": 2}


@pytest.mark.parametrize(
    ("kind", "stage", "keys", "module_keys"),
    [
        ("tied", 0, {}, None),
        sweep("plain", 0, {}, None),
        ("plain", 1, SPLIT, {"partition_method": "uniform"}),
        sweep("tied", 2, SPLIT, None),
        ("tied", 2, INTERLEAVED, TWICE),
        ("uneven", 1, INTERLEAVED, TWICE | {"partition_method": "uniform"}),
        ("uneven", 1, SPLIT, {"partition_method": "uniform"}),
        sweep("plain", 3, INTERLEAVED, TWICE),
        sweep("tied", 0, INTERLEAVED, TWICE),
        ("plain", 3, {}, {"activation_checkpoint_interval": 2}),
        sweep("tied", 3, {}, {"partition_method": "type:block"}),
    ],
)
def test_two_stages(kind, stage, keys, module_keys):
    check(2, kind, 2, stage, module_keys=module_keys, **keys)


@pytest.mark.parametrize(
    ("kind", "stage", "keys", "interval", "hooked"),
    [
        ("plain", 0, SPLIT, 1, False),
        sweep("plain", 1, SPLIT, 2, False),
        sweep("tied", 2, SPLIT, 1, False),
        sweep("plain", 0, SPLIT, 0, True),
        ("plain", 2, SPLIT, 1, True),
        sweep("tied", 1, SPLIT, 0, True),
        sweep("plain", 2, {}, 1, True),
        ("plain", 1, SPLIT, 0, "after"),
        sweep("tied", 0, SPLIT, 0, "after"),
    ],
)
def test_split_backwards_see_what_autograd_sees(kind, stage, keys, interval, hooked):
    check(2, kind, 2, stage, module_keys={"activation_checkpoint_interval": interval}, hooked=hooked, **keys)


def test_three_stages_with_shapes_that_change():
    check(3, "plain", 3, 1, varies=True, clip=0.1)


@pytest.mark.parametrize(
    ("kind", "stage", "keys"),
    [
        ("tied", 1, {}),
        sweep("plain", 0, SPLIT),
        sweep("plain", 2, {}),
        sweep("tied", 3, {}),
        sweep("tied", 2, SPLIT),
    ],
)
def test_four_stages(kind, stage, keys):
    check(4, kind, 4, stage, clip=0.1, **keys)


@pytest.mark.parametrize(
    ("kind", "stage", "clip", "keys"),
    [
        sweep("tied", 0, 0.1, {}),
        sweep("tied", 1, 0.1, SPLIT),
        ("tied", 2, 0.1, SPLIT),
        ("tied", 3, 0.1, {}),
        sweep("plain", 1, 0.0, {}),
        sweep("plain", 3, 0.1, {}),
    ],
)
def test_two_stages_on_two_data_parallel_ranks(kind, stage, clip, keys):
    check(4, kind, 2, stage, clip=clip, **keys)


def save_job(folder, kind, stages, stage, keys):
    engine = create(kind, stages, stage, **keys)
    data = batches(engine.mesh.rank("dp"))
    for _ in range(2):
        engine.train_batch(data)
    engine.save_checkpoint(folder)
    losses = [engine.train_batch(data).item() for _ in range(3)]
    engine.destroy()
    return losses


def load_job(folder, kind, stages, stage, module_keys):
    engine = create(kind, stages, stage, {"base_seed": 99, **module_keys})
    engine.load_checkpoint(folder)
    data = batches(engine.mesh.rank("dp"))
    for _ in range(2 * MICROS):
        next(data)
    losses = [engine.train_batch(data).item() for _ in range(3)]
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("kind", "stages", "worlds", "stage", "module_keys"),
    [
        ("plain", (4, 2), (4, 2), 1, {"partition_method": "uniform"}),
        sweep("plain", (1, 3), (1, 3), 3, {}),
        sweep("plain", (2, 4), (2, 4), 2, {}),
        ("tied", (2, 3), (2, 3), 2, {}),
        sweep("tied", (4, 1), (4, 1), 0, {}),
    ],
)
def test_a_checkpoint_loads_at_another_number_of_stages(tmp_path, kind, stages, worlds, stage, module_keys):
    folder = str(tmp_path)
    saved = run_ranks(worlds[0], save_job, folder, kind, stages[0], stage, {})
    loaded = run_ranks(worlds[1], load_job, folder, kind, stages[1], stage, module_keys)
    for losses in loaded:
        assert losses == pytest.approx(saved[0], rel=1e-5)


class Mixing(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


def seeded_job(first_shared, stages, interleave):
    """The first weights, of layers in which one shares its module with the last but one."""
    layers = [LayerSpec(Mixing, WIDTH, WIDTH) for _ in range(8)]
    layers[first_shared] = layers[6] = TiedLayerSpec("shared", Mixing, WIDTH, WIDTH)
    torch.manual_seed(dist.get_rank())  # the script's own seed changes nothing
    model = PipelineModule(
        layers,
        num_stages=stages,
        loss_fn=F.mse_loss,
        seed_layers=True,
        partition_method="uniform",
        interleave=interleave,
    )
    schedule = {"pipeline": {"schedule": "interleaved"}} if interleave > 1 else {}
    engine = deepspeed.initialize(model=model, config=config_of(0, **schedule))[0]
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine.destroy()
    return weights


@pytest.mark.parametrize(
    ("world", "interleave", "first_shared"), [(2, 1, 3), (2, 2, 2), sweep(2, 4, 1), sweep(4, 2, 3), sweep(2, 2, 4)]
)
def test_seeded_layers_do_not_depend_on_stages_and_parts(world, interleave, first_shared):
    (whole,) = run_ranks(1, seeded_job, first_shared, 1, 1)
    assert "tied_modules.shared.weight" in whole
    for own in run_ranks(world, seeded_job, first_shared, world, interleave):
        for name, weight in own.items():
            assert torch.equal(weight, whole[name]), name


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=groups.get_tensor_model_parallel_group())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _SumForward.apply(grad)


class DividedBlock(Block):
    """`Block` with its two products divided over tensor-parallel ranks, as Megatron's layers are."""

    def __init__(self, scale, tp):
        super().__init__(scale)
        rows = 2 * WIDTH // tp
        own = slice(dist.get_rank() % tp * rows, (dist.get_rank() % tp + 1) * rows)
        self.first.weight = nn.Parameter(self.first.weight.detach()[own].clone())
        self.first.bias = nn.Parameter(self.first.bias.detach()[own].clone())
        self.second.weight = nn.Parameter(self.second.weight.detach()[:, own].clone())
        for param in (self.first.weight, self.first.bias, self.second.weight):
            param.tensor_model_parallel = True
        self.own = own

    def forward(self, inputs):
        hidden, mask = inputs
        update = F.gelu(self.first(_SumBackward.apply(self.norm(hidden))))
        update = _SumForward.apply(F.linear(update, self.second.weight)) + self.second.bias
        return hidden + self.scale * update * mask.unsqueeze(-1), mask


def divided_job(tp, stage, keys):
    layers = layers_of("tied")
    for spec in layers[1:-1]:
        spec.typename, spec.module_args = DividedBlock, (*spec.module_args, tp)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=tp, num_dp=dist.get_world_size() // (2 * tp))
    model = PipelineModule(layers, topology=topology, loss_fn=loss_fn, seed_layers=True, base_seed=SEED)
    engine = deepspeed.initialize(model=model, config=config_of(stage, gradient_clipping=0.1, **keys))[0]
    data = batches(engine.mesh.rank("dp"))
    losses = [engine.train_batch(data).item() for _ in range(STEPS)]
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return (
        losses,
        norm,
        [(module.own, name, module.state_dict()) for name, module in model.named_children() if name.isdigit()],
    )


@pytest.mark.parametrize(
    ("world", "stage", "keys"), [(4, 1, {}), sweep(8, 2, SPLIT), sweep(8, 3, {}), sweep(4, 0, SPLIT)]
)
def test_two_stages_of_two_tensor_parallel_ranks(world, stage, keys):
    losses, norm, weights = reference("tied", world // 4, clip=0.1)
    for own_losses, own_norm, blocks in run_ranks(world, divided_job, 2, stage, keys):
        assert own_losses == pytest.approx(losses, abs=1e-5, rel=1e-5)
        assert own_norm == pytest.approx(norm, rel=1e-4)
        for own, layer, state in blocks:
            close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
            close(state["first.weight"], weights[f"{layer}.first.weight"][own])
            close(state["second.weight"], weights[f"{layer}.second.weight"][:, own])
            close(state["norm.weight"], weights[f"{layer}.norm.weight"])


class _Done:
    def poll(self):
        return True

    def wait(self):
        pass


def _in_order(start):
    """A transport without buffers: a send is over when its receive is, and nothing runs before that."""

    def meet(self, kind, tensor, peer, tag):
        is_send = kind.startswith("a send")
        start(self, kind, tensor, peer, tag).wait()
        answer = "a receive from" if is_send else "a send to"
        start(self, answer, torch.zeros(1), peer, tag + 4).wait()
        return _Done()

    return meet


def ordered_job(kind, stages, stage, module_keys, keys):
    with (
        patch.object(PointToPoint, "completes_on_host", False),
        patch.object(PointToPoint, "_start", _in_order(PointToPoint._start)),
    ):
        engine = create(kind, stages, stage, module_keys, **keys)
        data = batches(engine.mesh.rank("dp"))
        losses = [engine.train_batch(data).item() for _ in range(3)]
        losses.append(engine.eval_batch(batches(9)).item())
        engine.destroy()
    return losses


def plain_job(kind, stages, stage, module_keys, keys):
    engine = create(kind, stages, stage, module_keys, **keys)
    data = batches(engine.mesh.rank("dp"))
    losses = [engine.train_batch(data).item() for _ in range(3)]
    losses.append(engine.eval_batch(batches(9)).item())
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("stages", "kind", "keys", "module_keys"),
    [
        (2, "plain", SPLIT, None),
        (2, "plain", INTERLEAVED, TWICE),
        sweep(2, "uneven", INTERLEAVED, TWICE | {"partition_method": "uniform"}),
        sweep(3, "tied", SPLIT, None),
        sweep(3, "plain", {}, None),
    ],
)
def test_messages_that_wait_for_those_before_them(stages, kind, keys, module_keys):
    """As NCCL's do; see `pipe/timeline.py`."""
    found = run_ranks(stages, ordered_job, kind, stages, 0, module_keys, keys)
    assert found == run_ranks(stages, plain_job, kind, stages, 0, module_keys, keys)


def test_one_stage():
    check(2, "tied", 1, 1)
