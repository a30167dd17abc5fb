"""Training on the stand-in, through the vendor's operator: what the plain device computes by core's reference."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops import registry

BF16 = {"bf16": {"enabled": True}}


def train(stage, precision):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64},
        **precision,
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(10):
        x = torch.randn(4, 5, generator=generator).to(engine.device, next(engine.module.parameters()).dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = {name: value.cpu() for name, value in engine.module.state_dict().items()}
    device = str(engine.device)
    engine.destroy()
    return losses, weights, device


def train_and_count(stage, precision):
    import torch_npu.operators

    torch_npu.operators.calls.clear()
    return *train(stage, precision), dict(torch_npu.operators.calls), dist.get_backend()


def compare(npu, cpu, stage, precision, tolerance):
    for rank, (found, wanted) in enumerate(
        zip(npu(train_and_count, stage, precision), cpu(train, stage, precision), strict=True)
    ):
        losses, weights, device, calls, library = found
        assert (device, library) == (f"npu:{rank}", "hccl")
        assert set(calls) == {"npu_apply_adam_w"}
        assert calls["npu_apply_adam_w"] >= 5
        assert losses == pytest.approx(wanted[0], rel=tolerance)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, wanted[1][name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_fp32_equals_the_reference(npu, cpu, stage):
    compare(npu, cpu, stage, {}, 1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bf16_with_fp32_masters_equals_the_reference(npu, cpu, stage):
    compare(npu, cpu, stage, BF16, 2**-6)


@pytest.mark.parametrize("stage", [1, 2])
def test_two_ranks_on_two_devices_equal_the_reference(npu_ranks, cpu_ranks, stage):
    compare(npu_ranks, cpu_ranks, stage, {}, 1e-5)


def resolved():
    accelerator = get_accelerator()
    return type(accelerator).__name__, {
        op: (registry.resolve(op).source, type(registry.resolve(op).builder).__name__, registry.resolve(op).why())
        for op in ("fused_adam", "transformer_inference", "fused_lion")
    }


def test_who_serves_which_op(npu):
    ((accelerator, found),) = npu(resolved)
    assert accelerator == "NPU_Accelerator"
    assert found["fused_adam"] == ("device", "FusedAdamBuilder", "")
    assert found["transformer_inference"] == ("device", "InferenceBuilder", "")
    assert found["fused_lion"][0] == "reference"
    assert "has no FusedLionBuilder" in found["fused_lion"][2]


def host_builder():
    return registry.resolve("cpu_adam").source, type(registry.resolve("cpu_adam").builder).__name__


def test_the_hosts_kernels_serve_offloaded_states(npu):
    pytest.importorskip("ds_ext_cpu")
    assert npu(host_builder) == [("host", "CPUAdamBuilder")]
