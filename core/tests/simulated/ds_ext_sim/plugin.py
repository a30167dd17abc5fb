"""The door of the extension."""

import os

from deepspeed.plugins import Offer, hookimpl

DS_PLUGIN_API = ">=1,<2"


@hookimpl
def ds_probe():
    count = int(os.environ.get("DS_SIM_DEVICES", "2"))
    name = os.environ.get("DS_SIM_NAME", "sim")
    poses = "" if name == "sim" else name
    return Offer("sim", 50, count > 0, f"{count} simulated devices", impersonates=poses)


@hookimpl
def ds_accelerator():
    from ds_ext_sim.accelerator import Sim_Accelerator

    return Sim_Accelerator()
