"""torch.sim: what a vendor's PyTorch package registers, as `torch.get_device_module("sim")` finds it.

`install` loads the library and makes this module `torch.sim`; the accelerator calls it. Nearly everything is answered
by `torch.accelerator`. The device may have another name, that of a vendor whose extension is tried on it: then this
module is `torch.<name>`.
"""

import contextlib
import os
import sys
from dataclasses import dataclass

import torch

from ds_ext_sim import collectives

# "late": work runs when somebody waits. "early": side streams run ahead as far as they may. "ordered": when somebody
# waits, and in the order of the program over all streams. "none": at once, a synchronous device.
SCHEDULES = ("late", "early", "ordered", "none")

_name = None
_schedule = SCHEDULES[0]
_library = None


def chosen_name():
    """The name under which torch knows the device, or will."""
    return _name or os.environ.get("DS_SIM_NAME", "sim")


def install(name=None, library="simccl", visible_devices_env="SIM_VISIBLE_DEVICES"):
    """Make the device known to torch, once in a process. Compiles the library when this machine has not yet.

    Args:
        name: torch's name for it; without one that of `DS_SIM_NAME`, or "sim". PrivateUse1 has one name for good:
            another one later raises `RuntimeError`.
        library: the name of its backend of torch.distributed.
        visible_devices_env: the variable that lists the devices a process may see.
    """
    global _name, _library
    name = name or chosen_name()
    if _name is not None:
        if name != _name:
            raise RuntimeError(f"the simulated device is installed as {_name!r} and cannot become {name!r} as well")
        return
    from ds_ext_sim.op_builder import SimDeviceBuilder

    _library = SimDeviceBuilder().load()
    _library.set_device_count(_visible(visible_devices_env))
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    collectives.register(library, name)
    _name = name
    set_schedule(os.environ.get("DS_SIM_SCHEDULE", _schedule))


def _visible(variable):
    limit = os.environ.get(variable)
    count = int(os.environ.get("DS_SIM_DEVICES", "2"))
    return count if limit is None else len([index for index in limit.split(",") if index.strip()])


# ----- devices -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Properties:
    name: str
    total_memory: int


def is_available():
    return device_count() > 0


def device_count():
    return _library.device_count()  # torch.accelerator asks here


def current_device():
    return torch.accelerator.current_device_index()


def set_device(device):
    torch.accelerator.set_device_index(_index(device))


def device(index):
    return torch.accelerator.device_index(_index(index))


def synchronize(device=None):
    torch.accelerator.synchronize(_index(device))


def get_device_properties(device=None):
    return Properties("simulated device", mem_get_info(device)[1])


def _index(device):
    if device is None:
        return current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None else index


def _lazy_init():
    """Nothing is left to do: the library was loaded by `install`."""


def _is_in_bad_fork():
    return False


# ----- streams and events --------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    """Queues work; the base, for which the device need not be named."""

    def __new__(cls, device=None, priority=0, **kwargs):
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device(_name, _index(device)), priority=priority)


def Event(enable_timing=False, blocking=False, interprocess=False):  # noqa: N802 - the name in torch's modules
    """A mark in a stream. No class of its own: `torch.Event.elapsed_time` takes no derived one."""
    return torch.Event(_name, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


@contextlib.contextmanager
def stream(queue):
    """Work is queued on `queue` inside; its device is the current one there."""
    if queue is None:
        yield
        return
    with device(queue.device_index):
        before = torch.accelerator.current_stream(queue.device_index)
        torch.accelerator.set_stream(queue)
        try:
            yield queue
        finally:
            torch.accelerator.set_stream(before)


def current_stream(device=None):
    return torch.accelerator.current_stream(_index(device))


def default_stream(device=None):
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_device_type())


def _device_type():
    return torch.Stream(device=_name).device_type


def set_schedule(name):
    """When work runs: one of `SCHEDULES`, on all devices. What waits is done before."""
    global _schedule
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r}: one of {', '.join(SCHEDULES)} is possible")
    _library.set_schedule(SCHEDULES.index(name))
    _schedule = name


def schedule():
    """The name of the current schedule."""
    return _schedule


def waiting_jobs(device=None):
    """Jobs of all streams that nobody has waited for yet."""
    return _library.waiting_jobs(_index(device))


def host_waits():
    """How often the host has waited for a device in this process: it read a value, made a copy that is not
    asynchronous, or synchronized a stream, an event or the device. What the library of collectives does for itself does
    not count."""
    return _library.host_waits() - collectives.own_host_waits


# ----- memory --------------------------------------------------------------------------------------------------------


def empty_cache():
    torch.accelerator.empty_cache()


def memory_stats(device=None):
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device=None):
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device=None):
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device=None):
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device=None):
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device=None):
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device=None):
    return torch.accelerator.get_memory_info(_index(device))


def set_total_memory(num_bytes, device=None):
    """How much memory the device has; more than that raises `torch.OutOfMemoryError`."""
    _library.set_total_memory(_index(device), num_bytes)


# ----- faults --------------------------------------------------------------------------------------------------------


def lose_device(after=0, device=None):
    """`after` more operations (operators, copies, values read) work; then the device is lost.

    From then on operators and waits raise `torch.AcceleratorError`, and what was queued is never done.
    """
    if after < 0:
        raise ValueError(f"lose_device: after {after} operations; 0 or more are possible")
    _library.lose_device(_index(device), after)


def restore_device(device=None):
    """The device works again, or is not lost after all; what it held is not to be relied on."""
    _library.lose_device(_index(device), -1)


# ----- random numbers ------------------------------------------------------------------------------------------------


def __getattr__(name):
    if name == "default_generators":
        return tuple(_library.default_generator(index) for index in range(device_count()))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _generator(device=None):
    return _library.default_generator(_index(device))


def manual_seed(seed):
    _generator().manual_seed(seed)


def manual_seed_all(seed):
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def initial_seed():
    return _generator().initial_seed()


def get_rng_state(device=None):
    return _generator(device).get_state()


def set_rng_state(state, device=None):
    _generator(device).set_state(state)


# ----- dtypes --------------------------------------------------------------------------------------------------------


def is_bf16_supported():
    return True


def get_amp_supported_dtype():
    return [torch.bfloat16, torch.float16]
