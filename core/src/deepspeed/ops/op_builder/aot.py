"""Ahead-of-time builds: use the same builders at `pip install`, so that a wheel contains its libraries.

This is the complete `setup.py` of an extension; everything else stays in its `pyproject.toml`:

    import os
    from setuptools import setup

    wanted = any(name.startswith("DS_BUILD_") and value == "1" for name, value in os.environ.items())
    if wanted:
        from deepspeed.ops.op_builder.aot import setup_arguments
    setup(**(setup_arguments("my_extension.op_builder") if wanted else {}))

`DS_BUILD_OPS=1` builds every op that can be built here. `DS_BUILD_<OP>=1` builds one op (an error if it cannot be
built), and `DS_BUILD_<OP>=0` excludes it. torch and ds-core must be importable: `DS_BUILD_OPS=1 pip install
--no-build-isolation ...`. With no variable set, `setup.py` imports neither: a pure wheel, ops compiled at first use.
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
    """Return the arguments for `setup()` of an extension; {} if no op must be built. Called by `setup.py`.

    Args:
        package: import name of the package with the builders, for example `"ds_ext_cpu.op_builder"`.
        source_dir: the folder to import the package from, because it is not installed yet.
        environment: the source of the `DS_BUILD_*` variables.

    Raises:
        OpUnavailable: an op that was requested by name cannot be built here.
        ConfigError: a `DS_BUILD_*` variable is neither 0 nor 1.
    """
    sys.path.insert(0, str(Path(source_dir).absolute()))
    try:
        builders = find_builders(package)
    finally:
        sys.path.pop(0)
    by_name = {builder.absolute_name(): builder for builder in builders if _is_wanted(builder, environment)}
    wanted = list(by_name.values())  # ops that share a library count once
    if not wanted:
        return {}
    return {
        "ext_modules": [OpExtension(builder) for builder in wanted],
        "cmdclass": {"build_ext": BuildOps, "bdist_wheel": _wheel_command(wanted)},
    }


def find_builders(package: str) -> list[OpBuilder]:
    """Return an instance of every concrete builder class with a `NAME` in `package`, sorted by op name.

    The classes come from its function `builders()` (the result of `ds_op_builders`), else `__all__`, else all names.
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
    """Build the op of `builder` into the file `library`, and write its manifest next to it. Called by `BuildOps`.

    Raises:
        BuildError: the build failed; the message has the first error and the command.
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
    """The setuptools extension of one op."""

    def __init__(self, builder: OpBuilder) -> None:
        super().__init__(builder.absolute_name(), sources=[])
        self.builder = builder


class BuildOps(build_ext):
    """A `build_ext` command that builds ops with their builders, and other extensions as usual."""

    def initialize_options(self) -> None:
        """Set the defaults. setuptools calls this first."""
        super().initialize_options()
        self.built: list[tuple[str, Path]] = []

    def get_ext_filename(self, fullname: str) -> str:
        """Return `<package>/<name>.so` for an op: it does not depend on the Python version, so it has no Python tag."""
        last = fullname.rpartition(".")[2]
        if any(op.name.rpartition(".")[2] == last for op in self._ops()):
            return os.path.join(*fullname.split(".")) + ".so"
        return str(super().get_ext_filename(fullname))

    def build_extension(self, ext: Extension) -> None:
        """Build one of `ext_modules`. setuptools calls this for each."""
        if not isinstance(ext, OpExtension):
            super().build_extension(ext)
            return
        library = Path(self.get_ext_fullpath(ext.name)).absolute()
        spec = ext.builder.describe()
        same = next((path for key, path in self.built if key == spec.load_key), None)
        if same is None:
            build_ahead(ext.builder, library)
        else:  # two ops share a library: copy it under the second name
            library.write_bytes(same.read_bytes())
            _write_manifest(spec, library)
        self.built.append((spec.load_key, library))

    def copy_extensions_to_source(self) -> None:
        """Copy the libraries and their manifests for an editable install."""
        build_py = self.get_finalized_command("build_py")
        for op in self._ops():
            package, _, name = op.name.rpartition(".")
            folder = build_py.get_package_dir(package)
            self.mkpath(folder)  # a package with only libraries has no folder in the sources
            built = Path(self.build_lib, self.get_ext_filename(op.name)).with_suffix(".json")
            self.copy_file(str(built), os.path.join(folder, f"{name}.json"))
        super().copy_extensions_to_source()

    def get_outputs(self) -> list[str]:
        """Return every file that this command creates."""
        manifests = [
            str(Path(self.build_lib, self.get_ext_filename(op.name)).with_suffix(".json")) for op in self._ops()
        ]
        return [*super().get_outputs(), *manifests]

    def _ops(self) -> list[OpExtension]:
        return [extension for extension in self.extensions or () if isinstance(extension, OpExtension)]


def _write_manifest(spec: BuildSpec, library: Path) -> None:
    """Write the manifest next to `library`, without the commands, which have paths of this machine."""
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
    """Return a `bdist_wheel` that tags the wheel for this platform, and for this Python only if an op is a module."""
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
