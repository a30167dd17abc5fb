"""A checkpoint of pipeline stages of divided layers loads at other numbers of both: losses as unbroken."""

import deepspeed
import pytest
import torch
from deepspeed.checkpoint.convert import convert
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.testing.distributed import run_ranks
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, WIDTH, INNER, LENGTH, MICROS = 11, 8, 12, 5, 2
BEFORE, AFTER = 2, 3
LAYER_SPECS = [
    {"patterns": [r".*\.up\.weight"], "partition_type": "column"},
    {"patterns": [r".*\.down\.weight"], "partition_type": "row"},
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def as_logits(embedding, x):
    return x @ embedding.weight.t()


def loss_fn(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def create(pp, tp, stage, seed=7):
    tied = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH)
    head = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=as_logits)
    layers = [tied, *(LayerSpec(Block) for _ in range(4)), head]
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": MICROS,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "mesh": {"pp": pp, "tp": tp},
        "tensor_parallel": {"autotp_size": tp, "partition_config": {"layer_specs": LAYER_SPECS}},
    }
    if tp == 1:
        config.pop("tensor_parallel")
    model = PipelineModule(layers, num_stages=pp, loss_fn=loss_fn, seed_layers=True, base_seed=seed)
    return deepspeed.initialize(model=model, config=config)[0]


def batches(engine):
    """The same on all data-parallel ranks, of which the number may change."""
    generator = torch.Generator().manual_seed(3)
    while True:
        tokens = torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator)
        yield tokens, tokens.roll(1, 1)


def save_job(folder, pp, tp, stage):
    engine = create(pp, tp, stage)
    data = batches(engine)
    for _ in range(BEFORE):
        engine.train_batch(data)
    engine.save_checkpoint(folder)
    losses = [engine.train_batch(data).item() for _ in range(AFTER)]
    engine.destroy()
    return losses


def load_job(folder, pp, tp, stage):
    engine = create(pp, tp, stage, seed=99)
    engine.load_checkpoint(folder)
    data = batches(engine)
    for _ in range(BEFORE * MICROS):
        next(data)
    losses = [engine.train_batch(data).item() for _ in range(AFTER)]
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("world", "source", "targets", "stages"),
    [
        (4, (2, 2), {(1, 2): 2, (2, 1): 3, (4, 1): 1, (1, 1): 0}, 1),
        (4, (2, 2), {(1, 2): 1, (4, 1): 0}, 3),
        (4, (4, 1), {(2, 2): 3}, 2),
        pytest.param(4, (1, 2), {(2, 2): 1, (2, 1): 2}, 3, marks=pytest.mark.sweep),
        pytest.param(6, (2, 3), {(1, 2): 3, (3, 1): 2, (2, 1): 1}, 2, marks=pytest.mark.sweep),
        pytest.param(6, (3, 2), {(1, 3): 3, (2, 2): 0}, 0, marks=pytest.mark.sweep),
        pytest.param(8, (2, 2), {(2, 2): 3, (4, 2): 1}, 2, marks=pytest.mark.sweep),
    ],
)
def test_losses_are_those_of_the_unbroken_run(tmp_path, world, source, targets, stages):
    saved = run_ranks(world, save_job, tmp_path, *source, stages)
    assert all(losses == saved[0] for losses in saved)
    for (pp, tp), stage in targets.items():
        for losses in run_ranks(pp * tp, load_job, tmp_path, pp, tp, stage):
            assert losses == pytest.approx(saved[0], rel=1e-5), (pp, tp, stage)


@pytest.mark.parametrize(
    ("world", "source", "stage", "form", "targets"),
    [
        (4, (2, 2), 1, "universal", {(1, 1): 0, (1, 2): 2, (4, 1): 1}),
        (4, (2, 1), 3, "universal", {(1, 1): 3, (2, 1): 3}),
        (2, (1, 2), 2, "dcp", {(1, 1): 2, (2, 1): 1}),
        (2, (2, 1), 0, "dcp", {(1, 1): 3}),
        pytest.param(4, (4, 1), 2, "universal", {(2, 1): 1, (1, 1): 1}, marks=pytest.mark.sweep),
        pytest.param(4, (2, 2), 3, "universal", {(2, 1): 1, (1, 2): 3}, marks=pytest.mark.sweep),
        pytest.param(4, (2, 2), 3, "dcp", {(2, 2): 3, (1, 1): 0}, marks=pytest.mark.sweep),
        pytest.param(4, (2, 2), 0, "universal", {(2, 2): 0, (1, 1): 1}, marks=pytest.mark.sweep),
    ],
)
def test_what_is_joined_of_a_checkpoint_goes_on_with_its_losses(tmp_path, world, source, stage, form, targets):
    saved = run_ranks(world, save_job, tmp_path / "divided", *source, stage)
    convert(tmp_path / "divided", tmp_path / "joined", form)
    for (pp, tp), zero_stage in targets.items():
        for losses in run_ranks(pp * tp, load_job, tmp_path / "joined", pp, tp, zero_stage):
            assert losses == pytest.approx(saved[0], rel=1e-5), (pp, tp, zero_stage)


def test_the_files_of_layers_are_joined(tmp_path):
    run_ranks(4, save_job, tmp_path / "divided", 2, 2, 1)
    run_ranks(1, save_job, tmp_path / "whole", 1, 1, 1)
    folders = []
    for name in ("divided", "whole"):
        convert(tmp_path / name, tmp_path / f"{name}_joined", "universal")
        folders.append(tmp_path / f"{name}_joined" / f"global_step{BEFORE}_universal")
    files = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pt")) for folder in folders]
    assert files[0] == files[1]
    for name in files[0]:
        found, expected = (torch.load(folder / name, weights_only=True) for folder in folders)
        if name.startswith("layer_") or name.endswith(("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt")):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
