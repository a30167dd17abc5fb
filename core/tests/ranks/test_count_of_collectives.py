"""How many collectives one step issues: per bucket one reduction and one gather, and two small ones.

Counted where ZeRO calls the communication backend, whatever library or transport serves it; a collective of
torch.distributed that does not go through the backend is counted apart. Stage 3 gathers each bucket twice: in forward
and in backward.
"""

import contextlib
import functools
from collections import Counter
from unittest import mock

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError
from deepspeed.testing.distributed import run_ranks

WIDTH, NUM_LAYERS = 64, 12
BUCKET_NUMEL = 3 * WIDTH * WIDTH
#: a collective of at most so many elements is a small one: the norm, the overflow, what was used
SMALL_NUMEL = 512
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}

# method of a backend -> what it is in a count
PRIMITIVES = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "broadcast": "broadcast",
    "all_to_all": "all-to-all",
    "barrier": "barrier",
}
TORCH_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "isend", "irecv", "recv"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"),
)


@contextlib.contextmanager
def counted_collectives():
    """Inside, every collective of the backend of all ranks is counted, once each however the backend makes it.

    Yields:
        A Counter of names in `PRIMITIVES`, "small" in place of the name for few elements; "torch.distributed.<name>"
        for what is called past the backend.
    """
    counts = Counter()
    is_inside = False

    def counting(name, call):
        @functools.wraps(call)
        def counted(*args, **kwargs):
            nonlocal is_inside
            if is_inside:
                return call(*args, **kwargs)
            numel = max((value.numel() for value in args if isinstance(value, torch.Tensor)), default=0)
            counts["small" if numel <= SMALL_NUMEL and "." not in name else name] += 1
            is_inside = True
            try:
                return call(*args, **kwargs)
            finally:
                is_inside = False

        return counted

    with contextlib.ExitStack() as stack:
        owner = type(dist.group_backend())
        for method, name in PRIMITIVES.items():
            stack.enter_context(mock.patch.object(owner, method, counting(name, getattr(owner, method))))
        for name in TORCH_COLLECTIVES:
            call = counting(f"torch.distributed.{name}", getattr(torch.distributed, name))
            stack.enter_context(mock.patch.object(torch.distributed, name, call))
        yield counts


def is_supported(stage):
    """Whether this version trains with the stage."""
    try:
        DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": stage}}, world_size=1).check_supported()
    except ConfigError:
        return False
    return True


def make_engine(stage, precision, own_optimizer):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET_NUMEL,
            "stage3_param_persistence_threshold": 0,
        },
        precision: {"enabled": True},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer if own_optimizer else None, config=config)[0]


def count_step(stage, precision, own_optimizer):
    """The number of buckets, and the counts of the third step."""
    engine = make_engine(stage, precision, own_optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(2, WIDTH, generator=generator).to(getattr(torch, DTYPES[precision]))
    for number in range(3):
        with counted_collectives() if number == 2 else contextlib.nullcontext(Counter()) as counts:
            engine.backward(engine(x).float().square().mean())
            engine.step()
    num_buckets = len(engine.sharding.gradients.memory.buckets)
    engine.destroy()
    return num_buckets, dict(counts)


# ----- the counting itself -------------------------------------------------------------------------------------------


def collectives_of_a_job():
    with counted_collectives() as counts:
        dist.group_backend().all_reduce(torch.ones(SMALL_NUMEL + 1)).wait()
        dist.group_backend().all_reduce(torch.ones(3)).wait()
        torch.distributed.all_reduce(torch.ones(3))
    dist.group_backend().all_reduce(torch.ones(3)).wait()
    return dict(counts)


def test_what_is_counted():
    assert run_ranks(2, collectives_of_a_job)[0] == {"all-reduce": 1, "small": 1, "torch.distributed.all_reduce": 1}


# ----- one step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("own_optimizer", [False, True], ids=["kernel", "torch"])
@pytest.mark.parametrize("stage", [stage for stage in range(4) if is_supported(stage)])
def test_a_step_issues_a_reduction_and_a_gather_per_bucket(stage, precision, own_optimizer):
    num_buckets, counts = run_ranks(2, count_step, stage, precision, own_optimizer)[0]
    assert num_buckets > 2
    allowed = {
        0: {"all-reduce": num_buckets},
        1: {"reduce-scatter": num_buckets, "all-gather": num_buckets},
        2: {"reduce-scatter": num_buckets, "all-gather": num_buckets},
        3: {"reduce-scatter": num_buckets, "all-gather": 2 * num_buckets},
    }[stage] | {"small": 2}
    beyond = {name: count for name, count in counts.items() if count > allowed.get(name, 0)}
    assert beyond == {}, f"{num_buckets} buckets, found {counts}"
    assert counts.keys() >= allowed.keys()


def collectives_of_a_start():
    """From `initialize` to changed weights, a large one and a small one that stage 3 does not shard."""
    with counted_collectives() as counts:
        config = {"train_batch_size": 2, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 600}}
        model = torch.nn.Sequential(torch.nn.Linear(512, 600), torch.nn.Linear(600, 1))
        engine = deepspeed.initialize(model=model, config=config)[0]
        with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=1):
            for param in model.parameters():
                torch.nn.init.constant_(param, dist.get_rank())
        with deepspeed.zero.GatheredParameters(model.parameters()):
            changed = all(bool((param == 1).all()) for param in model.parameters())
        engine.destroy()
    return changed, dict(counts)


def test_first_and_changed_weights_go_through_the_backend():
    for changed, counts in run_ranks(2, collectives_of_a_start):
        assert changed
        assert counts["broadcast"] >= 2
        assert "torch.distributed.broadcast" not in counts


def count_pipeline_batch(stage, num_micros):
    """The reduce-scatters of the second batch of two stages on two data-parallel ranks each."""
    layers = [deepspeed.pipe.LayerSpec(torch.nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    model = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": num_micros,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    batch = [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))] * num_micros
    engine.train_batch(iter(batch))
    with counted_collectives() as counts:
        engine.train_batch(iter(batch))
    engine.destroy()
    return counts["reduce-scatter"]


@pytest.mark.parametrize(("stage", "times"), [(1, 1), (2, 4)])
def test_a_pipeline_reduces_once_per_batch_up_to_stage_1(stage, times):
    """From stage 2 on a rank has no place for the sum of whole gradients: docs/explanation/pipelines.md."""
    (one, *_), many = (run_ranks(4, count_pipeline_batch, stage, num_micros) for num_micros in (1, 4))
    assert one > 0
    assert many == [times * one] * 4
