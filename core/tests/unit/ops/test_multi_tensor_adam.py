"""A vendor's fused Adam with DeepSpeed's function serves our front, with what that function lacks done around it."""

import copy

import pytest
import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.ops import registry
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.optimizer import OnePass

SHAPES = [(7,), (3, 5), (0,), (1,)]


class VendorsAdam:
    """The function as vendors' packages have it: a static method that updates lists in place; notes its calls."""

    calls = []
    private = "the vendor's own"

    @staticmethod
    def multi_tensor_adam(
        chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
    ):
        assert noop_flag.tolist() == [0]
        assert noop_flag.dtype is torch.int32
        assert {type(step), type(mode), type(bias_correction)} == {int}
        VendorsAdam.calls.append((chunk_size, step, len(tensor_lists[0])))
        c1, c2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        for g, p, m, v in zip(*tensor_lists, strict=True):
            assert g.dtype == p.dtype == m.dtype == v.dtype
            g = g if mode == 1 else g + weight_decay * p
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            update = (m / c1) / ((v / c2).sqrt() + eps)
            p.sub_(lr * (update + weight_decay * p if mode == 1 else update))


@pytest.fixture
def vendor(builders):
    """An accelerator whose fused_adam is the vendor's."""
    VendorsAdam.calls = []
    kind = builders.make("fused_adam", VendorsAdam, class_name="FusedAdamBuilder")
    set_accelerator(builders.accelerator(kind, name="cpu")())
    return VendorsAdam


def make_params(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def train(params, **arguments):
    groups = [{"params": params, "fp32_optimizer_states": True}]
    optimizer = FusedAdam(groups, lr=3e-2, weight_decay=0.1, **arguments)
    for seed in range(1, 5):
        generator = torch.Generator().manual_seed(seed)
        for param in params if seed > 1 else params[1:]:  # one parameter is a step behind
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"adam_w_mode": False}, {"bias_correction": False}, {"betas": (0.8, 0.95), "eps": 1e-6}]
)
def test_steps_are_those_of_the_reference(vendor, monkeypatch, dtype, options):
    ours, theirs = make_params(dtype), make_params(dtype)
    ours_state = train(ours, **options).state
    calls = [(step, number) for _, step, number in vendor.calls]  # the empty parameter is not among them
    assert calls == [(1, 2), (1, 1), (2, 2), (2, 1), (3, 2), (3, 1), (4, 2)]
    monkeypatch.setenv("DS_OPS_DISABLE", "all")
    their_state = train(theirs, **options).state
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        assert ours_state[one]["step"] == their_state[other]["step"]


def test_one_pass_scales_gradients_in_half_precision_and_writes_copies(vendor):
    master, reference = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    optimizer, expected = FusedAdam([master], lr=0.1), torch.optim.AdamW([reference], lr=0.1, weight_decay=0.0)
    grad, copy = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.bfloat16), torch.empty(4, dtype=torch.bfloat16)
    assert optimizer.has_one_pass(optimizer.param_groups[0])
    optimizer.step(one_pass=OnePass([[grad]], [[copy]], 0.25))
    reference.grad = grad.float() * 0.25
    expected.step()
    torch.testing.assert_close(master, reference)
    assert torch.equal(copy, master.bfloat16())
    assert len(vendor.calls) == 1


def test_an_empty_parameter_counts_its_step_and_is_not_shown_to_the_vendor(vendor):
    params = [torch.nn.Parameter(torch.ones(size)) for size in (3, 0)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = FusedAdam(params, lr=0.1)
    optimizer.step()
    assert vendor.calls == [(2048 * 32, 1, 1)]
    assert [float(optimizer.state[param]["step"]) for param in params] == [1, 1]


def test_a_loaded_op_can_be_copied(vendor):
    assert copy.copy(registry.require("fused_adam")).private == "the vendor's own"


def test_the_vendors_own_names_are_still_there_and_the_op_is_the_devices(vendor):
    loaded = registry.require("fused_adam")
    assert loaded.private == "the vendor's own"
    assert registry.resolve("fused_adam").source == "device"
    assert not hasattr(loaded, "no_such_function")
