"""The engine and its parts: what each is given, and that none sees more."""

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import deepspeed
import deepspeed.engine
import pytest
import torch
from deepspeed.checkpoint import Checkpointer
from deepspeed.engine.saving import Saving
from deepspeed.engine.training_state import TrainingState
from deepspeed.engine.wrapper import ModuleWrapper
from deepspeed.errors import StateError
from torch import nn

FILES = sorted(Path(deepspeed.engine.__file__).parent.glob("*.py"))


def names_in(path):
    return {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}


def test_only_building_sees_the_root_of_the_configuration():
    assert [path.name for path in FILES if "DeepSpeedConfig" in names_in(path)] == ["build.py", "sharding.py"]


def test_the_engine_is_composed(make_engine):
    engine = make_engine(nn.Linear(4, 2))
    assert type(engine).__bases__ == (ModuleWrapper, nn.Module)
    for part in (engine._training, engine._saving, engine._observers, engine.schedule, engine.checkpointer):
        assert not [name for name, value in vars(part).items() if value is engine]


def test_attributes_of_parts_can_be_written(make_engine):
    engine = make_engine(nn.Linear(4, 2))
    engine.global_steps, engine.skipped_steps, engine.global_samples, engine.micro_steps = 3, 2, 12, 3
    engine.lr_scheduler = None
    engine.backward(engine(torch.ones(4, 4)).sum())
    engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples, engine.micro_steps) == (4, 2, 16, 4)


def test_a_checkpoint_of_one_of_several_model_parallel_ranks(make_engine, tmp_path):
    engine = make_engine(nn.Linear(4, 2), zero_optimization={"stage": 1})
    state = TrainingState(
        module=engine.module, training=engine._training, config=engine.config, sparse_tensor_module_names=set()
    )
    checkpointer = Checkpointer(mp_rank=1, mp_world_size=2, commits=True)
    saving = Saving(state, checkpointer, gather=lambda value: [value], tag_validation="Warn")
    saving.save(str(tmp_path), "a", client_state=None, save_latest=True, exclude_frozen=False)
    names = {"index.json", "mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == names
    assert torch.load(tmp_path / "a" / "mp_rank_01_model_states.pt", weights_only=True)["mp_world_size"] == 2


def test_one_save_or_load_at_a_time(make_engine, tmp_path):
    """Of another thread, or of a signal handler in the midst of a save: it is refused, and the first one goes on."""
    engine = make_engine(nn.Linear(4, 2), zero_optimization={"stage": 1})
    refused = []

    def interrupt(src, dst):
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            for run in (call, lambda path, call=call: threads.submit(call, path).result()):
                with pytest.raises(StateError) as caught:
                    run(str(tmp_path))
                refused.append(str(caught.value))
        dst.load_state_dict(src)

    engine.save_checkpoint(str(tmp_path))
    with ThreadPoolExecutor(1) as threads:
        assert engine.load_checkpoint(str(tmp_path), custom_load_fn=interrupt)[0]
    assert [text.split(";")[0] for text in refused] == [
        *2 * ["save_checkpoint: found load_checkpoint going on"],
        *2 * ["load_checkpoint: found load_checkpoint going on"],
    ]
    assert engine.save_checkpoint(str(tmp_path))


@pytest.mark.parametrize("has_loaded", [True, False])
def test_a_custom_load_fn_that_raises_is_not_taken_for_a_change_of_sharded_parameters(
    make_engine, tmp_path, has_loaded
):
    def load(src, dst):
        if has_loaded:
            dst.load_state_dict(src)
        raise RuntimeError("mine")

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = make_engine(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), zero_optimization=zero)
    engine.save_checkpoint(str(tmp_path))
    with pytest.raises(RuntimeError, match="mine"):
        engine.load_checkpoint(str(tmp_path), custom_load_fn=load)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        assert engine.module[0].weight.shape == (4, 4)
    with pytest.raises(StateError, match="load_checkpoint failed before all was restored .*mine"):
        engine(torch.ones(4, 4))
    assert engine.load_checkpoint(str(tmp_path))[0]
    engine.backward(engine(torch.ones(4, 4)).sum())
    engine.step()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_values_of_a_custom_load_fn_stay(make_engine, tmp_path, stage, dtype):
    def load(src, dst):
        dst.load_state_dict({**src, "0.weight": src["0.weight"] * 2})

    def train(engine):
        engine.backward(engine(torch.ones(4, 4, dtype=engine.module[0].weight.dtype)).float().sum())
        engine.step()

    def create():
        sections = {"zero_optimization": {"stage": stage}}
        if dtype == "bf16":
            sections["bf16"] = {"enabled": True}
        sgd = {"type": "SGD", "params": {"lr": 1e-4, "momentum": 0.9}}
        return make_engine(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), optimizer=sgd, **sections)

    def masters(engine):
        return [deepspeed.utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()]

    engine = create()
    train(engine)
    engine.save_checkpoint(str(tmp_path))
    saved = masters(engine)
    other = create()
    other.load_checkpoint(str(tmp_path), custom_load_fn=load)
    loaded = masters(other)
    assert torch.equal(loaded[0], 2 * (saved[0].bfloat16().float() if dtype == "bf16" else saved[0]))
    assert all(torch.equal(now, before) for now, before in zip(loaded[1:], saved[1:], strict=True))
    with deepspeed.zero.GatheredParameters(list(other.module.parameters())):
        for param, master in zip(other.module.parameters(), loaded, strict=True):
            assert torch.equal(param.detach(), master.to(param.dtype))
    train(other)
    torch.testing.assert_close(masters(other)[0], loaded[0], atol=1e-2, rtol=0)
