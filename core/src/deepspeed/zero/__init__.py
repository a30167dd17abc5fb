"""ZeRO: optimizer states, gradients and parameters sharded over ranks.

May import `precision`, `optim`, `parallel`, `comm` and below. Read `stages.py` (what is divided), `sharding.py` (the
step), then its parts: `units.py`, `unit.py` and `layout.py`; `gradients.py`, `backward_window.py`,
`gradient_memory.py`, `gradient_reduction.py` and `bucket.py`; `update.py` and `matrix_exchange.py`; `states.py`.
Stage 3: `param_unit.py`, `fetcher.py`, `module_hooks.py`, `module_units.py`, then `construct.py` (`zero.Init`) and
`gather.py`. Checkpoints: `state_dict.py`, `named_states.py`, `redistribute.py`. Names load on first use.

    a gradient is averaged over ranks       `Bucket` multiplies by the factor of `ZeroStage.begin_backward`, and
                                            `ZeroStage.reduce` sums
    a gathered weight is freed or kept      `ParamFetcher.release_or_keep`, called by the hooks of `module_hooks.py`
    an optimizer needs whole matrices       `Units.attach` gives it whole parameters, or refuses it at stage 3;
                                            `MatrixExchange` is Muon's way there
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
