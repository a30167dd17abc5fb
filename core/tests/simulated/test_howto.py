"""docs/howto/accelerator-in-60-lines.md: its files are an extension, which trains on the simulated device."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "accelerator-in-60-lines.md"
# The vendor's PyTorch package, and the device in /dev: the simulated device under the name that the page uses.
TORCH_XYZ = """
from ds_ext_sim import torch_sim
torch_sim.install("xyz", library="xyzccl", visible_devices_env="XYZ_VISIBLE_DEVICES")
"""
TRAIN = """
import json
import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.cli import report

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
config = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
engine, *_ = deepspeed.initialize(model=model, config=config)
losses = []
for seed in range(5):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(engine.device)
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
told = report.collect()
torch.distributed.destroy_process_group()
print(json.dumps([str(engine.device), losses, told["chosen"], told["device"]]))
"""


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_it_is_under_60_lines_of_python():
    files = blocks("python fragment")
    assert len(files) == 2
    assert sum(len(file.splitlines()) for file in files) < 60


@pytest.fixture
def site(tmp_path):
    """The page's files as pip leaves them."""
    (toml,) = blocks("toml")
    plugin, accelerator = blocks("python fragment")
    package = tmp_path / "ds_ext_xyz"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(plugin.replace('Path("/dev")', f'Path("{tmp_path}/dev")'))
    (package / "accelerator.py").write_text(accelerator)
    (tmp_path / "torch_xyz.py").write_text(TORCH_XYZ)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "xyz0").touch()
    entry = re.search(r'^\[project.entry-points."deepspeed.accelerators"\]\n(\w+) = "([\w.]+)"$', toml, re.MULTILINE)
    info = tmp_path / "ds_ext_xyz-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ds-ext-xyz\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[deepspeed.accelerators]\n{entry[1]} = {entry[2]}\n")
    return tmp_path


def run(python, site, installed, **variables):
    environment = {**os.environ, **installed, "DS_ACCELERATOR": "xyz", **variables}
    environment["PYTHONPATH"] = os.pathsep.join([str(site), installed["PYTHONPATH"]])
    done = subprocess.run(
        [python, "-c", TRAIN],
        env=environment,
        cwd=site,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_trains_as_the_cpu_does(python, site, installed):
    name, losses, chosen, device = run(python, site, installed)
    assert name == "xyz:0"
    assert (chosen["class"], chosen["why"]) == ("ds_ext_xyz.accelerator.XYZ_Accelerator", "DS_ACCELERATOR=xyz")
    assert device["communication_backend_name"] == "xyzccl"
    assert not [answer for answer in device.values() if str(answer).startswith("failed")]
    on_cpu, expected, _, _ = run(python, site, installed, DS_ACCELERATOR="plain")
    assert on_cpu == "cpu"
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]


def test_without_its_device_it_is_told_and_the_rest_works(python, site, installed):
    (site / "dev" / "xyz0").unlink()
    name, _, chosen, _ = run(python, site, installed, DS_ACCELERATOR="", DS_PLUGINS_BLOCK="cpu,sim")
    assert name == "cpu"
    assert "xyz: 0 devices in /dev" in chosen["why"]
