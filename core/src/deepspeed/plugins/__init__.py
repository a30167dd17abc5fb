"""Plugins: how other packages extend the core, and how the core finds them.

A plugin is a module (or any object) with functions marked `@hookimpl`. A package declares it by an entry point in the
group `deepspeed.accelerators` (devices) or `deepspeed.plugins` (everything else):

    [project.entry-points."deepspeed.accelerators"]
    cpu = "ds_ext_cpu.plugin"

May import `config`, `errors`, `log`, but not torch: the core must find plugins without a device.
Read next: `hookspecs.py` (the hooks), `manager.py` (how plugins are found), then `admission.py`;
`torch_build` of `hookspecs.py` is for probes.
"""

from deepspeed.plugins.hookspecs import PLUGIN_API, Offer, hookimpl
from deepspeed.plugins.manager import ACCELERATORS, FEATURES, PluginManager, plugin_manager

__all__ = ["ACCELERATORS", "FEATURES", "PLUGIN_API", "Offer", "PluginManager", "hookimpl", "plugin_manager"]
