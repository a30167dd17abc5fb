"""Start ranks on many hosts: with ssh or pdsh, with MPI or Slurm, or with a plugin's launcher.

    deepspeed --hostfile hosts train.py
    deepspeed --launcher mine --hostfile hosts --num_nodes 4 train.py

`launcher/runner.py` calls this package in a process without torch, so the package must not import torch. Read next:
`runners.py` (the contract, and one class per launcher), `start.py` (hosts, checks and start; `Watcher` for ssh and
pdsh).
"""

from deepspeed.launcher.multinode.runners import MultiNodeRunner

__all__ = ["MultiNodeRunner"]
