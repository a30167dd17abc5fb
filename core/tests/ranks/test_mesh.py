"""Meshes on real ranks: engines with different meshes, torch's DTensor, FSDP2 and tensor parallelism over one."""

import copy

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.config.zero import ZeroConfig
from deepspeed.engine import sharding
from deepspeed.errors import ConfigError
from deepspeed.parallel import groups
from deepspeed.parallel.layout import grid
from deepspeed.parallel.mesh import Mesh, RankGrid
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import Scale, weight_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def ranks(group):
    return dist.get_all_ranks_from_group(group)


# ---- engines -------------------------------------------------------------------------------------------------------


def make_engine(mesh_param, stage):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0,
    }
    return deepspeed.initialize(model=Scale(), config=config, mesh_param=mesh_param)[0]


def side_by_side_job(stage):
    """Steps of two engines in turn; in step k the gradient of a rank is its rank + k."""
    engines = [make_engine({"tp": 2}, stage), make_engine((2, 2), stage), make_engine(None, stage)]
    assert groups._get_sequence_data_parallel_world_size() == 4  # a view of the engine built last
    for step in range(2):
        for engine in engines:
            engine.backward(engine(torch.tensor(float(dist.get_rank() + step))).sum())
            engine.step()
    found = [(weight_of(engine), engine.train_batch_size(), engine.dp_world_size) for engine in engines]
    for engine in engines:
        engine.destroy()
    return found


def test_engines_with_different_meshes_train_side_by_side():
    """Averages of rank + step over dp [0, 2] or [1, 3], over dp x sp, and over all ranks."""
    for stage in (0, 1, 2, 3):
        rest = [(-4.0, 2, 2), (-4.0, 4, 4)]
        even, odd = [(-3.0, 2, 2), *rest], [(-5.0, 2, 2), *rest]
        assert run_ranks(4, side_by_side_job, stage) == [even, odd, even, odd]


def from_config_job(keys, mesh_param=None):
    config = {"train_micro_batch_size_per_gpu": 1, **keys}
    try:
        engine = deepspeed.initialize(model=Scale(), config=config, mesh_param=mesh_param)[0]
    except ConfigError as error:
        return str(error)
    found = engine.train_batch_size(), {axis: engine.mesh.size(axis) for axis in ("pp", "dp", "sp", "tp")}
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ({"mesh": {"tp": 2}}, {"dp": 2, "tp": 2}),
        ({"mesh": {"pp": 2, "sp": 2}}, {"pp": 2, "sp": 2}),
        ({"sequence_parallel_size": 2, "data_parallel_size": 2}, {"dp": 2, "sp": 2}),
        ({"mesh": {"sp": 4}, "sequence_parallel_size": 4}, {"sp": 4}),
    ],
)
def test_a_config_lays_the_ranks_out(keys, sizes):
    whole = {"pp": 1, "dp": 1, "sp": 1, "tp": 1, **sizes}
    assert run_ranks(4, from_config_job, keys) == [(whole["dp"], whole)] * 4


@pytest.mark.parametrize(
    ("keys", "mesh_param", "problem"),
    [
        ({"mesh": {"tp": 3}}, None, "mesh.tp: pp 1 x dp 1 x sp 1 x tp 3 = 3, but the world has 4 ranks"),
        ({"mesh": {"sp": 4}, "sequence_parallel_size": 2}, None, "sequence_parallel_size: found 2, but mesh.sp is 4"),
        ({"mesh": {"sp": 4}}, {"sp": 2}, "mesh.sp: found 4, but initialize(mesh_param=...) has sp 2"),
        ({"mesh": {"xp": 4}}, None, "mesh.xp"),
    ],
)
def test_sizes_that_do_not_fit_are_named_on_every_rank(keys, mesh_param, problem):
    assert all(problem in each for each in run_ranks(4, from_config_job, keys, mesh_param))


def other_sizes_job(asked):
    return from_config_job(*asked[deepspeed.comm.get_rank()])


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ([({"mesh": {"tp": 2}},), ({},)], "rank 0 asks for mesh.tp (tp): 2, and rank 1 for all ranks data parallel"),
        (
            [({}, {"sp": 2}), ({}, {"sp": 1})],
            "rank 0 asks for mesh_param: {'sp': 2}, and rank 1 for mesh_param: {'sp': 1}",
        ),
    ],
)
def test_sizes_that_differ_from_rank_to_rank_are_named_on_every_rank(asked, problem):
    assert all(problem in each for each in run_ranks(2, other_sizes_job, asked))


def batch_job():
    engine = make_engine((2, 2), 0)
    engine.set_train_micro_batch_size(2)
    sizes = [engine.train_batch_size()]
    engine.set_gradient_accumulation_steps(3)
    sizes.append(engine.train_batch_size())
    engine.set_train_batch_size(8)
    sizes.append(engine.gradient_accumulation_steps())
    samples = [batch.tolist() for batch in engine.deepspeed_io(torch.arange(8), route="eval")]
    engine.destroy()
    return sizes, samples


def test_ranks_of_one_sequence_read_the_same_samples():
    first, second = ([4, 12, 2], [[0, 2], [4, 6]]), ([4, 12, 2], [[1, 3], [5, 7]])
    assert run_ranks(4, batch_job) == [first, first, second, second]


def checkpoint_job(folder, stage):
    engine = make_engine({"tp": 2}, stage)
    engine.backward(engine(torch.tensor(float(dist.get_rank()))).sum())
    engine.step()
    engine.save_checkpoint(folder, tag="a")
    with pytest.raises(ConfigError, match=r"divided over ranks \(pp 1 x tp 2\).* do not say"):
        engine.save_16bit_model(folder)
    again = make_engine({"tp": 2}, stage)
    again.load_checkpoint(folder, tag="a")
    found = weight_of(again), again.mp_world_size
    engine.destroy()
    again.destroy()
    return found


@pytest.mark.parametrize(("stage", "num_model_files"), [(1, 2), (3, 4)])
def test_each_part_of_a_model_has_its_own_files(tmp_path, stage, num_model_files):
    assert run_ranks(4, checkpoint_job, tmp_path, stage) == [(-1.0, 2), (-2.0, 2), (-1.0, 2), (-2.0, 2)]
    names = [path.name for path in (tmp_path / "a").iterdir()]
    assert sum(name.endswith("mp_rank_01_model_states.pt") for name in names) == num_model_files / 2
    assert sum(name.endswith("_model_states.pt") for name in names) == num_model_files
    assert sum(name.endswith("_optim_states.pt") for name in names) == 4


# ---- groups --------------------------------------------------------------------------------------------------------


def roles_job():
    """Two copies of two shards."""
    mesh = sharding.split_data(Mesh(grid(dp=4)), ZeroConfig(stage=3, mics_shard_size=2))
    assert mesh.gradient_group() is mesh.norm_group is dist.get_world_group()
    assert mesh.gradient_group(ep_size=2) is mesh.shard_group(ep_size=2) is mesh.experts(2).group("edp")
    assert ranks(mesh.replicate_group(ep_size=2)) == [dist.get_rank()]
    same = Mesh(grid(dp=4, shard=2))
    assert same.shard_group() is mesh.shard_group()  # meshes with equal lines share groups
    return ranks(mesh.shard_group()), ranks(mesh.replicate_group()), ranks(mesh.gradient_group(ep_size=2))


def test_groups_of_shards_copies_and_experts():
    assert run_ranks(4, roles_job) == [
        ([0, 1], [0, 2], [0, 2]), ([0, 1], [1, 3], [1, 3]), ([2, 3], [0, 2], [0, 2]), ([2, 3], [1, 3], [1, 3])
    ]  # fmt: skip


# ---- torch's own parallelism ---------------------------------------------------------------------------------------


def dtensor_job():
    mesh = Mesh(grid(dp=2, tp=2))
    full = torch.arange(8.0).view(4, 2)
    sharded = distribute_tensor(full, mesh["dp_shard", "tp"], [Shard(0), Shard(1)])
    torch.testing.assert_close(sharded.full_tensor(), full)
    assert mesh["tp"].get_group() is mesh.group("tp")
    return sharded.to_local().flatten().tolist()


def part_of_the_world_job():
    """The sum over a mesh of ranks 0 and 1, which are in different numbers of groups, while rank 2 is elsewhere."""
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    if dist.get_rank() == 2:
        return None
    group = RankGrid(grid(dp=2, ranks=(0, 1))).group("dp")
    x = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(x, group=group)
    return x.item(), ranks(group)


def test_a_mesh_on_a_part_of_the_world():
    assert run_ranks(3, part_of_the_world_job) == [(3.0, [0, 1]), (3.0, [0, 1]), None]


def test_dtensor_takes_a_submesh():
    assert run_ranks(4, dtensor_job) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def parallel_model_job():
    """Tensor parallelism and FSDP2 over submeshes of one mesh compute what one rank does."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    x = torch.randn(3, 4)
    expected = plain(x)
    mesh = Mesh(grid(dp=2, tp=2))
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    torch.testing.assert_close(fully_shard(model, mesh=mesh["dp"])(x), expected)

    copies = Mesh(grid(dp=4, shard=2))
    both = fully_shard(copy.deepcopy(plain), mesh=copies["dp_replicate", "dp_shard"])
    torch.testing.assert_close(both(x), expected)
    assert ranks(copies["dp"].get_group()) == [0, 1, 2, 3]


def test_tensor_parallel_layers_and_fsdp_take_submeshes():
    run_ranks(4, parallel_model_job)
