"""`offload_param` to NVMe: shards in swap files, losses and weights as in memory; resume after a kill; faults."""

import os
import signal
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.testing.distributed import RankError, run_ranks
from deepspeed.testing.engines import make_engine
from deepspeed.testing.tiers import swept

PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


class Net(torch.nn.Module):
    """Frozen, unused, small and large parameters; some sizes are odd."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(7, 7) for _ in range(4)))
        self.frozen = torch.nn.Linear(7, 5).requires_grad_(False)
        self.unused = torch.nn.Linear(4, 6)
        self.last = torch.nn.Linear(5, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).tanh()
        return self.last(self.frozen(x)).float().square().mean()


def on_disk(path, **keys):
    keys = {"buffer_count": 2, "max_in_cpu": 0, **keys}
    return {"offload_param": {"device": "nvme", "nvme_path": str(path), **keys}}


def create_engine(precision="fp32", model=None, **section):
    torch.manual_seed(0)
    # the smallest biases stay whole; units are released after every use, and hardly gathered ahead
    stage3 = {
        "stage3_param_persistence_threshold": 4,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 60,
    }
    return make_engine(
        model or Net(),
        3,
        gradient_accumulation_steps=2,
        gradient_clipping=0.5,
        zero_optimization={**stage3, **section},
        **PRECISIONS[precision],
    )


def run(engine, steps):
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for _ in range(2 * steps):
        loss = engine(torch.randn(4, 7, generator=generator).to(dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train(precision, section, steps=20, path=None):
    """`path`: shards are below it, and what else the section wants on disk; None: all is in memory."""
    if path is not None:
        section = {**section, **on_disk(path)}
    if section.get("offload_optimizer", {}).get("device") == "nvme":
        section = {**section, "offload_optimizer": {"device": "nvme", "nvme_path": path}} if path else {}
    engine = create_engine(precision, **section)
    losses = run(engine, steps)
    engine.eval()
    with torch.no_grad():
        losses.append(engine(torch.ones(2, 7, dtype=next(engine.module.parameters()).dtype)).item())
    weights = engine._zero3_consolidated_16bit_state_dict() or {}
    engine.destroy()
    assert all(torch.equal(value, engine.module.state_dict()[name]) for name, value in weights.items())
    return losses, [param.detach() for param in engine.module.parameters()]


def assert_same(one, other, tolerance=1e-6):
    for (losses, weights), (losses_2, weights_2) in zip(one, other, strict=True):
        assert losses == pytest.approx(losses_2, rel=tolerance, abs=tolerance)
        torch.testing.assert_close(weights, weights_2, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("world_size", "precision", "section"),
    swept(
        [
            (world_size, precision, section)
            for world_size in (1, 2)
            for precision in PRECISIONS
            for section in (
                {},
                {"offload_optimizer": {"device": "cpu"}},
                {"offload_optimizer": {"device": "nvme"}},
                {"zero_quantized_weights": True},
                {"mics_shard_size": 1},
            )
        ],
        lambda world_size, precision, section: (
            (world_size, precision, section)
            in (
                (1, "fp32", {}),
                (2, "bf16", {"offload_optimizer": {"device": "cpu"}}),
                (2, "fp32", {"offload_optimizer": {"device": "nvme"}}),
            )
        ),
    ),
)
def test_losses_and_weights_are_those_in_memory(tmp_path, world_size, precision, section):
    expected = run_ranks(world_size, train, precision, section)
    assert_same(run_ranks(world_size, train, precision, section, 20, str(tmp_path)), expected)
    assert list(tmp_path.iterdir()) == []  # the swap files are gone with their engine


def where(path):
    """On which kinds of device shards are, and how many reads were begun before their unit was used."""
    engine = create_engine(**on_disk(path, max_in_cpu=30))
    run(engine, 1)
    units = engine.sharding.module_units.all
    kinds = [unit.shard_S.device.type for unit in units]
    (folder,) = Path(path).glob(f"*_rank{torch.distributed.get_rank()}_*")
    num_bytes = sum(unit.shard_S.nbytes for unit in units if unit.shard_S.is_meta)
    assert (folder / "parameters.swap").stat().st_size >= num_bytes
    ahead = []
    for unit in units:
        if unit.shard_S.is_meta:
            prepare = unit.offloaded.prepare
            unit.offloaded.prepare = lambda shard=unit.offloaded, do=prepare: (
                ahead.append(shard._buffer is not None), do()
            )  # fmt: skip
    run(engine, 1)
    engine.destroy()
    return kinds, sum(ahead) / len(ahead)


def test_shards_leave_memory_and_are_read_ahead(tmp_path):
    for kinds, part_read_ahead in run_ranks(2, where, str(tmp_path)):
        assert kinds.count("cpu") >= 1  # the first ones, up to `max_in_cpu` elements
        assert kinds.count("meta") > kinds.count("cpu")
        assert part_read_ahead > 0.5  # the others come first after an update, or after a change of direction


def save_and_die(path, folder):
    engine = create_engine("bf16", **on_disk(path))
    run(engine, 2)
    engine.save_checkpoint(folder, tag="two")
    losses = run(engine, 1)
    if torch.distributed.get_rank() == 0:
        Path(folder, "losses").write_text(repr(losses))
    torch.distributed.barrier()
    engine.backward(engine(torch.ones(4, 7, dtype=torch.bfloat16)))
    os.kill(os.getpid(), signal.SIGKILL)


def resume(folder, section):
    engine = create_engine("bf16", **section)
    engine.load_checkpoint(folder)
    losses = run(engine, 1)
    engine.destroy()
    return losses


def test_a_killed_run_is_resumed_without_its_swap_files(tmp_path):
    path, folder = tmp_path / "nvme", str(tmp_path / "checkpoint")
    path.mkdir()
    with pytest.raises(RankError):
        run_ranks(2, save_and_die, str(path), folder)
    assert len(list(path.iterdir())) == 2
    expected = eval(Path(folder, "losses").read_text())
    assert run_ranks(2, resume, folder, on_disk(path))[0] == expected
    assert list(path.iterdir()) == []
    assert run_ranks(2, resume, folder, {})[0] == expected


def access(path):
    """What users read and change of single parameters, with shards in memory and on disk."""
    seen = []
    for section in ({}, on_disk(path)):
        engine, other = create_engine("bf16", **section), create_engine("bf16", **section)
        run(engine, 1)
        weight, frozen = engine.module.layers[1].weight, engine.module.frozen.weight
        with deepspeed.zero.GatheredParameters([weight, frozen], modifier_rank=0), torch.no_grad():
            weight.mul_(2)
            frozen.add_(1)
        values = [deepspeed.utils.safe_get_full_fp32_param(weight)]
        deepspeed.utils.safe_set_full_fp32_param(weight, values[-1] / 2)
        run(engine, 1)
        values.append(deepspeed.utils.safe_get_full_fp32_param(weight))
        deepspeed.utils.safe_set_local_fp32_param(weight, deepspeed.utils.safe_get_local_fp32_param(weight) * 2)
        values.append(deepspeed.utils.safe_get_full_fp32_param(weight))
        with deepspeed.zero.GatheredParameters([weight, frozen]):
            values += [weight.clone(), frozen.clone()]
        run(other, 1)
        seen.append([run(engine, 1), run(other, 1), *(value.detach().tolist() for value in values)])
        engine.destroy()
        other.destroy()
    return seen


def test_single_parameters_are_read_and_changed_as_in_memory(tmp_path):
    for in_memory, swapped in run_ranks(2, access, str(tmp_path)):
        assert in_memory == swapped


def build(path):
    config = {"zero_optimization": {"stage": 3, **on_disk(path)}}
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Net()
    kinds = {param.ds_tensor.device.type for param in model.parameters()}
    engine = create_engine(model=model, **on_disk(path))
    losses = run(engine, 1)
    engine.destroy()
    return kinds, losses


def test_init_builds_on_disk(tmp_path):
    (kinds, losses), _ = run_ranks(2, build, str(tmp_path))
    assert kinds == {"meta"}
    assert losses == run_ranks(2, train, "fp32", {}, 1)[0][0][:2]


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.float().square().mean()


def lose(path, folder, fault):
    """A fault of the disk in the middle of training: what is raised, and that what is in memory can still be saved."""
    engine = create_engine(
        "bf16", torch.nn.Sequential(*(torch.nn.Linear(7, 7) for _ in range(4)), Mean()), **on_disk(path)
    )
    run(engine, 2)
    (swap,) = Path(path).glob("*/parameters.swap")
    weight = engine.module[3].weight
    expected = deepspeed.utils.safe_get_full_fp32_param(weight)
    if fault == "gone":
        for each in (swap, swap.parent / "owner.lock"):
            each.unlink()
        swap.parent.rmdir()
    else:
        os.truncate(swap, swap.stat().st_size // 2)
    with pytest.raises(OSError, match="swap file") as caught:
        run(engine, 1)
    assert str(swap) in str(caught.value)
    assert "load the last checkpoint" in str(caught.value)
    assert torch.equal(expected, deepspeed.utils.safe_get_full_fp32_param(weight))
    engine.zero_grad()
    engine.save_checkpoint(folder)
    fresh = create_engine("bf16", torch.nn.Sequential(*(torch.nn.Linear(7, 7) for _ in range(4)), Mean()))
    fresh.load_checkpoint(folder)
    assert torch.equal(expected, deepspeed.utils.safe_get_full_fp32_param(fresh.module[3].weight))
    return str(caught.value)


@pytest.mark.parametrize("fault", ["gone", "cut off"])
def test_a_fault_of_the_disk_is_named(tmp_path, fault):
    text = run_ranks(1, lose, str(tmp_path), str(tmp_path / "checkpoint"), fault)[0]
    assert ("cut off" in text) is (fault == "cut off")


def refused(path):
    absent = {"offload_param": {"device": "nvme", "max_in_cpu": 0}}
    with pytest.raises(ConfigError, match=r"offload_param\.nvme_path: found none, and device is 'nvme'; name a folder"):
        create_engine(**absent)
    with pytest.raises(ConfigError, match="nvme_path: found none"):
        deepspeed.zero.Init(remote_device="nvme")
    with pytest.raises(ConfigError, match="nvme_path: .*nowhere does not exist; create it"):
        create_engine(**on_disk(f"{path}/nowhere"))
    with pytest.raises(
        ConfigError, match=r"buffer_size: found 10 elements, and .* layers\.0\.weight .* has 56; make it"
    ):
        create_engine(**on_disk(path, buffer_size=10))
    with pytest.raises(ConfigError, match="found 'nvme' with zero_quantized_nontrainable_weights true"):
        create_engine(zero_quantized_nontrainable_weights=True, **on_disk(path))
    with pytest.raises(ConfigError, match=r"offload_param\.device: found 'nvme' with zero_optimization\.stage 2"):
        make_engine(Net(), 2, zero_optimization=on_disk(path))


def test_what_cannot_work_is_refused(tmp_path):
    run_ranks(1, refused, str(tmp_path))
