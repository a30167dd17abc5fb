"""Keeps what the choices ask for: one licence, and the files of one kernel language; run by cookiecutter at the end."""

import shutil
from pathlib import Path

LANGUAGE = "{{ cookiecutter.kernel_language }}"
PACKAGE = Path("src/{{ cookiecutter.__package }}")
LION = PACKAGE / "csrc/lion"

_OF_ALL = {"fused_lion.cpp", "lion.h", "lion_formula.h"}
_OF_LANGUAGE = {
    "cpp": {"lion_staged.cpp", "lion_kernel.h", "lion_kernel.cpp"},
    "cuda": {"lion.cu"},
    "sycl": {"lion_sycl.cpp"},
    "own": {"lion_staged.cpp", "lion_kernel.h", "lion_kernel.cpp"},
}

Path("licences", "{{ cookiecutter.licence }}").rename("LICENSE")
shutil.rmtree("licences")

if LANGUAGE == "none":
    shutil.rmtree(PACKAGE / "op_builder")
    shutil.rmtree(PACKAGE / "csrc")
    for name in ("setup.py", ".clang-format", "tests/test_fused_lion.py"):
        Path(name).unlink()
else:
    (PACKAGE / f"op_builder/device_builder_{LANGUAGE}.py").rename(PACKAGE / "op_builder/device_builder.py")
    for path in PACKAGE.glob("op_builder/device_builder_*.py"):
        path.unlink()
    for path in LION.iterdir():
        if path.name not in _OF_ALL | _OF_LANGUAGE[LANGUAGE]:
            path.unlink()
    if LANGUAGE == "own":
        (LION / "lion_kernel.cpp").rename(LION / "lion_kernel.{{ cookiecutter.device_name }}")
