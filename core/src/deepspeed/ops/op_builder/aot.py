"""Ahead of time: the same builders at `pip install`, so that a wheel carries its libraries.

An extension's `setup.py`, whole; everything else stays in its `pyproject.toml`:

    import os
    from setuptools import setup

    wanted = any(name.startswith("DS_BUILD_") and value == "1" for name, value in os.environ.items())
    if wanted:
        from deepspeed.ops.op_builder.aot import setup_arguments
    setup(**(setup_arguments("my_extension.op_builder") if wanted else {}))

`DS_BUILD_OPS=1` builds every op that can be built here, `DS_BUILD_<OP>=1` that one (an error if it cannot be built),
`=0` leaves it out. torch and ds-core must be importable then: `DS_BUILD_OPS=1 pip install --no-build-isolation ...`.
With none of them set, `setup.py` imports neither, and the wheel is a pure one whose ops are compiled at first use.
"""

import importlib
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from deepspeed.errors import ConfigError, OpUnavailable
from deepspeed.log import logger
from deepspeed.ops.op_builder import jit
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.cache import Manifest
from deepspeed.ops.op_builder.compiling import compile_spec
from deepspeed.ops.op_builder.spec import BuildSpec

ALL = "DS_BUILD_OPS"


def setup_arguments(
    package: str, source_dir: str | Path = "src", environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the arguments that `setup()` of an extension needs; none if no op is to be built. Called by `setup.py`.

    Args:
        package: import name of the package whose names are the builders, for example `"ds_ext_cpu.op_builder"`.
        source_dir: the folder from which it is imported, so that it need not be installed yet.
        environment: where `DS_BUILD_*` are read.

    Raises:
        OpUnavailable: an op that was asked for by name cannot be built here.
        ConfigError: a `DS_BUILD_*` variable is neither 0 nor 1.
    """
    sys.path.insert(0, str(Path(source_dir).absolute()))
    try:
        builders = find_builders(package)
    finally:
        sys.path.pop(0)
    by_name = {builder.absolute_name(): builder for builder in builders if _is_wanted(builder, environment)}
    wanted = list(by_name.values())  # ops of one library are one
    if not wanted:
        return {}
    return {
        "ext_modules": [OpExtension(builder) for builder in wanted],
        "cmdclass": {"build_ext": BuildOps, "bdist_wheel": _wheel_command(wanted)},
    }


def find_builders(package: str) -> list[OpBuilder]:
    """An instance of every builder class that `package` names and that says which op it is, by op name.

    The names are those of its function `builders()` (what `ds_op_builders` returns), else its `__all__`, else all.
    """
    module = importlib.import_module(package)
    listing = getattr(module, "builders", None)
    if callable(listing):
        values = list(listing().values())
    else:
        values = [getattr(module, name) for name in getattr(module, "__all__", dir(module))]
    classes = {
        value
        for value in values
        if isinstance(value, type) and issubclass(value, OpBuilder) and value.NAME and not inspect.isabstract(value)
    }
    return sorted((kind() for kind in classes), key=lambda builder: builder.name)  # type: ignore[call-arg]


def build_ahead(builder: OpBuilder, library: Path) -> None:
    """Build the op of `builder` into the file `library`, and its manifest beside it. Called by `BuildOps`.

    Raises:
        BuildError: the build failed, with the first error and the command.
    """
    spec = builder.describe()
    library.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{library.stem}.", suffix=".tmp", dir=library.parent))
    try:
        built = compile_spec(spec, folder, library.stem)
        built.library.replace(library)
        _write_manifest(spec, library)
    except jit.BuildError as error:
        command = " ".join(error.command)
        raise jit.BuildError(f"{error}; command: {command}", error.first_error, error.command, error.output) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class OpExtension(Extension):
    """The setuptools side of one op."""

    def __init__(self, builder: OpBuilder) -> None:
        super().__init__(builder.absolute_name(), sources=[])
        self.builder = builder


class BuildOps(build_ext):
    """setuptools' `build_ext` that builds ops through their builders and any other extension as before."""

    def initialize_options(self) -> None:
        """Called by setuptools first."""
        super().initialize_options()
        self.built: list[tuple[str, Path]] = []

    def get_ext_filename(self, fullname: str) -> str:
        """`<package>/<name>.so`: a library of operators is no module of one Python, so its name carries no such tag."""
        last = fullname.rpartition(".")[2]
        if any(op.name.rpartition(".")[2] == last for op in self._ops()):
            return os.path.join(*fullname.split(".")) + ".so"
        return str(super().get_ext_filename(fullname))

    def build_extension(self, ext: Extension) -> None:
        """Called by setuptools for each of `ext_modules`."""
        if not isinstance(ext, OpExtension):
            super().build_extension(ext)
            return
        library = Path(self.get_ext_fullpath(ext.name)).absolute()
        spec = ext.builder.describe()
        same = next((path for key, path in self.built if key == spec.load_key), None)
        if same is None:
            build_ahead(ext.builder, library)
        else:  # two ops of one library: a copy under the second name
            library.write_bytes(same.read_bytes())
            _write_manifest(spec, library)
        self.built.append((spec.load_key, library))

    def copy_extensions_to_source(self) -> None:
        """Called for an editable install; the manifests go along with the libraries."""
        build_py = self.get_finalized_command("build_py")
        for op in self._ops():
            package, _, name = op.name.rpartition(".")
            folder = build_py.get_package_dir(package)
            self.mkpath(folder)  # a package of libraries alone has no folder among the sources
            built = Path(self.build_lib, self.get_ext_filename(op.name)).with_suffix(".json")
            self.copy_file(str(built), os.path.join(folder, f"{name}.json"))
        super().copy_extensions_to_source()

    def get_outputs(self) -> list[str]:
        """Every file that this command makes."""
        manifests = [
            str(Path(self.build_lib, self.get_ext_filename(op.name)).with_suffix(".json")) for op in self._ops()
        ]
        return [*super().get_outputs(), *manifests]

    def _ops(self) -> list[OpExtension]:
        return [extension for extension in self.extensions or () if isinstance(extension, OpExtension)]


def _write_manifest(spec: BuildSpec, library: Path) -> None:
    """The manifest beside `library`, without paths of this machine."""
    Manifest.of(spec, library, []).write(library.with_suffix(".json"))


def _is_wanted(builder: OpBuilder, environment: Mapping[str, str]) -> bool:
    variable = builder.BUILD_VAR or f"DS_BUILD_{builder.name.upper()}"
    by_name = _switch(environment, variable)
    if by_name is False or (by_name is None and not _switch(environment, ALL)):
        return False
    if builder.is_compatible():
        return True
    if by_name:
        raise OpUnavailable(f"{variable}=1: op {builder.name!r} cannot be built here: {builder.reason}")
    logger.warning("%s=1: op %r is left out: %s", ALL, builder.name, builder.reason)
    return False


def _switch(environment: Mapping[str, str], name: str) -> bool | None:
    value = environment.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{name}: found {value!r}, but it must be 0 or 1")
    return None if value == "" else value == "1"


def _wheel_command(builders: list[OpBuilder]) -> type:
    """`bdist_wheel` that tags a wheel for this platform, and for this Python only if a module is among the ops."""
    try:
        from setuptools.command.bdist_wheel import bdist_wheel
    except ImportError:  # setuptools before 70.1
        from wheel.bdist_wheel import bdist_wheel

    for_any_python = all(builder.op_namespace is not None for builder in builders)

    class BdistWheel(bdist_wheel):  # type: ignore[misc,valid-type]
        def get_tag(self) -> tuple[str, str, str]:
            python, abi, platform = super().get_tag()
            return ("py3", "none", platform) if for_any_python else (python, abi, platform)

    return BdistWheel
