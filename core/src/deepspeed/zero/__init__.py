"""ZeRO: optimizer states, gradients and parameters sharded over ranks.

May import `precision`, `optim`, `parallel`, `comm` and below. Read `strategy.py` (the contract, and stage 0), then
`stage1.py` and `stage2.py` beside it, `holding.py`, `layout.py`, `unit_ranks.py`, `gradient_reduction.py`, `bucket.py`,
`update.py`, `backward_window.py`.
Stage 3: `stage3.py`, `param_gathering.py`, `param_unit.py`, `fetcher.py`, `module_hooks.py`, `module_units.py`,
`granularity.py`, then `construct.py` (`zero.Init`) and `gather.py`. Checkpoints: `stateful.py`, `state_dict.py`,
`saved_group.py`, `named_states.py`, `division.py`, `parameter_parts.py`, `redistribute.py`. Names load on first use.
"""

from deepspeed._forward import forward

_NAMES = {
    "GatheredParameters": "deepspeed.zero.gather:GatheredParameters",
    "Init": "deepspeed.zero.construct:Init",
    "MiCS_Init": "deepspeed.zero.mics_init:MiCS_Init",
    "TiledLinear": "deepspeed.zero.tiling:TiledLinear",
    "TiledLinearReturnBias": "deepspeed.zero.tiling:TiledLinearReturnBias",
    "ZeroParamStatus": "deepspeed.zero.param_state:ZeroParamStatus",
    "register_external_parameter": "deepspeed.zero.gather:register_external_parameter",
    "show_layout": "deepspeed.zero.show_layout:show_layout",
    "unregister_external_parameter": "deepspeed.zero.gather:unregister_external_parameter",
}

__all__ = sorted(_NAMES)  # noqa: PLE0605

__getattr__, __dir__ = forward(__name__, _NAMES)
