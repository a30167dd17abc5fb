"""Offer: what an accelerator plugin answers when it is asked whether its device is here.

Whether there is a device is half of the answer, whether the installed torch can use it is the other. `torch_build`
finds which torch this process has or would import, and what it was built for, without importing it, which would take a
second.
"""

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from deepspeed.errors import PluginError

_LINE = re.compile(r"^(\w+)\b[^=\n]*=\s*(?:'([^'\n]*)'|\"([^\"\n]*)\"|None)", re.MULTILINE)


def torch_build() -> dict[str, str | None]:
    """Return what `torch.version` states, as text or None: `{"__version__": "2.13.0+cpu", "git_version": ...}`.

    Read the torch in memory if it is there whole, else its `version.py`. Return {} when torch is not installed, and
    `{"__version__": None}` when that file cannot be read.
    """
    version = getattr(sys.modules.get("torch"), "version", None)
    if hasattr(version, "__version__"):  # not while another thread is in the middle of importing torch
        return {name: None if value is None else str(value) for name, value in vars(version).items()}
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = Path(spec.origin).with_name("version.py").read_text(errors="replace")
    except OSError:
        return {"__version__": None}
    return {match[1]: match[2] or match[3] for match in _LINE.finditer(text)}


def torch_name(build: dict[str, str | None]) -> str:
    """That torch as reasons name it: `torch 2.13.0+cpu`, or `torch is not installed`."""
    return f"torch {build['__version__'] or 'of an unknown version'}" if build else "torch is not installed"


@dataclass(frozen=True, slots=True)
class Offer:
    """One plugin's answer to `ds_probe`. Made by the plugin, compared by `accelerator.current`, shown by `ds_report`.

    Fields:
        name: the device as `DS_ACCELERATOR` and torch call it, for example `"cpu"`. The entry point has the same name.
        priority: among available offers the highest wins; a tie is an error. The host CPU offers 0, a device 100;
            a vendor who means to win over another vendor for the same device goes above that.
        available: a device was found and this process can use it.
        reason: why, in one line: what was found, or what is missing and how to get it.
        impersonates: torch's device type where it is not `name`: that of the device as which this one poses. Two
            available offers for one device of torch are an error, whatever their priorities. New in plugin API 1.2.
    """

    name: str
    priority: int = 0
    available: bool = True
    reason: str = ""
    impersonates: str = ""

    @property
    def device(self) -> str:
        """Torch's device type that it claims."""
        return self.impersonates or self.name

    def check_types(self) -> None:
        """Refuse a field of another type, which would fail later, where offers are compared. Asked after each probe.

        Raises:
            PluginError: the message names the field, its value and what is expected.
        """
        kinds = {"name": str, "priority": int, "available": bool, "reason": str, "impersonates": str}
        for field, kind in kinds.items():
            value = getattr(self, field)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                wanted = f"{'an' if kind is int else 'a'} {kind.__name__}"
                raise PluginError(
                    f"ds_probe offers {field} {value!r}, found {type(value).__name__}; {wanted} is expected"
                )
        if self.impersonates == self.name:
            raise PluginError(f"ds_probe offers impersonates {self.name!r}, its own name; leave it empty")
