"""Wrong calls whose message once blamed something else."""

import json

import deepspeed
import pytest
import torch
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.training import resolve_batch
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@pytest.fixture
def net():
    return nn.Linear(4, 4)


@pytest.fixture
def pipeline(single_rank):
    """A factory of engines of one stage, which are destroyed afterwards."""
    made = []

    def make(**keys):
        module = PipelineModule([nn.Linear(4, 4)], num_stages=1, loss_fn=nn.MSELoss())
        made.append(deepspeed.initialize(model=module, config={**CONFIG, **keys})[0])
        return made[-1]

    yield make
    for engine in made:
        engine.destroy()


def test_names_in_place_of_parameters(net, single_rank):
    with pytest.raises(ConfigError, match=r"model_parameters holds 'weight' \(str\); pass parameters"):
        deepspeed.initialize(model=net, model_parameters=["weight", "bias"], config=CONFIG)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("form", ["object", "callable"])
def test_one_line_says_which_optimizer_is_used(net, single_rank, lines, stage, form):
    def given(params):
        return torch.optim.Adagrad(params, lr=0.1)

    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    optimizer = given(net.parameters()) if form == "object" else given
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    said = "optimizer: Adagrad, which initialize() was given, is used in place of the config's SGD"
    assert [text for _, text in lines if text.startswith("optimizer: ")] == [said]
    assert isinstance(engine.basic_optimizer, torch.optim.Adagrad)
    engine.destroy()


@pytest.mark.parametrize("form", ["object", "callable"])
def test_one_line_says_which_schedule_is_used(net, single_rank, lines, form):
    def given(optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = {"train_batch_size": 2, "scheduler": {"type": "WarmupLR"}}
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=given(optimizer) if form == "object" else given, config=config
    )
    said = "scheduler: ConstantLR, which initialize() was given, is used in place of the config's WarmupLR"
    assert [text for _, text in lines if ": " in text and "which initialize() was given" in text] == [said]
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("form", ["of another optimizer", "of the given one", "of groups that are shared"])
def test_a_schedule_that_moves_no_rate_of_this_engine_is_told(net, single_rank, lines, form, stage):
    """Torch alone warns of it, and blames the order of the calls."""
    warn_once.cache_clear()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    keys = {
        "of another optimizer": {},
        "of the given one": {"optimizer": optimizer},
        "of groups that are shared": {"optimizer": torch.optim.SGD(optimizer.param_groups, lr=0.5)},
    }[form]
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=net, lr_scheduler=schedule, config=config, **keys)
    said = (
        "scheduler: StepLR, which initialize() was given, was made for an optimizer (Adam) that this engine does not "
        "use: it changes no learning rate of the engine's SGD. Give initialize() that optimizer too (optimizer=), or a "
        "callable that makes the schedule (lr_scheduler=lambda optimizer: ...)"
    )
    found = [text for _, text in lines if text.startswith("scheduler: ")]
    assert found == ([said] if form == "of another optimizer" else [])
    engine.destroy()


def test_a_yaml_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("train_batch_size: 2\n")
    with pytest.raises(ConfigError, match=r"a YAML file; write the configuration as JSON"):
        DeepSpeedConfig(str(path))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"zero_optimization": {"stag": 2}}, r"zero_optimization.stag: found an unknown key"),
        ({"zero_optimization": {"stage": 9}}, r"zero_optimization.stage: found 9"),
        ({"train_batch_size": 3}, r"train_batch_size: found 3, which is not a multiple"),
    ],
)
def test_an_error_in_a_key_names_the_file(keys, message, tmp_path):
    path = tmp_path / "my config.json"
    path.write_text(json.dumps({**CONFIG, **keys}))
    with pytest.raises(ConfigError, match=f"my config.json: {message}"):
        DeepSpeedConfig(path)
    with pytest.raises(ConfigError, match=f"^{message}"):
        DeepSpeedConfig({**CONFIG, **keys})


@pytest.mark.parametrize("section", ["fp16", "flops_profiler"])
@pytest.mark.parametrize("value", [True, False])
def test_true_in_place_of_a_section(section, value):
    switch = str(value).lower()
    with pytest.raises(ConfigError, match=f'found {switch}; allowed: an object, such as {{"enabled": {switch}}}'):
        DeepSpeedConfig({**CONFIG, section: value})


def test_stages_without_a_launcher(single_rank):
    with pytest.raises(ConfigError, match=r"found 2 stages and 1 rank; .*`deepspeed --num_accelerators 2 script.py`"):
        PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2)


def test_a_whole_model_as_layers(single_rank):
    with pytest.raises(ConfigError, match="layers is TransformerEncoderLayer, which cannot be cut into stages"):
        PipelineModule(nn.TransformerEncoderLayer(4, 1), num_stages=1)


def test_a_pipeline_without_data(pipeline):
    with pytest.raises(ConfigError, match=r"data iterator of rank 0 \(stage 0\) is missing; pass an iterator"):
        pipeline().train_batch()


def test_an_evaluation_without_data_leaves_the_iterator_of_training(pipeline):
    engine = pipeline()
    engine.set_dataiterator(iter([(torch.ones(2, 4), torch.ones(2, 4))]))
    with pytest.raises(
        ConfigError, match="is missing; pass an iterator of the samples to evaluate; the iterator of tr"
    ):
        engine.eval_batch()
    engine.train_batch()


def test_a_loader_in_place_of_an_iterator(pipeline):
    loader = DataLoader(TensorDataset(torch.randn(4, 4), torch.randn(4, 4)), batch_size=2)
    with pytest.raises(ConfigError, match=r"is a DataLoader, .* pass iter\(\.\.\.\) of it"):
        pipeline().train_batch(loader)


def test_inputs_of_another_dtype_in_a_pipeline(pipeline):
    data = iter([(torch.randn(2, 4), torch.randn(2, 4))])
    with pytest.raises(RuntimeError, match="config's bf16 made the model's parameters bfloat16, .* inputs of float32"):
        pipeline(bf16={"enabled": True}).train_batch(data)


def test_experts_of_another_width():
    with pytest.raises(ConfigError, match="found inputs of width 4, and hidden_size 8"):
        MoE(hidden_size=8, expert=nn.Linear(8, 8), num_experts=2)(torch.randn(2, 4))


def test_batch_sizes_of_a_library_that_saw_one_process():
    with pytest.raises(ConfigError, match="right for 1 rank, so what wrote it saw one process where there are 2"):
        resolve_batch(8, 4, 2, world_size=2)
    with pytest.raises(ConfigError, match="change one of them"):
        resolve_batch(9, 4, 2, world_size=2)


@pytest.mark.parametrize("stage", range(4))
def test_parameters_with_memory_in_common(single_rank, lines, stage):
    net = nn.Module()
    base = torch.arange(12.0)
    net.first, net.apart = nn.Parameter(base[:4]), nn.Parameter(base[8:])
    net.tied = net.first
    net.second = nn.Parameter(base[2:6])
    engine, *_ = deepspeed.initialize(model=net, config={**CONFIG, "zero_optimization": {"stage": stage}})
    engine.destroy()
    said = [text for _, text in lines if "share memory" in text]
    assert len(said) == (stage > 0)
    assert all("the parameters 'first' and 'second' share memory" in line for line in said)


def test_parameters_of_one_storage_that_are_apart(single_rank, lines):
    net = nn.LSTM(4, 4)
    base = torch.zeros(4, 4)
    net.even, net.odd = nn.Parameter(base[:, ::2]), nn.Parameter(base[:, 1::2])
    net.empty, net.rest = nn.Parameter(base[:0]), nn.Parameter(base[0])
    deepspeed.initialize(model=net, config={**CONFIG, "zero_optimization": {"stage": 1}})[0].destroy()
    assert not any("share memory" in text for _, text in lines)


@pytest.mark.parametrize(
    ("saved", "keys", "flags", "former"),
    [
        ({"gradient_accumulation_steps": 3}, {"train_batch_size": 2}, {}, 6),
        ({"train_batch_size": 8}, {}, {}, 8),
        ({"train_batch_size": 8}, {}, {"load_module_only": True}, None),
        ({"gradient_accumulation_steps": 2}, {"train_batch_size": 4}, {}, None),
    ],
)
def test_a_checkpoint_of_other_batches_is_told(saved, keys, flags, former, tmp_path, single_rank, lines):
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config={**CONFIG, **saved})[0]
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config={**CONFIG, **keys})[0]
    lines.clear()
    engine.load_checkpoint(str(tmp_path), **flags)
    said = [text for _, text in lines if "train_batch_size" in text]
    wanted = f"train_batch_size is {engine.train_batch_size()}, and was {former} when the checkpoint was saved: "
    assert [text.startswith(wanted) for text in said] == [True] * (former is not None)
    engine.destroy()


def test_a_batch_that_the_configuration_did_not_ask_for_is_not_told(tmp_path, single_rank, lines):
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=CONFIG)[0]
    engine.set_train_batch_size(3 * engine.train_batch_size())
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    engine.save_checkpoint(str(tmp_path))
    lines.clear()
    engine.load_checkpoint(str(tmp_path))
    engine.destroy()
    assert not [text for _, text in lines if "train_batch_size" in text]
