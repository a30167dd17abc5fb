"""ZeRO: optimizer states, gradients and parameters sharded over ranks.

May import `precision`, `optim`, `parallel`, `comm` and below. Read `strategy.py` (the contract), then
`stages.py` beside it, `holding.py`, `layout.py`, `unit_groups.py`, `backward.py` (where gradients are averaged),
`gradient_reduction.py`, `bucket.py`, `update.py`, `backward_window.py`.
Stage 3: `param_unit.py`, `fetcher.py`, `module_hooks.py`, `module_units.py`, then `construct.py`
(`zero.Init`) and `gather.py`. Checkpoints: `stateful.py`, `state_dict.py`, `named_states.py`, `redistribute.py`. Names
load on first use.
"""

import sys

from deepspeed._absent import complete
from deepspeed._forward import forward

_NAMES = {
    "GatheredParameters": "deepspeed.zero.gather:GatheredParameters",
    "Init": "deepspeed.zero.construct:Init",
    "MiCS_Init": "deepspeed.zero.construct:MiCS_Init",
    "TiledLinear": "deepspeed.zero.tiling:TiledLinear",
    "TiledLinearReturnBias": "deepspeed.zero.tiling:TiledLinearReturnBias",
    "ZeroParamStatus": "deepspeed.zero.param_marks:ZeroParamStatus",
    "register_external_parameter": "deepspeed.zero.gather:register_external_parameter",
    "show_layout": "deepspeed.zero.tools:show_layout",
    "unregister_external_parameter": "deepspeed.zero.gather:unregister_external_parameter",
}

__all__ = sorted(_NAMES)  # noqa: PLE0605

__getattr__, __dir__ = forward(__name__, _NAMES)

complete("deepspeed.runtime.zero", sys.modules[__name__])  # `deepspeed.zero` is that package in DeepSpeed
