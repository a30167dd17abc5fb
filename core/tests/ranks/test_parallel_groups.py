"""`deepspeed.parallel.groups` on real ranks."""

import logging
from unittest import mock

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed import log
from deepspeed.engine.start_line import start_line
from deepspeed.errors import CommError, ConfigError
from deepspeed.parallel import groups
from deepspeed.parallel.model_part import part_held
from deepspeed.tensor_parallel.ranks import ranks_of
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


# ---- what `tp_model_init` leaves for later engines ------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.act, self.down = torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def start(model, **keys):
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, **keys}
    return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]


def equals_torch(**keys):
    """Two steps of a whole model, each rank with data of its own, beside torch with the data of all ranks."""
    model, whole = Block(), Block()
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1)
    engine = start(model, **keys)
    data = [torch.randn(4, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(dist.get_world_size())]
    for _ in range(2):
        engine.backward(engine(data[dist.get_rank()]).square().mean())
        engine.step()
        whole(torch.cat(data)).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-7)
    found = engine.dp_world_size, start_line(engine).partition(", device")[0].partition(": ")[2]
    engine.destroy()
    return found


def divided_trains(model, **keys):
    """A step of a divided model equals one of the whole model: the ranks share its data."""
    whole = Block()
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1)
    engine = start(model, **keys)
    data = torch.randn(4, 4, generator=torch.Generator().manual_seed(7))
    engine.backward(engine(data).square().mean())
    engine.step()
    whole(data).square().mean().backward()
    theirs.step()
    for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
        part = part_held(param)
        torch.testing.assert_close(param, expected if part is None else part.take(expected), rtol=1e-5, atol=1e-7)
    found = engine.dp_world_size, start_line(engine).partition(", device")[0].partition(": ")[2]
    engine.destroy()
    return found


def after_division_job(kind):
    log.warn_once.cache_clear()
    first = deepspeed.tp_model_init(Block(), 2)
    if kind == "dropped":
        del first
    if kind == "engine destroyed":
        assert divided_trains(first) == (1, "2 ranks (tp 2)")
    with mock.patch.object(log.logger, "log") as lines:
        found = equals_torch()
        equals_torch(train_batch_size=8)  # was refused: 4 x 2 x 1
    warnings = [call.args[1] for call in lines.mock_calls if call.args[0] == logging.WARNING]
    return found, warnings


def divided_again_job(kind):
    """What a divided model gets after an engine of a whole one was built, and after its own one was destroyed."""
    first = Block()
    if kind == "tp_model_init":
        deepspeed.tp_model_init(first, 2)
    else:
        engine = start(first, tensor_parallel={"autotp_size": 2})
        engine.destroy()
    assert equals_torch() == (2, "2 ranks")
    keys = {"tensor_parallel": {"autotp_size": 2}} if kind == "asked again" else {}
    wrapped = torch.nn.Sequential(first) if kind == "wrapped" else first
    engine = start(wrapped, **keys)
    assert engine.mesh.group("tp") is ranks_of(first).group
    found = engine.dp_world_size
    engine.destroy()
    return found


def marked_job():
    """Layers of the user's own, divided by the groups that `tp_model_init` made, have Megatron's mark."""
    deepspeed.tp_model_init(Block(), 2)
    own = Block()
    own.up.weight.tensor_model_parallel = True
    engine = start(own)
    found = engine.dp_world_size, engine.mesh.size("tp")
    engine.destroy()
    return found


def other_size_job():
    deepspeed.tp_model_init(Block(), 2)
    engine = start(Block(), tensor_parallel={"autotp_size": 4})
    found = engine.mesh.size("tp"), engine.dp_world_size
    engine.destroy()
    with pytest.raises(ConfigError, match="mesh.tp is 4; both are the size of the axis tp"):
        start(deepspeed.tp_model_init(Block(), 2), mesh={"tp": 4})
    return found


@pytest.mark.parametrize("kind", ["alive", "dropped", "engine destroyed"])
def test_a_whole_model_after_a_divided_one_is_data_parallel(kind):
    (found, warnings), (found_of_1, warnings_of_1) = run_ranks(2, after_division_job, kind)
    assert found == found_of_1 == (2, "2 ranks")
    assert warnings_of_1 == []
    (warning,) = warnings
    assert "tp_model_init has laid the ranks out with tp 2, and this model is whole" in warning
    assert "tensor_model_parallel" in warning


@pytest.mark.parametrize("kind", ["tp_model_init", "autotp_size", "asked again", "wrapped"])
def test_a_divided_model_keeps_its_ranks(kind):
    assert run_ranks(2, divided_again_job, kind) == [1, 1]


def test_marked_layers_get_the_ranks_of_tp_model_init():
    assert run_ranks(2, marked_job) == [(1, 2)] * 2


def test_another_model_may_be_divided_over_more_ranks():
    assert run_ranks(4, other_size_job) == [(4, 1)] * 4


# ---- the groups -----------------------------------------------------------------------------------------------------


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
