"""Pipeline stages whose layers are divided over tensor-parallel ranks, beside one rank with the whole model."""

import deepspeed
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.parallel.model_part import part_held
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.testing.distributed import run_ranks
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, WIDTH, INNER, LENGTH = 11, 8, 18, 5
STEPS, MICROS, LR, SEED = 20, 2, 3e-3, 7


class Embed(nn.Embedding):
    """Tied: also the head."""

    def __init__(self):
        super().__init__(VOCABULARY, WIDTH)


def as_logits(embedding, x):
    return x @ embedding.weight.t()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def layers(kinds="BBBB"):
    """Between the ends: B a block, N a norm, which is not divided."""
    tied = TiedLayerSpec("embed", Embed), TiedLayerSpec("embed", Embed, forward_fn=as_logits)
    return [tied[0], *(LayerSpec(Block) if kind == "B" else LayerSpec(nn.LayerNorm, WIDTH) for kind in kinds), tied[1]]


def loss_fn(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(dp_rank):
    generator = torch.Generator().manual_seed(100 + dp_rank)
    for _ in range(STEPS * MICROS):
        tokens = torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator)
        yield tokens, tokens.roll(1, 1)


def reference(dp, clip, kinds="BBBB"):
    """Losses, and weights by the names of PipelineModule."""
    modules = {}
    for index, spec in enumerate(layers(kinds)[:-1]):
        torch.manual_seed(SEED + index)
        modules["tied_modules.embed" if index == 0 else str(index)] = spec.build()
    params = [param for module in modules.values() for param in module.parameters()]
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=0.01)
    data, losses = [batches(rank) for rank in range(dp)], []
    for _ in range(STEPS):
        total = 0.0
        for each in [each for each in data for _ in range(MICROS)]:
            x, labels = next(each)
            for module in modules.values():
                x = module(x)
            loss = loss_fn(as_logits(modules["tied_modules.embed"], x), labels) / (MICROS * dp)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(params, clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {
        f"{path}.{name}": param.detach()
        for path, module in modules.items()
        for name, param in module.named_parameters()
    }


def train_job(sizes, stage, clip, schedule, kinds="BBBB", divided=("up", "down")):
    specs = [
        {"patterns": [rf".*\.{divided[0]}\.weight"], "partition_type": "column"},
        {"patterns": [rf".*\.{divided[1]}\.weight"], "partition_type": "row"},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": MICROS,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": clip,
        "mesh": sizes,
        "tensor_parallel": {"autotp_size": sizes["tp"], "partition_config": {"layer_specs": specs}},
        "pipeline": {"schedule": schedule},
    }
    model = PipelineModule(
        layers(kinds),
        num_stages=sizes["pp"],
        loss_fn=loss_fn,
        seed_layers=True,
        base_seed=SEED,
        partition_method="uniform",
    )
    engine = deepspeed.initialize(model=model, config=config)[0]
    data = batches(engine.mesh.rank("dp"))
    ends = engine.is_first_stage() or engine.is_last_stage()
    losses = [engine.train_batch(data if ends else None).item() for _ in range(STEPS)]
    engine.destroy()
    weights = {name: (part_held(param), param.detach().clone()) for name, param in engine.module.named_parameters()}
    return losses, weights


@pytest.mark.parametrize(
    ("world", "sizes", "stage", "clip", "schedule"),
    [
        (4, {"pp": 2, "tp": 2}, 0, 0.0, "1f1b"),
        (4, {"pp": 2, "tp": 2}, 1, 0.3, "zero_bubble"),
        (8, {"pp": 2, "dp": 2, "tp": 2}, 1, 0.3, "1f1b"),
        pytest.param(8, {"pp": 2, "dp": 2, "tp": 2}, 0, 0.0, "zero_bubble", marks=pytest.mark.sweep),
        pytest.param(8, {"pp": 2, "dp": 2, "tp": 2}, 2, 0.3, "1f1b", marks=pytest.mark.sweep),
        pytest.param(8, {"pp": 2, "dp": 2, "tp": 2}, 3, 0.3, "1f1b", marks=pytest.mark.sweep),
        pytest.param(4, {"pp": 2, "tp": 2}, 3, 0.0, "1f1b", marks=pytest.mark.sweep),
        pytest.param(6, {"pp": 2, "tp": 3}, 2, 0.3, "1f1b", marks=pytest.mark.sweep),
    ],
)
def test_stages_of_divided_layers_learn_what_the_whole_model_learns(world, sizes, stage, clip, schedule):
    compare(reference(sizes.get("dp", 1), clip), run_ranks(world, train_job, sizes, stage, clip, schedule))


@pytest.mark.parametrize("kinds", ["NNBB", "BBNN"])
def test_a_stage_may_have_no_layer_that_is_divided(kinds):
    results = run_ranks(4, train_job, {"pp": 2, "tp": 2}, 1, 0.3, "1f1b", kinds)
    compare(reference(1, 0.3, kinds), results)


def test_patterns_that_match_in_no_stage_are_refused():
    with pytest.raises(ConfigError, match="no pattern matches a weight of any stage of the pipeline; those"):
        run_ranks(4, train_job, {"pp": 2, "tp": 2}, 0, 0.0, "1f1b", "BBBB", ("left", "right"))


def compare(expected, results):
    """Losses, and each rank's part of the weights; together the ranks have all."""
    losses, weights = expected
    seen = set()
    for own_losses, own in results:
        assert own_losses == pytest.approx(losses, rel=1e-5)
        for name, (part, value) in own.items():
            whole = weights[name] if part is None else part.take(weights[name])
            torch.testing.assert_close(value, whole, atol=1e-5, rtol=1e-5, msg=name)
            seen.add(name)
    assert seen == set(weights)
