"""The operator `adam_step_` and the front that calls it, against the torch reference."""

import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.adam.adam import adam_step, create_state
from deepspeed.ops.optimizer import OnePass
from ds_ext_cuda.op_builder import FusedAdamBuilder
from torch.nn import Parameter

NUMBERS = {"lr": 3e-2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
MODES = {"adam_w_mode": True, "bias_correction": True, "maximize": False}
REFERENCE_GROUP = {
    "lr": 3e-2,
    "betas": (0.8, 0.95),
    "eps": 1e-6,
    "weight_decay": 0.1,
    "fused": False,
    "foreach": False,
    **MODES,
}


@pytest.fixture
def adam(load_op):
    return load_op(FusedAdamBuilder).adam_step_


def _both(adam, step_ops, numel, dtypes, *, offset=1, grad_scale=1.0, num_steps=3, **modes):
    """(tensors of the operator, tensors of the reference) after some steps: param, m, v, step, copy."""
    param_dtype, grad_dtype, copy_dtype = dtypes
    param = step_ops.numbers(numel, dtype=param_dtype, offset=offset)
    wanted = param.clone()
    state = create_state(wanted, amsgrad=False, state_dtype=torch.float32)
    m, v, step = step_ops.zeros(numel, offset=offset), step_ops.zeros(numel, offset=offset), torch.tensor(0.0)
    rounded = None if copy_dtype is None else step_ops.zeros(numel, copy_dtype, offset=offset)
    for seed in range(1, num_steps + 1):
        grad = step_ops.numbers(numel, dtype=grad_dtype, seed=seed, offset=offset)
        copies = [] if rounded is None else [rounded]
        numbers = {**NUMBERS, **MODES, **modes, "grad_scale": grad_scale}
        adam([param], [grad], [m], [v], [step], copies, **numbers)
        wide = grad.float() * grad_scale
        if param_dtype == torch.float32:
            adam_step([wanted], [state], {**REFERENCE_GROUP, **modes}, [wide])
        else:  # the reference would round the gradient, too
            wide_param = wanted.float()
            adam_step([wide_param], [state], {**REFERENCE_GROUP, **modes}, [wide])
            wanted.copy_(wide_param)
    return (param, m, v, step, rounded), (wanted, state["exp_avg"], state["exp_avg_sq"], state["step"])


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_equals_the_reference(adam, step_ops, numel, dtypes, offset):
    (param, m, v, step, rounded), wanted = _both(adam, step_ops, numel, dtypes, offset=offset)
    for found, reference in zip((param, m, v, step), wanted, strict=True):
        step_ops.assert_close(found, reference)
    if rounded is not None:  # of the unrounded value, where the parameter itself is a half
        step_ops.assert_copied(param, rounded)


@pytest.mark.parametrize(
    "modes",
    [{"adam_w_mode": False}, {"bias_correction": False}, {"maximize": True}, {"maximize": True, "adam_w_mode": False}],
)
@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
def test_modes_and_scale_equal_the_reference(adam, step_ops, modes, grad_scale):
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)
    found, wanted = _both(adam, step_ops, 100, dtypes, offset=0, grad_scale=grad_scale, **modes)
    for one, reference in zip(found, wanted, strict=False):
        step_ops.assert_close(one, reference)


def test_many_tensors_of_any_size_dtype_and_alignment_in_one_call(adam, step_ops):
    """More than one launch takes; empty ones among them, and each with its own count of steps."""
    sizes = [(7 * index) % 40 if index % 5 else 0 for index in range(step_ops.many)]
    sizes[50] = 20000
    params = [step_ops.numbers(size, seed=index, offset=index % 2) for index, size in enumerate(sizes)]
    halves = (torch.float32, torch.bfloat16, torch.float16)
    grads = [step_ops.numbers(size, dtype=halves[i % 3], seed=i + 1, offset=0) for i, size in enumerate(sizes)]
    moments = [[step_ops.zeros(size, offset=0) for size in sizes] for _ in range(2)]
    counts = [torch.tensor(float(index % 4)) for index in range(len(sizes))]
    wanted = [param.clone() for param in params]
    states = [
        {**create_state(param, amsgrad=False), "step": count.clone()}
        for param, count in zip(wanted, counts, strict=True)
    ]
    adam(params, grads, *moments, counts, [], **NUMBERS, **MODES, grad_scale=0.5)
    for param, state, grad in zip(wanted, states, grads, strict=True):
        adam_step([param], [state], REFERENCE_GROUP, [grad.float() * 0.5])
    for found, reference in zip(params, wanted, strict=True):
        step_ops.assert_close(found, reference)
    assert [count.item() for count in counts] == [index % 4 + 1 for index in range(len(sizes))]


def test_an_infinite_gradient_spoils_its_own_element_alone(adam, step_ops):
    param, grad = step_ops.numbers(50), step_ops.numbers(50, seed=1)
    grad[3] = float("inf")
    clean, (before, after) = grad.clone(), (param.clone(), param.clone())
    clean[3] = 0.0
    for tensor, its in ((before, clean), (after, grad)):
        adam([tensor], [its], [step_ops.zeros(50)], [step_ops.zeros(50)], [torch.tensor(0.0)], [], **NUMBERS, **MODES,
             grad_scale=1.0)  # fmt: skip
    assert after[3].isnan()
    assert torch.equal(after[4:], before[4:])


def test_refuses_wrong_arguments_by_name(adam, step_ops, device):
    lists = {name: [torch.ones(5, device=device)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "copies")}
    lists["steps"] = [torch.tensor(3.0)]
    step_ops.check_refusals(lambda **given: adam(**given, **NUMBERS, **MODES, grad_scale=1.0), lists)


def test_a_step_under_capture_is_refused(adam, step_ops, device):
    lists = {name: [torch.ones(5, device=device)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "copies")}
    lists["steps"] = [torch.tensor(3.0)]
    step_ops.check_capture(lambda **given: adam(**given, **NUMBERS, **MODES, grad_scale=1.0), lists)


@pytest.mark.parametrize("with_copies", [True, False])
def test_opcheck(adam, step_ops, with_copies):
    halves = {"dtype": torch.bfloat16}
    lists = [[step_ops.numbers(20)], [step_ops.numbers(20, **halves)], [step_ops.zeros(20)], [step_ops.zeros(20)]]
    copies = [step_ops.zeros(20, torch.bfloat16)] if with_copies else []
    torch.library.opcheck(adam.default, (*lists, [torch.tensor(0.0)], copies), {**NUMBERS, **MODES, "grad_scale": 1.0})


# ----- the front -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_force")
@pytest.mark.parametrize("options", [{}, {"adam_w_mode": False, "weight_decay": 0.1}])
def test_front_equals_torch(step_ops, options):
    made = [Parameter(step_ops.numbers(70).view(7, 10)), Parameter(step_ops.numbers(5, seed=4))]
    theirs = [Parameter(param.detach().clone()) for param in made]
    torch_class = torch.optim.AdamW if options.get("adam_w_mode", True) else torch.optim.Adam
    rest = {"weight_decay": options.get("weight_decay", 0.0)}
    pairs = ((FusedAdam(made, lr=1e-2, **options), made), (torch_class(theirs, lr=1e-2, **rest), theirs))
    for seed in range(3):
        for optimizer, params in pairs:
            for param in params:
                param.grad = step_ops.numbers(param.numel(), seed=seed).view(param.shape)
            optimizer.step()
    assert pairs[0][0].takes_one_pass
    for found, wanted in zip(made, theirs, strict=True):
        step_ops.assert_close(found.detach(), wanted.detach())


@pytest.mark.usefixtures("in_force")
def test_one_pass_equals_cast_scale_step_and_copy(step_ops):
    master, reference = (Parameter(step_ops.numbers(100)) for _ in range(2))
    weight, grad = step_ops.zeros(100, torch.bfloat16), step_ops.numbers(100, dtype=torch.bfloat16, seed=1)
    ours, theirs = FusedAdam([master], lr=1e-2), FusedAdam([reference], lr=1e-2)
    ours.step(one_pass=OnePass([[grad]], [[weight]], 0.25))
    reference.grad = grad.float() * 0.25
    theirs.step()
    assert torch.equal(master, reference)
    assert torch.equal(weight, reference.bfloat16())
