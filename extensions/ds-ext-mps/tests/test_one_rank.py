"""One rank over gloo, on a device whose tensors gloo refuses: the simulated one, as there is no Metal here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SIMULATED = Path(__file__).parents[3] / "core" / "tests" / "simulated"
PROGRAM = """
import sys
import torch
import torch.distributed as dist
import deepspeed
from deepspeed.accelerator import set_accelerator
from ds_ext_sim.accelerator import Sim_Accelerator


class OneDevice(Sim_Accelerator):
    _communication_backend_name = "gloo"

    def device_count(self):
        return 1


set_accelerator(OneDevice())
for stage in (0, 1, 2):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 4, device=engine.device)).square().mean())
        engine.step()
    engine.save_checkpoint(sys.argv[1])
    engine.load_checkpoint(sys.argv[1])
    print(stage, dist.get_backend(), engine.device.type, engine.global_steps)
    engine.destroy()
try:
    dist.all_reduce(torch.ones(1, device="sim"))
except RuntimeError as error:
    print("refused" if "device type sim" in str(error) or "privateuse" in str(error).lower() else error)
"""


def test_one_rank_exchanges_no_tensors_of_the_device(tmp_path):
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        pytest.skip("the simulated device needs torch 2.9")
    if not SIMULATED.is_dir():
        pytest.skip(f"the simulated device is no part of this package; {SIMULATED} has it")
    kept = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    path = os.pathsep.join(filter(None, [str(SIMULATED), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**kept, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 gloo sim 2", "1 gloo sim 2", "2 gloo sim 2", "refused"]
