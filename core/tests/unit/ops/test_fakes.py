"""Fakes of the documented operators: registered for a library's namespace, refusing tensors that lie apart."""

import pytest
import torch
from deepspeed.ops.fakes import register_fakes


@pytest.fixture(scope="module")
def ops():
    library = torch.library.Library("ds_of_fakes", "DEF")
    library.define("gelu(Tensor x, bool tanh) -> Tensor")
    library.define("bias_gelu(Tensor x, Tensor bias, bool tanh) -> Tensor")
    library.define("twice(Tensor x) -> (Tensor, Tensor)")
    library.define(
        "lion_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] steps, *, float lr) -> ()"
    )
    register_fakes("ds_of_fakes", "gelu", "bias_gelu", "lion_step_", twice=lambda x: (x, x))
    yield torch.ops.ds_of_fakes
    library._destroy()


def test_shapes_and_dtypes_of_documented_and_own_operators(ops):
    x = torch.empty(2, 3, dtype=torch.bfloat16, device="meta")
    given = ops.bias_gelu(x, torch.empty(3, device="meta"), False)
    assert (given.shape, given.dtype, given.device.type) == (x.shape, x.dtype, "meta")
    assert len(ops.twice(x)) == 2
    assert ops.lion_step_([x], [x], [x], [x], lr=0.1) is None


def test_a_tensor_elsewhere_is_named(ops):
    x = torch.empty(2, device="meta")
    with pytest.raises(
        RuntimeError, match=r"ds_of_fakes::bias_gelu: bias: found a tensor on cpu, but it must be on meta as x is"
    ):
        ops.bias_gelu(x, torch.empty(2), True)
    with pytest.raises(RuntimeError, match=r"lion_step_: grads\[1\]: found a tensor on cpu.* as params\[0\] is"):
        ops.lion_step_([x, x], [x, torch.empty(2)], [x, x], [x, x], lr=0.1)


def test_counts_of_steps_lie_on_the_host_of_a_device(ops):
    fake = torch._subclasses.FakeTensorMode()
    with fake:
        x, elsewhere = torch.empty(2, device="cpu"), torch.empty((), device="meta")
        with pytest.raises(RuntimeError, match=r"steps\[0\]: found a tensor on meta, .* on cpu where a step"):
            ops.lion_step_([x], [x], [x], [elsewhere], lr=0.1)


def test_an_operator_that_is_not_documented_needs_a_fake_of_its_own():
    with pytest.raises(KeyError, match="twice"):
        register_fakes("ds_of_fakes", "twice")
