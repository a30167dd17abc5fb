"""The operator `adagrad_step_` and the front that calls it, against torch's own class."""

import copy

import pytest
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.optimizer import OnePass
from torch.nn import Parameter
from torch.optim.adagrad import adagrad as torch_adagrad

NUMBERS = {"lr": 3e-2, "lr_decay": 0.1, "eps": 1e-6, "weight_decay": 0.1}


@pytest.fixture
def adagrad(step_ops):
    return step_ops.operator("cpu_adagrad", "adagrad_step_")


@pytest.mark.parametrize("maximize", [True, False])
def test_equals_the_reference(adagrad, step_ops, numel, dtypes, maximize):
    param_dtype, grad_dtype, copy_dtype = dtypes
    param = step_ops.numbers(numel, param_dtype)
    wanted, wanted_sum, wanted_step = param.clone(), torch.zeros(numel), torch.tensor(0.0)
    its_sum, step = step_ops.zeros(numel), torch.tensor(0.0)
    copies = [] if copy_dtype is None else [step_ops.zeros(numel, copy_dtype)]
    for seed in range(1, 4):
        grad = step_ops.numbers(numel, grad_dtype, seed=seed)
        adagrad([param], [grad], [its_sum], [step], copies, **NUMBERS, maximize=maximize, grad_scale=0.37)
        wide = wanted.float()
        lists = [[wide], [grad.float() * 0.37], [wanted_sum], [wanted_step]]
        torch_adagrad(*lists, has_sparse_grad=False, foreach=False, has_complex=False, maximize=maximize, **NUMBERS)
        wanted.copy_(wide)
    step_ops.assert_close(param, wanted)
    step_ops.assert_close(its_sum, wanted_sum)
    assert step.item() == 3
    for rounded in copies:
        step_ops.assert_copied(param, rounded)


def test_what_is_not_finite_spreads(adagrad):
    param, grad, its_sum = torch.ones(20), torch.zeros(20), torch.zeros(20)
    grad[3], grad[19] = float("nan"), float("inf")
    numbers = {**NUMBERS, "weight_decay": 0.0, "maximize": False, "grad_scale": 1.0}
    adagrad([param], [grad], [its_sum], [torch.tensor(0.0)], [], **numbers)
    assert param.isnan().nonzero().flatten().tolist() == [3, 19]
    assert its_sum[3].isnan()
    assert its_sum[19].isinf()


def test_refuses_wrong_arguments_by_name(adagrad, step_ops):
    lists = {name: [torch.ones(5)] for name in ("params", "grads", "sums", "copies")}
    lists["steps"] = [torch.tensor(3.0)]
    step_ops.check_refusals(lambda **given: adagrad(**given, **NUMBERS, maximize=False, grad_scale=1.0), lists)


@pytest.mark.parametrize("with_copies", [True, False])
def test_opcheck(adagrad, step_ops, with_copies):
    lists = [[step_ops.numbers(20)], [step_ops.numbers(20, torch.bfloat16)], [step_ops.zeros(20)], [torch.tensor(0.0)]]
    copies = [step_ops.zeros(20, torch.bfloat16)] if with_copies else []
    torch.library.opcheck(adagrad.default, (*lists, copies), {**NUMBERS, "maximize": False, "grad_scale": 1.0})


# ----- the front -----------------------------------------------------------------------------------------------------


def _train(optimizer, param, first_seed=0):
    for seed in range(first_seed, first_seed + 3):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()


def test_front_equals_torch_and_exchanges_its_state(step_ops):
    a, b = (Parameter(step_ops.numbers(70).view(7, 10)) for _ in range(2))
    ours = DeepSpeedCPUAdagrad([a], lr=0.3, eps=1e-8, weight_decay=0.1)
    theirs = torch.optim.Adagrad([b], lr=0.3, eps=1e-8, weight_decay=0.1)
    assert ours.takes_one_pass
    _train(ours, a)
    _train(theirs, b)
    step_ops.assert_close(a.detach(), b.detach())
    saved, their_saved = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
    theirs.load_state_dict(saved)
    ours.load_state_dict(their_saved)
    _train(ours, a, first_seed=5)
    _train(theirs, b, first_seed=5)
    step_ops.assert_close(a.detach(), b.detach())
    assert ours.state[a]["step"].item() == 6


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_gradients_run_in_torch():
    dense, table = Parameter(torch.ones(4, 2)), Parameter(torch.ones(4, 2))
    optimizer = DeepSpeedCPUAdagrad([dense, table], lr=0.5)
    dense.grad = torch.zeros(4, 2)
    dense.grad[1] = 2.0
    table.grad = dense.grad.to_sparse(1)
    optimizer.step()
    torch.testing.assert_close(dense, table)
    torch.testing.assert_close(dense[1], torch.full((2,), 0.5))


def test_one_pass_equals_cast_scale_step_and_copy(step_ops):
    master, reference = (Parameter(step_ops.numbers(100)) for _ in range(2))
    weight, grad = torch.zeros(100, dtype=torch.bfloat16), step_ops.numbers(100, torch.bfloat16, seed=1)
    DeepSpeedCPUAdagrad([master], lr=1e-2).step(one_pass=OnePass([[grad]], [[weight]], 0.25))
    reference.grad = grad.float() * 0.25
    DeepSpeedCPUAdagrad([reference], lr=1e-2).step()
    assert torch.equal(master, reference)
    assert torch.equal(weight, reference.bfloat16())
