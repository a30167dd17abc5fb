"""`flatten` and `unflatten` against torch's own."""

import pytest
import torch
from ds_ext_cuda.op_builder import UtilsBuilder
from torch._utils import _flatten_dense_tensors


@pytest.fixture
def ops(load_op):
    return load_op(UtilsBuilder)


@pytest.mark.parametrize("of_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("offset", [0, 1])
def test_flatten_equals_torch(ops, numbers, of_dtype, offset):
    shapes = [(3, 5), (), (0, 2), (17,), (9000,), (64, 64), (1,)]
    tensors = [numbers(*shape, seed=seed, dtype=of_dtype, offset=offset) for seed, shape in enumerate(shapes)]
    assert torch.equal(ops.flatten(tensors), _flatten_dense_tensors(tensors))


def test_flatten_takes_more_tensors_than_one_launch_and_those_that_are_not_contiguous(ops, numbers):
    tensors = [numbers(index % 7, 3, seed=index).t() for index in range(300)]
    assert torch.equal(ops.flatten(tensors), torch.cat([tensor.reshape(-1) for tensor in tensors]))


def test_unflatten_gives_views_that_a_gradient_goes_through(ops, numbers):
    like = [numbers(2, 3), numbers(), numbers(0), numbers(4)]
    flat = numbers(13, seed=3).requires_grad_()  # two more than needed, as padding
    parts = ops.unflatten(flat, like)
    assert [part.shape for part in parts] == [tensor.shape for tensor in like]
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), flat[:11])
    assert parts[3].data_ptr() == flat[7:].data_ptr()
    (parts[0].sum() * 2).backward()
    assert flat.grad.tolist() == [2.0] * 6 + [0.0] * 7


def test_refuses_wrong_arguments_by_name(ops, numbers):
    with pytest.raises(RuntimeError, match="flatten: found no tensors|no tensor arguments|no Tensor arguments"):
        ops.flatten([])
    with pytest.raises(RuntimeError, match=r"tensors\[1\]: found dtype bfloat16, but it must be dtype float32"):
        ops.flatten([numbers(2), numbers(2, dtype=torch.bfloat16)])
    with pytest.raises(RuntimeError, match=r"flat: found shape \(3\), .* at least 4 elements"):
        ops.unflatten(numbers(3), [numbers(2, 2)])


def test_opcheck(ops, numbers):
    torch.library.opcheck(ops.flatten.default, ([numbers(5), numbers(2, 2)],))
