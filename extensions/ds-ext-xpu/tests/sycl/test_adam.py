"""The kernel of `adam_step_` against the torch reference of core."""

import pytest
import torch
from deepspeed.ops.adam.adam import adam_step, create_state

NUMBERS = {"lr": 3e-2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
MODES = {"adam_w_mode": True, "bias_correction": True, "maximize": False}
REFERENCE = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "fused": False, "foreach": False}
# parameters, gradients, copies (None: none)
MIXES = (
    (torch.float32, torch.float32, None),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16, torch.float16),
    (torch.bfloat16, torch.float32, None),
    (torch.float16, torch.bfloat16, torch.float32),
)


class Both:
    """One parameter, its states as the operator has them, and the same for the reference."""

    def __init__(self, close, numel, mix, seed=0):
        self.param_dtype, self.grad_dtype, copy_dtype = mix
        self.param = close.numbers(numel, self.param_dtype, seed=seed)
        self.exp_avg, self.exp_avg_sq, self.step = torch.zeros(numel), torch.zeros(numel), torch.tensor(0.0)
        self.copy = None if copy_dtype is None else torch.zeros(numel, dtype=copy_dtype)
        self.wanted = self.param.clone()
        self.state = create_state(self.wanted, amsgrad=False, state_dtype=torch.float32)

    def advance_reference(self, grad, scale, modes):
        wide = self.wanted.float()  # the arithmetic is fp32, also where the parameter is a half
        adam_step([wide], [self.state], {**REFERENCE, **modes}, [grad.float() * scale])
        self.wanted.copy_(wide)

    def check(self, close):
        close.check(self.param, self.wanted, atol=1e-7)
        close.check(self.exp_avg, self.state["exp_avg"], atol=1e-7)
        close.check(self.exp_avg_sq, self.state["exp_avg_sq"], atol=1e-7)
        assert torch.equal(self.step, self.state["step"])
        if self.copy is not None:  # both are roundings of one fp32 number
            wide, narrow = (self.param, self.copy) if self.param.dtype == torch.float32 else (self.copy, self.param)
            assert torch.equal(wide.to(narrow.dtype), narrow)


def run(ops, close, items, num_steps=3, grad_scale=1.0, **changed):
    modes = {**MODES, **changed}
    for seed in range(1, num_steps + 1):
        grads = [close.numbers(item.param.numel(), item.grad_dtype, seed=seed) for item in items]
        ops.adam_step_(
            [item.param for item in items],
            grads,
            [item.exp_avg for item in items],
            [item.exp_avg_sq for item in items],
            [item.step for item in items],
            [item.copy for item in items if item.copy is not None],
            **NUMBERS,
            **modes,
            grad_scale=grad_scale,
        )
        for item, grad in zip(items, grads, strict=True):
            item.advance_reference(grad, grad_scale, modes)
    for item in items:
        item.check(close)


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(str(one).removeprefix("torch.") for one in mix))
@pytest.mark.parametrize("decoupled", [True, False])
def test_equals_the_reference(ops, close, numel, mix, decoupled):
    run(ops, close, [Both(close, numel, mix)], adam_w_mode=decoupled)


@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
@pytest.mark.parametrize(
    "modes", [{"bias_correction": False}, {"maximize": True}, {"maximize": True, "adam_w_mode": False}]
)
def test_modes_and_scale_equal_the_reference(ops, close, modes, grad_scale):
    run(ops, close, [Both(close, 1000, MIXES[1])], grad_scale=grad_scale, **modes)


@pytest.mark.parametrize("num_tensors", [2, 16, 17, 40])
def test_one_call_steps_tensors_of_all_kinds(ops, close, num_tensors):
    """More tensors than one launch takes, and empty ones between them."""
    sizes = [(0, 1, 4096, 4097, 33)[index % 5] for index in range(num_tensors)]
    mixes = [(*MIXES[index % 5][:2], None) for index in range(num_tensors)]
    run(ops, close, [Both(close, size, mix, index) for index, (size, mix) in enumerate(zip(sizes, mixes, strict=True))])


def test_one_call_writes_every_copy(ops, close):
    run(ops, close, [Both(close, size, MIXES[1]) for size in (5, 0, 5000)])


def test_nothing_to_step_is_no_error(ops):
    ops.adam_step_([], [], [], [], [], [], **NUMBERS, **MODES, grad_scale=1.0)


def test_large_betas_interpolate_from_the_other_end(ops, close):
    """torch.lerp changes its formula where the weight of the gradient is 0.5 or more."""
    param, exp_avg, grad = close.numbers(100), close.numbers(100, seed=2), close.numbers(100, seed=1)
    wanted = torch.lerp(exp_avg, grad, 0.75)
    numbers = {**NUMBERS, "beta1": 0.25}
    lists = [[param], [grad], [exp_avg], [torch.zeros(100)], [torch.tensor(0.0)], []]
    ops.adam_step_(*lists, **numbers, **MODES, grad_scale=1.0)
    torch.testing.assert_close(exp_avg, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_where_it_is(ops, close, value):
    both = Both(close, 40, MIXES[0])
    grad = close.numbers(40, seed=1)
    grad[3] = value
    lists = [[both.param], [grad], [both.exp_avg], [both.exp_avg_sq], [both.step], []]
    ops.adam_step_(*lists, **NUMBERS, **MODES, grad_scale=1.0)
    both.advance_reference(grad, 1.0, MODES)
    both.check(close)
    assert both.param.isfinite().sum() == 39


def refusals():
    def five(dtype=torch.float32, **options):
        return [torch.zeros(5, dtype=dtype, **options)]

    states = ("exp_avgs", "exp_avg_sqs")
    tensors = ("params", "grads", *states, "copies")
    yield from ((name, five(torch.int64), rf"{name}\[0\]: found dtype int64") for name in tensors)
    yield from ((name, five(torch.bfloat16), rf"{name}\[0\]: found dtype bfloat16") for name in states)
    yield from ((name, [torch.zeros(10)[::2]], rf"{name}\[0\]: found a tensor that is not contig") for name in tensors)
    yield from ((name, [torch.zeros(4)], r"\[0\]: found shape \([45]\)") for name in tensors)
    yield from ((name, [torch.zeros(5).to_sparse()], rf"{name}\[0\]: found a sparse tensor") for name in tensors)
    yield from ((name, five() * 2, rf"{name}: found 2 tensors, but it must be 1") for name in tensors[1:])
    yield "steps", [torch.zeros(2)], r"steps\[0\]: found shape \(2\), but it must be one number"
    yield "steps", [torch.zeros((), dtype=torch.int64)], r"steps\[0\]: found dtype int64"
    yield "steps", [], r"steps: found 0 tensors, but it must be 1"
    yield "grads", five(device="meta"), r"grads\[0\]: found a tensor on meta"


@pytest.mark.parametrize(("name", "wrong", "match"), list(refusals()))
def test_a_wrong_argument_is_named_and_nothing_changes(ops, name, wrong, match):
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps", "copies")
    lists = {one: [torch.tensor(1.0) if one == "steps" else torch.arange(5.0)] for one in names}
    lists[name] = wrong
    before = {one: [tensor.clone() for tensor in tensors] for one, tensors in lists.items()}
    with pytest.raises(RuntimeError, match=match):
        ops.adam_step_(*lists.values(), **NUMBERS, **MODES, grad_scale=1.0)
    for one in set(names) - {name}:
        assert all(torch.equal(a, b) for a, b in zip(lists[one], before[one], strict=True)), one
