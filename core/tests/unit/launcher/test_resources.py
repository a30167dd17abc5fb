"""Hostfile, filters, environment file and plan: what the first process reads and hands on."""

import base64
import json
import os

import pytest
from deepspeed.errors import ConfigError
from deepspeed.launcher import environment
from deepspeed.launcher.arguments import parse_arguments
from deepspeed.launcher.plan import LaunchPlan
from deepspeed.launcher.runner import (
    encode_world_info,
    fetch_hostfile,
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
    "text", ["", "# none\n", "slots=4\n", "a slots=\n", "a slots=x\n", "a b slots=1\n", "a slots=1\na slots=2\n"]
)
def test_hostfile_refuses(tmp_path, text):
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--hostfile"):
        fetch_hostfile(str(path))


def test_missing_hostfile_falls_back_to_this_machine(tmp_path):
    assert fetch_hostfile(str(tmp_path / "nosuch")) is None


def plan_of(tmp_path, hosts, *flags):
    (tmp_path / "hostfile").write_text(hosts)
    (tmp_path / "train.py").touch()
    return make_plan(parse_arguments(["-H", str(tmp_path / "hostfile"), *flags, str(tmp_path / "train.py")]))


def test_local_hostfile_gives_the_number_of_slots(tmp_path):
    assert plan_of(tmp_path, f"{os.uname().nodename} slots=3\n").num_slots == 3


def test_remote_hostfile_is_refused_unless_one_node_is_chosen(tmp_path):
    both = "localhost slots=3\nworker-1 slots=3\n"
    with pytest.raises(ConfigError, match="worker-1.*later feature"):
        plan_of(tmp_path, both)
    assert plan_of(tmp_path, both, "--num_nodes", "1").num_slots == 3
    assert plan_of(tmp_path, both, "-i", "localhost:2,0,2").include == [0, 2]
    assert plan_of(tmp_path, both, "-e", "localhost:1,1").exclude == [1]
    with pytest.raises(ConfigError, match="worker-1.*later feature"):
        plan_of(tmp_path, "worker-1 slots=3\n", "--num_nodes", "1")


def test_plan_survives_the_command_line():
    plan = LaunchPlan(num_ranks=2, include=[0, 3], log_dir="a b/ü")
    assert LaunchPlan.decode(plan.encode()) == plan
    assert plan.encode().isascii()


def test_world_info_is_base64_of_json():
    assert json.loads(base64.urlsafe_b64decode(encode_world_info(HOSTS))) == HOSTS


def test_environment_file(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "home" / ".deepspeed_env").write_text("# ours\nA=1\nB=home\n")
    (tmp_path / "work" / ".deepspeed_env").write_text("B=x=y\n\n")
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(environment, "DEEPSPEED_ENVIRONMENT_PATHS", [str(tmp_path / "home"), "."])
    assert environment.read_environment_files() == {"A": "1", "B": "x=y"}
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "nosuch"))
    with pytest.raises(ConfigError, match="DS_ENV_FILE=.*no such file"):
        environment.read_environment_files()
    (tmp_path / "bad").write_text("A 1\n")
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "bad"))
    with pytest.raises(ConfigError, match="line 1.*NAME=VALUE"):
        environment.read_environment_files()
