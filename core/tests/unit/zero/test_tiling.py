"""`TiledLinear` computes what one linear layer does."""

import pytest
import torch
from deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias
from deepspeed.zero.tiling import _boundaries
from torch import nn

X = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("bias", "in_splits", "out_splits"), [(True, 1, 1), (True, 3, 2), (False, 2, 5)])
def test_it_computes_and_differentiates_like_a_linear_layer(bias, in_splits, out_splits):
    plain = nn.Linear(7, 5, bias=bias)
    tiled = TiledLinear(7, 5, bias=bias, in_splits=in_splits, out_splits=out_splits, init_linear=plain)
    assert sum(param.numel() for param in tiled.parameters()) == sum(param.numel() for param in plain.parameters())
    x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    tiled(x).square().sum().backward()
    plain(other).square().sum().backward()
    torch.testing.assert_close(tiled(x), plain(x))
    torch.testing.assert_close(x.grad, other.grad)


def test_parts_may_be_given_and_left_apart():
    tiled = TiledLinear(7, 5, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False)
    outputs = tiled([X[:, :4], X[:, 4:]])
    assert [output.shape for output in outputs] == [(3, 3), (3, 2)]
    with pytest.raises(ValueError, match="found 1 part of the input, in_splits is 2"):
        tiled([X])


class Deferred(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight), self.bias


def test_layers_that_return_their_bias():
    plain = nn.Linear(7, 5)
    tiled = TiledLinearReturnBias(7, 5, in_splits=2, out_splits=2, linear_cls=Deferred, init_linear=plain)
    output, bias = tiled(X)
    torch.testing.assert_close(output + bias, plain(X))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="in_splits is 8; it must be from 1 to the number of features, 7"):
        TiledLinear(7, 5, in_splits=8)
    with pytest.raises(ValueError, match="bias is True here; the other layer must have the same"):
        TiledLinear(7, 5).copy_params_from(nn.Linear(7, 5, bias=False))


def test_parts_differ_by_one_at_most():
    assert _boundaries("in_splits", 3, 8) == [0, 3, 6, 8]
