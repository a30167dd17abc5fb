"""Gradients of weights computed apart from those of activations equal those of one backward."""

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe.split_backward import DeferredWeights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


class Layers(nn.Module):
    """Linear layers with and without bias, one shared by two calls, one frozen, and others than linear ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.second, self.frozen = nn.Linear(4, 3, bias=False), nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        x = self.norm(torch.tanh(self.first(self.first(x))))
        return F.linear(self.frozen(self.second(x)), self.frozen.weight * 2)


def gradients(module, inputs):
    return [inputs.grad, *(param.grad for param in module.parameters() if param.requires_grad)]


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4)])
def test_both_parts_make_the_gradients_of_one_backward(shape):
    module, x = Layers(), torch.randn(shape, requires_grad=True)
    module(x).square().sum().backward()
    wanted = [grad.clone() for grad in gradients(module, x)]
    module.zero_grad()
    x.grad = None

    deferred = DeferredWeights()
    with deferred.in_forward():
        loss = module(x).square().sum()
    with deferred.in_backward():
        loss.backward()
    assert module.first.weight.grad is None
    assert module.first.bias.grad is None
    assert module.norm.weight.grad is not None
    torch.autograd.backward(deferred.roots())
    for found, want in zip(gradients(module, x), wanted, strict=True):
        torch.testing.assert_close(found, want)
    assert module.frozen.weight.grad is None
    assert deferred.roots() == []


class Operators(TorchDispatchMode):
    """The names of those that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_autograd_takes_the_gradients_without_a_copy():
    module = nn.Linear(64, 32)
    deferred = DeferredWeights()
    with deferred.in_forward():
        loss = module(torch.randn(5, 64)).sum()
    with deferred.in_backward():
        loss.backward()
    with Operators() as operators:
        torch.autograd.backward(deferred.roots())
    assert "mm" in operators.names
    assert not {"clone", "copy_", "new_empty_strided"} & set(operators.names)


def split_backward(module, inputs, run=lambda module, inputs: module(inputs)):
    """Both halves of a backward; the names of the parameters whose gradients come in the second one."""
    deferred = DeferredWeights()
    with deferred.in_forward():
        loss = run(module, inputs).square().sum()
    with deferred.in_backward():
        loss.backward()
    later = {name for name, param in module.named_parameters() if param.requires_grad and param.grad is None}
    torch.autograd.backward(deferred.roots())
    return later


LATER = {"first.weight", "first.bias", "second.weight"}


def halve(grad):
    return grad / 2


def test_hooks_get_the_gradients_of_one_backward():
    """Each is called once, with what autograd would give it; what it returns counts."""
    seen = {}
    results = []
    for backward in (lambda module, x: module(x).square().sum().backward(), split_backward):
        module, x, seen = Layers(), torch.linspace(-1, 1, 20).view(5, 4).requires_grad_(), {}
        for name, param in module.named_parameters():
            if not param.requires_grad:
                continue
            calls = seen.setdefault(name, [])
            if name in ("first.bias", "second.weight"):
                param.register_hook(halve)
                param.register_hook(lambda grad, calls=calls: calls.append(grad.clone()))
            param.register_post_accumulate_grad_hook(lambda param, calls=calls: calls.append(param.grad.clone()))
        multi = []
        torch.autograd.graph.register_multi_grad_hook([module.first.weight, module.norm.weight], multi.append)
        backward(module, x)
        results.append((gradients(module, x), seen, multi))
    (wanted, calls_wanted, (multi_wanted,)), (found, calls_found, (multi_found,)) = results
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(calls_found, calls_wanted)
    torch.testing.assert_close(multi_found, multi_wanted)


def test_what_has_hooks_is_not_deferred():
    module, x = Layers(), torch.randn(5, 4)
    assert split_backward(module, x) == LATER
    module.zero_grad()
    handle = module.second.weight.register_hook(halve)
    assert split_backward(module, x) == {"first.weight", "first.bias"}
    module.zero_grad()
    handle.remove()
    assert split_backward(module, x) == LATER


def recomputed(use_reentrant):
    return lambda module, x: checkpoint(module, x, use_reentrant=use_reentrant)


def kept_on_host(module, x):
    with torch.autograd.graph.save_on_cpu():
        return module(x)


def by_vmap(module, x):
    return torch.func.vmap(module)(x)


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4)])
@pytest.mark.parametrize(
    "run", [recomputed(True), recomputed(False), kept_on_host, by_vmap], ids=["reentrant", "recomputed", "host", "vmap"]
)
def test_what_others_compute_again_or_keep_is_not_divided(run, shape):
    module, x = Layers(), torch.randn(shape, requires_grad=True)
    module(x).square().sum().backward()
    wanted = [grad.clone() for grad in gradients(module, x)]
    module.zero_grad()
    x.grad = None
    assert split_backward(module, x, run) == set()
    torch.testing.assert_close(gradients(module, x), wanted)


def test_layers_beside_a_checkpoint_are_divided():
    module, x = Layers(), torch.randn(5, 4, requires_grad=True)
    outer = nn.Sequential(nn.Linear(4, 4), module, nn.Linear(3, 3))

    def run(outer, x):
        return outer[2](checkpoint(outer[1], outer[0](x), use_reentrant=False))

    outer(x).square().sum().backward()
    wanted = [grad.clone() for grad in gradients(outer, x)]
    outer.zero_grad()
    x.grad = None
    assert split_backward(outer, x, run) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    torch.testing.assert_close(gradients(outer, x), wanted)


def test_a_backward_outside_of_it_is_whole():
    module, x = Layers(), torch.randn(5, 4)
    module(x).sum().backward()
    wanted = module.first.weight.grad.clone()
    module.zero_grad()
    deferred = DeferredWeights()
    with deferred.in_forward():
        loss = module(x).sum()
    loss.backward()
    torch.testing.assert_close(module.first.weight.grad, wanted)
    assert deferred.roots() == []


def test_products_of_autocast_are_whole():
    module, x = nn.Linear(4, 4), torch.randn(5, 4)
    deferred = DeferredWeights()
    with deferred.in_forward(), torch.autocast("cpu", torch.bfloat16):
        loss = module(x).float().sum()
    with deferred.in_backward():
        loss.backward()
    assert module.weight.grad is not None
    assert deferred.roots() == []


class Others(nn.Module):
    """Layers whose two halves are one computation: convolution, embedding, RMS norm; and a product that is divided."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.convolution = nn.Embedding(7, 4), nn.Conv1d(4, 4, 3, padding=1)
        self.norm, self.linear = nn.RMSNorm(4), nn.Linear(4, 4)

    def forward(self, tokens):
        x = self.convolution(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        return self.linear(self.norm(x))


def test_weights_of_other_layers_come_with_the_gradients_of_inputs():
    module, tokens = Others(), torch.tensor([[1, 2, 6, 2], [0, 1, 3, 5]])
    module(tokens).square().sum().backward()
    wanted = {name: param.grad for name, param in module.named_parameters()}
    module.zero_grad()
    deferred = DeferredWeights()
    with deferred.in_forward():
        loss = module(tokens).square().sum()
    with deferred.in_backward():
        loss.backward()
    with_inputs = {name for name, param in module.named_parameters() if param.grad is not None}
    assert with_inputs == {"embedding.weight", "convolution.weight", "convolution.bias", "norm.weight"}
    torch.autograd.backward(deferred.roots())
    for name, param in module.named_parameters():
        torch.testing.assert_close(param.grad, wanted[name])


def test_an_input_changed_before_the_second_half_is_refused():
    module, x = nn.Linear(4, 4), torch.randn(5, 4)
    deferred = DeferredWeights()
    with deferred.in_forward():
        loss = module(x).square().sum()
    with deferred.in_backward():
        loss.backward()
    x.zero_()
    with pytest.raises(RuntimeError, match=r"the input of shape \(5, 4\) of a linear layer was changed in place"):
        torch.autograd.backward(deferred.roots())


class Implicit(nn.Module):
    """The fixed point of a layer, whose gradient a solver in a hook finds by backwards of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        def call(z):
            return torch.tanh(0.3 * self.inner(z) + self.outer(x))

        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(5):
                z = call(z)
        result = call(z)
        start = z.clone().requires_grad_()
        end = call(start)

        def solve(grad):
            solution = grad
            for _ in range(3):
                (of_start, _) = torch.autograd.grad(end, [start, self.outer.bias], solution, retain_graph=True)
                solution = of_start + grad
            return solution

        result.register_hook(solve)
        return result


def test_a_backward_inside_the_backward_for_other_gradients_adds_nothing_up():
    module, x = Implicit(), torch.randn(5, 4, requires_grad=True)
    module(x).square().sum().backward()
    wanted = [grad.clone() for grad in gradients(module, x)]
    module.zero_grad()
    x.grad = None
    assert split_backward(module, x) == {"inner.weight", "inner.bias", "outer.weight", "outer.bias"}
    torch.testing.assert_close(gradients(module, x), wanted)
