"""Offer: what an accelerator plugin answers when it is asked whether its device is here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """One plugin's answer to `ds_probe`. Made by the plugin, compared by `accelerator.current`, shown by `ds_report`.

    Fields:
        name: the device as `DS_ACCELERATOR` and torch call it, for example `"cpu"`. The entry point has the same name.
        priority: among available offers the highest wins; a tie is an error. The host CPU offers 0, a device 100;
            a vendor who means to win over another vendor for the same device goes above that.
        available: a device was found and this process can use it.
        reason: why, in one line: what was found, or what is missing and how to get it.
    """

    name: str
    priority: int = 0
    available: bool = True
    reason: str = ""
