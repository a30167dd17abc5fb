"""Peak memory of two ranks, from the allocator's records, is within a tenth of the estimate."""

import dataclasses

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.planning import Mesh, ModelShape, Training, estimate_memory, gloo
from deepspeed.testing.distributed import run_ranks
from torch.profiler import ProfilerActivity, profile, record_function

SHAPE = ModelShape(layers=3, hidden_size=128, heads=4, vocab_size=600, intermediate_size=256)
LENGTH, NUM_STEPS = 192, 3


def train_job(mesh, training):
    """(peak bytes of the last step, what the collectives need)."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.intermediate_size,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        use_cache=False,
        attn_implementation="sdpa",
    )
    dist.group_backend().release()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as records:
        model = transformers.LlamaForCausalLM(config).train()
        if training.checkpoints_activations:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        engine, *_ = deepspeed.initialize(model=model, config=ds_config(mesh, training))
        for number in range(NUM_STEPS):
            with record_function(f"step {number}"):
                for _ in range(training.accumulation):
                    tokens = torch.randint(SHAPE.vocab_size, (training.micro_batch, training.sequence))
                    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                    engine.step()
    engine.destroy()
    backend = dist.group_backend()
    can = backend.capabilities
    library = dataclasses.replace(
        gloo(mesh.replicas),
        bucket_bytes=can.preferred_bucket_bytes,
        all_reduce_bytes=can.preferred_all_reduce_bytes,
        stages=not getattr(backend, "is_direct", can.native_reduce_scatter),
    )
    return peak_bytes(records, f"step {NUM_STEPS - 1}"), library


def ds_config(mesh, training):
    return {
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": training.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": training.precision == "bf16"},
        "zero_optimization": {"stage": training.stage},
        "tensor_parallel": {"autotp_size": mesh.tp},
    }


def peak_bytes(records, name):
    from torch._C._profiler import _EventType

    sizes, window = [], None

    def visit(event):
        nonlocal window
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            sizes.append((event.start_time_ns, fields.alloc_size))
        elif event.name == name:
            window = (event.start_time_ns, event.end_time_ns)
        for child in event.children:
            visit(child)

    for root in records.profiler.kineto_results.experimental_event_tree():
        visit(root)
    live = peak = 0
    for time, size in sorted(sizes):
        live += size
        if window[0] <= time <= window[1]:
            peak = max(peak, live)
    return peak


CASES = [
    (Mesh(dp=2), Training(micro_batch=2, sequence=LENGTH, stage=1, precision="bf16")),
    (Mesh(dp=2), Training(micro_batch=1, sequence=LENGTH, stage=3, precision="fp32", accumulation=2)),
    (Mesh(tp=2), Training(micro_batch=2, sequence=LENGTH, stage=0, precision="fp32")),
    (Mesh(dp=2), Training(micro_batch=4, sequence=LENGTH, stage=2, precision="fp32", checkpoints_activations=True)),
]


@pytest.mark.parametrize(("mesh", "training"), CASES, ids=["stage1-bf16", "stage3", "tp", "stage2-checkpointed"])
def test_the_peak_is_as_planned(mesh, training):
    ranks = run_ranks(mesh.ranks, train_job, mesh, training)
    measured = max(peak for peak, _ in ranks)
    planned = estimate_memory(SHAPE, mesh, training, ranks[0][1])
    assert planned.total == pytest.approx(measured, rel=0.1), planned
