"""Target GPUs of a kernel: machine code for some GPUs, and PTX, which the driver compiles for later GPUs.

Used by `cuda_op_builder.py`. Lists have the format of torch's `TORCH_CUDA_ARCH_LIST`: "8.0;9.0 10.0+PTX", or "Hopper".
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepspeed.errors import ConfigError, OpUnavailable

VARIABLE = "TORCH_CUDA_ARCH_LIST"
#: targets of a portable library, if the toolkit supports them; with PTX of the last one
PROMISED = (80, 90, 100)

_ENTRY = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")
# torch's names, longer names first; families that no supported toolkit compiles for are left out
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
        number: ten times the compute capability, for example 90 for 9.0.
        variant: `a` or `f` for code that only runs on this chip or family; else empty.
        ptx: whether to add PTX to the machine code.
    """

    number: int
    variant: str = ""
    ptx: bool = False

    @property
    def capability(self) -> str:
        """The compute capability as users write it, for example `9.0` or `9.0a`."""
        return f"{self.number // 10}.{self.number % 10}{self.variant}"

    @property
    def flags(self) -> list[str]:
        """The flags for nvcc."""
        name = f"{self.number}{self.variant}"
        flags = [f"-gencode=arch=compute_{name},code=sm_{name}"]
        return [*flags, f"-gencode=arch=compute_{name},code=compute_{name}"] if self.ptx else flags

    def __str__(self) -> str:
        """Return the entry of a list, for example `9.0+PTX`."""
        return f"{self.capability}{'+PTX' if self.ptx else ''}"

    def runs_on(self, card: tuple[int, int]) -> bool:
        """Return whether this GPU runs the code: machine code of its generation, or PTX, not newer than the GPU."""
        number = 10 * card[0] + card[1]
        if self.variant == "a":
            return number == self.number
        same_generation = number // 10 == self.number // 10 and number >= self.number
        return same_generation or (self.ptx and not self.variant and number >= self.number)


def parse(text: str, origin: str = VARIABLE) -> list[Architecture]:
    """Return the entries of a list, separated by `;`, `,` or spaces, in order and without duplicates.

    Raises:
        ConfigError: an entry is invalid; `origin` names the source of the list.
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
    """Return `architectures` if the toolkit compiles for all of them.

    Raises:
        OpUnavailable: the toolkit does not compile for one of them; the message lists the supported ones.
    """
    wanted = list(architectures)
    for one in wanted:
        if one.number not in codes:
            known = ", ".join(Architecture(number).capability for number in sorted(codes))
            raise OpUnavailable(f"{toolkit} compiles for no GPU of capability {one.capability}; it does for {known}")
    return wanted


def default(codes: frozenset[int]) -> list[Architecture]:
    """Return the targets of `PROMISED` that the toolkit supports, with PTX of the last one."""
    numbers = [number for number in PROMISED if number in codes] or [max(codes)]
    return [*map(Architecture, numbers[:-1]), Architecture(numbers[-1], ptx=True)]


def of_devices(capabilities: Sequence[tuple[int, int]], codes: frozenset[int]) -> list[Architecture]:
    """Return targets for the given GPUs: machine code, or PTX of an older one if the toolkit does not know the GPU."""
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
