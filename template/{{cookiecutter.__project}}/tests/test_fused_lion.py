"""The example op against its torch reference. Where there is no kernel, the reference runs and the core says why."""

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import OpUnavailable
from deepspeed.ops import registry
from deepspeed.ops.lion import FusedLion
from deepspeed.ops.op_builder import jit

from {{ cookiecutter.__package }}.op_builder import FusedLionBuilder

SIZES = (0, 1, 7, 1023, 65537)
# parameters, gradients, copies (None: none)
DTYPES = (
    (torch.float32, torch.float32, None),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float16, torch.float32),
)
NUMBERS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}


@pytest.fixture
def device():
    return get_accelerator().current_device_name()


@pytest.fixture
def lion_step():
    """The operator; without it, the reason is that of the registry."""
    if registry.kernel("fused_lion") is None:
        pytest.skip(registry.resolve("fused_lion").why())
    return registry.kernel("fused_lion").lion_step_


def numbers(numel, dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator).to(dtype).to(device)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_equals_the_formula(lion_step, device, numel, dtypes):
    param, grad = (numbers(numel, dtype, device, seed) for seed, dtype in enumerate(dtypes[:2]))
    exp_avg = numbers(numel, torch.float32, device, 2)
    copy = None if dtypes[2] is None else torch.zeros(numel, dtype=dtypes[2], device=device)
    p, g, m = param.cpu().float().clone(), grad.cpu().float() * 0.5, exp_avg.cpu().clone()
    step = torch.tensor(3.0)
    lion_step([param], [grad], [exp_avg], [step], [] if copy is None else [copy], **NUMBERS, grad_scale=0.5)
    p = p * (1 - 0.01 * 0.1) - 0.01 * torch.lerp(m, g, 1 - 0.9).sign()
    torch.testing.assert_close(param.cpu(), p.to(param.dtype))
    torch.testing.assert_close(exp_avg.cpu(), m.lerp(g, 1 - 0.99))
    assert step.item() == 4.0
    if copy is not None:
        torch.testing.assert_close(copy.cpu(), p.to(copy.dtype))


def test_refuses_lists_that_do_not_fit(lion_step, device):
    one, two = torch.zeros(1, device=device), torch.zeros(2, device=device)
    step = torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="grads: found 2 tensors, but it must be 1"):
        lion_step([one], [one, one], [one], [step], [], **NUMBERS, grad_scale=1.0)
    with pytest.raises(RuntimeError, match="exp_avgs: found 2 elements"):
        lion_step([one], [one], [two], [step], [], **NUMBERS, grad_scale=1.0)
    assert step.item() == 0.0


def train(device):
    """Weights after three steps of the optimizer that users have."""
    weights = [numbers(numel, torch.float32, device, numel).requires_grad_() for numel in (3, 1025)]
    optimizer = FusedLion(weights, lr=0.01, weight_decay=0.1)
    for _ in range(3):
        sum((weight**2).sum() for weight in weights).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().cpu() for weight in weights]


def test_the_front_trains_as_its_reference_does(device, monkeypatch):
    found = train(device)
    kernel = registry.resolve("fused_lion")
    assert kernel.source == "device" or "{{ cookiecutter.__NAME }}_Accelerator" in kernel.why()
    monkeypatch.setenv("DS_OPS_DISABLE", "fused_lion")
    assert registry.kernel("fused_lion") is None
    torch.testing.assert_close(found, train(device))


def test_the_library_is_built_from_this_package():
    builder = FusedLionBuilder()
    assert all("{{ cookiecutter.__package }}/csrc/" in path for path in builder.sources())
    try:
        builder.toolchain()
    except OpUnavailable as error:
        pytest.skip(str(error))
    if builder.min_torch is not None and not builder.is_compatible() and builder.min_torch in str(builder.reason):
        pytest.skip(builder.reason)
    assert jit.build(builder.describe()).is_file()
