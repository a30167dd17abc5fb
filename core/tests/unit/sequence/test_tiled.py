"""Tiled computation: values and gradients of the whole, one tile's memory, and each parameter's gradient once."""

import pytest
import torch
from deepspeed.sequence.tiled import SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute
from torch.nn import functional as F

BATCH, TOKENS, WIDTH, VOCABULARY = 2, 11, 6, 13


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 8 * WIDTH)
        self.down = torch.nn.Linear(8 * WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        return self.down(F.dropout(F.gelu(self.up(x)), 0.0))


def mlp_forward(self, x):
    return self.down(F.gelu(self.up(x)))


def loss_of(self, x, y, mask=None):
    y = y if mask is None else y.masked_fill(~mask, -100)
    return F.cross_entropy(self.head(x).flatten(0, -2), y.flatten(), reduction="sum")


@pytest.fixture
def setup():
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    return MLP(), x, torch.randint(0, VOCABULARY, (BATCH, TOKENS))


def gradients(module, x, result):
    result.backward()
    found = [x.grad.clone(), *(param.grad.clone() for param in module.parameters() if param.grad is not None)]
    x.grad = None
    module.zero_grad()
    return found


def compare(setup, whole, tiled):
    module, x, _ = setup
    expected, found = whole(), tiled()
    assert torch.allclose(found, expected, atol=1e-5)
    for mine, theirs in zip(gradients(module, x, found.sum()), gradients(module, x, expected.sum()), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("shards", [1, 3, 7, TOKENS, 4 * TOKENS])
def test_an_mlp_in_tiles(setup, shards):
    module, x, _ = setup
    compare(setup, lambda: module(x), lambda: TiledMLP.apply(mlp_forward, module, x, shards, None))
    compare(setup, lambda: module(x[0]), lambda: TiledMLP.apply(mlp_forward, module, x[0], shards))


@pytest.mark.parametrize("masked", [False, True])
def test_logits_and_loss_in_tiles(setup, masked):
    module, x, y = setup
    mask = torch.arange(TOKENS).expand(BATCH, -1) % 3 > 0 if masked else None
    compare(
        setup,
        lambda: loss_of(module, x, y, mask),
        lambda: TiledFusedLogitsLoss.apply(loss_of, module, x, y, mask, 4, list(module.parameters()), "sum"),
    )
    mean = TiledFusedLogitsLoss.apply(loss_of, module, x, y, mask, 4)
    assert mean.item() == pytest.approx(loss_of(module, x, y, mask).item() / 4, rel=1e-5)


def test_any_function_in_tiles(setup):
    module, x, y = setup

    def loss(hidden, labels, scale, module):
        return scale * loss_of(module, hidden, labels)

    def tiled(reduction="sum"):
        to_shard, to_pass = {"hidden": x, "labels": y}, {"scale": 2.0, "module": module}
        return sequence_tiled_compute(loss, TOKENS, 3, to_shard, to_pass, "hidden", None, 0, reduction)

    compare(setup, lambda: 2 * loss_of(module, x, y), tiled)
    assert tiled(None).shape == (3,)
    assert tiled("mean").item() == pytest.approx(tiled().item() / 3)
    keys = ["hidden"], ["module"]
    compare(
        setup,
        lambda: module(x),
        lambda: SequenceTiledCompute.apply(
            lambda hidden, module: module(hidden), TOKENS, 3, *keys, "hidden", None, 1, None, x, module
        ),
    )


@pytest.mark.parametrize(
    ("tokens", "shards", "sizes"),
    [(16, 4, [4] * 4), (34, 4, [9, 9, 9, 7]), (17, 7, [3, 3, 3, 3, 3, 2]), (3, 4, [1] * 3), (1, 4, [1])],
)
def test_the_cut_is_that_of_deepspeed(tokens, shards, sizes):
    """As 0.19.6 was seen to cut, so that the mean of the tiles means the same."""
    x, seen = torch.arange(float(tokens))[None, :, None], []

    def mean(self, x, *_):
        seen.append(x.numel())
        return x.mean()

    found = TiledFusedLogitsLoss.apply(mean, None, x, x[..., 0], None, shards)
    assert seen == sizes
    assert found == torch.stack([tile.mean() for tile in x.flatten().chunk(shards)]).mean()
    y = TiledMLP.apply(lambda self, x: seen.append(x.shape[1]) or 2 * x, None, x, shards)
    assert torch.equal(y, 2 * x)
    arguments = {"x": x, "scale": 2}
    y = sequence_tiled_compute(
        lambda x, scale: seen.append(x.shape[1]) or x * scale, tokens, shards, arguments, {}, "x"
    )
    assert torch.equal(y, 2 * x)
    assert seen == 3 * sizes


def test_no_tokens(setup):
    module, x, _ = setup
    assert TiledMLP.apply(mlp_forward, module, x[:, :0], 4).shape == (BATCH, 0, WIDTH)


def test_hooks_see_each_gradient_once(setup):
    module, x, _ = setup
    seen = []
    for name, param in module.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    TiledMLP.apply(mlp_forward, module, x, 4).sum().backward()
    assert sorted(seen) == ["down.bias", "down.weight", "up.bias", "up.weight"]


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements that an operation gave."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return result


@pytest.mark.parametrize("kind", ["mlp", "logits"])
def test_memory_is_that_of_one_tile(kind):
    """Saved in the forward: the input. Made at any time: nothing larger than a tile's logits or hidden layer."""
    torch.manual_seed(0)
    tokens, shards, width = 64, 16, 512
    inner = torch.nn.Linear(8, width)
    x, y = torch.randn(1, tokens, 8, requires_grad=True), torch.zeros(1, tokens, dtype=torch.int64)

    def mlp(self, x):
        return inner(x).relu() @ inner.weight

    def loss(self, x, y):
        return F.cross_entropy(inner(x), y, reduction="sum")

    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), LargestTensor() as largest:
        if kind == "mlp":
            result = TiledMLP.apply(mlp, None, x, shards).sum()
        else:
            result = TiledFusedLogitsLoss.apply(loss, None, x, y, None, shards, None, "sum")
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
        result.backward()
    own = {x.untyped_storage().data_ptr(), y.untyped_storage().data_ptr()}
    assert sum(size for pointer, size in storages.items() if pointer not in own) < 4 * tokens  # scalars
    assert largest.numel <= max(tokens // shards * width, inner.weight.numel())
    assert tokens * width == 8 * max(tokens // shards * width, inner.weight.numel())  # the whole is eight times that


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: TiledMLP.apply(mlp_forward, None, x, 0), "found 0 shards; give 1 or more"),
        (
            lambda x: TiledFusedLogitsLoss.apply(loss_of, None, x, x[:, :3, 0], None, 2),
            "y has the shape .6,.; dim 0 must have 22 tokens",
        ),
        (lambda x: TiledFusedLogitsLoss.apply(loss_of, None, x, x, None, 2, None, "max"), "output_reduction is 'max'"),
        (lambda x: sequence_tiled_compute(abs, 11, 2, {"x": x}, {}, "y"), "is 'y', but the tensors in .* are x"),
        (lambda x: SequenceTiledCompute.apply(abs, 11, 2, ["x"], [], "x", None, 1, None), "found 0 values"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(BATCH, TOKENS, WIDTH))
