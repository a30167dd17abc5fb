"""What third-party libraries read and call on sharded parameters: on two ranks, as transformers, peft and trl do it.

Read from the libraries' sources, as `test_contract.py` and `test_contract_engines.py`.
"""

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.testing.distributed import run_ranks
from torch import nn

# as Hugging Face has it before the Trainer fills it in
UNFILLED: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
}


def create_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 2))


def create_engine(model: nn.Module, *, trains: bool = True) -> Any:
    """Stage 3 of which the LayerNorm and the biases stay whole."""
    config: dict[str, Any] = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 50},
        "zero_optimization.reduce_bucket_size": 1024,  # trl: keys with dots are tolerated
    }
    if trains:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    return deepspeed.initialize(model=model, config=config)[0]


PARAMETER_ATTRIBUTES = """
    ds_id ds_shape ds_numel ds_status ds_tensor ds_active_sub_modules partition_numel all_gather partition
"""


def parameters_of_an_engine() -> dict[str, Any]:
    model = create_net()
    shapes = [param.shape for param in model.parameters()]
    for param in model.parameters():
        param._is_hf_initialized = True
    engine = create_engine(model)
    params = list(model.parameters())
    sharded = [param for param in params if param.numel() == 0]
    facts = {
        "missing": sorted(
            {name for name in PARAMETER_ATTRIBUTES.split() for param in params if not hasattr(param, name)}
        ),
        "shapes": [param.ds_shape for param in params] == shapes,
        "numels": [param.ds_numel for param in params] == [shape.numel() for shape in shapes],
        "ids": [param.ds_id for param in params],
        "sharded": [tuple(param.shape) for param in sharded],
        "status": {param.ds_status for param in sharded} == {ZeroParamStatus.NOT_AVAILABLE},
        "whole": {param.ds_status for param in params if param.numel()} == {ZeroParamStatus.AVAILABLE},
        "parts": all(param.partition_numel() * 2 >= param.ds_numel for param in sharded),
        "kept": all(param._is_hf_initialized and isinstance(param, nn.Parameter) for param in params),
        "external": [list(module.ds_external_parameters()) for module in model.modules()],
    }
    engine.destroy()
    return facts


def test_parameters_of_an_engine() -> None:
    found = run_ranks(2, parameters_of_an_engine)
    assert found[0]["ids"] == found[1]["ids"]
    for facts in found:
        assert len(set(facts.pop("ids"))) == 6
        assert facts == {
            "missing": [],
            "shapes": True,
            "numels": True,
            "sharded": [(0,), (0,)],
            "status": True,
            "whole": True,
            "parts": True,
            "kept": True,
            "external": [[], [], [], []],
        }


def gather_as_libraries_do() -> dict[str, Any]:
    model = create_net()
    engine = create_engine(model)
    rank = deepspeed.comm.get_rank()
    buffer, loose = torch.zeros(3), nn.Parameter(torch.zeros(2))
    # transformers gives a list made from a set, whose order differs by rank, with buffers in it
    given = [*model.parameters(), buffer, loose]
    with deepspeed.zero.GatheredParameters(given if rank == 0 else given[::-1], modifier_rank=0):
        with deepspeed.zero.GatheredParameters(model[0].weight, modifier_rank=0):
            if rank == 0:
                nn.init.ones_(model[0].weight)
        inside = tuple(model[0].weight.shape)
        if rank == 0:
            nn.init.ones_(model[2].weight)
            nn.init.ones_(model[1].bias)
    with deepspeed.zero.GatheredParameters([], modifier_rank=0), deepspeed.zero.GatheredParameters(buffer):
        pass
    # peft: a generator, and the module whose forward reads them; trl: the same parameter twice
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=None, fwd_module=model):
        sums = [model[0].weight.sum().item(), model[2].weight.sum().item(), model[1].bias.sum().item()]
    with deepspeed.zero.GatheredParameters([model[2].weight, model[2].weight]):
        pass
    masters = deepspeed.utils.safe_get_full_fp32_param(model[0].weight)
    facts = {"inside": inside, "sums": sums, "masters": masters.sum().item(), "after": model[0].weight.numel()}
    engine.destroy()
    return facts


def test_gathered_parameters() -> None:
    facts = {"inside": (32, 8), "sums": [256.0, 64.0, 32.0], "masters": 256.0, "after": 0}
    assert run_ranks(2, gather_as_libraries_do) == [facts, facts]


def find_offload(engine: Any) -> Any:
    """trl's `remove_hooks` and `add_hooks`."""
    optimizer = engine.optimizer
    return optimizer.parameter_offload if hasattr(optimizer, "parameter_offload") else optimizer


def generate_as_trl(trains: bool) -> bool:
    model = create_net()
    expected = model(torch.ones(1, 8)).sum().item()
    engine = create_engine(model, trains=trains)
    values = [engine(torch.ones(1, 8)).sum().item()]
    if trains:
        engine.backward(engine(torch.ones(1, 8)).sum())
        with torch.no_grad():
            engine.module.zero_grad()
    with deepspeed.zero.GatheredParameters(model.parameters()):
        offload = find_offload(engine)
        for _, param in [*offload.module.named_parameters(), *offload.module.ds_external_parameters()]:
            param.ds_active_sub_modules.clear()
        for hook in offload.forward_hooks + offload.backward_hooks:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        with torch.no_grad():
            values.append(engine.module(torch.ones(1, 8)).sum().item())
        if not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()
        offload._register_deepspeed_module(offload.module)
    with torch.no_grad():
        values.append(engine(torch.ones(1, 8)).sum().item())
    engine.destroy()
    return values == pytest.approx([expected] * 3)


@pytest.mark.parametrize("trains", [True, False])
def test_trl_takes_the_hooks_off_to_generate(trains: bool) -> None:
    assert run_ranks(2, generate_as_trl, trains) == [True, True]


def build_under_init() -> dict[str, Any]:
    """transformers: the arange wrapper is replaced before `zero.Init`; the config is not filled in."""
    from deepspeed.runtime.zero import partition_parameters as pp

    original, seen = pp.zero_wrapper_for_fp_tensor_constructor, []

    def without_arange(fn: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((fn is pp._orig_torch_arange, "target_device" in kwargs))
        return fn if fn is pp._orig_torch_arange else original(fn, *args, **kwargs)

    pp.zero_wrapper_for_fp_tensor_constructor = without_arange
    try:
        with deepspeed.zero.Init(config_dict_or_path=UNFILLED):
            model = create_net()
            positions = torch.arange(0, 4, dtype=torch.int64).float()
    finally:
        pp.zero_wrapper_for_fp_tensor_constructor = original
    with deepspeed.zero.Init(enabled=False, remote_device=None, config_dict_or_path={}):
        plain = nn.Linear(2, 2)
    sharded = [param.numel() for param in model.parameters()]
    with deepspeed.zero.GatheredParameters(model.parameters()):
        equal = all(torch.equal(one, other) for one, other in zip(model.parameters(), create_net().parameters()))
    return {
        "wrapped": (True, True) in seen,
        "positions": (positions.dtype == torch.float32, positions.device.type),
        "sharded": sharded,
        "equal": equal,
        "plain": plain.weight.numel(),
    }


def test_zero_init_as_transformers_enters_it() -> None:
    facts = {"wrapped": True, "positions": (True, "cpu"), "sharded": [0] * 6, "equal": True, "plain": 4}
    assert run_ranks(2, build_under_init) == [facts, facts]


class Parent(nn.Module):
    """As nanoGPT and models of transformers: it initializes the weights of its children, which are built by then."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(8, 4)
        self.norm = nn.LayerNorm(8)
        nn.init.trunc_normal_(self.child.weight, std=0.02)
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.ones_(param)
        with torch.no_grad():
            self.norm.weight.fill_(3.0)


def initialize_children() -> bool:
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=UNFILLED):
        model = Parent()
    torch.manual_seed(0)
    expected = Parent()
    with deepspeed.zero.GatheredParameters(model.parameters()):
        return all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters()))


def test_a_parent_initializes_its_children_inside_init() -> None:
    assert run_ranks(2, initialize_children) == [True, True]


def adapt_a_sharded_model() -> dict[str, Any]:
    """peft: adapters, built outside `zero.Init`, for a frozen model that was built inside."""
    with deepspeed.zero.Init(config_dict_or_path=UNFILLED):
        model = create_net()
    model.requires_grad_(False)
    size = model[2].weight.ds_shape[1]
    model[2].adapter = nn.Linear(size, 2)
    model[2].register_forward_hook(lambda module, args, output: output + module.adapter(args[0]))
    engine = create_engine(model)
    engine.backward(engine(torch.ones(1, 8)).sum())
    grad = deepspeed.utils.safe_get_full_grad(model[2].adapter.weight)
    engine.step()
    weights = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    facts = {"grad": tuple(grad.shape), "weights": None if weights is None else sorted(weights)}
    engine.destroy()
    facts["whole"] = [param.numel() for param in model.parameters()]
    return facts


def test_adapters_of_a_sharded_model() -> None:
    first, second = run_ranks(2, adapt_a_sharded_model)
    assert first["weights"] == ["2.adapter.bias", "2.adapter.weight"]
    assert second["weights"] is None
    assert first["grad"] == second["grad"] == (2, 32)
    assert first["whole"] == [256, 32, 32, 32, 64, 2, 64, 2]


def two_engines_on_one_module() -> list[float]:
    """Lightning tests after it has fitted: all hooks are gone, and the first engine was not destroyed."""
    model = create_net()
    engine = create_engine(model)
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    before = engine(torch.ones(1, 8)).sum().item()
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            hooks.clear()
    second = deepspeed.initialize(
        model=model, config={"train_batch_size": 2, "zero_optimization": {"stage": 3}}, model_parameters=[]
    )[0]
    with torch.no_grad():
        after = second(torch.ones(1, 8)).sum().item()
    return [before, after]


def test_an_engine_that_tests_follows_one_that_trained() -> None:
    for before, after in run_ranks(2, two_engines_on_one_module):
        assert after == pytest.approx(before)
