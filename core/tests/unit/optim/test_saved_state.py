"""Which optimizers take each other's state, and how a refusal names both."""

import pytest
import torch
from deepspeed.errors import CheckpointError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon import Muon
from deepspeed.optim.saved_state import check_each_state, check_saved_state, num_states, state_names

ADAMS = [torch.optim.Adam, torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam]
FAMILIES = {
    "Adam": ADAMS,
    "Adagrad": [torch.optim.Adagrad, DeepSpeedCPUAdagrad],
    "Lion": [FusedLion, DeepSpeedCPULion],
    "SGD": [torch.optim.SGD],
    "Muon": [Muon],
    "RMSprop": [torch.optim.RMSprop],
    "Adadelta": [torch.optim.Adadelta],
    "Adamax": [torch.optim.Adamax],
    "NAdam": [torch.optim.NAdam],
}
ALL = [(family, cls) for family, classes in FAMILIES.items() for cls in classes]


class Mine(torch.optim.Optimizer):
    """Of a class that nobody knows."""

    def __init__(self, params, states=("own",), **options):
        super().__init__(params, {"lr": 0.1, **options})
        self.states = states

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            self.state[param] = {name: torch.zeros_like(param) for name in self.states}


def create(cls, *, steps=0, **options):
    params = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
    optimizer = cls(params, **{"lr": 0.1, **options})
    for _ in range(steps):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    return optimizer


def check(saved, loading):
    state = saved.state_dict()
    check_saved_state(loading, state["state"].values(), state["param_groups"])


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("family", "cls"), ALL)
def test_a_kind_takes_its_own_and_refuses_others(family, cls, steps):
    options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    saved = create(cls, steps=steps, **options)
    for other_family, other in ALL:
        if other_family == family:
            check(saved, create(other))
        elif steps:
            with pytest.raises(
                CheckpointError, match=rf"optimizer state: found that of .*this run has {other.__name__} "
            ):
                check(saved, create(other))


SETTINGS = [
    *((cls, {}) for _, cls in ALL),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (Mine, {"states": ("one", "other")}),
]


@pytest.mark.parametrize(("cls", "options"), SETTINGS)
def test_the_number_of_states_is_known_before_the_first_step(cls, options):
    stepped = create(cls, steps=1, **options)
    numbers = [sum(value.numel() > 1 for value in state.values()) for state in stepped.state.values()]
    expected = 2 if cls is Muon else max(numbers, default=0)  # which leaves some groups to Adam
    assert num_states(create(cls, **options)) == expected


@pytest.mark.parametrize(("saved", "loading"), [(torch.optim.SGD, torch.optim.AdamW), (FusedAdam, torch.optim.SGD)])
def test_before_the_first_step_the_options_tell(saved, loading):
    with pytest.raises(CheckpointError, match="states: none; options: "):
        check(create(saved), create(loading))


@pytest.mark.parametrize(("saved", "loading"), [({"momentum": 0.9}, {}), ({}, {"momentum": 0.9})])
def test_a_setting_of_one_kind_is_no_other_kind(saved, loading):
    check(create(torch.optim.SGD, steps=1, **saved), create(torch.optim.SGD, **loading))
    check(create(torch.optim.AdamW, steps=1, amsgrad=True), create(torch.optim.AdamW))


def test_what_schedules_and_users_write_into_groups_tells_nothing():
    saved, loading = create(FusedAdam, steps=1), create(torch.optim.AdamW)
    saved.param_groups[0].update(step=3, max_lr=1.0, name="first", layer_decay=0.5)
    torch.optim.lr_scheduler.LambdaLR(loading, lambda step: 1.0)
    loading.param_groups[0]["lr_scale"] = 0.5
    check(saved, loading)


def test_each_state_has_what_the_kind_needs():
    loading = create(torch.optim.AdamW)
    saved = create(torch.optim.AdamW, steps=1).state_dict()
    check_each_state(loading, [saved["state"][0], {}, {"step": torch.tensor(0.0)}])  # the others were never updated
    with pytest.raises(
        CheckpointError, match=r"\(exp_avg\) without exp_avg_sq.*AdamW needs.*load_optimizer_states=False"
    ):
        check_each_state(loading, [saved["state"][0], {"exp_avg": torch.zeros(2)}])


@pytest.mark.parametrize(
    "state", [{"step": torch.tensor(3.0)}, {"step": 3}, {"parameter_scalars": {"step": {0: 0.0, 2: 3.0}}}]
)
def test_a_count_of_steps_alone_is_no_state(state):
    with pytest.raises(
        CheckpointError, match=r"found states \(step\) without exp_avg, exp_avg_sq, which AdamW.*load_optimizer_states"
    ):
        check_each_state(create(torch.optim.AdamW), [{}, state])
    check_each_state(create(torch.optim.SGD), [state])


def test_lamb_keeps_adams_states():
    check(create(FusedLamb, steps=1), create(torch.optim.AdamW))


def test_of_an_unknown_class_only_a_contradiction_is_refused():
    adam = create(torch.optim.AdamW, steps=1)
    check(adam, create(Mine))
    check(create(Mine, steps=1), create(Mine, steps=1, states=("own", "later")))
    with pytest.raises(CheckpointError, match=r"that of Adam \(.*this run has Mine \(states: own; options: lr\)"):
        check(adam, create(Mine, steps=1))
    with pytest.raises(CheckpointError, match=r"this run has Mine \(states: none; options: decay, lr\)"):
        check(adam, create(Mine, decay=0.5))


def test_the_names_in_a_flat_group():
    flat = {"exp_avg": 1, "step": 3, "parameter_scalars": {"mu_product": {}}, "parameter_states": {"row": {0: 1}}}
    assert state_names([flat]) == {"exp_avg", "mu_product", "row"}
