"""Runs the tests of the operators with libraries built by the address and undefined-behaviour sanitizers.

    python extensions/ds-ext-cpu/tests/run_sanitized.py                      # all files of FILES
    python extensions/ds-ext-cpu/tests/run_sanitized.py test_adam.py -x      # or these, with pytest's arguments

A plain script: the sanitizer's library has to be in the process before Python, so pytest cannot start itself. The
libraries are built first, without it, into the cache like any other; `DS_CPU_SANITIZE=1` makes them other ones.
Leaks are not looked for: Python and torch keep much until the end.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = [
    name
    for name in (
        "test_adam.py",
        "test_lion.py",
        "test_adagrad.py",
        "test_lamb.py",
        "test_quantizer.py",
        "test_norm.py",
        "test_activation.py",
        "test_rotary.py",
        "test_inference_core.py",
        "test_decode_attention.py",
        "test_decoder_layer.py",
        "test_async_io.py",
    )
    if (HERE / name).is_file()
]
BUILD = "from ds_ext_cpu.op_builder import builders\nfor kind in builders().values(): print(kind().prepare())"


def main(arguments: list[str]) -> int:
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        print("no compiler: set CXX to a g++", file=sys.stderr)
        return 2
    environment = {**os.environ, "DS_CPU_SANITIZE": "1", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", BUILD], env=environment, check=True)
    libraries = [_runtime(compiler, name) for name in ("libasan.so", "libubsan.so")]
    # without libstdc++ in front of it, the sanitizer does not find the function that throws
    libraries.append(_runtime(compiler, "libstdc++.so.6"))
    environment |= {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    given = [argument for argument in arguments if argument.startswith("test_")] or FILES
    others = [argument for argument in arguments if not argument.startswith("test_")]
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=1200", *others, *(str(HERE / name) for name in given)]
    return subprocess.run(command, env=environment, check=False).returncode


def _runtime(compiler: str, name: str) -> str:
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(found.stdout.strip()).resolve())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
