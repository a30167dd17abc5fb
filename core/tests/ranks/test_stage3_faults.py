"""What goes wrong in stage 3 ends every rank with a message that names the cause, and the last checkpoint loads."""

import re
from itertools import product
from typing import Any

import deepspeed
import pytest
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from torch import nn

#: of the group; a rank that waits for one that does something else raises after it
TIMEOUT_S = 5

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

def die(unit):
    gather(unit)
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


@pytest.mark.parametrize(
    ("case", "direct"), swept(product(CAUSES, "10"), lambda case, direct: direct == "1" or case == "path")
)
@pytest.mark.usefixtures("direct")
def test_a_fault_is_named_and_the_last_checkpoint_loads(start_ranks, tmp_path, case, direct):
    ranks = start_ranks(TRAIN, case, tmp_path / "saved", TIMEOUT_S, DS_COMM_DIRECT=direct)
    for rank, cause in zip(ranks, CAUSES[case], strict=True):
        code, output = rank.end()
        assert code != 0
        assert re.search(cause, output), output
    assert run_ranks(2, load_job, str(tmp_path / "saved")) == [1, 1]
