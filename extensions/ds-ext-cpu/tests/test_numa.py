"""NUMA nodes from the kernel's files."""

import pytest
from ds_ext_cpu import numa


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8\n", [0, 1, 2, 3, 8]), ("5", [5]), ("\n", []), ("", []), ("0-0,2-3", [0, 2, 3]), ("1, 4-5", [1, 4, 5])],
)
def test_parse_core_list(text, cores):
    assert numa.parse_core_list(text) == cores


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes node folders; this process may run on cores 0 to 7."""
    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)

    def make(**nodes):
        for name, cores in nodes.items():
            (tmp_path / name).mkdir()
            if cores is not None:
                (tmp_path / name / "cpulist").write_text(cores)
        (tmp_path / "has_cpu").write_text("0-1\n")
        return tmp_path

    return make


def test_two_nodes(machine):
    assert numa.usable_nodes(machine(node1="4-7\n", node0="0-3\n")) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}


def test_a_node_of_memory_alone_and_a_foreign_node_do_not_count(machine):
    assert numa.usable_nodes(machine(node0="0-7", node1="\n", node2="8-15")) == {0: list(range(8))}


def test_nothing_to_read_is_one_node_with_all_cores(machine, tmp_path):
    assert numa.usable_nodes(tmp_path / "nosuch") == {0: list(range(8))}
    assert numa.usable_nodes(machine(node0=None)) == {0: list(range(8))}


def test_this_machine_has_a_node():
    nodes = numa.usable_nodes()
    assert len(nodes) >= 1
    assert all(nodes.values())
