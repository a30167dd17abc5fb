"""Hostfile, filters, environment file and plan: what the first process reads and hands on."""

import base64
import json
import os

import pytest
from deepspeed.errors import ConfigError
from deepspeed.launcher import plan
from deepspeed.launcher.arguments import parse_arguments
from deepspeed.launcher.multinode.start import choose_hosts
from deepspeed.launcher.plan import LaunchPlan, NodeReport, ReportReader
from deepspeed.launcher.resources import is_local
from deepspeed.launcher.runner import (
    encode_world_info,
    fetch_hostfile,
    is_many,
    make_plan,
    parse_inclusion_exclusion,
    parse_resource_filter,
)

HOSTS = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", HOSTS),
        ("worker-1", "", {"worker-1": [0, 1, 2, 3]}),
        ("worker-1:2,0", "", {"worker-1": [0, 2]}),
        ("worker-0:1,1", "", {"worker-0": [1]}),
        ("", "worker-0:3,0,3@worker-1", {"worker-0": [1, 2]}),
        ("worker-1:0@worker-1:3", "", {"worker-1": [0, 3]}),
        ("worker-1:0@worker-1", "", {"worker-1": [0, 1, 2, 3]}),
        ("", "worker-1:0@worker-0@worker-1:3,0", {"worker-1": [1, 2]}),
        ("worker-1:0@worker-0:1", "", {"worker-0": [1], "worker-1": [0]}),
        ("", "worker-0", {"worker-1": [0, 1, 2, 3]}),
        ("", "worker-0:0,1@worker-1:3", {"worker-0": [2, 3], "worker-1": [0, 1, 2]}),
        ("", "worker-0:0,1,2,3", {"worker-1": [0, 1, 2, 3]}),
    ],
)
def test_filters(include, exclude, expected):
    kept = parse_resource_filter(HOSTS, include_str=include, exclude_str=exclude)
    assert kept == expected
    assert list(kept) == list(expected)
    assert parse_inclusion_exclusion(dict.fromkeys(HOSTS, 4), include, exclude) == expected


@pytest.mark.parametrize(
    ("include", "exclude", "part"),
    [
        ("jeff", "", "no host jeff"),
        ("", "jeff:1", "no host jeff"),
        ("worker-1:5", "", "no slot 5"),
        ("worker-1:1,,2", "", "slot number"),
        ("worker-0@", "", "no host in"),
        ("worker-0", "worker-1", "exclude each other"),
        ("worker-0:²", "", "slot number"),
    ],
)
def test_filters_refuse(include, exclude, part):
    with pytest.raises(ValueError, match=part):
        parse_resource_filter(HOSTS, include_str=include, exclude_str=exclude)


def test_hostfile(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two nodes\nworker-1 slots=4\n\n  worker-0   slots = 2  # the old one\n")
    hosts = fetch_hostfile(str(path))
    assert list(hosts.items()) == [("worker-1", 4), ("worker-0", 2)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# none\n",
        "a slots=0\n",
        "-oProxyCommand=x slots=1\n",
        "a[1-2] slots=1\n",
        "a;b slots=1\n",
        "slots=4\n",
        "a slots=\n",
        "a slots=x\n",
        "a b slots=1\n",
        "a slots=1\na slots=2\n",
    ],
)
def test_hostfile_refuses(tmp_path, text):
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--hostfile"):
        fetch_hostfile(str(path))


def test_missing_hostfile_falls_back_to_this_machine(tmp_path):
    assert fetch_hostfile(str(tmp_path / "nosuch")) is None


@pytest.fixture
def arguments(tmp_path):
    """The command line of a hostfile and flags."""

    def parse(hosts, *flags):
        (tmp_path / "hostfile").write_text(hosts)
        (tmp_path / "train.py").touch()
        return parse_arguments(["-H", str(tmp_path / "hostfile"), *flags, str(tmp_path / "train.py")])

    return parse


ONE_HOST = {
    "": (3, None),
    "--num_gpus 2": (2, None),
    "-i localhost:2,0,2": (3, [0, 2]),
    "-e localhost:1,1": (3, [0, 2]),
    "-i localhost:1@localhost:0": (2, None),
}


@pytest.mark.parametrize("flags", ONE_HOST)
def test_a_hostfile_of_this_machine_gives_the_slots(arguments, flags):
    args = arguments("localhost slots=3\n", *flags.split())
    hosts = choose_hosts(args)
    assert not is_many(args, hosts)
    plan = make_plan(args, hosts)
    assert (plan.num_slots, plan.include) == ONE_HOST[flags]
    assert plan.num_ranks is plan.exclude is None


WHERE = {
    "": True,
    "--num_nodes 1": False,
    "-i localhost:1": False,
    "-i worker-1": True,
    "-e worker-1": False,
    "-e localhost:1": True,
    "--force_multi --num_nodes 1": True,
}


@pytest.mark.parametrize("flags", WHERE)
def test_a_launcher_is_needed_for_other_hosts(arguments, flags):
    args = arguments("localhost slots=3\nworker-1 slots=3\n", *flags.split())
    assert is_many(args, choose_hosts(args)) == WHERE[flags]


@pytest.mark.parametrize(
    ("flags", "nodes", "expected"),
    [
        ("", "2", True),
        ("", "1", False),
        ("", None, False),
        ("--num_nodes 1", "2", False),
        ("--num_nodes 2", None, True),
        ("-i localhost:0", "2", False),
        ("--force_multi", "1", True),
    ],
)
def test_all_nodes_that_slurm_gave_are_used(tmp_path, monkeypatch, flags, nodes, expected):
    (tmp_path / "train.py").touch()
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    if nodes is not None:
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
    args = parse_arguments(["--launcher", "slurm", *flags.split(), str(tmp_path / "train.py")])
    assert is_many(args, {}) == expected


def test_this_machine_by_name_and_address():
    name = os.uname().nodename
    assert all(map(is_local, ["localhost", name, name.split(".")[0], "127.0.0.1", "127.0.0.2", "::1"]))
    assert not any(map(is_local, ["worker-7", "192.0.2.77", "2001:db8::7"]))


def test_plan_survives_the_command_line():
    plan = LaunchPlan(num_ranks=2, include=[0, 3], log_dir="a b/ü")
    assert LaunchPlan.decode(plan.encode()) == plan
    assert plan.encode().isascii()


def test_each_node_finds_its_slots_in_the_plan():
    plan = LaunchPlan.decode(LaunchPlan(num_nodes=2, slots_of_nodes=[[0, 1], [1, 3]]).encode())
    assert (plan.on_node(0).num_slots, plan.on_node(0).include) == (2, None)
    assert (plan.on_node(1).num_slots, plan.on_node(1).include) == (4, [1, 3])
    assert plan._replace(slots_of_nodes=[[0, 1]]).on_node(1).num_slots == 2
    assert LaunchPlan(num_ranks=3).on_node(0).num_ranks == 3


def test_a_report_survives_the_way_back():
    reports = [NodeReport("b\n" * 3000, 3, True), NodeReport("ü", 1, False)]
    first, second = (report.lines().encode().splitlines(keepends=True) for report in reports)
    assert len(first) > 1
    assert max(map(len, first)) < 1100
    reader = ReportReader()
    assert reader.take("one", first[0])
    assert not reader.take("one", b"another line\n")
    assert reader.take("pdsh", b"two: " + second[0])
    for line in first[1:]:
        assert reader.take("one", line)
    assert reader.reports == [("two", reports[1]), ("one", reports[0])]
    assert reader.cause() == ("two", reports[1])


def test_world_info_is_base64_of_json():
    assert json.loads(base64.urlsafe_b64decode(encode_world_info(HOSTS))) == HOSTS


def test_environment_file(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "home" / ".deepspeed_env").write_text("# ours\nA=1\nB=home\n")
    (tmp_path / "work" / ".deepspeed_env").write_text("B=x=y\n\n")
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(plan, "DEEPSPEED_ENVIRONMENT_PATHS", [str(tmp_path / "home"), "."])
    assert plan.read_environment_files() == {"A": "1", "B": "x=y"}
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "nosuch"))
    with pytest.raises(ConfigError, match="DS_ENV_FILE=.*no such file"):
        plan.read_environment_files()
    (tmp_path / "bad").write_text("A 1\n")
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "bad"))
    with pytest.raises(ConfigError, match="line 1.*NAME=VALUE"):
        plan.read_environment_files()
