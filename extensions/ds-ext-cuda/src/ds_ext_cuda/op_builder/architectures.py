"""For which GPUs a kernel is compiled: machine code for some, and PTX, which a driver compiles for later ones.

Read by `cuda_op_builder.py`. A list is written as torch's `TORCH_CUDA_ARCH_LIST`: "8.0;9.0 10.0+PTX", or "Hopper".
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepspeed.errors import ConfigError, OpUnavailable

VARIABLE = "TORCH_CUDA_ARCH_LIST"
#: what a library that is to run anywhere is compiled for, as far as the toolkit can; PTX of the last
PROMISED = (80, 90, 100)

_ENTRY = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")
# torch's names, the longer before the shorter; families that no supported toolkit compiles for are left out
_NAMED = {
    "Volta+Tegra": "7.2",
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere+Tegra": "8.7",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}


@dataclass(frozen=True, order=True)
class Architecture:
    """One entry of a list.

    Attributes:
        number: ten times the compute capability: 90 for 9.0.
        variant: `a` or `f`, code for this chip or family alone; else empty.
        ptx: PTX beside the machine code.
    """

    number: int
    variant: str = ""
    ptx: bool = False

    @property
    def capability(self) -> str:
        """As users write it: `9.0`, `9.0a`."""
        return f"{self.number // 10}.{self.number % 10}{self.variant}"

    @property
    def flags(self) -> list[str]:
        """For nvcc."""
        name = f"{self.number}{self.variant}"
        flags = [f"-gencode=arch=compute_{name},code=sm_{name}"]
        return [*flags, f"-gencode=arch=compute_{name},code=compute_{name}"] if self.ptx else flags

    def __str__(self) -> str:
        """As an entry of a list: `9.0+PTX`."""
        return f"{self.capability}{'+PTX' if self.ptx else ''}"

    def runs_on(self, card: tuple[int, int]) -> bool:
        """Whether a card of this capability runs it: code of its generation up to its own, or PTX of any before it."""
        number = 10 * card[0] + card[1]
        if self.variant == "a":
            return number == self.number
        same_generation = number // 10 == self.number // 10 and number >= self.number
        return same_generation or (self.ptx and not self.variant and number >= self.number)


def parse(text: str, origin: str = VARIABLE) -> list[Architecture]:
    """The entries of a list, divided by `;`, `,` or spaces, in order and each once.

    Raises:
        ConfigError: an entry is none; `origin` says where the list stood.
    """
    for name, meaning in _NAMED.items():
        text = re.sub(rf"\b{re.escape(name)}(?![+\w])", meaning, text)
    found: dict[Architecture, None] = {}
    for entry in re.split(r"[;,\s]+", text.strip()):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ConfigError(f"{origin}: found {entry!r} in {text!r}, but an entry is written as 9.0, 9.0a or 9.0+PTX")
        found[Architecture(int(match[1] + match[2]), match[3], bool(match[4]))] = None
    return list(found)


def compilable(architectures: Iterable[Architecture], codes: frozenset[int], toolkit: str) -> list[Architecture]:
    """`architectures`, once it is known that the toolkit compiles for all of them.

    Raises:
        OpUnavailable: it does not for one; the message says for which it does.
    """
    wanted = list(architectures)
    for one in wanted:
        if one.number not in codes:
            known = ", ".join(Architecture(number).capability for number in sorted(codes))
            raise OpUnavailable(f"{toolkit} compiles for no GPU of capability {one.capability}; it does for {known}")
    return wanted


def default(codes: frozenset[int]) -> list[Architecture]:
    """`PROMISED` as far as the toolkit can, with PTX of the last."""
    numbers = [number for number in PROMISED if number in codes] or [max(codes)]
    return [*map(Architecture, numbers[:-1]), Architecture(numbers[-1], ptx=True)]


def of_devices(capabilities: Sequence[tuple[int, int]], codes: frozenset[int]) -> list[Architecture]:
    """For the cards that are here: machine code for each, or, of one that is newer than the toolkit, PTX before it."""
    found: dict[Architecture, None] = {}
    for major, minor in sorted(set(capabilities)):
        number = 10 * major + minor
        if number in codes:
            found[Architecture(number)] = None
            continue
        older = [code for code in codes if code < number]
        if older:
            found[Architecture(max(older), ptx=True)] = None
    return list(found) or default(codes)
