"""Compression under the engine: each stage trains as a plain loop, and checkpoints keep step, scores and masks."""

import copy

import deepspeed
import pytest
import torch
from deepspeed.compression import compression_scheduler, init_compression, redundancy_clean
from deepspeed.compression.compress import get_compression_config
from deepspeed.errors import ConfigError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.zero import GatheredParameters
from torch import nn

STEPS, BATCH = 6, 4


def technique(params, modules, related=None, **shared):
    group = {"params": params, "modules": modules} | ({"related_modules": related} if related else {})
    return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": {"g1": group}}


def settings(stage=0, **keys):
    return {
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.05}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "compression_training": {
            "weight_quantization": technique(
                {"start_bits": 8, "target_bits": 4, "quantization_period": 1}, ["*"], schedule_offset=2
            ),
            "activation_quantization": technique({"bits": 8}, ["2"], range_calibration="dynamic", schedule_offset=1),
            "sparse_pruning": technique({"dense_ratio": 0.5}, ["2"], method="topk", schedule_offset=1),
            "row_pruning": technique({"dense_ratio": 0.5}, ["0"], [["2"]], method="topk", schedule_offset=3),
        },
        **keys,
    }


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(BATCH, 10, generator=generator) for _ in range(count)]
    return [(value[:, :6], value[:, 6:]) for value in values]


def train(engine, count=STEPS, start=0):
    rank = deepspeed.comm.get_rank()
    for x, y in batches(count)[start:]:
        mine = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
        engine.backward(nn.functional.mse_loss(engine(x[mine]), y[mine]))
        engine.step()


def values_of(engine):
    with GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def create(stage):
    config = settings(stage)
    return deepspeed.initialize(model=init_compression(build(), config), config=config)[0]


def job(stage, folder):
    engine = create(stage)
    train(engine, 4)
    engine.save_checkpoint(folder, tag="four")
    at_four = values_of(engine)
    train(engine, STEPS, start=4)
    done = values_of(engine)
    steps = engine.compression_scheduler.training_steps
    engine.destroy()
    other = create(stage)
    other.load_checkpoint(folder, tag="four")
    loaded = values_of(other)
    with torch.no_grad():
        other(batches()[0][0])
    quantizer = other.module[0].weight_quantizer
    state = (quantizer.num_bits, other.module[0].row_pruning_enabled, other.compression_scheduler.training_steps)
    train(other, STEPS, start=4)
    again = values_of(other)
    other.destroy()
    return {"done": done, "four": at_four, "loaded": loaded, "again": again, "steps": steps, "state": state}


def plain():
    config = settings()
    model = init_compression(build(), config)
    scheduler = compression_scheduler(model, get_compression_config(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for x, y in batches():
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model


@pytest.mark.parametrize("stage", swept([0, 1, 2, 3], lambda stage: stage in (0, 3)))
def test_a_stage_trains_as_a_plain_loop_and_goes_on_from_its_checkpoint(tmp_path, stage):
    model = plain()
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    for found in run_ranks(2, job, stage, str(tmp_path)):
        torch.testing.assert_close(found["done"], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["loaded"], found["four"], rtol=0, atol=0)
        torch.testing.assert_close(found["again"], found["done"], rtol=1e-5, atol=1e-6)
        assert found["steps"] == STEPS
        assert found["state"] == (6, True, 4)
    trained = init_compression(build(), settings())
    trained.load_state_dict(found["done"])
    x = batches()[0][0]
    smaller = redundancy_clean(trained, settings())
    assert smaller[0].weight.shape == (4, 6)
    torch.testing.assert_close(smaller(x), model.eval()(x), rtol=1e-3, atol=1e-4)


def masked_job(folder):
    """Masks of method l1 are rank 0's, and are saved."""
    config = settings(2, compression_training={"sparse_pruning": technique({"dense_ratio": 0.5}, ["*"], method="l1")})
    torch.manual_seed(deepspeed.comm.get_rank() if deepspeed.comm.is_initialized() else 0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    engine = deepspeed.initialize(model=init_compression(model, config), config=config)[0]
    mask = engine.module[0].sparse_pruning_mask.clone()
    train(engine, 2)
    engine.save_checkpoint(folder)
    engine.module[0].sparse_pruning_mask.fill_(True)
    engine.load_checkpoint(folder)
    found = engine.module[0].sparse_pruning_mask.clone()
    engine.destroy()
    return mask, found


def test_masks_are_alike_on_all_ranks_and_in_the_checkpoint(tmp_path):
    (one, loaded), (other, _) = run_ranks(2, masked_job, str(tmp_path))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(loaded, one)
    assert one.sum() == one.numel() / 2


def refused_job():
    with pytest.raises(ConfigError, match="weight_quantization: found '0', which is not prepared"):
        deepspeed.initialize(model=build(), config=settings())
    config = settings(3)
    engine = deepspeed.initialize(model=init_compression(build(), config), config=config)[0]
    with pytest.raises(ConfigError, match="redundancy_clean: found sharded weights, such as '.+save_16bit_model"):
        redundancy_clean(engine, config)
    engine.destroy()
    return True


def test_what_was_not_prepared_or_is_sharded_is_refused():
    assert run_ranks(2, refused_job) == [True, True]


def test_a_copy_of_the_model_compresses_itself():
    model = plain()
    x = batches()[0][0]
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
