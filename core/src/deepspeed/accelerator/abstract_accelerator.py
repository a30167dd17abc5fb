"""DeepSpeedAccelerator: the interface between the core and a device. Every method has a default built on torch.

For a device that torch supports, a vendor writes two lines and overrides only the methods that differ:

    class XYZ_Accelerator(DeepSpeedAccelerator):
        _name = "xyz"                          # torch.device("xyz"), torch.xyz
        _communication_backend_name = "xyzccl"

    # optional: override any method of the six mixins below

The methods are split into files by subject: `device.py` (device selection and behavior, random numbers, streams,
events, graphs, dtypes), `memory.py`, `building.py` (op builders, environment, compiler). There is no abstract method
and no `__init__`. A class may override every method, as vendor classes written for DeepSpeed do, or none. New methods
never break an existing class.
"""

from deepspeed.accelerator.building import BuildingMixin
from deepspeed.accelerator.device import DeviceMixin, DtypeMixin, RngMixin, StreamMixin
from deepspeed.accelerator.memory import MemoryMixin


class DeepSpeedAccelerator(DeviceMixin, RngMixin, StreamMixin, MemoryMixin, DtypeMixin, BuildingMixin):
    """A device as the core uses it. A plugin's `ds_accelerator`, or the user, builds one per process.

    Class attributes (an old-style class sets the same names in its `__init__`):
        _name: the device type of torch, for example `"cpu"`.
        _communication_backend_name: the torch.distributed backend for tensors of this device.
        _compile_backend: the `torch.compile` backend; `set_compile_backend` changes it.
    """


# Title -> mixin. The reference page is generated from this table.
MIXINS: dict[str, type] = {
    "Device": DeviceMixin,
    "Random numbers": RngMixin,
    "Streams, events, graphs": StreamMixin,
    "Memory": MemoryMixin,
    "Dtypes and tensors": DtypeMixin,
    "Op builders, environment, compiler": BuildingMixin,
}

# Methods that may be called at any time, even before a fork, in the launcher, and without a device. They create no
# device context. Every other method may initialize the current device, so only the process that computes calls it.
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
