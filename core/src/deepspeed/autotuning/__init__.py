"""Search for the fastest settings of a training command: `deepspeed --autotuning tune script.py ...`.

Read `autotuner.py` first. May import `planning`, `config` and `accelerator`; a trial's engine uses `trial.py`.
"""

from deepspeed._forward import forward

__getattr__, __dir__ = forward(__name__, {"Autotuner": "deepspeed.autotuning.autotuner:Autotuner"})
