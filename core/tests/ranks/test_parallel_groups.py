"""`deepspeed.parallel.groups` on real ranks."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.errors import CommError, ConfigError, StateError
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


class Mpu:
    def get_data_parallel_group(self):
        return dist.get_world_group()

    def get_data_parallel_world_size(self):
        return 2

    def get_data_parallel_rank(self):
        return dist.get_rank()

    def get_model_parallel_world_size(self):
        return 1


def mpu_job():
    with pytest.raises(StateError, match="get_data_parallel_group"):
        groups.set_mpu(object())
    groups.set_mpu(Mpu())
    assert groups._get_sequence_data_parallel_group() is dist.get_world_group()
    assert groups._get_sequence_parallel_world_size() == 1
    return groups._get_data_parallel_rank(), groups._get_model_parallel_world_size()


def refused_job():
    with pytest.raises(ConfigError, match="= 3, but the world has 2 ranks"):
        groups.set_mesh((3, 1))
    for name in ("group", "world_size", "rank"):
        for kind in ("expert_parallel", "expert_data_parallel"):
            with pytest.raises(CommError, match="mixture of experts"):
                getattr(groups, f"_get_{kind}_{name}")("ep_size_2")
    assert groups._get_expert_parallel_group_dict() == {}
    return groups._get_max_expert_size()


def test_all_data_parallel_by_default():
    assert run_ranks(2, default_job) == [(2, 0), (2, 1)]


def test_a_group_of_one_is_no_collective():
    assert run_ranks(2, one_rank_alone_job) == [None, [1]]


def test_mesh_of_data_and_sequence():
    assert run_ranks(4, mesh_job) == [([0, 2], 1.0, 0), ([1, 3], 1.0, 1), ([0, 2], 5.0, 0), ([1, 3], 5.0, 1)]


def test_model_parallel():
    expected = [([0, 2], [0, 1], 0), ([1, 3], [0, 1], 1), ([0, 2], [2, 3], 0), ([1, 3], [2, 3], 1)]
    assert run_ranks(4, model_parallel_job) == expected


def test_mpu_is_adopted():
    assert run_ranks(2, mpu_job) == [(0, 1), (1, 1)]


def test_what_is_not_there_is_refused():
    assert run_ranks(2, refused_job) == [1, 1]


def test_before_the_start():
    with pytest.raises(CommError, match="init_distributed"):
        groups._get_data_parallel_group()
