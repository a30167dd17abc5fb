"""Starting ranks on many hosts, by a launcher that a plugin gives; this version has none of its own.

    deepspeed --launcher mine --hostfile hosts --num_nodes 4 train.py

Called by `launcher/runner.py` when `--launcher` is given, in a process without torch. May import what the launcher may,
and no torch. Read next: `runner.py` (the contract), then `start.py` (what is done with it).
"""

from deepspeed.launcher.multinode.runner import MultiNodeRunner
from deepspeed.launcher.multinode.start import choose_hosts, find_runner, make_command

__all__ = ["MultiNodeRunner", "choose_hosts", "find_runner", "make_command"]
