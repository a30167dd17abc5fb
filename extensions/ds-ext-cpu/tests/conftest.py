"""What the tests of optimizer operators share: every kind of tensor, and the refusals that all operators have.

`numel`, `dtypes` and `step_ops` are given to the tests that name them.
"""

from pathlib import Path

import pytest
import torch
from deepspeed.ops import registry
from deepspeed.testing.tiers import thin_out

FOLDER = Path(__file__).parent
SIZES = (0, 1, 7, 1023, 65537)
# parameters, gradients, copies (None: none)
DTYPES = (
    (torch.float32, torch.float32, None),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16, torch.float16),
    (torch.bfloat16, torch.float32, None),
    (torch.float16, torch.bfloat16, torch.float32),
)


def pytest_generate_tests(metafunc):
    if "numel" in metafunc.fixturenames:
        metafunc.parametrize("numel", SIZES)
    if "dtypes" in metafunc.fixturenames:
        names = ["-".join(str(dtype).removeprefix("torch.") for dtype in dtypes) for dtypes in DTYPES]
        metafunc.parametrize("dtypes", DTYPES, ids=names)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    thin_out(item for item in items if item.path.is_relative_to(FOLDER))


class StepOps:
    """Helpers of the tests of `ds_cpu::*_step_`."""

    @staticmethod
    def operator(op, name):
        """The operator, loaded; OpUnavailable with the registry's reasons when it is not to be had."""
        return getattr(registry.require(op), name)

    @staticmethod
    def numbers(numel, dtype=torch.float32, *, seed=0, offset=1):
        """Random numbers, `offset` elements into a storage, so that nothing is aligned."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(numel + offset, generator=generator).to(dtype)[offset:]

    @staticmethod
    def zeros(numel, dtype=torch.float32, *, offset=1):
        return torch.zeros(numel + offset, dtype=dtype)[offset:]

    @staticmethod
    def assert_close(found, wanted):
        """fp32 to 1e-6; a rounded number may fall on the other side of a tie, one unit in its last place away."""
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[found.dtype]
        torch.testing.assert_close(found, wanted.to(found.dtype), rtol=tolerance, atol=1e-7, equal_nan=True)
        if found.dtype != torch.float32 and found.numel() > 1000:
            assert (found == wanted.to(found.dtype)).float().mean() > 0.99

    @staticmethod
    def assert_copied(param, copy):
        """Both are roundings of one fp32 number."""
        wider, narrower = (param, copy) if param.dtype == torch.float32 else (copy, param)
        assert torch.equal(wider.to(narrower.dtype), narrower)

    @staticmethod
    def check_refusals(call, lists):
        """Wrong arguments are refused by name, and nothing has changed then.

        Args:
            call: takes the operator's lists as keyword arguments.
            lists: good ones, of one parameter of 5 elements each, `params` and `steps` among them.
        """
        states = [name for name in lists if name not in ("params", "grads", "copies", "steps")]
        before = {name: [tensor.clone() for tensor in tensors] for name, tensors in lists.items()}

        def refuses(match, **wrong):
            with pytest.raises(RuntimeError, match=match):
                call(**{**lists, **wrong})

        for name in lists:
            if name != "steps":
                refuses(rf"(?s)({name}|grads)\[0\]: found (a tensor|shape)", **{name: [torch.zeros(4)]})
                refuses(rf"{name}\[0\]: found a tensor that is not contiguous", **{name: [torch.zeros(10)[::2]]})
                refuses(rf"{name}\[0\]: found a sparse tensor", **{name: [torch.zeros(5).to_sparse()]})
                refuses(rf"{name}\[0\]: found dtype int64", **{name: [torch.zeros(5, dtype=torch.int64)]})
            if name != "params":
                refuses(rf"{name}\[0\]: found a tensor on meta", **{name: [torch.zeros(5, device="meta")]})
                refuses(rf"{name}: found 2 tensors, but it must be 1", **{name: lists[name] * 2})
        refuses(r"grads\[0\]: found a tensor on cpu", params=[torch.zeros(5, device="meta")])
        for name in states:
            refuses(rf"{name}\[0\]: found dtype bfloat16", **{name: [torch.zeros(5, dtype=torch.bfloat16)]})
        refuses(r"steps\[0\]: found shape \(2\)", steps=[torch.zeros(2)])
        refuses(r"steps\[0\]: found dtype int64", steps=[torch.zeros((), dtype=torch.int64)])
        for name, tensors in lists.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, before[name], strict=True)), name


@pytest.fixture
def step_ops():
    return StepOps
