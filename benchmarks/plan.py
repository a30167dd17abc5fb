"""Memory of training on small meshes: the estimate of `ds_plan` against the measured peak of live tensors.

    python benchmarks/plan.py                 # all points: three minutes on two idle cores
    python benchmarks/plan.py --points 0 5 7  # some of them

*planned* is the estimate for the ranks that need the most. *measured* is the exact peak of the bytes in torch's
allocator in the third step, from the profiler's record of each allocation; the maximum over the ranks counts. It
contains states, gradients, activations, buffers and the collectives' tensors. Models are Llamas and Mixtrals of
transformers with random weights; pipelines have the same layers. Each expert gets the same number of tokens, as in the
formula. A point is met if the ratio is within 10%. The exit code is 1 if a point is missed. SHOW_PARTS=1 in the
environment lists the tensors that are live at the peak.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.planning import Library, Mesh, ModelShape, Training, estimate_memory, gloo, read_shape
from deepspeed.testing.distributed import run_ranks
from torch import Tensor, nn

MEBIBYTE = 2**20
TOLERANCE = 0.1
NUM_STEPS = 3
LIMIT_S = 300  # for a point, on a busy machine
LLAMA = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 1500,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
GROUPED = {**LLAMA, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
MIXTRAL = {
    **GROUPED,
    "model_type": "mixtral",
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "grouped": GROUPED,
    "tied": {**GROUPED, "tie_word_embeddings": True},
    "mixtral": MIXTRAL,
}


@dataclasses.dataclass(frozen=True)
class Point:
    """A model, a mesh and training options."""

    mesh: Mesh
    training: Training
    model: str = "llama"

    def config(self) -> dict[str, Any]:
        """Return the configuration of the model."""
        return MODELS[self.model]

    def shape(self) -> ModelShape:
        return read_shape(self.config())

    def __str__(self) -> str:
        training = self.training
        text = f"{self.model:8} {self.mesh!s:22} ZeRO {training.stage} {training.precision} "
        text += f"{training.micro_batch} x {training.sequence} x {training.accumulation}"
        return text + (" checkpointed" if training.checkpoints_activations else "")


def point(stage: int, *, precision: Any = "fp32", model: str = "llama", **sizes: Any) -> Point:
    axes = {axis: sizes.pop(axis) for axis in ("pp", "dp", "sp", "tp", "ep") if axis in sizes}
    training = Training(**{"micro_batch": 2, "sequence": 256, **sizes}, stage=stage, precision=precision)
    return Point(Mesh(**axes), training, model)


POINTS = [
    point(0, dp=2),
    point(1, dp=2, precision="bf16", model="grouped"),
    point(2, dp=2, accumulation=2),
    point(3, dp=2, precision="bf16", model="tied"),
    point(3, dp=3, micro_batch=1),
    point(2, dp=4, precision="bf16", micro_batch=1),
    point(1, dp=2, model="grouped", checkpoints_activations=True, micro_batch=4),
    point(3, dp=2, precision="bf16", model="grouped", checkpoints_activations=True, accumulation=2),
    point(0, tp=2),
    point(0, tp=3, model="grouped", precision="bf16"),
    point(1, dp=2, tp=2, precision="bf16", model="grouped"),
    point(3, dp=2, tp=2),
    point(0, pp=2, accumulation=4, micro_batch=1),
    point(1, pp=2, dp=2, accumulation=4, micro_batch=1, precision="bf16"),
    point(0, pp=4, accumulation=6, micro_batch=1, model="grouped"),
    point(2, pp=2, dp=2, accumulation=2, micro_batch=1),
    point(1, pp=2, tp=2, accumulation=4, micro_batch=1, precision="bf16", model="grouped"),
    point(1, pp=2, dp=2, tp=2, accumulation=4, micro_batch=1),
    point(0, sp=2, model="grouped", micro_batch=1, sequence=512),
    point(3, sp=2, dp=2, model="grouped", micro_batch=1, sequence=512, precision="bf16"),
    point(1, sp=3, micro_batch=1, sequence=384, precision="bf16"),
    point(0, dp=2, ep=2, model="mixtral"),
    point(2, dp=4, ep=2, model="mixtral", micro_batch=1),
    point(1, dp=2, ep=2, model="mixtral", precision="bf16", accumulation=2),
]


# ----- on a rank -----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A decoder layer of transformers that maps a tensor to a tensor, for pipelines."""

    def __init__(self, config: Any, at: int) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        self.layer = LlamaDecoderLayer(config, at)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        output: Tensor = self.layer(hidden, position_embeddings=self.rotary_emb(hidden, positions))
        return output


class Head(nn.Module):
    """The final norm and the output layer."""

    def __init__(self, config: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.lm_head(self.norm(hidden))
        return output


def build(point: Point) -> Callable[[], None]:
    """Create an engine, and return a function that runs a step."""
    import deepspeed
    import transformers

    keys = {name: value for name, value in point.config().items() if name != "model_type"}
    family = {"mixtral": "Mixtral"}.get(point.model, "Llama")
    config = getattr(transformers, f"{family}Config")(**keys, use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    if point.mesh.pp > 1:
        return build_pipeline(point, config)
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    for module in model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.register_forward_hook(balanced)
    if point.training.checkpoints_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    mpu = None
    if point.mesh.sp > 1:
        mpu = deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF.register_with_transformers(
            model, "sdpa", point.mesh.sp, point.training.micro_batch
        )
    parameters = list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=ds_config(point), mpu=mpu)
    length = point.training.sequence // point.mesh.sp
    start = length * (torch.distributed.get_rank() // point.mesh.tp % point.mesh.sp)
    positions = {"position_ids": torch.arange(start, start + length)[None]} if point.mesh.sp > 1 else {}

    def step() -> None:
        for _ in range(point.training.accumulation):
            tokens = torch.randint(config.vocab_size, (point.training.micro_batch, length))
            engine.backward(engine(input_ids=tokens, labels=tokens, **positions).loss)
            engine.step()

    return step


def balanced(router: nn.Module, _: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Replace a router's choice by experts in turn, because an untrained router is not balanced."""
    logits, scores, experts = outputs
    return logits, scores, (torch.arange(experts.numel()) % router.num_experts).view_as(experts)


def build_pipeline(point: Point, config: Any) -> Callable[[], None]:
    import deepspeed
    from deepspeed.pipe.topology import PipeModelDataParallelTopology

    spec = deepspeed.pipe.LayerSpec
    layers = [
        spec(nn.Embedding, config.vocab_size, config.hidden_size),
        *[spec(Layer, config, at) for at in range(config.num_hidden_layers)],
        spec(Head, config),
    ]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.float().view(-1, config.vocab_size), labels.view(-1))

    mesh = point.mesh
    topology = PipeModelDataParallelTopology(num_pp=mesh.pp, num_mp=mesh.tp, num_dp=mesh.dp)
    module = deepspeed.pipe.PipelineModule(layers, topology=topology, loss_fn=loss, partition_method="parameters")
    if mesh.tp > 1:
        module.config = config
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=ds_config(point))

    def step() -> None:
        shape = (point.training.micro_batch, point.training.sequence)
        batches = [torch.randint(config.vocab_size, shape) for _ in range(point.training.accumulation)]
        engine.train_batch(iter([(tokens, tokens) for tokens in batches]))

    return step


def ds_config(point: Point) -> dict[str, Any]:
    """Return the configuration of DeepSpeed."""
    mesh, training = point.mesh, point.training
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": training.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": training.precision == "bf16"},
        "zero_optimization": {"stage": training.stage},
        "steps_per_print": 10**9,
    }
    if mesh.tp > 1:
        config["tensor_parallel"] = {"autotp_size": mesh.tp}
    if mesh.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": mesh.ep}
    return config


def measure(point: Point) -> dict[str, Any]:
    """Return the peak bytes of live tensors in the last step, and the preferences of the collectives."""
    import deepspeed.comm as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    dist.group_backend().release()  # drop buffers of an earlier point
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as records:
        step = build(point)
        for number in range(NUM_STEPS):
            dist.barrier()
            with record_function(f"step {number}"):
                step()
    backend = dist.group_backend()
    can = backend.capabilities
    peak, parts = peak_bytes(records, f"step {NUM_STEPS - 1}")
    return {
        "peak": peak,
        "bucket_bytes": can.preferred_bucket_bytes,
        "all_reduce_bytes": can.preferred_all_reduce_bytes,
        "stages": not getattr(backend, "is_direct", can.native_reduce_scatter),
        "parts": parts if os.environ.get("SHOW_PARTS") else None,
    }


def peak_bytes(records: Any, name: str) -> tuple[int, list[tuple[int, int, str]]]:
    """Return the peak of live bytes in the range `name`, and the blocks that are live at the peak."""
    from torch._C._profiler import _EventType

    events: list[tuple[int, int, int, str]] = []
    window = (0, 0)

    def visit(event: Any, above: tuple[str, ...]) -> None:
        nonlocal window
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            events.append((event.start_time_ns, fields.alloc_size, fields.ptr, " > ".join(above[-3:])))
        elif event.name == name:
            window = (event.start_time_ns, event.end_time_ns)
        for child in event.children:
            visit(child, (*above, event.name))

    for root in records.profiler.kineto_results.experimental_event_tree():
        visit(root, ())
    live = peak = 0
    blocks: dict[int, tuple[int, str]] = {}
    at_peak: dict[int, tuple[int, str]] = {}
    for time, size, pointer, origin in sorted(events):
        live += size
        if size > 0:
            blocks[pointer] = (size, origin)
        else:
            blocks.pop(pointer, None)
        if window[0] <= time <= window[1] and live > peak:
            peak, at_peak = live, dict(blocks)
    counts: dict[tuple[int, str], int] = {}
    for block in at_peak.values():
        counts[block] = counts.get(block, 0) + 1
    return peak, sorted(((size * n, n, origin) for (size, origin), n in counts.items()), reverse=True)[:45]


# ----- the report ----------------------------------------------------------------------------------------------------


def report(points: list[Point]) -> list[dict[str, Any]]:
    rows = []
    print(f"{'MiB':64} {'planned':>9} {'measured':>9} {'ratio':>7}")
    for each in points:
        ranks = run_ranks(each.mesh.ranks, measure, each, timeout_s=LIMIT_S)
        measured = max(rank["peak"] for rank in ranks)
        library = library_of(ranks[0], each.mesh)
        planned = estimate_memory(each.shape(), each.mesh, each.training, library)
        ratio = planned.total / measured
        verdict = "" if abs(ratio - 1) <= TOLERANCE else "  MISSED"
        figures = f"{planned.total / MEBIBYTE:9.2f} {measured / MEBIBYTE:9.2f} {ratio:7.3f}{verdict}"
        print(f"{each!s:64} {figures}", flush=True)
        peaks = [rank["peak"] for rank in ranks]
        rows.append({"point": str(each), "planned": dataclasses.asdict(planned), "measured": peaks, "ratio": ratio})
        if ranks[0]["parts"]:
            print(planned, peaks)
            for part in max(ranks, key=lambda rank: rank["peak"])["parts"]:
                print("   ", part)
    return rows


def library_of(rank: dict[str, Any], mesh: Mesh) -> Library:
    """Return the needs of the collectives of the measured ranks."""
    names = ("bucket_bytes", "all_reduce_bytes", "stages")
    return dataclasses.replace(gloo(mesh.replicas), **{name: rank[name] for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--points", type=int, nargs="+", help="numbers of points, from 0; default: all")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    numbers = range(len(POINTS)) if arguments.points is None else arguments.points
    rows = report([POINTS[number] for number in numbers])
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    missed = sum(abs(row["ratio"] - 1) > TOLERANCE for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} within {TOLERANCE:.0%}")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
