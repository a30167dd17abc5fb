"""What goes wrong in stage 3 ends every rank with a message that names the cause, and the last checkpoint loads."""

import contextlib
import os
import re
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.comm.torch_group import forget, group_backend
from deepspeed.errors import CommError, StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from torch import nn

#: of the group; over gloo a rank that waits for one that does something else raises after it
TIMEOUT_S = {("path", "0"): 5}
#: for the others, which never reach it
LIMIT_S = 100

TRAIN = """
import datetime, os, signal, sys
import deepspeed, torch
from torch import nn
from deepspeed.zero.param_unit import ParamUnit

case, folder = sys.argv[1:3]
rank = int(os.environ["RANK"])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.goes_right, self.fails = False, False

    def forward(self, x):
        x = self.first(x)
        if self.fails:
            raise RuntimeError("the batch is bad")
        return self.right(x) if self.goes_right else self.left(x)

def train_step():
    engine.backward(engine(torch.ones(1, 8)).square().mean())
    engine.step()

def die(unit, **keys):
    gather(unit, **keys)
    if "left.weight" in unit.names:
        os.kill(os.getpid(), signal.SIGKILL)

deepspeed.init_distributed(timeout=datetime.timedelta(seconds=float(sys.argv[3])))
torch.manual_seed(0)
net = Net()
zero = {
    "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
config = {
    "train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": zero
}
engine = deepspeed.initialize(model=net, config=config)[0]
train_step()
engine.save_checkpoint(folder, "good")
if case == "value":
    net.left.weight.data = torch.ones(8, 8)
elif case == "in place":
    with torch.no_grad():
        net.left.weight.mul_(2)
elif case == "in place, whole":
    engine.module.left.weight.all_gather()
    with torch.no_grad():
        net.left.weight.mul_(2)
elif rank == 1:
    net.goes_right = case == "path"
    net.fails = case == "forward"
    if case == "kill":
        gather, ParamUnit.launch = ParamUnit.launch, die
train_step()
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


def load_job(folder: str) -> int:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config: dict[str, Any] = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    engine = deepspeed.initialize(model=Net(), config=config)[0]
    engine.load_checkpoint(folder, "good")
    engine.destroy()
    return engine.global_steps


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.goes_right = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(x) if self.goes_right else self.left(x)


def evaluation_job() -> tuple[int, str]:
    """Without a step ranks take one path together, and then different ones."""
    os.environ["DS_COMM_DIRECT"] = "0"  # put back after the job
    forget()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    engine = deepspeed.initialize(model=Choice(), config={"train_batch_size": 2, "zero_optimization": zero})[0]
    with torch.no_grad(), counted_all_reduces() as counts:
        engine(torch.ones(1, 8))
        engine(torch.ones(1, 8))  # gathers nothing
        engine.sharding.release_gathered()
        engine.module.goes_right = deepspeed.comm.get_rank() == 1
        with pytest.raises(CommError) as caught:
            engine(torch.ones(1, 8))
    engine.destroy()
    return len(counts), str(caught.value)


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[None]]:
    counts: list[None] = []
    owner = type(group_backend())
    call = owner.all_reduce

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(None)
        return call(self, *args, **kwargs)

    with mock.patch.object(owner, "all_reduce", counting):
        yield counts


def test_different_paths_are_noticed_at_the_end_of_an_evaluation() -> None:
    for rank, (num_compared, message) in enumerate(run_ranks(2, evaluation_job)):
        assert num_compared == 2
        own, other = ("left", "right") if rank == 0 else ("right", "left")
        assert re.match(rf"rank {rank} makes .* \({own}.weight\) where rank {1 - rank} .* \({other}.weight\)", message)


def without_engine_job() -> None:
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    x = torch.ones(1, 8)
    with pytest.raises(
        StateError, match=r"Linear needs its parameter weight, .* no engine gathers it; call the engine"
    ):
        model(x)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        expected = model(x)
    engine = deepspeed.initialize(model=model, config=config)[0]
    torch.testing.assert_close(engine(x), expected)
    assert all(len(each._forward_pre_hooks) == 1 for each in model.modules())  # the engine's own
    engine.destroy()


def test_a_model_of_zero_init_says_that_it_needs_an_engine() -> None:
    run_ranks(2, without_engine_job)


CHANGED = "StateError: parameter left.weight: found a value of shape .8, 8. that was put into it outside"
IN_PLACE = "StateError: parameter left.weight: found an in-place change outside of deepspeed.zero.GatheredParameters"
CAUSES = {
    "value": [CHANGED, CHANGED],
    "in place": [IN_PLACE, IN_PLACE],
    "in place, whole": [IN_PLACE, IN_PLACE],
    "path": [
        r"rank 0 makes .* \(left.weight\) where rank 1 makes .* \(right.weight\)",
        r"rank 1 makes .* \(right.weight\) where rank 0 makes .* \(left.weight\)",
    ],
    # which gather of the survivor meets the end of its peer depends on who is ahead
    "kill": [r"all-gather of the parameters \w+.weight, \w+.bias: rank 1 \(process \d+\) ended before", ""],
    "forward": [r"rank 1 .*its own output says why", "RuntimeError: the batch is bad"],
}
# of a rank that was killed gloo knows that a connection ended, not which rank failed
CLOSED = (
    r"all-gather of the parameters \w+.weight, \w+.bias: rank 0 cannot .*(closed|reset) by peer.* failed first says why"
)
TOLD = r"all-gather of the parameters \w+.weight, \w+.bias: .*: rank 1 failed with RuntimeError: the batch is bad"
CAUSES_BY_MESSAGES = CAUSES | {"kill": [CLOSED, ""], "forward": [TOLD, CAUSES["forward"][1]]}


@pytest.mark.parametrize(
    ("case", "direct"), swept(product(CAUSES, "10"), lambda case, direct: direct == "1" or case == "path")
)
@pytest.mark.usefixtures("direct")
def test_a_fault_is_named_and_the_last_checkpoint_loads(start_ranks, tmp_path, case, direct):
    ranks = start_ranks(TRAIN, case, tmp_path / "saved", TIMEOUT_S.get((case, direct), LIMIT_S), DS_COMM_DIRECT=direct)
    causes = CAUSES if direct == "1" else CAUSES_BY_MESSAGES
    for rank, cause in zip(ranks, causes[case], strict=True):
        code, output = rank.end()
        assert code != 0
        assert re.search(cause, output), output
    assert run_ranks(2, load_job, str(tmp_path / "saved")) == [1, 1]
