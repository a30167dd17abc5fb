"""`init_distributed` in a process of its own: no environment, half an environment, a master that is not there."""

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import deepspeed.comm as dist
import pytest
from deepspeed.comm.environment import loopback_address
from deepspeed.errors import CommError
from deepspeed.testing import forked

_SINGLE = """
import os, sys
import deepspeed.comm as dist
dist.init_distributed("gloo")
dist.init_distributed("gloo")
print(dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), os.environ["RANK"], os.environ["WORLD_SIZE"])
import torch
x = torch.ones(3)
dist.all_reduce(x)
dist.barrier()
print(x.tolist(), dist.is_backend("gloo"), "mpi4py" in sys.modules)
dist.destroy_process_group()
print(dist.is_initialized())
"""

_FAILING = """
from datetime import timedelta
import deepspeed.comm as dist
try:
    dist.init_distributed({backend!r}, timeout=timedelta(seconds=2))
except Exception as error:
    print(type(error).__name__, error)
"""


def run_script(script, **variables):
    """What it prints, by a fork of a process that has torch and no group."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))}
    with tempfile.TemporaryDirectory() as name, open(os.devnull) as nothing:
        path, output, errors = (Path(name) / each for each in ("script.py", "output", "errors"))
        path.write_text(script)
        with output.open("wb") as out, errors.open("wb") as err:
            environment = {**clean, "OMP_NUM_THREADS": "1", **variables}
            job = forked.start(0, [str(path)], environment, nothing.fileno(), out.fileno(), errors=err.fileno())
        try:
            code = job.wait(60)
        finally:
            job.kill()
        assert code == 0, errors.read_text()
        return output.read_text().splitlines()


def test_no_environment_is_one_rank_and_starting_twice_is_harmless():
    assert run_script(_SINGLE) == ["0 1 0 0 1", "[1.0, 1.0, 1.0] True False", "False"]


def test_half_an_environment_fails_at_once():
    (line,) = run_script(_FAILING.format(backend="gloo"), RANK="1", MASTER_ADDR="127.0.0.1")
    assert line.startswith("CommError")
    assert "missing WORLD_SIZE, MASTER_PORT" in line


def test_a_master_that_is_not_there_is_named_within_the_timeout():
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    (line,) = run_script(_FAILING.format(backend="gloo"), **variables)
    assert line.startswith("CommError rank 1 of 2 could not join")
    assert "127.0.0.1:9" in line
    assert "timeout 2 s" in line
    assert "Check that rank 0 runs" in line
    assert float(re.search(r"after ([\d.]+) s", line).group(1)) < 50  # not torch's thirty minutes


def test_an_unknown_backend_is_named():
    (line,) = run_script(_FAILING.format(backend="nosuch"))
    assert line.startswith("CommError")
    assert "no communication backend 'nosuch'" in line
    assert "gloo" in line


def test_questions_before_the_start():
    assert not dist.is_initialized()
    for ask in (dist.get_world_group, dist.group_backend):
        with pytest.raises(CommError, match="init_distributed"):
            ask()
    with pytest.raises(CommError, match="not initialized"):
        dist.init_distributed(dist_init_required=False)


_PLUGIN = """
import deepspeed.comm as dist
import torch
from deepspeed.plugins import FEATURES, hookimpl, plugin_manager

asked = []

class Plugin:
    @hookimpl
    def ds_comm_backend(self, name, group):
        from deepspeed.comm.torch_group import TorchGroup

        class Mine(TorchGroup):
            def __init__(self, group, name):
                super().__init__(group)
                self.name = name

        asked.append(name)
        if name == "registered":
            torch.distributed.Backend.register_backend(name, lambda *arguments: None, devices=["cpu"])
        if name == "none":
            return object()
        names = {"mine": "mine", "gloo": "better gloo"}
        return Mine(group, names[name]) if group is not None and name in names else None

plugin_manager().register(Plugin(), "comm", FEATURES)
plugin_manager().activate("comm", FEATURES)
"""


def test_a_plugin_may_replace_the_collectives_of_a_library_of_torch():
    script = """
dist.init_distributed("gloo")
print(list(asked), dist.group_backend().name, dist.group_backend() is dist.group_backend(), asked)
dist.destroy_process_group()
"""
    assert run_script(_PLUGIN + script) == ["[] better gloo True ['gloo']"]


def test_a_plugins_collectives_are_chosen_by_name():
    script = """
from deepspeed.errors import CommError

try:
    dist.init_deepspeed_backend("mine")
except CommError as error:
    print(str(error).partition(" was")[0])
dist.init_distributed("gloo")
try:
    dist.init_deepspeed_backend("nobody's")
except CommError as error:
    print(str(error).partition(";")[0], dist.group_backend().name)
dist.init_deepspeed_backend("mine")
backend = dist.group_backend()
shard = torch.empty(3)
backend.reduce_scatter(shard, torch.arange(3.0)).wait()
print(backend.name, backend is dist.group_backend(), dist.is_backend("mine"), shard.tolist())
dist.set_backend()
print(dist.group_backend().name)
dist.destroy_process_group()
"""
    assert run_script(_PLUGIN + script) == [
        "deepspeed.comm.init_deepspeed_backend()",
        'init_deepspeed_backend("nobody\'s"): no installed plugin offers this backend with ds_comm_backend better gloo',
        "mine True True [0.0, 1.0, 2.0]",
        "better gloo",
    ]


def test_a_plugin_may_serve_each_group():
    script = """
from deepspeed.comm.torch_group import TorchGroup

class PerGroup:
    @hookimpl
    def ds_comm_backend(self, name, group):
        asked.append((name, group is not None))
        return None if group is None else Mine(group)

class Mine(TorchGroup):
    pass

plugin_manager().unregister("comm", FEATURES)
plugin_manager().register(PerGroup(), "per group", FEATURES)
plugin_manager().activate("per group", FEATURES)
dist.init_distributed("gloo")
first, second = dist.group_backend(), dist.group_backend(dist.new_group([0]))
print(type(first).__name__, type(second).__name__, first is second, asked)
dist.destroy_process_group()
"""
    assert run_script(_PLUGIN + script) == ["Mine Mine False [('gloo', True), ('gloo', True)]"]


def test_a_plugin_may_register_its_library_with_torch():
    script = """
from deepspeed.comm.start import _require_library
_require_library("registered")
_require_library("registered")
print(torch.distributed.is_backend_available("registered"), asked)
"""
    assert run_script(_PLUGIN + script) == ["True ['registered']"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "as the communication backend 'none'; it must be an object with the methods of"),
        ("x", "no plugin gives it"),
    ],
)
def test_a_plugin_without_a_backend_of_that_name(name, message):
    (line,) = run_script(_PLUGIN + _FAILING.format(backend=name))
    assert line.startswith("CommError")
    assert message in line


def test_the_chosen_accelerators_plugin_is_asked_too():
    script = """
class Device(Plugin):
    @hookimpl
    def ds_probe(self):
        from deepspeed.plugins import Offer
        return Offer("device", 1000)

    @hookimpl
    def ds_accelerator(self):
        from deepspeed.accelerator.plain import PlainAccelerator
        return PlainAccelerator()

plugin_manager().unregister("comm", FEATURES)
plugin_manager().register(Device(), "device")
dist.init_distributed("gloo")
print(dist.group_backend().name)
"""
    assert run_script(_PLUGIN + script, DS_ACCELERATOR="device") == ["better gloo"]


_LISTENING = """
import os, sys
import psutil, torch.distributed
import deepspeed.comm as dist
dist.init_distributed("gloo")
if dist.get_rank() == 0:
    port = int(os.environ["MASTER_PORT"])
    listening = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == port]
    print([address.ip for address in listening])
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_of_a_loopback_address_is_reached_from_this_machine_only(address):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LOCAL_", "TORCHELASTIC_"))}
    env = {**clean, "MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _LISTENING],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert outputs[0][0].splitlines()[-1] == "['127.0.0.1']"


@pytest.mark.parametrize(
    ("host", "expected"), [("localhost", "127.0.0.1"), ("127.0.1.1", "127.0.1.1"), ("::1", "::1"), ("10.0.0.1", None)]
)
def test_what_a_loopback_address_is(host, expected):
    assert loopback_address(host) == expected


_TIMEOUTS = """
from datetime import timedelta
import deepspeed, torch
import deepspeed.comm as dist
from deepspeed.comm.backend import timeout_of

how, stage = {how!r}, {stage}
config = {{"train_batch_size": 1, "zero_optimization": {{"stage": stage}}}}
try:
    if how == "argument":
        dist.init_distributed("gloo", timeout=timedelta(seconds=90))
    if how == "zero.Init":
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = torch.nn.Linear(2, 2)
    else:
        model = torch.nn.Linear(2, 2)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    groups = [dist.get_world_group(), dist.new_group([0])]
    groups += [engine.mesh.group(axis) for axis in ("dp", "tp", "sp", "pp")]
    print(*{{timeout_of(group).total_seconds() for group in groups}})
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("how", "stage", "minutes", "expected"),
    [
        *[("initialize", stage, "7", "420.0") for stage in (0, 2, 3)],
        ("initialize", 1, "", "600.0"),
        ("zero.Init", 3, "0.5", "30.0"),
        ("argument", 0, "7", "90.0"),
        ("argument", 3, "7", "90.0"),
    ],
)
def test_every_group_has_the_timeout_of_the_variable_or_the_argument(how, stage, minutes, expected):
    assert run_script(_TIMEOUTS.format(how=how, stage=stage), DEEPSPEED_TIMEOUT=minutes)[-1] == expected


@pytest.mark.parametrize("minutes", ["soon", "0", "-3", "nan", "1e9", "1e300"])
def test_a_timeout_that_is_no_time_is_refused(minutes):
    line = run_script(_TIMEOUTS.format(how="initialize", stage=0), DEEPSPEED_TIMEOUT=minutes)[-1]
    assert line.startswith(f"CommError DEEPSPEED_TIMEOUT: found {minutes!r}; set it to a positive number of minutes")


def test_a_timeout_of_another_type_is_refused():
    with pytest.raises(CommError, match=r"timeout: found 3; give a datetime.timedelta"):
        dist.init_distributed(timeout=3)
