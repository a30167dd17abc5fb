"""Runs the tests of the kernels on the host, built with the address and undefined-behaviour sanitizers.

    python extensions/ds-ext-cuda/tests/run_sanitized.py                       # all kernels
    python extensions/ds-ext-cuda/tests/run_sanitized.py test_quantizer.py -x  # or these, with pytest's arguments

A plain script: the sanitizer's library has to be in the process before Python, so pytest cannot start itself. The
libraries are built first, without it, into the cache like any other.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = [
    *("optimizers", "test_flatten.py", "test_inference_core.py", "test_quantizer.py", "test_random_ltd.py"),
    "test_transformer_inference.py",
]
BUILD = """
import runpy, sys
from ds_ext_cuda.op_builder import builders
emulated = runpy.run_path(sys.argv[1])["EmulatedBuilder"]
for kind in builders().values():
    print(emulated.of(kind()).prepare())
"""


def main(arguments: list[str]) -> int:
    environment = {**os.environ, "DS_CUDA_SANITIZE": "1", "DS_CUDA_EMULATED": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", BUILD, str(HERE / "conftest.py")], env=environment, check=True)
    # without libstdc++ behind it, the sanitizer does not find the function that throws
    environment |= {
        "LD_PRELOAD": " ".join(_runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    given = [argument for argument in arguments if (HERE / argument).exists()] or FILES
    others = [argument for argument in arguments if argument not in given]
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=1200", *others, *(str(HERE / name) for name in given)]
    return subprocess.run(command, env=environment, check=False).returncode


def _runtime(name: str) -> str:
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(found.stdout.strip()).resolve())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
