"""Shells complete the flags of all commands from what `ds_report --completion` prints."""

import subprocess

import pytest
from deepspeed.cli import report

# What bash does on TAB: it gives the words to the function that is registered for the first of them.
TAB = """
eval "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
registered=$(complete -p "$1"); function=${registered#*-F }; function=${function% *}
"$function" "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}" 2>/dev/null
echo "${COMPREPLY[*]}"
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ds_plan", "--stag"], "--stages"),
        (["ds_ckpt", ""], "verify show prune convert compare"),
        (["ds_ckpt", "verify", "--j"], "--json"),
        (["deepspeed", "--autotuning", ""], "tune run"),
        (["deepspeed", "--num_accelerators", "2", "trai"], "train.py"),
        (["ds_verify", "--against", "trai"], "train.py"),
        (["ds_config", "ch"], "check"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else " ".join(value),
)
def test_tab_in_bash(words, found, capsys, tmp_path):
    (tmp_path / "train.py").touch()
    assert report.main(["--completion", "bash"]) == 0
    command = ["bash", "-c", TAB, "bash", capsys.readouterr().out, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found, done.stderr
