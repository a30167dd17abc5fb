"""The command line of `deepspeed`: whose argument is whose, and one line for each mistake."""

import subprocess
import sys

import pytest
from deepspeed._version import __version__
from deepspeed.errors import ConfigError
from deepspeed.launcher.arguments import parse_arguments
from deepspeed.launcher.runner import main, make_plan


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return "train.py"


def test_script_arguments_belong_to_the_script_unchanged(script):
    theirs = ["--num_gpus", "7", "--module", "-e", "--", "--", "--no_such", "a b", "--help", ""]
    args = parse_arguments(["--num_accelerators", "2", script, *theirs])
    assert args.num_gpus == 2
    assert not args.module
    assert args.user_script == script
    assert args.user_args == theirs


def test_every_documented_flag_parses(script):
    args = parse_arguments(
        "--num_nodes 1 --num_gpus 2 --master_addr 127.0.0.1 --master_port 1234 --node_rank 0 --no_local_rank "
        "--bind_cores_to_rank --bind_core_list 0 --log_dir logs --save_pid --launcher slurm --launcher_args=-v "
        f"--no_ssh_check {script}".split()
    )
    plan = make_plan(args, {})
    assert (plan.num_ranks, plan.master_port, plan.no_local_rank, plan.log_dir) == (2, 1234, True, "logs")
    assert not plan.log_only


def test_minus_one_means_all_as_in_deepspeed(script):
    assert parse_arguments(["--num_gpus", "-1", script]).num_gpus is None


MALFORMED = {
    "--num_gpus 0 train.py": ("--num_gpus", "1 or more"),
    "--num_gpus two train.py": ("--num_gpus", "'two'"),
    "--num_nodes 2 train.py": ("--num_nodes 2", "--num_nodes 1"),
    "--num_gpus 2 --include localhost:0 train.py": ("--include", "--num_gpus 2"),
    "-i localhost:0 -e localhost:1 train.py": ("--include", "--exclude"),
    "-i localhost:0 --num_nodes 1 train.py": ("--include", "--num_nodes"),
    "-i localhost:a train.py": ("--include", "localhost:0,1"),
    "-i :0 train.py": ("--include", "no host"),
    "-i worker-7:0 train.py": ("--include", "worker-7"),
    "-e localhost train.py": ("--exclude", "no device"),
    "--master_port 70000 train.py": ("--master_port", "65535"),
    "--node_rank 1 train.py": ("--node_rank 1", "--no_ssh"),
    "--bind_cores_to_rank --bind_core_list 5-2 train.py": ("--bind_core_list", "2-5"),
    "--bind_core_list 0 train.py": ("--bind_core_list", "--bind_cores_to_rank"),
    "--log_dir a --enable_each_rank_log b train.py": ("--log_dir", "one of them"),
    "--log_dir train.py train.py": ("--log_dir", "not a directory"),
    "--module --no_python train": ("--module", "--no_python"),
    "--no_python ./train.py": ("--no_python ./train.py", "executable"),
    "--min_elastic_nodes 1 train.py": ("--min_elastic_nodes 1", "--elastic_training"),
    "--max_restarts 0 train.py": ("--max_restarts 0", "--elastic_training"),
    "--elastic_training --max_restarts -1 train.py": ("--max_restarts", "0 or more"),
    "--elastic_training --launcher pdsh train.py": ("--launcher pdsh", "--launcher ssh"),
    "--elastic_training --min_elastic_nodes 3 --max_elastic_nodes 2 train.py": ("--max_elastic_nodes 2", "larger"),
    "--elastic_training --min_elastic_nodes 2 train.py": ("--min_elastic_nodes 2", "--max_elastic_nodes"),
    "--elastic_training --max_elastic_nodes 2 train.py": ("--max_elastic_nodes 2", "--no_ssh"),
    "--elastic_training --no_ssh --max_elastic_nodes 2 train.py": ("--no_ssh: --node_rank is missing", "--master_addr"),
    "--autotuning run train.py": ("--autotuning", "--deepspeed_config ds_config.json"),
    "--autotuning tune --dry_run train.py": ("--autotuning tune", "--dry_run"),
    "--force_multi train.py": ("--force_multi", "--hostfile"),
    "--launcher nosuch train.py": ("--launcher", "pdsh"),
    "--num_gpu 2 train.py": ("--num_gpu:", "--num_gpus"),
    "nosuch.py": ("nosuch.py", "check the path"),
    "--num_gpus 2": ("no script", "deepspeed [flags] script.py"),
    "": ("no script", "deepspeed [flags] script.py"),
}


@pytest.mark.parametrize("line", MALFORMED)
def test_each_mistake_is_one_line_that_names_flag_and_remedy(script, line):
    with pytest.raises(ConfigError) as caught:
        main(line.split())
    message = str(caught.value)
    for part in MALFORMED[line]:
        assert part in message
    assert "\n" not in message


def test_the_command_answers_on_stderr_with_exit_code_2_and_without_torch(script):
    program = (
        "import sys; sys.argv[1:] = ['--num_nodes', '2', 'train.py']\n"
        "from deepspeed.launcher.runner import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith("deepspeed: error: --num_nodes 2: ")
    assert run.stderr.count("\n") == 1


def test_the_version_is_printed_without_torch():
    program = (
        "import sys; sys.argv[1:] = ['--version']\n"
        "from deepspeed.launcher.runner import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout == f"deepspeed {__version__}\n"
