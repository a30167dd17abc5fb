"""Engines over the groups of a caller's `mpu`."""

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.parallel.mesh import mesh_of_mpu
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import Scale, weight_of


class Mpu:
    """Megatron's, from the lines of ranks of each kind: `Mpu(data_parallel=[[0, 1]], ...)`."""

    def __init__(self, **lines):
        for name, theirs in lines.items():
            groups = {tuple(line): dist.new_group(line) for line in theirs}
            (own,) = (line for line in groups if dist.get_rank() in line)
            answers = {"group": groups[own], "world_size": len(own), "rank": own.index(dist.get_rank())}
            for what, answer in answers.items():
                setattr(self, f"get_{name}_{what}", lambda answer=answer: answer)


def train(stage, **arguments):
    """The engine after one step of SGD in which each rank's gradient is its own rank."""
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0,
    }
    engine, *_ = deepspeed.initialize(model=Scale(), config=config, **arguments)
    engine.backward(engine(torch.tensor(float(dist.get_rank()))).sum())
    engine.step()
    return engine


def tensor_parallel_job(kind):
    mpu = Mpu(data_parallel=[[0, 2], [1, 3]], **{kind: [[0, 1], [2, 3]]})
    seen = []
    for stage in (0, 1, 2, 3):
        engine = train(stage, mpu=mpu)
        assert engine.mesh.group("dp") is mpu.get_data_parallel_group()
        assert engine.mesh.norm_group is dist.get_world_group()
        seen.append((weight_of(engine), engine.train_batch_size(), engine.mesh.model_rank))
        engine.destroy()
    return seen


@pytest.mark.parametrize("kind", ["tensor_model_parallel", "model_parallel", "pipe_parallel"])
def test_gradients_are_averaged_over_the_data_parallel_ranks_only(kind):
    of_first, of_second = [(-1.0, 6, 0)] * 4, [(-2.0, 6, 1)] * 4
    assert run_ranks(4, tensor_parallel_job, kind) == [of_first, of_second, of_first, of_second]


def sequence_parallel_job():
    engine = train(1, mpu=Mpu(data_parallel=[[0], [1]], sequence_parallel=[[0, 1]]))
    found = weight_of(engine), engine.train_batch_size(), engine.dp_world_size
    assert dist.get_all_ranks_from_group(engine.get_sequence_parallel_group()) == [0, 1]
    engine.destroy()
    return found


def test_ranks_of_one_sequence_average_gradients_and_count_as_one_in_the_batch():
    assert run_ranks(2, sequence_parallel_job) == [(-0.5, 3, 1)] * 2


def parts_of_the_world_job(folder, stage):
    """Two ranks train one model, the third another, and all of them a third model, each with its own groups."""
    mpu = Mpu(data_parallel=[[0, 1], [2]])
    part, whole = train(stage, mpu=mpu), train(stage)
    own_folder = folder / str(part.mesh.ranks("dp"))
    part.save_checkpoint(own_folder, tag="a")
    part.load_checkpoint(own_folder, tag="a")
    found = weight_of(part), part.train_batch_size(), weight_of(whole), whole.train_batch_size()
    assert dist.get_all_ranks_from_group(part.mesh.norm_group) == list(part.mesh.ranks("dp"))
    part.destroy()
    whole.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_models_on_parts_of_the_world(tmp_path, stage):
    assert run_ranks(3, parts_of_the_world_job, tmp_path, stage) == [
        (-0.5, 6, -1.0, 9),
        (-0.5, 6, -1.0, 9),
        (-2.0, 3, -1.0, 9),
    ]


def refused_job():
    def error(mpu):
        with pytest.raises(ConfigError) as caught:
            mesh_of_mpu(mpu)
        return str(caught.value)

    data = Mpu(data_parallel=[[0, 1]])
    messages = [error(object())]
    data.get_data_parallel_world_size = lambda: 4
    messages.append(error(data))
    no_group = Mpu(data_parallel=[[0], [1]])
    no_group.get_model_parallel_world_size = lambda: 2
    messages.append(error(no_group))
    messages.append(error(Mpu(data_parallel=[[0, 1]], tensor_model_parallel=[[0, 1]])))
    return messages


def test_contradictions_name_the_method():
    for rank, (absent, wrong, no_group, no_grid) in enumerate(run_ranks(2, refused_job)):
        assert "mpu: object has no method get_data_parallel_world_size()" in absent
        assert f"get_data_parallel_world_size() is 4 and get_data_parallel_rank() is {rank}" in wrong
        assert "has the ranks [0, 1]; the three must agree" in wrong
        assert "has no method get_model_parallel_group()" in no_group
        assert "multiply to 4, but its groups connect the ranks [0, 1]" in no_grid


def misplaced_job():
    """Rank 3 and 2 have changed places in the tensor-parallel groups."""
    with pytest.raises(ConfigError) as caught:
        mesh_of_mpu(Mpu(data_parallel=[[0, 1], [2, 3]], tensor_model_parallel=[[0, 3], [1, 2]]))
    return str(caught.value)


def test_groups_that_do_not_cross_are_refused_on_every_rank():
    for message in run_ranks(4, misplaced_job):
        assert "by their places the ranks of it are" in message
