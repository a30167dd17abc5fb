"""`scan` finds the headers that sources include by reading their `#include` lines, when a build's key is computed.

The compiler is not asked: a warm load must not start one, and not every compiler writes a list of what it read (some
device compilers do not). Every include counts, also one that an `#if` leaves out, one that a macro names by a literal
(`#define LOOPS "adam/loops.h"`) and one that a flag names (`-include x.h`), so the set may be too large. Where a macro
names a header in another way, all files of the project's folders count.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: what follows a `#`: an include, or a macro that stands for a literal name, which an `#include MACRO` may mean
_DIRECTIVE = re.compile(
    rb'[ \t]*(?:(include_next|include|import)\b|define[ \t]+(\w+))[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\w+))'
)
_FORCED = re.compile(r"--?(?:include|imacros)=?(.*)")
_TORCH = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/", "Python.h")
_STABLE = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/")


@dataclass(frozen=True)
class Includes:
    """`Includes` holds the names and files of the headers that a scan found.

    Attributes:
        headers: files of the project, as (name in the directive, path), sorted.
        outside: names that no folder of the project has: torch's, the system's.
    """

    headers: tuple[tuple[str, Path], ...]
    outside: frozenset[str]

    @property
    def uses_torch(self) -> bool:
        """Whether a header of torch (or Python) is included directly by the project."""
        return any(name.startswith(_TORCH) for name in self.outside)

    @property
    def stable_abi(self) -> bool:
        """Whether the only headers of torch are those of its stable ABI: the library then outlives a torch upgrade."""
        return self.uses_torch and all(name.startswith(_STABLE) for name in self.outside if name.startswith(_TORCH))


def scan(sources: Sequence[Path], include_paths: Sequence[Path], flags: Sequence[str] = ()) -> Includes:
    """Every header of the project that `sources` reach, through any number of headers.

    Args:
        sources: existing files.
        include_paths: the project's folders of headers; a quoted name is first looked up beside the file that has it.
        flags: of the compile command; those that include a file count.
    """
    headers: dict[tuple[str, Path], None] = {}
    outside: set[str] = set()
    macros: set[str] = set()  # named by an include
    literals: set[str] = set()  # defined as a literal name
    forced = "".join(f'#include "{name}"\n' for name in _forced(flags)).encode()
    waiting = [(Path("/"), forced), *((source.parent, source.read_bytes()) for source in sources)]
    seen = set(sources)
    while waiting:
        folder, text = waiting.pop()
        for include, defined, quoted, angled, word in _directives(text):
            if word:
                macros |= {word} if include else set()
                continue
            literals.add(defined)
            name = quoted or angled
            found = _look_up(name, [folder, *include_paths] if quoted else include_paths)
            if found is None:
                outside |= {name} if include else set()
                continue
            headers[name, found] = None
            if found not in seen:
                seen.add(found)
                waiting.append((found.parent, found.read_bytes()))
    if macros - literals:
        headers.update(dict.fromkeys(_all_below({*include_paths, *(source.parent for source in sources)})))
    return Includes(tuple(sorted(headers)), frozenset(outside))


def _directives(text: bytes) -> Iterator[list[str]]:
    """[include, defined, quoted, angled, word] of each directive that may name a header; "" for what it has not.

    Cut at `#` first: that is quick.
    """
    for before, after in itertools.pairwise(text.split(b"#")):
        if before.rstrip(b" \t")[-1:] in (b"", b"\n"):  # the first thing of its line
            match = _DIRECTIVE.match(after)
            if match is not None:
                yield [(group or b"").decode(errors="replace") for group in match.groups()]


def _look_up(name: str, folders: Iterable[Path]) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _all_below(folders: Iterable[Path]) -> list[tuple[str, Path]]:
    found = ((str(path.relative_to(folder)), path) for folder in folders for path in folder.rglob("*"))
    return [(name, path) for name, path in found if path.is_file()]


def _forced(flags: Sequence[str]) -> list[str]:
    """The files of `-include x.h`, `-includex.h` and `--include=x.h`."""
    pairs = itertools.zip_longest(flags, flags[1:], fillvalue="")
    found = [(match[1] or following) for flag, following in pairs if (match := _FORCED.fullmatch(flag))]
    return [name for name in found if name]
