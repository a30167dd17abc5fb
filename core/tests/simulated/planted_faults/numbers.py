"""Lies about random numbers."""

import torch
from ds_ext_sim.accelerator import Sim_Accelerator


class RestoresNoState(Sim_Accelerator):
    def set_rng_state(self, new_state, device_index=None):
        pass


class RestoresTheStateOfTheFirstDevice(Sim_Accelerator):
    def set_rng_state(self, new_state, device_index=None):
        super().set_rng_state(new_state, 0)


class IgnoresTheSeed(Sim_Accelerator):
    def manual_seed(self, seed):
        pass


class SeedsOneDeviceOfAll(Sim_Accelerator):
    def manual_seed_all(self, seed):
        self.manual_seed(seed)


class SeedsTheHostToo(Sim_Accelerator):
    def manual_seed(self, seed):
        torch.default_generator.manual_seed(seed)
        super().manual_seed(seed)


class RemembersNoSeed(Sim_Accelerator):
    def initial_seed(self):
        return 42


class GivesTheHostsGenerator(Sim_Accelerator):
    def default_generator(self, device_index):
        return torch.default_generator
