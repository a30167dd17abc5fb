"""The door: the device's name in torch is "cpu", so that the tests run on every machine."""

from deepspeed.plugins import Offer, hookimpl


@hookimpl
def ds_probe():
    return Offer("outsider", priority=100, reason="an outsider's device")


@hookimpl
def ds_accelerator():
    from ds_outsider.accelerator import XYZ_Accelerator

    return XYZ_Accelerator()
