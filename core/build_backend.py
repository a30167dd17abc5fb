"""setuptools' build backend, except that wheels are built from a temporary copy of this folder, with `_old/` flat.

setuptools builds in the source tree and leaves `build/` and `*.egg-info` there; a file that was deleted from the source
is then still in `build/`, and so in the next wheel. An editable install needs its `*.egg-info` and is left as it is.
In the source, DeepSpeed's packages that hold nothing but old addresses stand in `_old/`, so that a listing shows what
exists; in a wheel they stand where they are imported from, for tools that read code without running it.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_LEFT_OUT = shutil.ignore_patterns("build", "dist", "tests", "*.egg-info", "__pycache__", ".*")


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """The wheel's file name, as PEP 517 says."""
    wheel_directory = os.path.abspath(wheel_directory)
    metadata_directory = metadata_directory and os.path.abspath(metadata_directory)
    with _copy():
        return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """The name of the `.dist-info` folder, as PEP 517 says."""
    metadata_directory = os.path.abspath(metadata_directory)
    with _copy():
        return str(build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings))


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What a wheel needs beyond `build-system.requires`, as PEP 517 says."""
    with _copy():
        return list(build_meta.get_requires_for_build_wheel(config_settings))


@contextlib.contextmanager
def _copy() -> Iterator[None]:
    """Work in a copy of the current folder, which is that of the distribution."""
    source = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="ds_core_build_") as folder:
        copy = shutil.copytree(source, os.path.join(folder, "source"), ignore=_LEFT_OUT, symlinks=True)
        _flatten(Path(copy, "src", "deepspeed"))
        os.chdir(copy)
        try:
            yield
        finally:
            os.chdir(source)


def _flatten(package: Path) -> None:
    for path in (package / "_old").iterdir():
        path.rename(package / path.name)
    stub = package / "__init__.pyi"
    stub.write_text(stub.read_text(encoding="utf-8").replace("deepspeed._old", "deepspeed"), encoding="utf-8")
