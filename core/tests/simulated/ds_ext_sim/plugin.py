"""The door of the extension."""

import os

from deepspeed.plugins import Offer, hookimpl

DS_PLUGIN_API = ">=1,<2"


@hookimpl
def ds_probe():
    count = int(os.environ.get("DS_SIM_DEVICES", "2"))
    return Offer("sim", priority=50, available=count > 0, reason=f"{count} simulated devices")


@hookimpl
def ds_accelerator():
    from ds_ext_sim.accelerator import Sim_Accelerator

    return Sim_Accelerator()
