"""Select this process's device, and check that it supports the dtypes that the configuration asks for.

`build.py` calls these functions once per engine; nothing else sets a device.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from deepspeed.accelerator.current import plugin_of
from deepspeed.comm.values import dtype_name
from deepspeed.errors import ConfigError, counted, environment_int


def local_rank(args: Any) -> int:
    """Return the number of this process on its machine: the launcher's LOCAL_RANK, else `args.local_rank`, else 0."""
    given = getattr(args, "local_rank", None)
    default = given if isinstance(given, int) and given >= 0 else 0
    return default if os.environ.get("LOCAL_RANK") == "-1" else environment_int("LOCAL_RANK", default)


def _source_of_local_rank() -> str:
    return "LOCAL_RANK" if "LOCAL_RANK" in os.environ else "args.local_rank"


def claim_device(args: Any) -> torch.device:
    """Make this process's device current, and return it: number `args.device_rank` if given, else the local rank.

    If only one device is visible, that one is taken whatever the local rank: a scheduler shows each rank its own.

    Raises:
        ConfigError: there is no device of that number.
    """
    accelerator = get_accelerator()
    asked = getattr(args, "device_rank", None)
    rank = local_rank(args) if asked is None else int(asked)
    index = _index(accelerator, rank, "args.device_rank" if asked is not None else _source_of_local_rank())
    accelerator.set_device(index)
    return torch.device(accelerator.device_name(index))


def claim_dtypes(asked: Mapping[str, torch.dtype]) -> None:
    """Refuse dtypes that the accelerator does not train in (`supported_dtypes`), and prepare it for the others.

    Args:
        asked: the dtypes that the configuration asks for, by config key.

    Raises:
        ConfigError: for the first key whose dtype is not supported.
    """
    accelerator = get_accelerator()
    supported = [torch.float32, *accelerator.supported_dtypes()]
    for key, dtype in asked.items():
        if dtype not in supported:
            names = ", ".join(sorted({dtype_name(each) for each in supported}))
            raise ConfigError(
                f"{key}: asks for {dtype_name(dtype)}, which the accelerator {accelerator.device_name()!r} does not "
                f"train in; it has {names}"
            )
    for dtype in dict.fromkeys(asked.values()):
        accelerator.prepare_dtype(dtype)


def move_module(model: torch.nn.Module, device: torch.device, stage: int) -> torch.nn.Module:
    """Move the model to its device; at stage 3 only the buffers, since parameters move when they are sharded."""
    if stage < 3:
        before = dict(model.named_parameters(remove_duplicate=False))
        model.to(device)
        for name, param in model.named_parameters(remove_duplicate=False):
            if param is not before[name]:  # on some devices torch makes a new one: keep the marks of experts and parts
                vars(param).update(vars(before[name]))
        return model
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model


def _index(accelerator: DeepSpeedAccelerator, rank: int, source: str) -> int:
    if accelerator.on_accelerator(torch.empty(0)):  # it uses host memory, which all ranks of a machine share
        return rank
    count = accelerator.device_count()
    if count == 1 and source != "args.device_rank":
        return 0
    variables = " or ".join(accelerator.visible_devices_envs()) or "the variable that limits them"
    name = accelerator.device_name()
    if count == 0:
        plugin = plugin_of(accelerator)
        told = f"ds_probe of {plugin!r} says available, but " if plugin is not None else ""
        raise ConfigError(
            f"{source}={rank}: {told}device_count() of {name!r} is 0; check the driver, the "
            f"variable that limits the visible devices ({variables}), or the probe"
        )
    if rank >= count:
        raise ConfigError(
            f"{source}={rank}: this process sees {counted(count, 'device')} of {name!r}, numbered from 0; start as "
            f"many ranks as there are devices, or show each rank its own by {variables}"
        )
    return rank
