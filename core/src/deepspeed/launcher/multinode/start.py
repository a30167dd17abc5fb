"""From `--launcher NAME` to the command that starts the job: the plugin's class, the hosts, the checks."""

import os
from collections.abc import Mapping
from typing import Any

from deepspeed.errors import ConfigError, PluginError, counted
from deepspeed.launcher.arguments import DEFAULT_HOSTFILE
from deepspeed.launcher.hostfile import fetch_hostfile
from deepspeed.launcher.plan import encode_world_info
from deepspeed.launcher.resources import parse_inclusion_exclusion

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

# What the process on each node does for ranks that the core starts itself: (attribute, flag).
PER_NODE_FLAGS = (
    ("bind_cores_to_rank", "--bind_cores_to_rank"),
    ("log_dir", "--log_dir"),
    ("enable_each_rank_log", "--enable_each_rank_log"),
    ("save_pid", "--save_pid"),
)


def find_runner(name: str) -> Any | None:
    """The class that a feature plugin gives for `--launcher NAME`, or None. No accelerator is chosen for it."""
    from deepspeed.plugins import plugin_manager  # late: only a command line with --launcher pays for it

    return plugin_manager().hook.ds_launcher(name=name)


def make_command(kind: Any, args: "argparse.Namespace", environment: Mapping[str, str]) -> list[str]:
    """The command that the launcher of the class `kind` writes for this command line.

    Raises:
        ConfigError: the command line or the hostfile ask for what is not there.
        PluginError: the plugin's class is no launcher.
    """
    where = f"--launcher {args.launcher}"
    if not isinstance(kind, type) or not callable(getattr(kind, "get_cmd", None)):
        raise PluginError(f"{where}: a plugin gave {kind!r}; a class with the methods of MultiNodeRunner is expected")
    for attribute, flag in PER_NODE_FLAGS:
        if getattr(args, attribute) and attribute not in getattr(kind, "flags", ()):
            raise ConfigError(f"{flag}: {kind.__name__} of {where} does not do this; omit the flag")
    hosts = choose_hosts(args)
    runner = kind(args, encode_world_info(hosts))
    if not getattr(runner, "backend_exists", lambda: True)():
        raise ConfigError(f"{where}: what {kind.__name__} needs is not installed on this machine; install it")
    getattr(runner, "validate_args", lambda: None)()
    command = runner.get_cmd(environment, hosts)
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise PluginError(f"{where}: {kind.__name__}.get_cmd returned {command!r}; a list of words is expected")
    return command


def choose_hosts(args: "argparse.Namespace") -> dict[str, list[int]]:
    """Host -> slots, from the hostfile and the flags that cut it down; empty without a hostfile.

    Raises:
        ConfigError: a flag asks for more than the hostfile has, or there is none to ask.
    """
    path = args.hostfile or (DEFAULT_HOSTFILE if os.path.isfile(DEFAULT_HOSTFILE) else None)
    found = fetch_hostfile(path) if path else None
    if found is None:
        if args.include or args.exclude:
            flag = "--include" if args.include else "--exclude"
            raise ConfigError(f"{flag}: needs the hosts to choose from; give a --hostfile")
        return {}
    hosts = parse_inclusion_exclusion(found, args.include, args.exclude)
    if not hosts:
        raise ConfigError(f"--exclude {args.exclude}: leaves no slot to run on")
    if args.num_nodes is not None:
        if args.num_nodes > len(hosts):
            raise ConfigError(f"--num_nodes {args.num_nodes}: the hostfile {path} has {len(hosts)}; ask for those")
        hosts = dict(list(hosts.items())[: args.num_nodes])
    if args.num_gpus is not None:
        for host, slots in hosts.items():
            if args.num_gpus > len(slots):
                raise ConfigError(
                    f"--num_gpus/--num_accelerators {args.num_gpus}: {host} has {counted(len(slots), 'slot')} in the "
                    f"hostfile {path}; ask for those"
                )
        hosts = {host: slots[: args.num_gpus] for host, slots in hosts.items()}
    return hosts
