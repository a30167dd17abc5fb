"""Norms against fp64, clipping against torch's own."""

import math
from fractions import Fraction

import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.optim import norm as norm_module
from deepspeed.optim.norm import (
    ExactSquares,
    clip_coefficient,
    clip_grad_norm_,
    clip_tensors_by_global_norm,
    get_global_norm,
    get_global_norm_of_tensors,
    get_grad_norm,
    get_weight_norm,
    global_norm,
    scale_in_place,
)


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("numel", [1, 4095, 4096, 4097, 3 * 4096, 3_000_001])
def test_long_tensors_are_exact_to_fp32(numel):
    tensor = _random(numel)
    wanted = tensor.double().norm().item()
    assert global_norm([tensor]).item() == pytest.approx(wanted, rel=5e-7)
    assert global_norm([tensor]).dtype == torch.float32


@pytest.mark.parametrize("numel", [1, 1000, 2**20 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_squares_are_the_same_in_every_order(numel, dtype):
    numbers = (_random(numel) * _random(numel, seed=1).exp()).to(dtype)
    squares = ExactSquares(numel)
    largest = squares.largest([numbers])
    assert largest == numbers.abs().max()
    whole = squares.folds([numbers], largest)
    shuffled = numbers[torch.randperm(numel, generator=torch.Generator().manual_seed(2))]
    for parts in (shuffled.split(numel // 7 + 1), shuffled.split(numel // 2 + 1)):
        sums = torch.stack([squares.folds([part], largest) for part in parts])
        for added in (sums.sum(0), sums.flip(0).cumsum(0)[-1]):
            assert _integers(added) == _integers(whole)
            assert torch.equal(squares.total(added, largest), squares.total(whole, largest))
    expected = math.fsum(numbers.double().square().tolist())
    assert squares.total(whole, largest).item() == pytest.approx(expected, rel=2**-30, abs=0)


def _integers(folds):
    """The integers whose halves `folds` has."""
    high, low = folds.view(2, -1).tolist()
    return [int(each) * 2**32 + int(rest) for each, rest in zip(high, low, strict=True)]


def test_exact_squares_are_what_rational_numbers_give():
    numbers = torch.cat([_random(3000), _random(20, seed=1) * 2.0**-21, torch.tensor([2.0**14, -(2.0**-60)])])
    for numel, num_folds in ((len(numbers), 1), (2**25 - 3, 2), (2**33, 3)):
        squares = ExactSquares(numel)
        assert squares.num_folds == num_folds
        largest = squares.largest([numbers])
        found = Fraction(squares.total(squares.folds(numbers.split(1000), largest), largest).item())
        expected = sum(Fraction(number) ** 2 for number in numbers.tolist())
        assert abs(found / expected - 1) < Fraction(1, 2**30)


@pytest.mark.parametrize("numel", [2**16 - 3, 2**25 - 3])
def test_exact_squares_of_many_equal_numbers_keep_to_an_integer(numel):
    number = torch.tensor(1 - 2**-24).expand(numel)  # whose square is the largest below a power of two
    squares = ExactSquares(numel)
    largest = squares.largest([number[:1]])
    assert squares.total(squares.folds([number], largest), largest).item() == pytest.approx(
        numel * float(number[0]) ** 2, rel=2**-30, abs=0
    )


def test_exact_squares_of_very_large_and_very_small_numbers():
    numbers = torch.cat([torch.full((1000,), 3e38), torch.full((1000,), 1e-38), torch.zeros(5)])
    for part in (numbers, numbers[1000:], numbers[2000:]):
        squares = ExactSquares(len(numbers))
        found = squares.total(squares.folds([part], squares.largest([part])), squares.largest([part])).item()
        assert found == pytest.approx(part.double().square().sum().item(), rel=2**-30)
    many = ExactSquares(2**33)
    assert many.num_folds == 3
    assert many.total(many.folds([numbers], many.largest([numbers])), many.largest([numbers])).item() == pytest.approx(
        numbers.double().square().sum().item(), rel=2**-30
    )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_exact_squares_show_an_overflow(value):
    numbers = _random(100)
    numbers[7] = value
    squares = ExactSquares(100)
    parts = [squares.folds([part], squares.largest([numbers])) for part in (numbers[:50], numbers[50:])]
    total = squares.total(sum(parts), squares.largest([numbers])).item()
    assert math.isnan(total) if math.isnan(value) else total == math.inf


def test_exact_squares_of_nothing_are_zero():
    squares = ExactSquares(0)
    for parts in ([], [torch.zeros(0)], [torch.zeros(7)]):
        assert squares.total(squares.folds(parts, squares.largest(parts)), squares.largest(parts)) == 0


def test_the_norm_does_not_depend_on_how_gradients_are_cut():
    tensor = _random(1_000_003)
    whole = global_norm([tensor])
    parts = [global_norm([part]).square() for part in tensor.split(300_001)]
    assert torch.stack(parts).sum().sqrt().item() == pytest.approx(whole.item(), rel=3e-7)


def test_mixed_shapes_and_dtypes():
    tensors = [_random(3, 5), _random(7).bfloat16(), torch.zeros(0), _random(2, 2, 2).double(), torch.tensor(2.0)]
    wanted = math.sqrt(sum(t.double().square().sum().item() for t in tensors))
    assert global_norm(tensors).item() == pytest.approx(wanted, rel=1e-6)


def test_half_tensors_are_added_up_in_fp32():
    ones = torch.ones(100_000, dtype=torch.bfloat16)
    assert global_norm([ones]).item() == pytest.approx(math.sqrt(100_000), rel=1e-6)
    assert global_norm([torch.full((4,), 60000.0, dtype=torch.float16)]).item() == pytest.approx(120000.0, rel=1e-3)


def test_sparse_and_complex():
    sparse = torch.sparse_coo_tensor([[1, 1]], [3.0, 1.0], (4,), check_invariants=True)
    assert global_norm([sparse]).item() == 4.0
    assert global_norm([torch.tensor([3 + 4j])]).item() == 5.0
    assert global_norm([torch.tensor([3 + 4j, 1 + 0j])], math.inf).item() == 5.0


def test_other_norms():
    tensors = [torch.tensor([1.0, -7.0]), torch.full((5000,), 2.0)]
    assert global_norm(tensors, math.inf).item() == 7.0
    assert global_norm(tensors, 1.0).item() == 10008.0


def test_no_tensors():
    assert global_norm([]).item() == 0.0
    assert global_norm([torch.zeros(0)]).item() == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(bad):
    tensors = [_random(10_000), torch.tensor([1.0, bad])]
    assert not math.isfinite(global_norm(tensors).item())
    assert math.isnan(global_norm(tensors).item()) == math.isnan(bad)
    assert math.isnan(clip_coefficient(math.nan, 1.0).item())
    assert clip_coefficient(torch.tensor(math.inf), 1.0).item() == 0.0


def test_clip_coefficient():
    assert clip_coefficient(torch.tensor(4.0), 1.0).item() == pytest.approx(0.25, rel=1e-6)
    assert clip_coefficient(0.5, 1.0).item() == 1.0
    assert clip_coefficient(4, 2).item() == pytest.approx(0.5, rel=1e-6)
    assert clip_coefficient(100.0, 0.0).item() == 1.0


def test_clip_grad_norm_is_torch_s():
    def make():
        params = [torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(5))]
        params.append(torch.nn.Parameter(torch.zeros(1)))  # without a gradient
        params[0].grad, params[1].grad = _random(4, 3), _random(5, seed=1)
        return params

    ours, theirs = make(), make()
    assert get_grad_norm(ours).item() == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs, 0.7).item(), rel=1e-6)
    clip_grad_norm_(ours, 0.7)
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert ours[2].grad is None


def test_names_of_deepspeed():
    tensors = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    assert get_global_norm([3.0, 4.0]) == 5.0
    assert get_global_norm([torch.tensor(3.0), torch.tensor(4.0)]).item() == 5.0
    assert get_global_norm_of_tensors(tensors, use_graph=True, moe_ep_group=None).item() == 5.0
    assert get_weight_norm(tensors).item() == 5.0
    assert clip_tensors_by_global_norm(tensors, max_norm=1.0).item() == 5.0
    torch.testing.assert_close(tensors[0], torch.tensor([0.6]))
    assert clip_tensors_by_global_norm(tensors, max_norm=1.0, global_norm=2.0) == 2.0
    torch.testing.assert_close(tensors[0], torch.tensor([0.3]))


def test_model_parallel_norms_are_refused():
    class Mpu:
        def get_model_parallel_world_size(self):
            return 2

    with pytest.raises(ConfigError, match="model-parallel world size of 2"):
        norm_module.get_grad_norm([], mpu=Mpu())


def test_scaling_keeps_dtypes():
    tensors = [torch.ones(2, dtype=torch.bfloat16), torch.ones(2)]
    scale_in_place(tensors, torch.tensor(0.5))
    assert [tensor.dtype for tensor in tensors] == [torch.bfloat16, torch.float32]
    assert tensors[0].tolist() == [0.5, 0.5]
