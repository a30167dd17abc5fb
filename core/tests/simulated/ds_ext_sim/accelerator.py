"""Sim_Accelerator: what differs from the base, which asks `torch.sim`."""

from deepspeed.accelerator import DeepSpeedAccelerator

from ds_ext_sim import torch_sim


class Sim_Accelerator(DeepSpeedAccelerator):
    """The simulated device: works behind the host, has a memory of its own, and several of it are in a process."""

    _communication_backend_name = "simccl"
    _compile_backend = "eager"

    def __init__(self):
        self._name = torch_sim.chosen_name()
        torch_sim.install(self._name)

    def is_synchronized_device(self):
        return torch_sim.schedule() == "none"

    def resolves_data_dependency(self):
        return torch_sim.schedule() in ("none", "ordered")

    def visible_devices_envs(self):
        return ["SIM_VISIBLE_DEVICES"]

    def export_envs(self):
        return ["DS_SIM", "SIM_VISIBLE_DEVICES"]
