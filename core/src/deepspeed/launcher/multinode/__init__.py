"""Starting ranks on many hosts: by ssh or pdsh, by MPI or Slurm, or by a launcher that a plugin gives.

    deepspeed --hostfile hosts train.py
    deepspeed --launcher mine --hostfile hosts --num_nodes 4 train.py

Called by `launcher/runner.py` in a process without torch. May import what the launcher may, and no torch. Read next:
`runners.py` (the contract, and a class per launcher), `start.py` (the hosts, the checks, the start; `Watcher`, for
ssh and pdsh).
"""

from deepspeed.launcher.multinode.runners import MultiNodeRunner

__all__ = ["MultiNodeRunner"]
