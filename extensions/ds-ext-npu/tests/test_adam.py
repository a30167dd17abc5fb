"""`adam_step_` over the vendor's operator against core's reference, on the stand-in."""

import itertools

import pytest
import torch
from deepspeed.ops import registry
from deepspeed.ops.adam import FusedAdam

SIZES = (1, 7, 1023, 65537)
OPTIONS = {
    "adamw": {"weight_decay": 0.1},
    "l2": {"weight_decay": 0.1, "adam_w_mode": False},
    "uncorrected": {"bias_correction": False},
    "plain": {"betas": (0.0, 0.5), "eps": 1e-3},
    "still": {"lr": 0.0, "weight_decay": 0.1},
}


def params_and_grads(device, shapes=((),) + tuple((size,) for size in SIZES) + ((3, 5), (0,))):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator) for shape in shapes]
    grads = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3)]
    return [torch.nn.Parameter(param.to(device)) for param in params], [[g.to(device) for g in each] for each in grads]


def step(device, options, maximize=False):
    import torch_npu.operators

    params, grads = params_and_grads(device)
    optimizer = FusedAdam(params, **{"lr": 0.02, **options})
    optimizer.param_groups[0]["maximize"] = maximize
    before = torch_npu.operators.calls["npu_apply_adam_w"]
    for each in grads:
        for param, grad in zip(params, each, strict=True):
            param.grad = grad
        optimizer.step()
    states = [optimizer.state[param] for param in params]
    return {
        "calls": torch_npu.operators.calls["npu_apply_adam_w"] - before,
        "params": [param.detach().cpu() for param in params],
        "moments": [[state[name].cpu() for name in ("exp_avg", "exp_avg_sq")] for state in states],
        "steps": [float(state["step"]) for state in states],
    }


def both(options, maximize):
    """On the device, and by core's reference on the host: no kernel is offered for it there."""
    return step("npu", options, maximize), step("cpu", options, maximize)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_is_the_references(npu, options, maximize):
    ((device, host),) = npu(both, OPTIONS[options], maximize)
    assert host["calls"] == 0
    assert device["calls"] == 3 * (len(device["params"]) - 1)  # the one without elements is left alone
    assert device["steps"] == host["steps"] == [3.0] * len(device["params"])
    torch.testing.assert_close(device["params"], host["params"], rtol=2e-6, atol=1e-6)
    # of beta2 = 0.999 the device has 1 - beta2 to 5e-5
    torch.testing.assert_close(device["moments"], host["moments"], rtol=6e-5, atol=1e-6)


def one_pass(param_dtype, grad_dtype, copy_dtype):
    import deepspeed.ops.adam.adam as reference

    operator = registry.require("fused_adam").adam_step_
    generator = torch.Generator().manual_seed(1)
    param = torch.randn(1023, generator=generator).to("npu", param_dtype)
    grad = torch.randn(1023, generator=generator).to("npu", grad_dtype)
    m, v = torch.zeros(1023, device="npu"), torch.zeros(1023, device="npu")
    copy = torch.zeros(1023, device="npu", dtype=copy_dtype)
    wide, steps = param.float().cpu(), torch.tensor(0.0)
    numbers = {"lr": 0.02, "eps": 1e-8, "weight_decay": 0.1}
    modes = {"adam_w_mode": True, "bias_correction": True}
    operator(
        *([param], [grad], [m], [v], [steps], [copy]),
        **(numbers | modes | {"beta1": 0.9, "beta2": 0.999, "maximize": False, "grad_scale": 0.125}),
    )
    state = reference.create_state(wide, amsgrad=False)
    reference.adam_step([wide], [state], numbers | modes | {"betas": (0.9, 0.999)}, [grad.float().cpu() * 0.125])
    return param.cpu(), copy.cpu(), wide, steps.item()


def updates(bias_correction, num_steps):
    """The last update, of weights that were zero before it, so that all of what is stored is the update."""
    found = []
    for device in ("npu", "cpu"):
        param = torch.nn.Parameter(torch.zeros(1023, device=device))
        optimizer = FusedAdam([param], lr=0.02, bias_correction=bias_correction)
        for _ in range(num_steps):
            param.data.zero_()
            param.grad = torch.linspace(-3.0, 3.1, 1023).to(device)
            optimizer.step()
        found.append(param.detach().cpu())
    return found


@pytest.mark.parametrize("num_steps", [1, 2, 20])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_betas_in_fp32_do_not_change_the_update(npu, bias_correction, num_steps):
    ((device, host),) = npu(updates, bias_correction, num_steps)
    torch.testing.assert_close(device, host, rtol=2e-6, atol=0.0)


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    "dtypes",
    [*itertools.product([torch.float32], HALVES, HALVES), *((half, half, torch.float32) for half in HALVES)],
    ids=str,
)
def test_a_mixed_step_scales_updates_and_writes_copies(npu, dtypes):
    ((param, copy, wide, steps),) = npu(one_pass, *dtypes)
    assert steps == 1.0
    for found in (param, copy):
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[found.dtype]
        torch.testing.assert_close(found, wide.to(found.dtype), rtol=tolerance, atol=1e-7)
    assert (param == wide.to(param.dtype)).float().mean() > 0.6


def refused():
    import torch_npu

    tensor = torch.ones(3, device="npu")
    numbers = (0.9, 0.999, 0.1, 0.0, 0.9, 0.999, 1e-8)
    told = []
    for arguments in (
        (*numbers, tensor, None, False, False),
        (*numbers, tensor, None, False),
    ):
        try:
            torch_npu.npu_apply_adam_w(*arguments, out=(tensor, tensor.half(), tensor))
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_the_stand_in_refuses_what_the_vendor_does(npu):
    ((dtype, arguments),) = npu(refused)
    assert "one dtype is wanted" in dtype
    assert "missing value for argument 'maximize'" in arguments
