"""The entry point of this extension."""

import platform
import sys
from typing import Any

from deepspeed.plugins import Offer, hookimpl

DS_PLUGIN_API = ">=1,<2"


@hookimpl
def ds_probe() -> Offer:
    """Offer the device on a Mac with an Apple chip; torch supports it on no other machine."""
    machine = f"{sys.platform} on {platform.machine()}"
    return Offer("mps", 100, machine == "darwin on arm64", f"{machine}; Metal needs darwin on arm64")


@hookimpl
def ds_accelerator() -> Any:
    """Create the accelerator; imports torch."""
    from ds_ext_mps.accelerator import MPS_Accelerator

    return MPS_Accelerator()
