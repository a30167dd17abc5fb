"""`make_kernel_path` finds the sources and headers of a package's own builders, `SourcePlaces` those of any other.

cpu_kernel_path, cpu_kernel_include = make_kernel_path("ds_ext_cpu")

def sources(self):
    return [cpu_kernel_path("csrc/adam/cpu_adam.cpp")]
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from deepspeed.errors import OpUnavailable

_OPS_FOLDER = Path(__file__).absolute().parents[1]  # DeepSpeed's root of relative sources
_SYSTEM_FOLDERS = (Path("/usr"), Path("/opt"))


def make_kernel_path(package: str | Path, folder: str = "csrc") -> tuple[Callable[[str], str], Callable[[str], str]]:
    """The two functions for one package; called at import of an extension's `op_builder`.

    Args:
        package: the package's import name, or a path: its folder, or a file in it (`__file__`).
        folder: where the sources are within it. A path given to the functions may begin with that folder or not:
            `"csrc/adam/x.cpp"` and `"adam/x.cpp"` are the same file.

    Returns:
        `kernel_path(code_path)` for a source file and `kernel_include(code_path)` for a folder of headers. Each
        returns an absolute path, or raises OpUnavailable where there is none; an empty `code_path` stays empty and an
        absolute one stays as it is.

    >>> kernel_path, _ = make_kernel_path("deepspeed", folder="ops")
    >>> kernel_path("registry.py") == kernel_path("ops/registry.py")
    True
    """
    inside = Path(folder).parts

    def locate(code_path: str, what: str, kind: str, is_there: Callable[[Path], bool]) -> str:
        if not code_path or os.path.isabs(code_path):
            return code_path
        has_folder = Path(code_path).parts[: len(inside)] == inside
        path = _root(package) / ("" if has_folder else folder) / code_path
        if not is_there(path):
            raise OpUnavailable(
                f"kernel {what} {code_path!r}: there is no {kind} {path}; is {package} installed whole?"
            )
        return str(path)

    def kernel_path(code_path: str) -> str:
        return locate(code_path, "source", "file", Path.is_file)

    def kernel_include(code_path: str) -> str:
        return locate(code_path, "headers", "folder", Path.is_dir)

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


class SourcePlaces:
    """The part of `OpBuilder` that finds files: absolute paths anywhere, or relative ones as in DeepSpeed."""

    name: str

    def deepspeed_src_path(self, code_path: str | Path) -> str:
        """The absolute path of a source or a folder of headers.

        An absolute path stays as it is, and an empty one stays empty (it never becomes a folder). A relative one is
        looked for in the package that the builder's class belongs to, its top folder first and then down to the folder
        of its module, and last in `deepspeed/ops`, where DeepSpeed's own sources are.

        Raises:
            OpUnavailable: a file that is in none of these places; the message names them. A folder may be missing.
        """
        if not str(code_path) or os.path.isabs(code_path):
            return str(code_path)
        places = [*self._own_folders(), _OPS_FOLDER]
        found = next((place / code_path for place in places if (place / code_path).exists()), None)
        if found is None and Path(code_path).suffix:
            looked_at = ", ".join(str(place) for place in places)
            raise OpUnavailable(f"op {self.name!r}: source {str(code_path)!r} is in none of {looked_at}")
        return str(found or places[0] / code_path)

    def _own_folders(self) -> list[Path]:
        """The folders from the top package of this builder's class down to its module."""
        module = sys.modules.get(type(self).__module__)
        file = getattr(module, "__file__", None)
        if file is None:
            return []
        is_package = Path(file).name == "__init__.py"
        depth = type(self).__module__.count(".") + is_package
        folder = Path(file).absolute().parent
        return [folder, *folder.parents][: max(depth, 1)][::-1]

    def _sort_include_paths(
        self, paths: Sequence[str], sources: Sequence[Path]
    ) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """Folders of headers: those of the project, whose files are part of the key, and those of an installed SDK.

        Of the project is what lies below the builder's package, or beside or above the sources by one folder; and all
        that is not below `/usr` or `/opt`.
        """
        near = [
            folder for source in sources for folder in (source.parent, source.parent.parent) if len(folder.parts) > 2
        ]
        roots = [*self._own_folders()[:1], *near]
        found = [Path(self.deepspeed_src_path(text)) for text in paths]
        others = [path for path in found if _is_below(path, _SYSTEM_FOLDERS) and not _is_below(path, roots)]
        return tuple(path for path in found if path not in others), tuple(others)


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
