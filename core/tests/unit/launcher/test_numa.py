"""Sharing cores between ranks."""

import os

import pytest
from deepspeed.errors import ConfigError
from deepspeed.launcher import resources
from deepspeed.launcher.resources import available_cores, check_cores, format_cores, parse_core_list, share_cores
from deepspeed.utils import numa as utils_numa


def test_core_list():
    assert parse_core_list("0-3,8") == [0, 1, 2, 3, 8]
    assert parse_core_list("5") == [5]
    assert parse_core_list(" 2-2 , 0") == [2, 0]


@pytest.mark.parametrize("text", ["", "a", "1,", "5-2", "1-2-3", "-1", "0-2,1"])
def test_core_list_refuses(text):
    with pytest.raises(ConfigError, match="--bind_core_list"):
        parse_core_list(text)


def test_shares_are_equal_and_the_rest_idles():
    assert share_cores([0, 1, 2, 3, 8], 2) == [[0, 1], [2, 3]]
    assert share_cores([4], 1) == [[4]]


def test_too_few_cores_names_flag_and_numbers():
    with pytest.raises(ConfigError, match=r"--bind_cores_to_rank: 3 ranks cannot share 2 cores \(0-1\)"):
        share_cores([0, 1], 3)


def test_cores_of_this_machine():
    cores = available_cores()
    assert cores
    assert set(cores) <= os.sched_getaffinity(0)
    check_cores(cores)
    with pytest.raises(ConfigError, match="core 99999"):
        check_cores([*cores, 99999])


def test_format_is_the_inverse_of_parse():
    for text in ("0-3,8", "1", "0,2,4-5"):
        assert format_cores(parse_core_list(text)) == text


def test_the_cores_of_each_node(monkeypatch):
    monkeypatch.setattr(resources, "_node_of_core", lambda: {1: 0, 0: 0, 9: 2, 8: 2})
    assert utils_numa.get_numa_cores() == [[0, 1], [8, 9]]
    monkeypatch.setattr(resources, "_node_of_core", dict)
    assert utils_numa.get_numa_cores() == []


def test_a_command_that_binds_a_rank(monkeypatch):
    monkeypatch.setattr(resources.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert utils_numa.check_for_numactl_pkg()
    assert utils_numa.get_numactl_cmd("0-3,8,9", 2, 1) == (3, ["numactl", "-C", "3,8-9"])
    count, command = utils_numa.get_numactl_cmd(None, 1, 0)
    assert utils_numa.parse_range_list(command[2]) == sorted(available_cores())
    assert count == len(available_cores())
    monkeypatch.setattr(resources.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="found no command numactl"):
        utils_numa.get_numactl_cmd(None, 1, 0)
