"""Each technique, at its documented setting, on a classifier of real digits: it keeps its accuracy within 1%."""

import copy

import deepspeed
import pytest
import torch
from deepspeed.compression import init_compression, redundancy_clean
from torch import nn

STEPS, BATCH = 200, 128


def technique(name, params, modules, related=None, **shared):
    group = {"params": params, "modules": modules} | ({"related_modules": related} if related else {})
    shared = {"enabled": True, "schedule_offset": 0, **shared}
    return {name: {"shared_parameters": shared, "different_groups": {"g1": group}}}


class Attention(nn.Module):
    """Each row of pixels is a token."""

    def __init__(self, width=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.embed = nn.Linear(8, width)
        self.places = nn.Parameter(torch.randn(8, width) * 0.1)
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.out = nn.Linear(8 * width, 10)

    def forward(self, x):
        x = self.embed(x.view(-1, 8, 8)) + self.places
        parts = (each(x).unflatten(-1, (self.num_heads, -1)) for each in (self.query, self.key, self.value))
        q, k, v = (part.transpose(1, 2) for part in parts)
        x = x + self.dense(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return self.out((x + self.down(self.up(x).relu())).flatten(1))


class Convolutions(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, stride=2), nn.BatchNorm2d(channels)
        self.out = nn.Linear(channels * 16, 10)

    def forward(self, x):
        x = self.bn1(self.conv1(x.view(-1, 1, 8, 8))).relu()
        return self.out(self.bn2(self.conv2(x)).relu().flatten(1))


class Residuals(nn.Module):
    def __init__(self, num_layers=4, width=64):
        super().__init__()
        self.embed, self.out = nn.Linear(64, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))

    def forward(self, x):
        x = self.embed(x).relu()
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.up(x).relu())


CASES = {
    "weights in 8 bits": (
        Residuals,
        technique("weight_quantization", {"start_bits": 8, "target_bits": 8, "quantization_period": 50}, ["*"]),
    ),
    "weights in 4 bits": (
        Residuals,
        technique("weight_quantization", {"start_bits": 8, "target_bits": 4, "quantization_period": 20}, ["up"]),
    ),
    "inputs, dynamic": (
        Residuals,
        technique("activation_quantization", {"bits": 8}, ["up"], quantization_type="asymmetric",
                  range_calibration="dynamic", schedule_offset=50),
    ),
    "inputs, static": (
        Residuals,
        technique("activation_quantization", {"bits": 8}, ["up", "down"], range_calibration="static",
                  schedule_offset=50),
    ),
    "sparse, l1": (
        Residuals,
        technique("sparse_pruning", {"dense_ratio": 0.5}, ["up", "down"], schedule_offset=30),
    ),
    "sparse, topk": (
        Residuals,
        technique("sparse_pruning", {"dense_ratio": 0.5}, ["*"], method="topk", schedule_offset=30),
    ),
    "rows": (
        Residuals,
        technique("row_pruning", {"dense_ratio": 0.5}, ["up"], [["down"]], method="topk", schedule_offset=20),
    ),
    "heads": (
        Attention,
        technique("head_pruning", {"dense_ratio": 0.5}, ["dense"], [["query", "key", "value"]], method="topk",
                  num_heads=4, schedule_offset=10),
    ),
    "channels": (
        Convolutions,
        technique("channel_pruning", {"dense_ratio": 0.5}, ["conv1"], [["conv2", "bn1"]], method="topk"),
    ),
}  # fmt: skip
SMALLER = {"rows", "heads", "channels"}


@pytest.fixture(scope="module")
def digits():
    sklearn = pytest.importorskip("sklearn.datasets")  # imported here, as it takes 2 s, which each worker would spend
    images, labels = sklearn.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def plain_loss(logits, images, labels):
    return nn.functional.cross_entropy(logits, labels)


def train(model, data, config, loss=plain_loss):
    engine, *_ = deepspeed.initialize(
        model=model,
        config={"train_batch_size": BATCH, "optimizer": {"type": "Adam", "params": {"lr": 0.003}}, **config},
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        chosen = torch.randint(len(data[1]), (BATCH,), generator=generator)
        images, labels = data[0][chosen], data[1][chosen]
        engine.backward(loss(engine(images), images, labels))
        engine.step()
    engine.destroy()
    return model.eval()


@torch.no_grad()
def accuracy(model, data):
    return (model(data[0]).argmax(1) == data[1]).float().mean().item()


@pytest.fixture(scope="module")
def trained(digits, single_rank):
    """A classifier of each kind, and its accuracy."""
    found = {}
    for kind in (Attention, Convolutions, Residuals):
        torch.manual_seed(0)
        model = train(kind(), digits[0], {})
        found[kind] = model, accuracy(model, digits[1])
        assert found[kind][1] > 0.95
    return found


@pytest.mark.parametrize("case", CASES)
def test_accuracy_stays_within_one_percent(digits, trained, case):
    kind, section = CASES[case]
    before, reached = trained[kind]
    config = {"compression_training": section}
    model = train(init_compression(copy.deepcopy(before).train(), config), digits[0], config)
    expected = model(digits[1][0])
    smaller = redundancy_clean(model, config)
    torch.testing.assert_close(smaller(digits[1][0]), expected, rtol=1e-3, atol=1e-3)
    assert accuracy(smaller, digits[1]) >= reached - 0.01
    sizes = [sum(param.numel() for param in each.parameters()) for each in (smaller, before)]
    assert sizes[0] < sizes[1] if case in SMALLER else sizes[0] == sizes[1]


def test_a_student_of_half_the_layers_learns_from_its_teacher(digits, trained):
    teacher, reached = trained[Residuals]
    torch.manual_seed(1)
    student = Residuals(num_layers=2)
    reduction = {
        "enabled": True,
        "keep_number_layer": 2,
        "module_name_prefix": "layers",
        "teacher_layer": [1, 3],
        "other_module_name": ["embed", "out"],
    }
    init_compression(student, {"compression_training": {"layer_reduction": reduction}}, teacher)

    def loss(logits, images, labels):
        with torch.no_grad():
            target = teacher(images).softmax(1)
        return nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits, target)

    train(student, digits[0], {}, loss)
    assert accuracy(student, digits[1]) >= reached - 0.01
