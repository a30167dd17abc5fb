"""What is known of an optimizer by its type."""

import pytest
import torch
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.muon import Muon
from deepspeed.optim import arguments_of_step, create_optimizer, is_elementwise, is_tested_with_zero


def _params():
    return [torch.nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize(
    ("name", "elementwise", "tested"),
    [
        ("Adam", True, True),
        ("SGD", True, True),
        ("Adagrad", True, True),
        ("Lion", True, True),
        ("RMSprop", True, False),
        ("Lamb", False, False),
        ("Muon", False, True),
        ("Adafactor", False, False),
    ],
)
def test_by_name(name, elementwise, tested):
    optimizer = create_optimizer(name, {}, _params())
    assert is_elementwise(optimizer) is elementwise
    assert is_tested_with_zero(optimizer) is tested


def test_the_declaration_is_true():
    """Cutting a parameter in two changes nothing for an elementwise optimizer, and something for LAMB and Muon."""

    def trained(name, pieces):
        values = torch.linspace(-1, 2, 8).view(4, 2)
        params = [torch.nn.Parameter(piece.clone()) for piece in values.split(4 // pieces)]
        optimizer = create_optimizer(name, {"lr": 0.1}, params)
        for seed in range(3):
            grads = torch.randn(4, 2, generator=torch.Generator().manual_seed(seed)).split(4 // pieces)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            optimizer.step()
        return is_elementwise(optimizer), torch.cat([param.detach() for param in params])

    for name in ("AdamW", "SGD", "Adagrad", "Lion", "RMSprop", "Adamax", "Lamb", "Muon", "Adafactor"):
        declared, whole = trained(name, 1)
        _, cut = trained(name, 2)
        assert torch.allclose(whole, cut, atol=1e-6) is declared, name


def test_subclasses_count_while_they_keep_the_step():
    class Renamed(torch.optim.AdamW):
        pass

    class Other(torch.optim.AdamW):
        def step(self, closure=None):
            return None

    class OtherLamb(FusedLamb):
        pass

    for cls, wanted in ((Renamed, True), (Other, False), (OtherLamb, False)):
        assert is_elementwise(cls(_params())) is wanted
        # torch wraps `step` once a class has been instantiated; that must not look like another step
        torch.optim.AdamW(_params())
        assert is_elementwise(cls(_params())) is wanted


def test_a_class_may_say_so_itself():
    class Client(torch.optim.Optimizer):
        is_elementwise = True

    class Silent(torch.optim.Optimizer):
        pass

    assert is_elementwise(Client(_params(), {}))
    assert not is_elementwise(Silent(_params(), {}))
    assert not is_tested_with_zero(Client(_params(), {}))


def test_wrappers_are_opened():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    assert is_elementwise(Wrapper(torch.optim.SGD(_params(), lr=0.1)))
    assert not is_elementwise(Wrapper(Muon(_params())))
    assert is_tested_with_zero(Wrapper(Wrapper(torch.optim.AdamW(_params()))))
    assert not is_elementwise(object())


def test_what_a_step_needs():
    assert arguments_of_step(torch.optim.LBFGS(_params())) == ["closure"]
    scheduled = torch.optim.SGD(_params(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    assert arguments_of_step(scheduled) == []


class Compiled(torch.optim.SGD):
    step = type  # of which Python knows no signature


def test_a_step_that_does_not_say_what_it_needs():
    assert arguments_of_step(Compiled(_params(), lr=0.1)) == []


@pytest.mark.parametrize("name", ["Adam", "SGD", "Lion", "Lamb", "Muon", "Adafactor", "SparseAdam"])
def test_the_steps_of_known_optimizers_need_nothing(name):
    assert arguments_of_step(create_optimizer(name, {}, _params())) == []
