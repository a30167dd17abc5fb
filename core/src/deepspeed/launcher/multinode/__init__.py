"""Starting ranks on many hosts: by ssh or pdsh, by MPI or Slurm, or by a launcher that a plugin gives.

    deepspeed --hostfile hosts train.py
    deepspeed --launcher mine --hostfile hosts --num_nodes 4 train.py

Called by `launcher/runner.py` in a process without torch. May import what the launcher may, and no torch. Read next:
`runner.py` (the contract), `start.py` (the hosts, the checks, the start), then `remote_shell.py` and `watch.py` for ssh
and pdsh, `mpi.py` for the others.
"""

from deepspeed.launcher.multinode.runner import MultiNodeRunner

__all__ = ["MultiNodeRunner"]
