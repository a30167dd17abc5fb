"""Names to objects, and a one-line error that names the key for everything that is wrong."""

import math

import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon import Muon
from deepspeed.optim import create_optimizer, create_scheduler
from deepspeed.plugins import hookimpl
from deepspeed.plugins.manager import plugin_manager

NEEDED = {"OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}, "WarmupDecayLR": {"total_num_steps": 9}}


def _params():
    return [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize(
    ("name", "params", "offload", "cls"),
    [
        ("Adam", {}, False, FusedAdam),
        ("adamw", {}, False, FusedAdam),
        ("ADAM", {}, True, DeepSpeedCPUAdam),
        ("AdamW", {"amsgrad": True}, False, DeepSpeedCPUAdam),
        ("Adam", {"torch_adam": True}, False, torch.optim.AdamW),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, False, torch.optim.Adam),
        ("AdamW", {"torch_adam": True, "adam_w_mode": False}, False, torch.optim.AdamW),
        ("Adagrad", {}, False, DeepSpeedCPUAdagrad),
        ("Lion", {}, False, FusedLion),
        ("lion", {}, True, DeepSpeedCPULion),
        ("Lamb", {}, False, FusedLamb),
        ("Muon", {}, False, Muon),
        ("Muon", {"per_head_muon": True}, True, Muon),
        ("SGD", {"momentum": 0.9}, False, torch.optim.SGD),
        ("rmsprop", {}, False, torch.optim.RMSprop),
        ("NAdam", {}, False, torch.optim.NAdam),
    ],
)
def test_names(name, params, offload, cls):
    optimizer = create_optimizer(name, {"lr": 0.25, **params}, _params(), offload=offload)
    assert type(optimizer) is cls
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_adam_is_decoupled_unless_told_otherwise():
    def trained(name, **params):
        param = torch.nn.Parameter(torch.tensor([2.0]))
        optimizer = create_optimizer(name, {"lr": 0.1, "weight_decay": 0.5, **params}, [param])
        param.grad = torch.tensor([1.0])
        optimizer.step()
        return param.item()

    decoupled, coupled = 2.0 * 0.95 - 0.1, 2.0 - 0.1
    assert trained("Adam") == pytest.approx(decoupled)
    assert trained("AdamW", adam_w_mode=False) == pytest.approx(decoupled)
    assert trained("Adam", adam_w_mode=False) == pytest.approx(coupled)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Lion", "Lamb", "RMSprop"])
def test_auto_stands_for_the_default_of_what_has_one(name):
    """Hugging Face's placeholder; where neither its Trainer nor Accelerate fills it in, `lr` alone is asked for."""
    given = {"AdamW": ("betas", "eps", "weight_decay", "adam_w_mode", "torch_adam"), "Lion": ("betas", "weight_decay")}
    left = dict.fromkeys(given.get(name, ("eps", "weight_decay")), "auto")
    found, expected = (create_optimizer(name, {"lr": 0.1, **params}, _params()) for params in (left, {}))
    for one, other in zip(found.param_groups, expected.param_groups, strict=True):
        assert {**one, "params": None} == {**other, "params": None}


def test_auto_stands_for_the_default_in_a_schedule_too():
    left = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"), "auto")
    found, expected = (
        create_scheduler("WarmupLR", params, create_optimizer("SGD", {"lr": 0.25}, _params())) for params in (left, {})
    )
    for _ in range(3):
        found.step(), expected.step()
        assert found.get_last_lr() == expected.get_last_lr()


def test_groups_and_json_lists():
    a, b = _params()
    groups = [{"params": [a], "weight_decay": 0.3}, {"params": [b], "name": "bias"}]
    optimizer = create_optimizer("AdamW", {"betas": [0.5, 0.75], "weight_decay": 0.1}, groups)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.1]
    assert optimizer.param_groups[1]["name"] == "bias"


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("FusedAdam", {}, r"type: found 'FusedAdam', a kernel that Adam uses where it fits; write Adam or AdamW$"),
        ("DeepSpeedCPUAdam", {}, r"'DeepSpeedCPUAdam', a kernel that Adam uses where it fits; write Adam or AdamW$"),
        ("fused_lamb", {}, r"'fused_lamb', a kernel that Lamb uses where it fits; write Lamb$"),
        ("FusedLion", {}, r"'FusedLion', a kernel that Lion uses where it fits; write Lion$"),
        ("CPULion", {}, r"'CPULion', a kernel that Lion uses where it fits; write Lion$"),
        ("DeepSpeedCPUAdagrad", {}, r"'DeepSpeedCPUAdagrad', a kernel that Adagrad uses where it fits; write Adagrad$"),
        ("CPUAdagrad", {}, r"'CPUAdagrad', a kernel that Adagrad uses where it fits; write Adagrad$"),
        ("AdmW", {}, r'^optimizer\.type: found \'AdmW\'.*Did you mean "AdamW"\?.*Known are Adam, .*RMSprop'),
        ("Optimizer", {}, r"^optimizer\.type: found 'Optimizer'"),
        ("MuAdam", {}, r"^optimizer\.type: found 'MuAdam', which is not in this version"),
        ("musgd", {}, "not in this version"),
        ("LBFGS", {}, r"^optimizer\.type: found 'LBFGS'.*closure"),
        ("AdamW", {"lrr": 1}, r'^optimizer\.params\.lrr: AdamW \(FusedAdam\) has no.*mean "lr"\?.*accepts.*betas'),
        ("AdamW", {"learning_rate": 1e-3}, r'params\.learning_rate: AdamW .* parameter\. Did you mean "lr"\?'),
        ("sgd", {"Learning-Rate": 1e-3}, r'params\.Learning-Rate: SGD .* parameter\. Did you mean "lr"\?'),
        ("SGD", {"beta": 0.9}, r'params\.beta: SGD has no such parameter\. Did you mean "momentum"\?'),
        ("Lion", {"beta1": 0.9}, r'params\.beta1: Lion \(FusedLion\) has .* Did you mean "betas"\?'),
        ("Lamb", {"epsilon": 0.9}, r'params\.epsilon: Lamb \(FusedLamb\) has .* Did you mean "eps"\?'),
        ("Muon", {"wd": 0.9}, r'params\.wd: Muon has .* Did you mean "weight_decay"\?'),
        ("Adagrad", {"step_size": 0.9}, r'params\.step_size: Adagrad \(DeepSpeed.* Did you mean "lr"\?'),
        (
            "Adam",
            {"lr": 1e-3, "weight_decy": 0.1},
            r'weight_decy: .*Did you mean "weight_decay"\?.* accepts adam_w_mode',
        ),
        (
            "Adam",
            {"torch_adm": True},
            r'torch_adm: Adam \(FusedAdam\) has no such.*Did you mean "torch_adam"\?.*accepts.*torch_',
        ),
        ("Lion", {"torch_adam": True}, r"torch_adam: Lion \(FusedLion\) has no such parameter. It accepts betas, lr,"),
        ("SGD", {"betas": [0.9, 0.99]}, r"^optimizer\.params\.betas: SGD has no such parameter"),
        ("AdamW", {"lr": "1e-3"}, r"^optimizer\.params\.lr: found '1e-3', but it must be a number"),
        ("AdamW", {"lr": "auto"}, r'^optimizer\.params\.lr: found "auto"'),
        ("AdamW", {"lr": True}, r"^optimizer\.params\.lr: found True"),
        ("AdamW", {"betas": 0.9}, r"^optimizer\.params\.betas: found 0\.9.*list of 2 numbers"),
        ("AdamW", {"betas": [0.9]}, r"^optimizer\.params\.betas: found \[0\.9\]"),
        ("AdamW", {"betas": [0.9, 1.5]}, r"^optimizer\.params\.betas\[1\]: found 1\.5"),
        (
            "AdamW",
            {"bias_correction": 1},
            r"^optimizer\.params\.bias_correction: found 1, but it must be true or false",
        ),
        ("Adam", {"torch_adam": "yes"}, r"^optimizer\.params\.torch_adam: found 'yes'"),
        ("AdamW", {"lr": -1}, r"^optimizer\.params\.lr: found -1"),
        ("SGD", {"lr": -1}, r"^optimizer\.params: SGD refused.*Invalid learning rate"),
        ("Lamb", {"max_grad_norm": 1.0}, r"^optimizer\.params\.max_grad_norm: found 1\.0.*gradient_clipping"),
        ("Muon", {"muon_lr": "x"}, r"^optimizer\.params\.muon_lr: found 'x', but it must be a number or null"),
        ("RMSprop", {"foreach": 1}, r"^optimizer\.params\.foreach: found 1, but it must be true or false or null"),
        ("Adafactor", {"eps": 1e-3}, r"^optimizer\.params\.eps: found 0\.001, .*2 numbers \(the first may be null\)"),
        ("Adafactor", {"eps": ["x", 1e-3]}, r"^optimizer\.params\.eps: found \['x', 0\.001\]"),
        ("Adafactor", {"eps": [None, None]}, r"^optimizer\.params\.eps: found \[None, None\]"),
        *(
            (name, {key: value}, rf"^optimizer\.params\.{key}: found -?(nan|inf), but it must be a finite number")
            for name, key in (("SGD", "lr"), ("SGD", "momentum"), ("SGD", "weight_decay"), ("AdamW", "lr"))
            for value in (math.nan, math.inf, -math.inf)
        ),
        ("AdamW", {"betas": [0.9, math.nan]}, r"^optimizer\.params\.betas: found \[0\.9, nan\].* finite numbers"),
        ("Muon", {"per_head_muon": 3}, r"^optimizer\.params\.per_head_muon: found 3, but it must be true or false"),
        ("Muon", {"ns_method": 3}, r"^optimizer\.params\.ns_method: found 3, but it must be a string"),
    ],
)
def test_faults_name_the_key(name, params, message):
    with pytest.raises(ConfigError, match=message) as caught:
        create_optimizer(name, params, _params())
    assert "\n" not in str(caught.value)


def test_the_section_is_left_as_it_was():
    params = {"lr": 0.1, "torch_adam": True, "adam_w_mode": False}
    create_optimizer("Adam", params, _params())
    assert params == {"lr": 0.1, "torch_adam": True, "adam_w_mode": False}


def test_a_plugin_is_asked_first():
    class Plugin:
        @hookimpl
        def ds_optimizer(self, name, params, arguments):
            return torch.optim.SGD(params, **arguments) if name == "Shiny" else None

    manager = plugin_manager()
    manager.register(Plugin(), "test-optimizer")
    manager.activate("test-optimizer")
    try:
        optimizer = create_optimizer("Shiny", {"lr": 0.5}, _params())
        assert type(optimizer) is torch.optim.SGD
        assert len(optimizer.param_groups[0]["params"]) == 2
        assert type(create_optimizer("Adam", {}, _params())) is FusedAdam
    finally:
        manager.unregister("test-optimizer")


def test_schedules_by_name():
    optimizer = create_optimizer("SGD", {"lr": 1.0}, _params())
    own = create_scheduler("warmuplr", {"warmup_max_lr": 0.5, "warmup_num_steps": 2}, optimizer)
    assert type(own).__name__ == "WarmupLR"
    own.step(5)
    assert optimizer.param_groups[0]["lr"] == 0.5
    listed = create_scheduler("WarmupLR", {"warmup_max_lr": [0.25]}, optimizer)
    listed.step(5000)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_torch_schedules_by_name():
    optimizer = create_optimizer("SGD", {"lr": 1.0}, _params())

    class Face:
        def __init__(self):
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups

    for face in (optimizer, Face()):
        schedule = create_scheduler("CosineAnnealingLR", {"T_max": 4}, face)
        assert type(schedule) is torch.optim.lr_scheduler.CosineAnnealingLR


@pytest.mark.parametrize(("name", "params"), [("WarmupLR", {}), ("WarmupDecayLR", {"total_num_steps": 8})])
def test_a_warmup_to_null_leads_to_the_optimizers_own_rate(name, params):
    optimizer = create_optimizer("SGD", {"lr": 0.25}, _params())
    schedule = create_scheduler(name, {"warmup_max_lr": None, "warmup_num_steps": 1, **params}, optimizer)
    for _ in range(3):
        schedule.step()
    assert schedule.warmup_max_lr is None
    assert max(schedule.get_last_lr()) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmpLR", {}, r'^scheduler\.type: found \'WarmpLR\'.*Did you mean "WarmupLR"\?.*torch\'s.*CosineAnnealingLR'),
        ("LRScheduler", {}, r"^scheduler\.type: found 'LRScheduler'"),
        ("ReduceLROnPlateau", {}, r"^scheduler\.type: found 'ReduceLROnPlateau'.*metric"),
        ("WarmupDecayLR", {}, r"^scheduler\.params\.total_num_steps: found nothing, but WarmupDecayLR needs it"),
        ("WarmupLR", {"warmup_steps": 3}, r'^scheduler\.params\.warmup_steps.*Did you mean "warmup_num_steps"\?'),
        ("WarmupLR", {"learning_rate": 3}, r'params\.learning_rate: WarmupLR .* Did you mean "warmup_max_lr"\?'),
        ("WarmupDecayLR", {"num_training_steps": 3}, r'num_training_steps: .* Did you mean "total_num_steps"\?'),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, r'^scheduler\.params\.total_num_steps: found "auto"'),
        ("WarmupLR", {"warmup_nm_steps": "auto"}, r"^scheduler\.params\.warmup_nm_steps: .* no such parameter"),
        ("WarmupLR", {"warmup_num_steps": 0}, r"^scheduler\.params\.warmup_num_steps: found 0"),
        ("WarmupLR", {"warmup_num_steps": [1]}, r"^scheduler\.params\.warmup_num_steps: found \[1\].* a number"),
        ("WarmupLR", {"warmup_max_lr": "x"}, r"^scheduler\.params\.warmup_max_lr: found 'x'.*one per group"),
        ("WarmupDecayLR", {"total_num_steps": "many"}, r"^scheduler\.params\.total_num_steps: found 'many'.*a number"),
        (
            "OneCycle",
            {"cycle_min_lr": "x", "cycle_max_lr": 1},
            r"^scheduler\.params\.cycle_min_lr: found 'x'.*per group",
        ),
        ("StepLR", {"step_size": "x"}, r"^scheduler\.params\.step_size: found 'x', but it must be a number"),
        ("StepLR", {"step_size": 0}, r"^scheduler\.params\.step_size: found 0, but it must be more than 0"),
        ("CosineAnnealingLR", {"T_max": 0}, r"^scheduler\.params\.T_max: found 0, but it must be more than 0"),
        *(
            (name, {**NEEDED.get(name, {}), key: value}, rf"^scheduler\.params\.{key}: found .*finite number")
            for name, key in (
                *(("WarmupLR", "warmup_min_lr"), ("WarmupLR", "warmup_max_lr"), ("OneCycle", "cycle_min_lr")),
                *(("OneCycle", "cycle_max_lr"), ("LRRangeTest", "lr_range_test_min_lr")),
                *(("LRRangeTest", "lr_range_test_step_rate"), ("WarmupDecayLR", "total_num_steps")),
            )
            for value in (math.nan, math.inf)
        ),
        *(
            (
                name,
                {"total_num_steps": value},
                rf"total_num_steps: found {value}, but it must be a whole number of 1 or",
            )
            for name in ("WarmupDecayLR", "WarmupCosineLR")
            for value in (-1, 0, 1.5)
        ),
        ("MultiStepLR", {"milestones": 3}, r"^scheduler\.params: MultiStepLR refused"),
    ],
)
def test_schedule_faults_name_the_key(name, params, message):
    optimizer = create_optimizer("SGD", {"lr": 1.0}, _params())
    with pytest.raises(ConfigError, match=message):
        create_scheduler(name, params, optimizer)
