"""SourcePlaces: where a builder's sources and headers are; absolute paths anywhere, or relative as in DeepSpeed."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.errors import OpUnavailable

_OPS_FOLDER = Path(__file__).absolute().parents[1]  # DeepSpeed's root of relative sources
_SYSTEM_FOLDERS = (Path("/usr"), Path("/opt"))


class SourcePlaces:
    """The part of `OpBuilder` that knows where files lie."""

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
        folder = Path(file).absolute().parent
        depth = type(self).__module__.count(".")
        if Path(file).name == "__init__.py":
            depth += 1
        steps = [folder, *folder.parents][: max(depth, 1)]
        return steps[::-1]

    def _folder_of_project(self, cmake_dir: str) -> Path:
        folder = Path(self.deepspeed_src_path(cmake_dir))
        if not (folder / "CMakeLists.txt").is_file():
            raise OpUnavailable(f"op {self.name!r}: {folder} has no CMakeLists.txt")
        return folder

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
        ours: list[Path] = []
        others: list[Path] = []
        for path in (Path(self.deepspeed_src_path(text)) for text in paths):
            installed = _below(path, _SYSTEM_FOLDERS) and not _below(path, roots)
            (others if installed else ours).append(path)
        return tuple(ours), tuple(others)


def _below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
