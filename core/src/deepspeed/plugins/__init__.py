"""The plug: what other packages may give to the core, and how the core finds it.

A plugin is a module (or any object) with functions marked `@hookimpl`. Packages announce it by an entry point:
devices in the group `deepspeed.accelerators`, everything else in `deepspeed.plugins`:

    [project.entry-points."deepspeed.accelerators"]
    cpu = "ds_ext_cpu.plugin"

May import `config`, `errors`, `log` and no torch: a plugin's door must open without a device.
Read next: `hookspecs.py` (what a plugin can say), `manager.py` (how it is found), then `admission.py`;
`torch_build` of `hookspecs.py` is for probes.
"""

from deepspeed.plugins.hookspecs import PLUGIN_API, Offer, hookimpl
from deepspeed.plugins.manager import ACCELERATORS, FEATURES, PluginManager, plugin_manager

__all__ = ["ACCELERATORS", "FEATURES", "PLUGIN_API", "Offer", "PluginManager", "hookimpl", "plugin_manager"]
