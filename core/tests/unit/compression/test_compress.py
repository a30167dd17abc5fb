"""A whole model, prepared by the configuration, moved by steps, and cleaned."""

import copy
import json

import pytest
import torch
from deepspeed.compression import compression_scheduler, init_compression, redundancy_clean, student_initialization
from deepspeed.compression.compress import convert_conv1d_to_linear, get_module_name, module_replacement
from deepspeed.compression.config import get_compression_config
from deepspeed.errors import ConfigError
from torch import nn


class Block(nn.Module):
    """Self-attention of separate projections, and a feed-forward: names as BERT has them."""

    def __init__(self, width=8, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        parts = (each(x).unflatten(-1, (self.num_heads, -1)) for each in (self.query, self.key, self.value))
        q, k, v = (part.transpose(1, 2) for part in parts)
        x = x + self.dense(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(self.up(x).relu())


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
        self.out = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x):
        return self.out(self.conv2(self.norm(self.conv1(x)).relu()).relu().flatten(1))


def technique(name, params, modules, related=None, **shared):
    group = {"params": params, "modules": modules} | ({"related_modules": related} if related else {})
    shared = {"enabled": True, "schedule_offset": 0, **shared}
    return {name: {"shared_parameters": shared, "different_groups": {"g1": group}}}


def config(*techniques):
    return {"compression_training": {name: value for each in techniques for name, value in each.items()}}


WEIGHTS = technique("weight_quantization", {"start_bits": 8, "target_bits": 4, "quantization_period": 2}, ["*"])
INPUTS = technique("activation_quantization", {"bits": 8}, ["up"], range_calibration="dynamic")
SPARSE = technique("sparse_pruning", {"dense_ratio": 0.5}, ["query", "key"], method="topk")
ROWS = technique("row_pruning", {"dense_ratio": 0.5}, ["up"], [["down"]], method="topk")
HEADS = technique("head_pruning", {"dense_ratio": 0.5}, ["dense"], [["query", "key", "value"]], num_heads=4)
CHANNELS = technique("channel_pruning", {"dense_ratio": 0.5}, ["conv1"], [["conv2", "norm"]], method="topk")
CHANNELS_OF_LINEAR = technique("channel_pruning", {"dense_ratio": 0.5}, ["conv2"], [["out"]], method="l1")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make(kind="block"):
    return (
        (nn.Sequential(Block(), Block()), torch.randn(2, 5, 8))
        if kind == "block"
        else (
            Convolutions(),
            torch.randn(2, 1, 8, 8),
        )
    )


def num_values(model):
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("block", config(WEIGHTS)),
        ("block", config(INPUTS)),
        ("block", config(SPARSE)),
        ("block", config(ROWS)),
        ("block", config(HEADS)),
        ("block", config(WEIGHTS, INPUTS, SPARSE, ROWS, HEADS)),
        ("convolutions", config(CHANNELS)),
        ("convolutions", config(CHANNELS_OF_LINEAR)),
        ("convolutions", config(WEIGHTS, CHANNELS, CHANNELS_OF_LINEAR | {})),
    ],
)
def test_the_cleaned_model_computes_what_the_trained_one_does(kind, settings):
    if kind == "convolutions" and "weight_quantization" in settings["compression_training"]:
        settings = config(technique("weight_quantization", {}, ["conv"]), CHANNELS)
    model, x = make(kind)
    size = num_values(model)
    assert init_compression(model, settings) is model
    scheduler = compression_scheduler(model, get_compression_config(settings))
    for _ in range(20):
        model(x).square().mean().backward()
        scheduler.step()
    model.eval()
    expected = model(x)
    assert redundancy_clean(model, settings) is model
    torch.testing.assert_close(model(x), expected)
    if "row_pruning" in settings["compression_training"] or "channel_pruning" in settings["compression_training"]:
        assert num_values(model) < size
    if "activation_quantization" not in settings["compression_training"]:
        assert not any(type(module).__module__.startswith("deepspeed") for module in model.modules())
        reloaded = copy.deepcopy(model)
        reloaded.load_state_dict(model.state_dict())


def test_bits_that_never_change_need_no_period():
    model, x = make()
    params = {"start_bits": 8, "target_bits": 8, "quantization_period": 0}
    outputs = []
    for each, period in ((model, 0), (copy.deepcopy(model), 1)):
        chosen = config(technique("weight_quantization", params | {"quantization_period": period}, ["up"]))
        init_compression(each, chosen)
        scheduler = compression_scheduler(each, get_compression_config(chosen))
        for _ in range(3):
            scheduler.step()
        outputs.append(each(x))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    assert model[0].up.weight_quantizer.num_bits == 8


def test_techniques_begin_at_their_step():
    model, x = make()
    settings = config(
        technique("weight_quantization", {"start_bits": 8, "target_bits": 6, "quantization_period": 2}, ["up"],
                  schedule_offset=2),
        technique("sparse_pruning", {"dense_ratio": 0.5}, ["up"], schedule_offset=3),
    )  # fmt: skip
    plain = copy.deepcopy(model)
    init_compression(model, settings)
    scheduler = compression_scheduler(model, get_compression_config(settings))
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
    up, seen = model[0].up, []
    for _ in range(7):
        scheduler.step()
        seen.append((up.weight_quantization_enabled, up.weight_quantizer.num_bits, up.sparse_pruning_enabled))
    assert seen == [
        (False, 8, False),
        (True, 8, False),
        (True, 8, True),
        (True, 7, True),
        (True, 7, True),
        (True, 6, True),
        (True, 6, True),
    ]
    assert scheduler.training_steps == 7
    scheduler.step(step_zero_check=True)
    assert scheduler.training_steps == 7


def test_layers_stay_the_objects_they_were():
    model, _ = make()
    layers, params = list(model.modules()), list(model.parameters())
    init_compression(model, config(WEIGHTS, ROWS))
    assert all(one is other for one, other in zip(model.modules(), layers, strict=True))
    kept = {id(param) for param in model.parameters()}
    assert all(id(param) in kept for param in params)


def test_a_group_is_paired_with_its_relatives_layer_by_layer():
    model, x = make()
    init_compression(model, config(ROWS))
    with torch.no_grad():
        model[0].up.row_mask_scores.copy_(torch.arange(32.0).view(32, 1))
        model[1].up.row_mask_scores.copy_(-torch.arange(32.0).view(32, 1))
    before = [copy.deepcopy(model[index]) for index in (0, 1)]
    redundancy_clean(model, config(ROWS))
    torch.testing.assert_close(model[0].down.weight, before[0].down.weight[:, 16:])
    torch.testing.assert_close(model[1].up.weight, before[1].up.weight[:16])


def test_without_relatives_rows_become_zeros():
    model, _ = make()
    settings = config(technique("row_pruning", {"dense_ratio": 0.25}, ["up"]))
    redundancy_clean(init_compression(model, settings), settings)
    assert model[0].up.weight.shape == (32, 8)
    assert int(model[0].up.weight.any(1).sum()) == 8


def test_heads_are_counted():
    model, x = make()
    redundancy_clean(init_compression(model, config(HEADS)), config(HEADS))
    assert (model[0].num_heads, model[0].query.weight.shape) == (2, (4, 8))


def test_a_state_dict_of_training_is_cleaned_in_another_process():
    settings = config(SPARSE, ROWS)
    trained = init_compression(make()[0], settings)
    with torch.no_grad():
        for param in trained.parameters():
            param.add_(torch.randn_like(param))
    other = init_compression(make()[0], settings)
    other.load_state_dict(trained.state_dict())
    _, x = make()
    torch.testing.assert_close(redundancy_clean(other, settings)(x), redundancy_clean(trained, settings)(x))


def test_excluded_modules_keep_all_weights():
    settings = config(technique("sparse_pruning", {"dense_ratio": 0.5}, ["*"], excluded_modules=["0.up", "dense"]))
    model = redundancy_clean(init_compression(make()[0], settings), settings)
    assert bool((model[0].up.weight != 0).all() and (model[1].dense.weight != 0).all())
    assert (model[1].up.weight == 0).sum() == model[1].up.weight.numel() / 2


def test_a_file_is_a_configuration_too(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config(WEIGHTS)))
    model = init_compression(make()[0], str(path))
    assert model[0].up.weight_quantizer.target_bits == 4


def test_a_student_begins_as_some_layers_of_its_teacher():
    teacher = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), "head": nn.Linear(4, 2)})
    student = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), "head": nn.Linear(4, 2)})
    reduction = {
        "enabled": True,
        "keep_number_layer": 2,
        "module_name_prefix": "layers",
        "teacher_layer": [1, 3],
        "other_module_name": ["head"],
    }
    settings = {"compression_training": {"layer_reduction": reduction}}
    init_compression(student, settings, teacher_model=teacher)
    for mine, theirs in ((0, 1), (1, 3)):
        torch.testing.assert_close(student["layers"][mine].weight, teacher["layers"][theirs].weight)
    torch.testing.assert_close(student["head"].bias, teacher["head"].bias)
    with pytest.raises(ConfigError, match="layer_reduction.enabled: found true without a teacher"):
        init_compression(student, settings)
    for change, message in (
        ({"keep_number_layer": 3}, "keep_number_layer: found 3, but teacher_layer lists 2"),
        ({"teacher_layer": [1, 9]}, "found no module 'layers.9' in the teacher"),
        ({"module_name_prefix": ""}, "module_name_prefix: found nothing beside teacher_layer"),
        ({"teacher_layer": [], "other_module_name": []}, "found neither teacher_layer nor other_module_name"),
    ):
        wrong = {"compression_training": {"layer_reduction": reduction | change}}
        with pytest.raises(ConfigError, match=message):
            student_initialization(student, teacher, wrong)
    student["head"] = nn.Linear(4, 3)
    with pytest.raises(ConfigError, match=r"found 'bias' of shape \(3,\) in the student's 'head' and \(2,\)"):
        student_initialization(student, teacher, settings)


def test_conv1d_becomes_linear():
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(6, 4), nn.ReLU())
    x = torch.randn(2, 4)
    expected = model(x)
    convert_conv1d_to_linear(model, Conv1D)
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(model(x), expected)


def test_names_and_single_layers():
    model, _ = make()
    names, seen = get_module_name("g", model, "up", set())
    assert names == ["0.up", "1.up"]
    with pytest.raises(ConfigError, match="g: found '0.up', which is in another group too"):
        get_module_name("g", model, "up", seen)
    module_replacement(model, "0.up")
    assert type(model[0].up).__name__ == "LinearLayer_Compress"
    with pytest.raises(ConfigError, match="found '0', a Block"):
        module_replacement(model, "0")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (technique("row_pruning", {}, ["nothing"]), r"g1.modules: found 'nothing', which is in the name of no Linear"),
        (technique("row_pruning", {}, ["("]), r"found the pattern '\(', which is no regular expression"),
        (technique("row_pruning", {}, ["up", "0.up"], [["down"], ["0.down"]]), r"names '0.up', that is in g1 too"),
        (technique("row_pruning", {}, ["up"], [["0.down"]]), r"'0.down', .+ 1 layer \(0.down\), for 2 layers"),
        (technique("row_pruning", {"dense_ratio": 0}, ["up"]), r"g1.params.dense_ratio: found 0"),
        (technique("row_pruning", {"ratio": 1}, ["up"]), r"g1.params.*ratio"),
        (technique("row_pruning", {}, ["up"], [["down"], ["down"]]), r"related_modules: found .+ for 1 of modules"),
        (technique("sparse_pruning", {}, ["up"], [["down"]]), r"related_modules: found it with sparse_pruning"),
        (
            technique("sparse_pruning", {"dense_ratio": 0.5}, ["up"], method="snip_momentum"),
            r"g1.params: found .+, but snip_momentum prunes all layers together",
        ),
        (technique("sparse_pruning", {}, ["up"], method="snip_momentum", block_pattern="2:4"), r"block_pattern: found"),
        (
            technique("sparse_pruning", {}, ["up"], method="snip_momentum", schedule_offset=2, schedule_offset_end=1),
            r"schedule_offset_end: found 1, before schedule_offset",
        ),
        (technique("sparse_pruning", {}, ["up"], method="l3"), r"sparse_pruning.shared_parameters.method: found 'l3'"),
        (technique("head_pruning", {}, ["dense"]), r"num_heads: found nothing"),
        (technique("weight_quantization", {"start_bits": 4}, ["up"]), r"target_bits: found 8, above start_bits 4"),
        (
            technique("weight_quantization", {"target_bits": 4, "quantization_period": 0}, ["up"]),
            "quantization_period: found 0 with start_bits 8 and target_bits 4; give the steps",
        ),
        (technique("weight_quantization", {}, ["up"], quantize_groups=7), r"quantize_groups: found 7"),
        (technique("activation_quantization", {"bits": 2}, ["up"]), r"params.bits: found 2"),
        ({"row_pruning": {"shared_parameters": {"enabled": True}}}, r"different_groups: found none"),
    ],
)
def test_what_does_not_fit_is_named_and_the_model_stays(settings, message):
    model, _ = make()
    with pytest.raises(ConfigError, match=message):
        init_compression(model, config(settings))
    assert type(model[0].up) is nn.Linear or "quantize_groups" in message


def test_what_was_not_prepared_is_not_scheduled_or_cleaned():
    model, _ = make()
    with pytest.raises(ConfigError, match=r"row_pruning: found '0.up', which is not prepared .+init_compression"):
        redundancy_clean(model, config(ROWS))
    with pytest.raises(ConfigError, match=r"row_pruning: found '0.up', which is not prepared"):
        compression_scheduler(model, get_compression_config(config(ROWS)))
    with pytest.raises(ConfigError, match=r"init_compression: found mpu object"):
        init_compression(model, config(ROWS), mpu=object())


def test_sharded_weights_are_refused():
    model, _ = make()
    model[0].up.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(ConfigError, match=r"init_compression: found sharded weights, such as '0.up.weight'"):
        init_compression(model, config(ROWS))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.middle(self.embed(tokens)))


def test_a_tied_weight_is_refused():
    """Else zeros of the head would be zeros of the embedding, in the cleaned model alone."""
    model = Tied()
    before = model.embed.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"sparse_pruning: found 'head', whose weight another module has too"):
        init_compression(model, config(technique("sparse_pruning", {"dense_ratio": 0.5}, ["*"], method="l1")))
    assert type(model.middle) is nn.Linear
    assert torch.equal(model.embed.weight, before)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            technique("row_pruning", {"dense_ratio": 0.5}, ["up"], [["dense"]], method="l1"),
            "8 inputs for a layer of 32",
        ),
        (
            technique("head_pruning", {"dense_ratio": 0.5}, ["dense"], [["up"]], num_heads=4),
            "32 outputs for heads of 8",
        ),
        (
            technique("row_pruning", {"dense_ratio": 0.5}, ["query", "key"], [["up"], ["up"]], method="l1"),
            "'key' and 'query', which both have 'up' in related_modules",
        ),
    ],
)
def test_related_modules_that_do_not_fit_are_refused_before_training(asked, message):
    model = Block()
    with pytest.raises(ConfigError, match=message):
        init_compression(model, config(asked))
    assert type(model.up) is nn.Linear


def test_a_range_that_no_training_has_seen_rounds_nothing():
    static = technique("activation_quantization", {"bits": 8}, ["up"], range_calibration="static")
    asked, x = config(static), torch.randn(2, 3, 8)
    model = Block().eval()
    wanted = model(x)
    compression_scheduler(init_compression(model, asked), asked["compression_training"])
    assert torch.equal(model(x), wanted)
    with pytest.raises(ConfigError, match="found 'up', whose inputs have no range yet"):
        redundancy_clean(model, asked)
    model.train()(x)
    redundancy_clean(model.eval(), asked)
    torch.testing.assert_close(model(x), wanted, rtol=0.1, atol=0.1)


def test_an_overflow_leaves_the_range_as_it_is():
    static = technique("activation_quantization", {"bits": 8}, ["up"], range_calibration="static")
    model = init_compression(Block(), config(static))
    compression_scheduler(model, config(static)["compression_training"])
    model.up(torch.ones(2, 8))
    before = model.up.activation_quantizer.x_min_max.clone()
    model.up(torch.full((2, 8), torch.inf))
    assert torch.equal(model.up.activation_quantizer.x_min_max, before)


def test_no_input_at_all():
    static = technique("activation_quantization", {"bits": 8}, ["up"], range_calibration="dynamic")
    model = init_compression(Block(), config(static))
    compression_scheduler(model, config(static)["compression_training"])
    assert model.up(torch.empty(0, 8)).shape == (0, 32)


def test_something_is_left_of_a_layer():
    model = init_compression(Block(), config(technique("row_pruning", {"dense_ratio": 0.01}, ["up"], method="l1")))
    assert int(model.up.get_mask("row").sum()) == 1


def test_the_scheduler_passes_layers_that_were_cleaned():
    model = init_compression(Block(), config(ROWS))
    steps = iter(range(3))
    scheduler = compression_scheduler(model, config(ROWS)["compression_training"], num_steps=lambda: next(steps))
    redundancy_clean(model, config(ROWS))
    scheduler.check_all_modules()
    assert type(model.up) is nn.Linear
