"""What the tests of optimizer operators share: every mix of dtypes, how results are compared, what is refused.

Operators come from `load_op` of `../conftest.py`: on a GPU where there is one, else run on the host. `dtypes` and
`step_ops` are given to the tests that name them.
"""

import contextlib

import pytest
import torch

# parameters, gradients, copies (None: none)
DTYPES = (
    (torch.float32, torch.float32, None),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16, torch.float16),
    (torch.bfloat16, torch.float32, None),
    (torch.float16, torch.bfloat16, torch.float32),
)
# More parameters than one launch has room for.
MANY = 130
_UNDER_CAPTURE = (
    r"ds_cuda::\w+_step_: found a stream that is being captured into a graph; "
    "a replay would repeat this step: step outside the graph"
)


def pytest_generate_tests(metafunc):
    if "dtypes" in metafunc.fixturenames:
        names = ["-".join(str(dtype).removeprefix("torch.") for dtype in dtypes) for dtypes in DTYPES]
        metafunc.parametrize("dtypes", DTYPES, ids=names)


class StepOps:
    """Helpers of the tests of `ds_cuda::*_step_`.

    Args:
        numbers: makes random tensors, see `../conftest.py`.
        device: theirs.
    """

    many = MANY

    def __init__(self, numbers, device):
        self.numbers, self.device = numbers, device

    def zeros(self, numel, dtype=torch.float32, *, offset=1):
        return torch.zeros(numel + offset, dtype=dtype, device=self.device)[offset:]

    @staticmethod
    def assert_close(found, wanted):
        """fp32 to 1e-6; a rounded number may fall on the other side of a tie, one unit in its last place away."""
        found, wanted = found.cpu(), wanted.cpu().to(found.dtype)
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[found.dtype]
        torch.testing.assert_close(found, wanted, rtol=2 * tolerance, atol=3e-7, equal_nan=True)
        if found.dtype != torch.float32 and found.numel() > 1000:
            assert (found == wanted).float().mean() > 0.99

    @staticmethod
    def assert_copied(param, copy):
        """Both are roundings of one fp32 number."""
        wider, narrower = (param, copy) if param.dtype == torch.float32 else (copy, param)
        assert torch.equal(wider.to(narrower.dtype), narrower)

    def check_refusals(self, call, lists):
        """Wrong arguments are refused by name, and nothing has changed then.

        Args:
            call: takes the operator's lists as keyword arguments.
            lists: good ones, of one parameter of 5 elements each, `params` and `steps` among them.
        """
        states = [name for name in lists if name not in ("params", "grads", "copies", "steps")]
        before = {name: [tensor.clone() for tensor in tensors] for name, tensors in lists.items()}

        def zeros(*shape, **options):
            return torch.zeros(*shape, **{"device": self.device, **options})

        def refuses(match, **wrong):
            with pytest.raises(RuntimeError, match=match):
                call(**{**lists, **wrong})

        for name in lists:
            if name != "steps":
                refuses(rf"(?s)({name}|grads)\[0\]: found (a tensor|shape)", **{name: [zeros(4)]})
                refuses(rf"{name}\[0\]: found a tensor that is not contiguous", **{name: [zeros(10)[::2]]})
                refuses(rf"{name}\[0\]: found dtype int64", **{name: [zeros(5, dtype=torch.int64)]})
            if name != "params":
                refuses(rf"{name}\[0\]: found a tensor on meta", **{name: [torch.zeros(5, device="meta")]})
                refuses(rf"{name}: found 2 tensors, but it must be 1", **{name: lists[name] * 2})
        refuses(rf"grads\[0\]: found a tensor on {self.device}", params=[torch.zeros(5, device="meta")])
        for name in states:
            refuses(rf"{name}\[0\]: found dtype bfloat16", **{name: [zeros(5, dtype=torch.bfloat16)]})
        refuses(r"steps\[0\]: found shape \(2\)", steps=[torch.zeros(2)])
        refuses(r"steps\[0\]: found dtype int64", steps=[torch.zeros((), dtype=torch.int64)])
        for name, tensors in lists.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, before[name], strict=True)), name

    def check_capture(self, call, lists):
        """A step inside the capture of a graph is refused; no count is raised, and outside it runs.

        Args:
            call, lists: as in `check_refusals`.
        """
        before = {name: [tensor.clone() for tensor in tensors] for name, tensors in lists.items()}
        with self._capture(), pytest.raises(RuntimeError, match=_UNDER_CAPTURE):
            call(**lists)
        for name, tensors in lists.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, before[name], strict=True)), name
        call(**lists)
        assert lists["steps"][0] == before["steps"][0] + 1

    @contextlib.contextmanager
    def _capture(self):
        if self.device == "cuda":
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device="cuda")  # torch warns of a graph without work
                yield
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("DS_CUDA_EMULATED_CAPTURE", "1")
                yield


@pytest.fixture(scope="session")
def step_ops(numbers, device):
    return StepOps(numbers, device)
