"""Offer: what an accelerator plugin answers when it is asked whether its device is here."""

from dataclasses import dataclass

from deepspeed.errors import PluginError


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
