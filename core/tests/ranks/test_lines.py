"""What the start line and the lines of steps say where a rank holds a part of the model."""

import copy

import deepspeed
import deepspeed.log
import pytest
import torch
import torch.nn.functional as F
from deepspeed.engine.start_line import start_line
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.testing.distributed import run_ranks
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "steps_per_print": 1,
}
TIED = 5 * 4


def start(model, **keys):
    return deepspeed.initialize(model=model, config={**copy.deepcopy(CONFIG), **keys})[0]


def tied_pipeline():
    def embed(module, ids):
        return F.embedding(ids, module.weight)

    layers = [
        TiedLayerSpec("words", nn.Linear, 4, 5, bias=False, forward_fn=embed),
        LayerSpec(nn.Linear, 4, 4),
        TiedLayerSpec("words", nn.Linear, 4, 5, bias=False),
    ]
    return PipelineModule(layers, num_stages=2, loss_fn=F.cross_entropy, partition_method="uniform")


def pipeline_job():
    engine = start(tied_pipeline(), zero_allow_untested_optimizer=True)
    lines = []
    original = deepspeed.log.announce
    deepspeed.log.announce = lambda line, **how: lines.append(line)
    try:
        data = iter([(torch.randint(5, (2,)), torch.randint(5, (2,))) for _ in range(4)])
        loss = engine.train_batch(data)
    finally:
        deepspeed.log.announce = original
    return start_line(engine), lines, loss.item()


def test_a_pipeline_counts_the_whole_model_and_says_its_loss():
    (line, lines, loss), (other, _, _) = run_ranks(2, pipeline_job)
    assert f"{TIED + 4 * 4 + 4} parameters," in line
    assert line == other
    assert [each for each in lines if each.endswith(f", loss={loss:.4g}")]


def experts_job(stage):
    layer = MoE(hidden_size=4, expert=nn.Linear(4, 4), num_experts=4, ep_size=2)
    return start_line(start(layer, zero_optimization={"stage": stage}))


@pytest.mark.parametrize("stage", [0, 2])
def test_divided_experts_are_counted_once_each(stage):
    lines = run_ranks(2, experts_job, stage)
    assert all(f"{4 * (4 * 4 + 4) + 4 * 4} parameters," in line for line in lines)


def tensor_parallel_job():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    numel = sum(param.numel() for param in model.parameters())
    return numel, start_line(start(model, tensor_parallel={"autotp_size": 2}))


def test_a_divided_model_is_counted_whole():
    for numel, line in run_ranks(2, tensor_parallel_job):
        assert f"{numel:,} parameters," in line


def plain_loss_job():
    engine = start(nn.Linear(2, 1))
    lines, original = [], deepspeed.log.announce
    deepspeed.log.announce = lambda line, **how: lines.append(line)
    losses = []
    try:
        for _ in range(2):
            loss = engine(torch.randn(2, 2)).square().mean()
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    finally:
        deepspeed.log.announce = original
    return lines, losses


def test_the_line_of_a_step_has_the_mean_loss_of_its_micro_batches():
    ((lines, losses),) = run_ranks(1, plain_loss_job)
    assert [each for each in lines if each.endswith(f", loss={sum(losses) / 2:.4g}")]
