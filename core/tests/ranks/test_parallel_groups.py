"""`deepspeed.parallel.groups` on real ranks."""

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.errors import CommError, ConfigError
from deepspeed.parallel import groups
from deepspeed.testing.distributed import run_ranks


def members(group):
    return sorted(dist.get_all_ranks_from_group(group))


def default_job():
    assert groups._get_data_parallel_group() is dist.get_world_group()
    assert groups._get_sequence_data_parallel_group() is dist.get_world_group()
    assert groups._get_data_parallel_group_ranks() == [0, 1]
    assert groups._get_broadcast_src_rank() == 0
    assert members(groups._get_model_parallel_group()) == [dist.get_rank()]
    assert members(groups._get_sequence_parallel_group()) == [dist.get_rank()]
    assert groups._get_sequence_parallel_rank() == groups._get_model_parallel_rank() == 0
    assert groups._get_sequence_parallel_world_size() == groups._get_model_parallel_world_size() == 1
    clone = groups._clone_world_group()
    assert clone is not dist.get_world_group()
    assert clone is groups._clone_world_group()
    assert members(clone) == [0, 1]
    return groups._get_data_parallel_world_size(), groups._get_data_parallel_rank()


def one_rank_alone_job():
    """A group of one rank needs nobody else."""
    if dist.get_rank() == 1:
        return members(groups._get_sequence_parallel_group())
    return None


def mesh_job():
    groups.set_mesh((2, 2))
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=groups._get_sequence_parallel_group())
    assert groups._get_sequence_data_parallel_world_size() == 4
    assert groups._get_sequence_data_parallel_rank() == dist.get_rank()
    return members(groups._get_data_parallel_group()), x.item(), groups._get_sequence_parallel_rank()


def model_parallel_job():
    data, model = groups._create_model_parallel(2)
    return members(data), members(model), groups.get_tensor_model_parallel_rank()


def refused_job():
    with pytest.raises(ConfigError, match="= 3, but the world has 2 ranks"):
        groups.set_mesh((3, 1))
    for name in ("group", "world_size", "rank"):
        for kind in ("expert_parallel", "expert_data_parallel"):
            with pytest.raises(CommError, match="'ep_size_2', found none; make them on all ranks first"):
                getattr(groups, f"_get_{kind}_{name}")("ep_size_2")
    assert groups._get_expert_parallel_group_dict() == {}
    return groups._get_max_expert_size()


def experts_job():
    """The expert groups that a script makes before there is an engine are those of the engine."""
    groups.initialize(ep_size=2)
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 1), config={"train_micro_batch_size_per_gpu": 1})
    assert engine.mesh.experts(2).group("ep") is groups._get_expert_parallel_group("ep_size_2")
    assert groups._get_expert_data_parallel_group_dict().keys() == {"ep_size_2"}
    assert (groups._get_max_expert_size(), groups._get_max_expert_size_name()) == (2, "ep_size_2")
    with pytest.raises(ConfigError, match="expert parallel size: found 3"):
        groups._create_expert_and_data_parallel(3)
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=groups._get_expert_data_parallel_group("ep_size_2"))
    engine.destroy()
    return (
        members(groups._get_expert_parallel_group("ep_size_2")),
        groups._get_expert_parallel_rank("ep_size_2"),
        groups._get_expert_data_parallel_rank("ep_size_2"),
        x.item(),
    )


def test_all_data_parallel_by_default():
    assert run_ranks(2, default_job) == [(2, 0), (2, 1)]


def test_a_group_of_one_is_no_collective():
    assert run_ranks(2, one_rank_alone_job) == [None, [1]]


def test_mesh_of_data_and_sequence():
    assert run_ranks(4, mesh_job) == [([0, 2], 1.0, 0), ([1, 3], 1.0, 1), ([0, 2], 5.0, 0), ([1, 3], 5.0, 1)]


def test_model_parallel():
    expected = [([0, 2], [0, 1], 0), ([1, 3], [0, 1], 1), ([0, 2], [2, 3], 0), ([1, 3], [2, 3], 1)]
    assert run_ranks(4, model_parallel_job) == expected


def test_expert_groups():
    assert run_ranks(4, experts_job) == [
        ([0, 1], 0, 0, 2.0), ([0, 1], 1, 0, 4.0), ([2, 3], 0, 1, 2.0), ([2, 3], 1, 1, 4.0)
    ]  # fmt: skip


def test_what_is_not_there_is_refused():
    assert run_ranks(2, refused_job) == [1, 1]


def test_before_the_start():
    with pytest.raises(CommError, match="init_distributed"):
        groups._get_data_parallel_group()
