"""Lies to the launcher, the compiler and profilers."""

from ds_ext_sim.accelerator import Sim_Accelerator


class HidesNoDevice(Sim_Accelerator):
    def set_visible_devices_envs(self, current_env, local_accelerator_ids):
        pass


class ForgetsLateCalls(Sim_Accelerator):
    def lazy_call(self, callback):
        pass


class KeepsItsCompiler(Sim_Accelerator):
    def set_compile_backend(self, backend):
        pass


class TrustsThatRangesAreOpen(Sim_Accelerator):
    def __init__(self):
        super().__init__()
        self._open = []

    def range_push(self, msg):
        self._open.append(msg)

    def range_pop(self):
        self._open.pop()


class NamesNoLibrary(Sim_Accelerator):
    def communication_backend_name(self):
        return "no_such_library"
