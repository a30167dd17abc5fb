"""DeepSpeedAccelerator: everything the core asks of a device, answered by torch where a vendor says nothing else.

A vendor whose device torch knows writes two lines and then only what differs:

    class XYZ_Accelerator(DeepSpeedAccelerator):
        _name = "xyz"                          # torch.device("xyz"), torch.xyz
        _communication_backend_name = "xyzccl"

    # optional: override any method of the six mixins below

The methods stand in files by subject, so that each can be read at once: `device.py` (which device, how it behaves, its
random numbers, streams, events, graphs, dtypes), `memory.py`, `building.py` (op builders, environment, compiler). There
is no abstract method and no `__init__`: a class that implements everything itself, as vendors wrote them for DeepSpeed,
is as welcome as one that implements nothing, and new methods never break it.
"""

from deepspeed.accelerator.building import BuildingMixin
from deepspeed.accelerator.device import DeviceMixin, DtypeMixin, RngMixin, StreamMixin
from deepspeed.accelerator.memory import MemoryMixin


class DeepSpeedAccelerator(DeviceMixin, RngMixin, StreamMixin, MemoryMixin, DtypeMixin, BuildingMixin):
    """A device as the core sees it. Built once per process by a plugin's `ds_accelerator`, or by the user.

    Class attributes (an old-style class sets the same names in its `__init__`):
        _name: the device type of torch, for example `"cpu"`.
        _communication_backend_name: the torch.distributed backend for tensors of this device.
        _compile_backend: the `torch.compile` backend; `set_compile_backend` changes it.
    """


# Title -> mixin; the reference page is written from this table.
MIXINS: dict[str, type] = {
    "Device": DeviceMixin,
    "Random numbers": RngMixin,
    "Streams, events, graphs": StreamMixin,
    "Memory": MemoryMixin,
    "Dtypes and tensors": DtypeMixin,
    "Op builders, environment, compiler": BuildingMixin,
}

# What may be asked at any time: also before a fork, in the launcher, and where there is no device. The answer makes no
# device context. Every other method may initialize the current device, so it is asked in the process that computes.
ANY_TIME = frozenset(
    """
    is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure device_name device_count
    is_available communication_backend_name communication_backend_version range_push range_pop lazy_call
    random Stream Event on_accelerator amp
    op_builder_dir create_op_builder get_op_builder build_extension export_envs visible_devices_envs
    set_visible_devices_envs get_compile_backend set_compile_backend
    """.split()  # noqa: SIM905 - read more easily so
)


def documented_names() -> list[str]:
    """Every public method and property of the interface, sorted."""
    return sorted({name for mixin in MIXINS.values() for name in vars(mixin) if not name.startswith("_")})
