"""Accelerators with one lie each: the simulated one, and a fault that the conformance suite has to catch.

Run in the process of the simulated device by `../test_mutations.py`, which names the test that catches each. Read any
module: they are by theme, as the suite is.
"""

from ds_ext_sim.accelerator import Sim_Accelerator

from planted_faults import builders, devices, environment, memory, numbers, order

MODULES = (devices, numbers, memory, order, environment, builders)


def names():
    """Every planted fault."""
    return sorted(
        name
        for module in MODULES
        for name, found in vars(module).items()
        if isinstance(found, type) and issubclass(found, Sim_Accelerator) and found.__module__ == module.__name__
    )


def make(name):
    """The accelerator with that fault."""
    (kind,) = (vars(module)[name] for module in MODULES if name in vars(module) and name != "Sim_Accelerator")
    return kind()
