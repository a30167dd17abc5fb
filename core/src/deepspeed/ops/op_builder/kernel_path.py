"""`<prefix>_kernel_path` and `<prefix>_kernel_include`: how a builder names sources that lie in its own package.

cpu_kernel_path, cpu_kernel_include = make_kernel_path("ds_ext_cpu")

def sources(self):
    return [cpu_kernel_path("csrc/adam/cpu_adam.cpp")]
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from deepspeed.errors import OpUnavailable


def make_kernel_path(package: str | Path, folder: str = "csrc") -> tuple[Callable[[str], str], Callable[[str], str]]:
    """The two functions for one package; called at import of an extension's `op_builder`.

    Args:
        package: the package's import name, or a path: its folder, or a file in it (`__file__`).
        folder: where the sources lie within it. A path given to the functions may begin with that folder or not:
            `"csrc/adam/x.cpp"` and `"adam/x.cpp"` are the same file.

    Returns:
        `kernel_path(code_path)` for a source file and `kernel_include(code_path)` for a folder of headers. Each
        returns an absolute path; an empty `code_path` stays empty and an absolute one stays as it is.
    """

    def locate(code_path: str) -> Path:
        root = _root(package)
        inside = Path(code_path)
        return (
            root / inside if inside.parts[: len(Path(folder).parts)] == Path(folder).parts else root / folder / inside
        )

    def kernel_path(code_path: str) -> str:
        if not code_path or os.path.isabs(code_path):
            return code_path
        path = locate(code_path)
        if not path.is_file():
            raise OpUnavailable(f"kernel source {code_path!r}: there is no file {path}; is {package} installed whole?")
        return str(path)

    def kernel_include(code_path: str) -> str:
        if not code_path or os.path.isabs(code_path):
            return code_path
        path = locate(code_path)
        if not path.is_dir():
            raise OpUnavailable(
                f"kernel headers {code_path!r}: there is no folder {path}; is {package} installed whole?"
            )
        return str(path)

    return kernel_path, kernel_include


def _root(package: str | Path) -> Path:
    """The folder of the package."""
    if isinstance(package, str) and os.sep not in package:
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or ()) if spec else []
        if not places:
            raise OpUnavailable(f"kernel sources: {package!r} is no package that can be imported")
        return Path(places[0]).absolute()
    path = Path(package).absolute()
    return path.parent if path.is_file() else path
