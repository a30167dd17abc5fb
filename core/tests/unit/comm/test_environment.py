"""Placements read from the environments of launchers, MPI and Slurm."""

import sys

import pytest
from deepspeed.comm.environment import find_placement, first_slurm_host
from deepspeed.errors import CommError

_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "MV2_", "SLURM_", "MPI_")


@pytest.fixture
def environment(monkeypatch):
    """Set exactly these variables, and nothing of a launcher beside them."""
    import os

    for name in list(os.environ):
        if name.startswith(_PREFIXES):
            monkeypatch.delenv(name)

    def set_all(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_all


def find(rank=-1, world_size=-1, **options):
    placement = find_placement(rank, world_size, 29500, options.pop("use_mpi", True), **options)
    return placement.rank, placement.world_size, placement.local_rank, placement.master_addr, placement.master_port


def test_nothing_is_a_single_rank(environment):
    assert find() == (0, 1, 0, "127.0.0.1", 29500)


def test_a_master_alone_is_no_launcher(environment):
    environment(MASTER_ADDR="host", MASTER_PORT=1234)
    assert find()[:2] == (0, 1)


def test_torchrun(environment):
    environment(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, MASTER_ADDR="host", MASTER_PORT=1234)
    assert find() == (5, 8, 1, "host", 1234)


def test_launcher_beats_slurm_and_mpi(environment):
    environment(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, MASTER_ADDR="host", MASTER_PORT=1234)
    environment(SLURM_STEP_ID=0, SLURM_PROCID=7, SLURM_NTASKS=8, OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4)
    assert find()[:2] == (1, 2)


def test_world_of_one_needs_no_master(environment):
    environment(RANK=0, WORLD_SIZE=1)
    assert find() == (0, 1, 0, "127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"RANK": 0}, "missing WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": 2, "MASTER_ADDR": "host", "MASTER_PORT": 1}, "missing RANK;"),
        ({"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "host"}, "missing MASTER_PORT;"),
        ({"OMPI_COMM_WORLD_RANK": 1}, "missing OMPI_COMM_WORLD_SIZE;"),
        ({"SLURM_STEP_ID": 0, "SLURM_PROCID": 1, "SLURM_NTASKS": 2}, "missing SLURM_JOB_NODELIST"),
    ],
)
def test_half_set_names_what_is_missing(environment, variables, missing):
    environment(**variables)
    with pytest.raises(CommError, match=missing):
        find()


def test_init_method_replaces_the_master(environment):
    environment(RANK=1, WORLD_SIZE=2, LOCAL_RANK=1)
    assert find(has_init_method=True)[:3] == (1, 2, 1)


def test_values_that_are_no_numbers_or_do_not_fit(environment):
    environment(RANK="one", WORLD_SIZE=1)
    with pytest.raises(CommError, match="RANK must be an integer of at least 0, found 'one'"):
        find()
    environment(RANK=2, WORLD_SIZE=2, LOCAL_RANK=0, MASTER_ADDR="host", MASTER_PORT=1)
    with pytest.raises(CommError, match="rank 2 of 2"):
        find()


NO_NUMBERS = ["", " ", "abc", "1e9", "0x10", "x" * 5000, "zw\u00f6lf", "1\n2", "\u00b2", "nan"]
GARBAGE = [*NO_NUMBERS, "-7", "1" * 5000, "99999999999"]
SOUND = {
    "launcher": {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0},
    "OMPI": {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", 0), ("SIZE", 2), ("LOCAL_RANK", 0))},
    "MV2": {f"MV2_COMM_WORLD_{name}": value for name, value in (("RANK", 0), ("SIZE", 2), ("LOCAL_RANK", 0))},
    "PMI": {"PMI_RANK": 0, "PMI_SIZE": 2, "MPI_LOCALRANKID": 0},
    "Slurm": {"SLURM_STEP_ID": 0, "SLURM_PROCID": 0, "SLURM_NTASKS": 2, "SLURM_LOCALID": 0},
}


@pytest.mark.parametrize("starter", SOUND)
def test_garbage_is_refused_by_name(environment, starter):
    sound = {"MASTER_ADDR": "host", "MASTER_PORT": 7, **SOUND[starter]}
    for name in [*SOUND[starter], "MASTER_PORT"]:
        for value in GARBAGE:
            if name != "SLURM_STEP_ID":  # of which nothing is read
                environment(**{**sound, name: value})
                with pytest.raises(CommError) as caught:
                    find()
                said = str(caught.value)
                assert f"the environment variable {name} must be an integer" in said
                assert f"found {value[:60]!r}" in said
                assert len(said) < 250


@pytest.mark.parametrize("address", ["", " ", "a host", "host\n", "x" * 5000])
def test_a_master_that_is_no_address(environment, address):
    environment(**SOUND["launcher"], MASTER_ADDR=address, MASTER_PORT=7)
    with pytest.raises(CommError, match="MASTER_ADDR: found .*; set it to the host of rank 0"):
        find()


def test_arguments_beat_the_environment(environment):
    environment(RANK=0, WORLD_SIZE=8, LOCAL_RANK=0, MASTER_ADDR="host", MASTER_PORT=7)
    assert find(1, 2) == (1, 2, 0, "host", 7)


def test_one_argument_of_two_is_refused(environment):
    with pytest.raises(CommError, match="give both"):
        find(rank=1)


@pytest.mark.parametrize(
    ("rank_key", "size_key", "local_key"),
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ],
)
def test_mpi(environment, rank_key, size_key, local_key):
    environment(**{rank_key: 3, size_key: 4, local_key: 1, "MASTER_ADDR": "host"})
    assert find() == (3, 4, 1, "host", 29500)


def test_mpi_without_mpi4py_says_what_to_install(environment, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    environment(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_LOCAL_RANK=0)
    with pytest.raises(CommError, match="pip install mpi4py"):
        find()
    assert find(use_mpi=False)[:2] == (0, 1)


def test_mpi_tells_the_address_of_rank_0(environment, monkeypatch):
    from types import SimpleNamespace

    world = SimpleNamespace(bcast=lambda own, root: "rank0host")
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=world)))
    environment(OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_LOCAL_RANK=1)
    assert find() == (1, 2, 1, "rank0host", 29500)


def test_srun(environment):
    environment(SLURM_STEP_ID=0, SLURM_PROCID=3, SLURM_NTASKS=4, SLURM_LOCALID=1, SLURM_JOB_NODELIST="n[07-08]")
    environment(PMI_RANK=3, PMI_SIZE=4)
    assert find() == (3, 4, 1, "n07", 29500)


def test_a_batch_script_is_a_single_rank(environment):
    environment(SLURM_PROCID=0, SLURM_NTASKS=4, SLURM_JOB_NODELIST="n[07-08]")
    assert find()[:2] == (0, 1)


def test_an_interactive_srun_is_a_single_rank(environment):
    environment(SLURM_STEP_ID=0, SLURM_PROCID=0, SLURM_NTASKS=4, SLURM_STEP_NUM_TASKS=1)
    assert find()[:2] == (0, 1)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[003-005,9],login", "gpu003"),
        ("rack1-n[12]", "rack1-n12"),
        ("n[1,3]-ib", "n1-ib"),
    ],
)
def test_first_slurm_host(nodelist, host):
    assert first_slurm_host(nodelist) == host


def test_empty_node_list_is_named():
    with pytest.raises(CommError, match="MASTER_ADDR"):
        first_slurm_host("")


@pytest.mark.parametrize("value", ["\x1b[31m", "x" * 5000])
def test_a_hostile_value_in_a_half_set_environment_is_shown_as_text(environment, value):
    environment(RANK=value)
    with pytest.raises(CommError, match="half set: found RANK='") as caught:
        find()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
