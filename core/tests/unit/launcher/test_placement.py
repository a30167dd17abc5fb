"""How many ranks, on which devices, with which commands: `launch.py` with an accelerator made for the test."""

import socket
import sys

import pytest
from deepspeed.errors import ConfigError
from deepspeed.launcher.launch import NodePlacement, choose_port, make_commands, place_ranks
from deepspeed.launcher.plan import LaunchPlan


class Devices:
    """The few answers that the launcher asks an accelerator for."""

    def __init__(self, count, on_host=False):
        self.count, self.on_host = count, on_host

    def device_count(self):
        return self.count

    def device_name(self):
        return "xyz"

    def is_synchronized_device(self):
        return self.on_host

    def visible_devices_envs(self):
        return ["XYZ_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, env, ids):
        env["XYZ_VISIBLE_DEVICES"] = ",".join(map(str, ids))


@pytest.fixture(autouse=True)
def _nothing_hidden(monkeypatch):
    monkeypatch.delenv("XYZ_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_default_is_every_device_and_leaves_the_environment_alone():
    assert place_ranks(LaunchPlan(), Devices(4)) == NodePlacement(4, {})


@pytest.mark.parametrize(
    ("plan", "visible"),
    [
        (LaunchPlan(num_ranks=2), "0,1"),
        (LaunchPlan(include=[1, 3]), "1,3"),
        (LaunchPlan(exclude=[0]), "1,2,3"),
        (LaunchPlan(num_slots=3), "0,1,2"),
    ],
)
def test_what_was_asked_is_made_visible(plan, visible):
    placement = place_ranks(plan, Devices(4))
    assert placement.environment == {"XYZ_VISIBLE_DEVICES": visible}
    assert placement.num_ranks == len(visible.split(","))


def test_slots_count_within_what_the_environment_shows(monkeypatch):
    monkeypatch.setenv("XYZ_VISIBLE_DEVICES", "GPU-a,GPU-b,7")
    assert place_ranks(LaunchPlan(include=[0, 2]), Devices(3)).environment == {"XYZ_VISIBLE_DEVICES": "GPU-a,7"}


class Unnamed(Devices):
    """An accelerator of a year in which the two methods were not there: the base's answers."""

    def visible_devices_envs(self):
        return []

    def set_visible_devices_envs(self, env, ids):
        pass


def test_without_a_variable_devices_can_be_counted_and_not_chosen():
    assert place_ranks(LaunchPlan(num_ranks=2), Unnamed(4)) == NodePlacement(2, {})
    assert place_ranks(LaunchPlan(include=[0, 1]), Unnamed(4)) == NodePlacement(2, {})
    with pytest.raises(ConfigError, match="--include: asks for devices 1, 3, but Unnamed names no variable"):
        place_ranks(LaunchPlan(include=[1, 3]), Unnamed(4))
    with pytest.raises(ConfigError, match="--exclude: asks for devices 1, 2, 3, but"):
        place_ranks(LaunchPlan(exclude=[0]), Unnamed(4))


@pytest.mark.parametrize(
    ("plan", "flag"),
    [
        (LaunchPlan(num_ranks=5), "--num_gpus/--num_accelerators: asks for 5 devices; found 4"),
        (LaunchPlan(include=[4]), "--include: asks for device 4; found 4"),
        (LaunchPlan(exclude=[4]), "--exclude: there is no device 4"),
        (LaunchPlan(exclude=[0, 1, 2, 3]), "--exclude: leaves no device"),
    ],
)
def test_devices_that_are_not_there(plan, flag):
    with pytest.raises(ConfigError, match=flag):
        place_ranks(plan, Devices(4))


def test_no_device_at_all():
    with pytest.raises(ConfigError, match="ds_report"):
        place_ranks(LaunchPlan(), Devices(0))


def test_on_the_host_any_number_of_ranks_runs():
    assert place_ranks(LaunchPlan(num_ranks=4), Devices(1, on_host=True)) == NodePlacement(4, {})
    assert place_ranks(LaunchPlan(include=[0, 1]), Devices(1, on_host=True)) == NodePlacement(2, {})
    assert place_ranks(LaunchPlan(include=[7], num_slots=8), Devices(1, on_host=True)) == NodePlacement(1, {})
    for include, told in (([7], "ask for 0, or use --num_accelerators 1"), ([0, 1, 5], "ask for 0,1,2, or use --num_")):
        with pytest.raises(ConfigError, match=f"--include: asks for slot {include[-1]}; .* no devices .*{told}"):
            place_ranks(LaunchPlan(include=include), Devices(1, on_host=True))


def commands(plan, num_ranks=2):
    return make_commands(plan, NodePlacement(num_ranks, {}), "train.py", ["--lr", "1"])


def test_commands():
    python = [sys.executable, "-u"]
    assert [c.arguments for c in commands(LaunchPlan())] == [
        [*python, "train.py", "--local_rank=0", "--lr", "1"],
        [*python, "train.py", "--local_rank=1", "--lr", "1"],
    ]
    assert commands(LaunchPlan(no_local_rank=True))[1].arguments == [*python, "train.py", "--lr", "1"]
    assert commands(LaunchPlan(module=True))[0].arguments == [*python, "-m", "train.py", "--local_rank=0", "--lr", "1"]
    assert commands(LaunchPlan(no_python=True))[0].arguments == ["train.py", "--local_rank=0", "--lr", "1"]


def test_threads_per_rank(monkeypatch):
    assert commands(LaunchPlan())[0].environment == {"OMP_NUM_THREADS": "1"}
    assert commands(LaunchPlan(), num_ranks=1)[0].environment == {}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert commands(LaunchPlan())[0].environment == {}
    bound = commands(LaunchPlan(bind_cores_to_rank=True), num_ranks=1)[0]
    assert bound.environment == {"OMP_NUM_THREADS": str(len(bound.cores))}


def test_a_taken_port_is_an_error_only_if_it_was_asked_for(monkeypatch):
    with socket.create_server(("", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--master_port {taken}: is in use"):
            choose_port(taken)
        monkeypatch.setattr("deepspeed.launcher.launch.DEFAULT_MASTER_PORT", taken)
        assert choose_port(None) not in (0, taken)
    assert choose_port(taken) == taken
