"""Stage 3 as libraries and users meet it: engines that share a module, contexts around forwards, `zero.Init`."""

import copy
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.testing.distributed import run_ranks
from deepspeed.zero import GatheredParameters
from torch import Tensor, nn
from torch.nn.utils import parametrize

CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10},
    "gradient_clipping": 0,
}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


def create_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 2))
    net[1].requires_grad_(False)
    return net


def create_engine(net: nn.Module, *, trains: bool) -> Any:
    return deepspeed.initialize(model=net, config={**CONFIG, **(ADAM if trains else {})})[0]


def train(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()


def evaluate(engine: Any) -> float:
    with torch.no_grad():
        return float(engine(torch.ones(1, 8)).sum())


def plain_values() -> list[float]:
    """Of an evaluation before each of two steps, and after them."""
    net = create_net()
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.1)
    values = [evaluate(net)]
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        values.append(evaluate(net))
    return values


def evaluate_beside_training(forgets_hooks: bool) -> list[float]:
    net = create_net()
    trainer = create_engine(net, trains=True)
    values = [evaluate(trainer)]
    train(trainer)
    if forgets_hooks:  # as Lightning does between fit and test
        for module in net.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
    evaluator = create_engine(net, trains=False)
    values.append(evaluate(evaluator))
    evaluator.destroy()
    train(trainer)
    values.append(evaluate(trainer))
    trainer.destroy()
    assert net[0].weight.shape == (32, 8)
    return [*values, evaluate(net)]


@pytest.mark.parametrize("forgets_hooks", [False, True])
def test_an_engine_evaluates_what_another_one_goes_on_training(forgets_hooks: bool) -> None:
    values = plain_values()
    for found in run_ranks(2, evaluate_beside_training, forgets_hooks):
        assert found == pytest.approx([*values, values[-1]], rel=1e-5)


def evaluate_then_train() -> list[float]:
    net = create_net()
    evaluator = create_engine(net, trains=False)
    values = [evaluate(evaluator)]
    trainer = create_engine(net, trains=True)
    for engine in (trainer, evaluator):
        train(trainer)
        values.append(evaluate(engine))
    evaluator.destroy()
    assert net[0].weight.ds_numel == 256  # they are still the trainer's
    trainer.destroy()
    return values


def test_an_evaluating_engine_leaves_its_parameters_to_one_that_trains() -> None:
    for found in run_ranks(2, evaluate_then_train):
        assert found == pytest.approx(plain_values(), rel=1e-5)


def gather_around() -> dict[str, Any]:
    net = create_net()
    engine = create_engine(net, trains=True)
    rank = deepspeed.comm.get_rank()
    with GatheredParameters(net.parameters(), modifier_rank=0):
        evaluate(engine)
        inside = net[0].weight.numel()
        if rank == 0:
            nn.init.ones_(net[2].weight)
            nn.init.ones_(net[2].bias)  # small, whole on every rank, trained
            nn.init.constant_(net[1].bias, 2.0)  # frozen
    facts = {"inside": inside, "sums": [], "whole": net[2].bias.ds_persist and net[2].bias.ds_tensor is net[2].bias}
    with GatheredParameters([net[2].weight, net[1].bias]):
        facts["sums"] = [float(param.sum()) for param in (net[2].weight, net[2].bias, net[1].bias)]
    facts["master"] = float(deepspeed.utils.safe_get_full_fp32_param(net[2].bias).sum())
    engine.destroy()
    facts["left"] = [name for param in net.parameters() for name in vars(param) if name.startswith("ds_")]
    return facts


def test_a_context_keeps_parameters_whole_around_a_forward_and_brings_small_ones_to_all_ranks() -> None:
    expected = {"inside": 256, "sums": [64.0, 2.0, 64.0], "whole": True, "master": 2.0, "left": []}
    assert run_ranks(2, gather_around) == [expected, expected]


class Parent(nn.Module):
    """Changes weights of its children in all the ways of torch, as nanoGPT and transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.xavier_uniform_(param)
        for name, param in self.body.named_parameters():
            if name.startswith("1."):
                param.requires_grad_(True)
                nn.init.normal_(param, std=0.02)
        nn.init.kaiming_uniform_(self.body[0].weight)
        with torch.no_grad():
            self.body[2].weight.copy_(torch.ones(8, 8)).mul_(3)
            self.body[2].bias[3] = 7
            torch.eye(8, out=self.body[3].weight)
        self._change_data()
        self.body.apply(lambda module: isinstance(module, nn.Linear) and module.bias.data.mul_(2))
        self.copies = nn.ModuleList([copy.deepcopy(self.body[4])])
        self.numel = sum(param.numel() for param in self.parameters())

    def _change_data(self) -> None:
        self.body[0].weight.data.normal_(0.0, 0.02)
        self.body[1].weight.data[2:4].zero_()
        row = self.body[2].weight.data[0]
        first, second = self.body[3].bias.data, self.body[4].bias.data
        self.late = nn.Linear(8, 8)  # a module is built, and sharded, while views are held
        row.uniform_()
        first.copy_(second.fill_(2.0))
        self.body[4].weight.data = torch.rand(8, 8)
        self.late.bias.detach().view(2, 4).T[1].normal_()


class Combining(nn.Module):
    """Calls functions of several weights of its children at once; rounding does not change what they select."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        first, second, third = (each.weight for each in self.body)
        self.both = nn.Parameter(torch.cat([first, second.detach()]))
        self.selected = nn.Parameter(torch.where(first > 0, third, other=second))
        with torch.no_grad():
            third.copy_(torch.min(first, -third))
            torch.abs(second, out=first)


class Symmetric(nn.Module):
    def forward(self, upper: Tensor) -> Tensor:
        return upper.triu() + upper.triu(1).T

    def right_inverse(self, whole: Tensor) -> Tensor:
        return whole.triu()


class Half(nn.Module):
    def forward(self, whole: Tensor) -> Tensor:
        return whole / 2


class Parametrized(nn.Module):
    """Lets torch compare the dtypes of weights and of what its parametrizations make of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for layer in self.body[:2]:
            parametrize.register_parametrization(layer, "weight", Symmetric())
        nn.utils.parametrizations.weight_norm(self.body[2], dim=None)
        for layer in self.body[1:]:
            parametrize.register_parametrization(layer, "weight", Half())


def build_under_init(build: Callable[[], nn.Module], dtype: torch.dtype) -> list[bool]:
    torch.manual_seed(1 + deepspeed.comm.get_rank())  # the first rank's seed counts
    with deepspeed.zero.Init(config_dict_or_path=CONFIG, dtype=dtype):
        net = build()
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    plain = build()
    facts = [vars(net).get("numel") == vars(plain).get("numel"), all(param.numel() == 0 for param in net.parameters())]
    if deepspeed.comm.get_rank() == 0:
        facts.append(torch.equal(state, torch.random.get_rng_state()))
    with GatheredParameters(net.parameters()):
        pairs = zip(net.parameters(), plain.parameters(), strict=True)
        facts += [param.dtype == dtype and torch.equal(param, other.to(dtype)) for param, other in pairs]
    return facts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", [Parent, Combining, Parametrized])
def test_what_an_init_of_a_parent_does_to_weights_of_its_children_stays(
    build: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    for facts in run_ranks(2, build_under_init, build, dtype):
        assert all(facts), facts


class EagerSGD(torch.optim.SGD):
    """Makes its state when it is built."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for param in self.param_groups[0]["params"]:
            self.state[param]["former"] = torch.zeros_like(param)


def train_with_adagrad(threshold: int) -> list[list[Tensor]]:
    """Weights of a model of the context, of one that is not, and whether another optimizer is refused."""
    results = []
    zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    for enabled in (True, False):
        torch.manual_seed(0)
        with deepspeed.zero.Init(enabled=enabled):
            net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
        optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1, initial_accumulator_value=0.5)
        engine = deepspeed.initialize(
            model=net, optimizer=optimizer, config={"train_batch_size": 2, "zero_optimization": zero}
        )[0]
        train(engine)
        engine.destroy()
        results.append([param.detach() for param in net.parameters()])
    with deepspeed.zero.Init():
        net = nn.Linear(8, 4)
    config = {"train_batch_size": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    with pytest.raises(ConfigError, match="EagerSGD was built with parameters that zero.Init had sharded.*'former'"):
        deepspeed.initialize(model=net, optimizer=EagerSGD(net.parameters()), config=config)
    return results


@pytest.mark.parametrize("threshold", [0, 1000])
def test_state_that_an_optimizer_made_of_sharded_parameters(threshold: int) -> None:
    for sharded, plain in run_ranks(2, train_with_adagrad, threshold):
        assert all(map(torch.equal, sharded, plain))


def refuse_whole_parameters(name: str) -> None:
    optimizer = {"type": name, "params": {"lr": 0.1}}
    with pytest.raises(
        ConfigError, match=f"stage 3: the update of .*{name} looks at whole parameters.*use stage 1 or 2"
    ):
        deepspeed.initialize(model=create_net(), config={**CONFIG, "optimizer": optimizer})


def test_an_optimizer_of_whole_parameters_is_refused() -> None:
    run_ranks(2, refuse_whole_parameters, "Lamb")


class BadAdam(torch.optim.AdamW):
    """Has a step of its own, of which nothing is known."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def refuse_unknown_step() -> None:
    net = create_net()
    config = {**CONFIG, "optimizer": None, "zero_allow_untested_optimizer": True}
    with pytest.raises(
        ConfigError,
        match="stage 3: the update of BadAdam is not known to be elementwise.*is_elementwise = True.*use stage 1 or 2",
    ):
        deepspeed.initialize(model=net, optimizer=BadAdam(net.parameters()), config=config)


def test_of_an_optimizer_with_a_step_of_its_own_it_says_what_is_not_known() -> None:
    run_ranks(1, refuse_unknown_step)


def run_without_parameters() -> bool:
    """As Lightning does where configure_optimizers returns None: its optimizer has no groups."""
    net = create_net()
    wanted = net[0].weight.detach().clone()
    optimizer = BadAdam(net.parameters())
    optimizer.param_groups.clear()
    config = {**CONFIG, "optimizer": None, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 8)).square().mean())
    engine.step()
    with pytest.raises(ConfigError, match="the update of BadAdam is not known to be elementwise"):
        engine.optimizer.add_param_group({"params": [net[0].weight]})
    with GatheredParameters(net[0].weight):
        return torch.equal(net[0].weight, wanted)


def test_an_optimizer_of_no_parameters_has_no_update_to_refuse() -> None:
    assert run_ranks(2, run_without_parameters) == [True, True]


def refuse_another_shape() -> None:
    with deepspeed.zero.Init(), pytest.raises(ValueError, match=r"parameter weight: .* of shape \(2, 2\), .* \(4, 8\)"):
        nn.Linear(8, 4).weight.data = torch.zeros(2, 2)


def test_data_of_another_shape_is_refused_inside_init() -> None:
    run_ranks(2, refuse_another_shape)


class Borrower(nn.Module):
    """Reads a weight of the other module from a list, where no read is noticed."""

    def __init__(self, use: Any, owner: nn.Module) -> None:
        super().__init__()
        self.owner, self.use, self.weights = owner, use, [owner.weight]

    def forward(self, x: Tensor) -> Any:
        return self.use(x, self.weights[0])


def read_what_is_empty() -> None:
    uses: list[Any] = [
        nn.functional.linear,
        lambda x, weight: x * weight,
        lambda x, weight: x @ weight,
        lambda x, weight: nn.functional.embedding(x.long(), weight),
        lambda x, weight: nn.functional.conv1d(x[None], weight),
        lambda x, weight: nn.functional.layer_norm(x, (8,), weight),
    ]
    for use in uses:
        engine = create_engine(Borrower(use, nn.Linear(8, 8)), trains=False)
        with pytest.raises(RuntimeError, match=r"; in ZeRO stage 3 .* call deepspeed\.zero\.register_external_param"):
            engine(torch.ones(1, 8))
    engine = create_engine(create_net(), trains=False)
    with pytest.raises(RuntimeError) as caught:
        engine(torch.ones(1, 7))
    assert "stage 3" not in str(caught.value)  # an error that has to do with no parameter


def test_a_read_that_nobody_notices_ends_with_a_hint() -> None:
    run_ranks(2, read_what_is_empty)


TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda weight: weight.square().sum(),
    "norm": lambda weight: weight.norm(),
    "product": lambda weight: (weight.T @ weight).sum(),
}


def add_a_term(name: str, backward_within: bool) -> tuple[str, list[float]]:
    net = create_net()
    engine = create_engine(net, trains=True)
    try:
        loss = engine(torch.ones(1, 8)).sum()
        with GatheredParameters(net.parameters()):
            loss = loss + TERMS[name](net[0].weight)
            if backward_within:
                engine.backward(loss)
        if not backward_within:
            engine.backward(loss)
    except (RuntimeError, IndexError) as error:
        return str(error), []
    engine.step()
    with GatheredParameters(net.parameters()):
        return "", [float(param.detach().sum()) for param in net.parameters()]


@pytest.mark.parametrize("name", TERMS)
def test_a_term_of_gathered_weights_has_its_backward_in_the_context(name):
    for message, _ in run_ranks(2, add_a_term, name, False):
        assert "call engine.backward within the same context" in message
    net = create_net()
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.1)
    (net(torch.ones(1, 8)).sum() + TERMS[name](net[0].weight)).backward()
    optimizer.step()
    for _, sums in run_ranks(2, add_a_term, name, True):
        assert sums == pytest.approx([float(param.detach().sum()) for param in net.parameters()], rel=1e-4, abs=1e-4)
