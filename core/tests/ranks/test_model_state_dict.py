"""Weights of an engine's module through `torch.distributed.checkpoint.state_dict`; what plain calls say at stage 3."""

import logging
from itertools import product
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.errors import StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.zero import redistribute
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
LR = 0.25


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.base(x)))


def create_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().eval()


def create_engine(net: nn.Module, stage: int, dtype: str, **zero: Any) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, **zero},
    }
    return deepspeed.initialize(model=net, config=config)[0]


def step(engine: Any) -> None:
    weight = next(engine.module.parameters())
    engine.backward(engine(BATCH.to(weight.dtype)).float().square().mean())
    engine.step()


def state_job(stage: int, dtype: str, zero: dict[str, Any], kind: str, folder: str) -> None:
    engine = create_engine(create_net(0), stage, dtype, **zero)
    step(engine)
    with torch.no_grad():  # which leaves parameters whole, to be used again soon
        engine(BATCH.to(engine.module.last.weight.dtype))
    own = get_model_state_dict(engine.module)
    target = {name: value.to(own[name].dtype) for name, value in create_net(7).state_dict().items()}
    if kind == "dcp":
        if dist.get_rank() == 0:
            dcp.save({"model": target}, checkpoint_id=folder, no_dist=True)
        dist.barrier()
        loaded = {"model": get_model_state_dict(engine.module)}
        dcp.load(loaded, checkpoint_id=folder)
        set_model_state_dict(engine.module, loaded["model"])
    elif kind == "broadcast":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(engine.module, dict(target) if dist.get_rank() == 0 else {}, options=options)
    else:
        set_model_state_dict(engine.module, dict(target))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(engine.module)
    assert found.keys() == target.keys()
    for name, value in found.items():
        assert torch.equal(value, target[name]), name
    whole = get_model_state_dict(engine.module, options=options)
    assert all(torch.equal(whole[name], found[name]) for name in whole)
    assert len(whole) == (len(found) if dist.get_rank() == 0 else 0)
    weight = engine.module.last.weight
    master = deepspeed.utils.safe_get_full_fp32_param(weight)
    torch.testing.assert_close(master, found["last.weight"].float(), rtol=0, atol=0)
    net = create_net(7)
    loss = net(BATCH).square().mean()
    loss.backward()
    step(engine)
    expected = net.last.weight.detach() - LR * net.last.weight.grad
    tolerance = 2e-2 if dtype == "bf16" else 1e-5
    now = deepspeed.utils.safe_get_full_fp32_param(weight)
    torch.testing.assert_close(now, expected, rtol=tolerance, atol=tolerance)
    engine.destroy()


SHARDED = {"stage3_param_persistence_threshold": 0}
OFFLOADED = {**SHARDED, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("stage", "dtype", "zero", "kind"),
    swept(
        [
            case
            for case in product(range(4), ["fp32", "bf16"], [{}, SHARDED, OFFLOADED], ["plain", "dcp", "broadcast"])
            if case[0] == 3 or not case[2]
        ],
        lambda stage, dtype, zero, kind: (
            (stage, dtype, len(zero), kind)
            in {
                (0, "bf16", 0, "plain"),
                (1, "bf16", 0, "dcp"),
                (2, "fp32", 0, "plain"),
                (3, "bf16", 1, "dcp"),
                (3, "fp32", 3, "broadcast"),
                (3, "bf16", 0, "plain"),
            }
        ),
    ),
)
def test_weights_through_torchs_state_dicts(tmp_path, stage, dtype, zero, kind):
    run_ranks(2, state_job, stage, dtype, zero, kind, str(tmp_path / "saved"))


def optimizer_job(stage: int, dtype: str) -> None:
    """Before the first step, where torch's functions would make one, and after it."""
    calls = [
        get_optimizer_state_dict,
        get_state_dict,
        lambda module, optimizer: set_optimizer_state_dict(module, optimizer, {"state": {}, "param_groups": []}),
        lambda module, optimizer: set_state_dict(
            module, optimizer, model_state_dict=get_model_state_dict(module), optim_state_dict={"state": {}}
        ),
    ]
    engines = [create_engine(create_net(0), stage, dtype) for _ in range(2)]
    for number in range(2):
        for call in calls:
            with pytest.raises(StateError, match=f"stage is {stage}.* engine.save_checkpoint.* get_model_state_dict"):
                call(engines[0].module, engines[0].optimizer)
        for engine in engines:
            step(engine)
        weights = [deepspeed.utils.safe_get_full_fp32_param(engine.module.last.weight) for engine in engines]
        assert torch.equal(*weights), number
    for engine in engines:
        engine.destroy()


@pytest.mark.parametrize(("stage", "dtype"), [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32")])
def test_states_of_the_optimizer_through_torchs_functions_name_the_way(stage, dtype):
    run_ranks(2, optimizer_job, stage, dtype)


def said_job(built_in_init: bool) -> tuple[list[str], list[str]]:
    """What plain calls say and raise of a sharded module."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collect(logging.WARNING)
    deepspeed.log.logger.addHandler(handler)
    with deepspeed.zero.Init(enabled=built_in_init):
        net = create_net(0)
    before = create_net(0).state_dict()
    said = []
    engine = None if built_in_init else create_engine(net, 3, "fp32", **SHARDED)
    for call in (lambda: net.load_state_dict(before), lambda: net.load_state_dict(net.state_dict())):
        try:
            call()
        except StateError as error:
            said.append(str(error))
    assert all(value.numel() == 0 for name, value in net.state_dict().items() if name in dict(net.named_parameters()))
    with deepspeed.zero.GatheredParameters(net.parameters(), modifier_rank=0):
        if dist.get_rank() == 0:
            net.load_state_dict(create_net(5).state_dict())
    with deepspeed.zero.GatheredParameters(net.parameters()):
        found, wanted = net.state_dict(), create_net(5).state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name, _ in net.named_parameters())
    if engine is not None:
        engine.destroy()
        net.load_state_dict(before)
    deepspeed.log.logger.removeHandler(handler)
    return said, [line for line in lines if line.startswith("state_dict:")]


@pytest.mark.parametrize("built_in_init", [False, True])
def test_plain_calls_name_the_way(built_in_init):
    for said, warned in run_ranks(2, said_job, built_in_init):
        assert len(said) == 2
        assert all("load_state_dict: the parameter 'base.weight' is sharded" in each for each in said)
        assert all("GatheredParameters(module.parameters(), modifier_rank=0)" in each for each in said)
        assert len(warned) <= 1  # a process says it once
        assert all("engine.save_16bit_model" in each and "get_model_state_dict" in each for each in warned)


class Pretrained(Net):
    @classmethod
    def from_pretrained(cls) -> "Pretrained":
        """As transformers: the names in a state dict, whose values nobody reads, say what is to be loaded."""
        with deepspeed.zero.Init():
            model = cls().eval()
        assert list(model.state_dict())
        return model


def library_job() -> tuple[int, int]:
    """Warnings after a library's load, and after a state dict of the script's own."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redistribute, "warn_once", said.append)
        model = Pretrained.from_pretrained()
        by_library = len(said)
        model.state_dict()
        return by_library, len(said)


def test_a_library_that_reads_names_does_not_use_the_warning_up():
    for by_library, by_script in run_ranks(2, library_job):
        assert by_library == 0
        assert by_script > 0
