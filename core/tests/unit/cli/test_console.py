"""What every command has: `--version`, help in sentences, and one grammar of sizes."""

import argparse
import importlib
import subprocess
import sys

import pytest
from deepspeed._version import __version__
from deepspeed.cli.console import size_bytes

COMMANDS = {
    "deepspeed": "launcher.runner",
    "ds_ssh": "launcher.ssh",
    **{f"ds_{name}": f"cli.{name}" for name in ("report", "build", "ckpt", "conformance", "nvme_tune", "plan")},
    "ds_io": "cli.io_speed",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_version_and_a_help(name, monkeypatch, capsys):
    module = importlib.import_module(f"deepspeed.{COMMANDS[name]}")
    for flag in ("--version", "--help"):
        monkeypatch.setattr("sys.argv", [name, flag])
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert not ended.value.code
    output = capsys.readouterr().out
    assert output.startswith(f"{name} {__version__}\n")
    assert f"usage: {name} " in output


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * 2**30),
        ("80G", 80 * 2**30),
        ("1.5k", 1536),
        ("80GB", 80 * 10**9),
        ("80 gb", 80 * 10**9),
        ("4096", 4096),
    ],
)
def test_sizes(text, num_bytes):
    assert size_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "x", "-5", "0", "0G", "8Gx", "G"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="give a size such as"):
        size_bytes(text)


def test_what_libraries_print_is_no_part_of_an_answer():
    program = r"""
import os, sys
from deepspeed.cli.console import answer_stream
print("before")
with answer_stream() as answer:
    os.write(1, b"of a library\n")
    print("of Python")
    answer.write("answer\n")
print("after")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["before", "answer", "after"]
    assert done.stderr.splitlines() == ["of a library", "of Python"]
