"""Which header files sources include, found by reading the `#include` lines; called when a build's key is computed.

A scan instead of the compiler's own answer because a warm load must not start a compiler. It follows every include,
also those that an `#if` leaves out and those that a macro names by a literal (`#define LOOPS "adam/loops.h"`), so the
set may be too large. What only the compiler can see (`-include`, a name put together from pieces) is recorded after the
build, see `cache.Manifest.extra`.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: what follows a `#`: an include, or a macro that stands for a literal name, which an `#include MACRO` may mean
_DIRECTIVE = re.compile(rb'[ \t]*(?:(include|include_next|import)|define[ \t]+\w+)[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)')
_TORCH = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/", "Python.h")
_STABLE = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/")


@dataclass(frozen=True)
class Includes:
    """What a scan saw.

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


def scan(sources: Iterable[Path], include_paths: Sequence[Path]) -> Includes:
    """Every header of the project that `sources` reach, through any number of headers.

    Args:
        sources: existing files.
        include_paths: the project's folders of headers; a quoted name is first looked up beside the file that has it.
    """
    headers: dict[tuple[str, Path], None] = {}
    outside: set[str] = set()
    waiting = list(sources)
    seen = set(waiting)
    while waiting:
        file = waiting.pop()
        for is_include, quoted, name in _names_in(file.read_bytes()):
            places = [file.parent, *include_paths] if quoted else include_paths
            found = next((place / name for place in places if (place / name).is_file()), None)
            if found is not None:
                headers[name, found] = None
                if found not in seen:
                    seen.add(found)
                    waiting.append(found)
            elif is_include:
                outside.add(name)
    return Includes(tuple(sorted(headers)), frozenset(outside))


def _names_in(text: bytes) -> Iterator[tuple[bool, bool, str]]:
    """(from an include, in quotes, name) of each directive that may name a header. Cut at `#` first: that is quick."""
    pieces = text.split(b"#")
    for before, after in itertools.pairwise(pieces):
        if before.rstrip(b" \t")[-1:] in (b"", b"\n"):  # the first thing of its line
            match = _DIRECTIVE.match(after)
            if match is not None:
                include, quoted, angled = match.groups()
                yield include is not None, quoted is not None, (quoted or angled).decode(errors="replace")
