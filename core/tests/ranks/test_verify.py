"""ds_verify finds each planted bug of `core/tests/planted`, names its first tensor, and accuses no healthy run."""

import importlib.util
from itertools import product
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed import comm
from deepspeed.moe.layer import MoE
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.verify.script import compared, recorded
from deepspeed.verify.verdict import OtherConfig, read_verdict
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

PLANTED = {path.stem: path for path in sorted((Path(__file__).parents[1] / "planted").glob("*.py"))}
WIDTH, VOCAB, LENGTH, NUM_STEPS = 16, 33, 5, 3
LIMIT_S = 100
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1200, "stage3_param_persistence_threshold": 0},
}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}}


class Layer(nn.Module):
    def __init__(self, uses):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1 if "batches" not in uses else 0.0)
        self.runs_twice = "twice" in uses

    def forward(self, x):
        if self.runs_twice:  # each run is a backward of its own inside the backward
            x = checkpoint(self._run, x, use_reentrant=True)
            return checkpoint(self._run, x, use_reentrant=True)
        return self._run(x)

    def _run(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class ExpertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = MoE(WIDTH, lambda: nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2, k=1, min_capacity=16)

    def forward(self, x):
        out, loss, _ = self.moe(x)
        return x + out, loss


class Model(nn.Module):
    """A language model; `uses` names what is unusual in it."""

    def __init__(self, uses=()):
        super().__init__()
        self.uses = frozenset(uses)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(uses) for _ in range(3))
        if "frozen" in uses:
            self.layers[0].requires_grad_(False)
        if "moe" in uses:
            self.experts = ExpertLayer()
        if "unused" in uses or "unused on rank 1" in uses:
            self.extra = nn.Linear(WIDTH, WIDTH)
        if "batch norm" in uses:
            self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        if "tied" in uses:
            self.head.weight = self.embed.weight

    def forward(self, tokens, targets):
        x, other = self.embed(tokens), 0.0
        if "batch norm" in self.uses:
            x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if "checkpoint" in self.uses else layer(x)
        if "moe" in self.uses:
            x, loss = self.experts(x)
            other = 0.01 * loss
        if "unused on rank 1" in self.uses and comm.get_rank() == 0:
            x = x + self.extra(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten()) + other


def halve(param):
    param.grad.mul_(0.5)


def train(config, uses):
    """The user's script."""
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled="zero.Init" in uses):
        model = Model(uses)
    arguments = {}
    if "client optimizer" in uses:
        groups = [{"params": list(model.embed.parameters())}, {"params": list(model.layers.parameters()), "lr": 0.03}]
        optimizer = torch.optim.Adam([*groups, {"params": [*model.norm.parameters(), *model.head.parameters()]}], 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        arguments = {"optimizer": optimizer, "lr_scheduler": scheduler}
        config = {key: value for key, value in config.items() if key != "optimizer"}
    engine, *_ = deepspeed.initialize(model=model, config=config, **arguments)
    if "hook" in uses:
        engine.module.head.bias.register_post_accumulate_grad_hook(halve)
    draws = torch.Generator().manual_seed(comm.get_rank() + 1)
    torch.manual_seed(comm.get_rank() + 1)
    try:
        for _ in range(NUM_STEPS * engine.gradient_accumulation_steps() + 2):
            if "batches" in uses:  # of the size that the configuration says
                size = engine.train_micro_batch_size_per_gpu()
                tokens, targets = torch.randint(VOCAB, (size, 2, LENGTH), generator=draws).unbind(1)
            else:
                tokens, targets = torch.randint(VOCAB, (2, 2, LENGTH), generator=draws)
            if "generation" in uses:
                generate(engine, tokens, targets)
            if "evaluation" in uses:
                with torch.no_grad():
                    engine(tokens, targets)
            loss = engine(tokens, targets)
            if "nan" in uses:
                loss = loss * torch.nan
            if "plain backward" in uses:
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                change_gradients(engine, uses)
            engine.step()
    except SystemExit:
        pass
    engine.destroy()


def generate(engine, tokens, targets):
    """What TRL does at stage 3 to generate: it takes the hooks off a model that is whole, and puts them on again."""
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        offload = engine.optimizer.parameter_offload
        for param in (*offload.module.parameters(), *(each for _, each in offload.module.ds_external_parameters())):
            param.ds_active_sub_modules.clear()
            assert (param.ds_status.name, param.ds_numel, param.ds_shape) == ("AVAILABLE", param.numel(), param.shape)
            assert param.partition_numel() <= param.numel()
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        with torch.no_grad():
            engine.module(tokens, targets)
        if not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()
        offload._register_deepspeed_module(offload.module)
    assert len({param.ds_id for param in engine.module.parameters()}) == len(list(engine.module.parameters()))


def change_gradients(engine, uses):
    """What some scripts do between the last backward and the step."""
    if "own clipping" in uses:
        nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
    if "safe calls" in uses:
        calls = deepspeed.utils  # as a script finds them when it runs
        for param in engine.module.parameters():
            calls.safe_set_full_grad(param, 0.5 * calls.safe_get_full_grad(param))
            calls.safe_set_full_fp32_param(param, 0.5 * calls.safe_get_full_fp32_param(param))
            if (state := calls.safe_get_full_optimizer_state(param, "exp_avg")) is not None:
                calls.safe_set_full_optimizer_state(param, 0.5 * state, "exp_avg")


def run_both(path, config, uses, folder, heals=False):
    """Both runs of ds_verify, with the bug in the engine in both, or in the first alone where it `heals`."""
    with pytest.MonkeyPatch.context() as patches:
        if path is not None:
            planted(path).plant(patches)
        with recorded(folder, NUM_STEPS):
            train(config, uses)
        if heals:
            patches.undo()
        with compared(folder, NUM_STEPS):
            train(config, uses)


def planted(path):
    spec = importlib.util.spec_from_file_location(f"planted_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configured(**more):
    zero = {**BASE["zero_optimization"], **more.pop("zero_optimization", {})}
    return {**BASE, **more, "zero_optimization": zero}


def verdict_of(folder, config, uses=(), path=None, num_ranks=2):
    run_ranks(num_ranks, run_both, path, configured(**config), uses, str(folder), timeout_s=LIMIT_S)
    return read_verdict(folder)


def test_there_are_forty_planted_bugs():
    assert len(PLANTED) >= 40
    assert all(planted(path).__doc__ for path in PLANTED.values())


#: like others in the list, or on 4 ranks
SWEPT = {
    *("copies_not_summed", "expert_copies_not_summed", "stale_second_copy", "divided_by_one_more", "not_unscaled"),
    *("norm_counts_copies", "shard_of_last_step_kept", "bf16_wire", "decayed_twice", "weight_not_rounded_from_master"),
}


@pytest.mark.parametrize("name", swept(PLANTED, lambda name: name not in SWEPT))
def test_it_finds_a_planted_bug(name, tmp_path):
    bug = planted(PLANTED[name])
    verdict = verdict_of(
        tmp_path, dict(bug.CONFIG), getattr(bug, "USES", ()), str(PLANTED[name]), getattr(bug, "NUM_RANKS", 2)
    )
    found = verdict.as_json()
    assert found["verdict"] == "differs", found["worst"]
    assert (verdict.first.kind, verdict.first.name) == bug.FIRST, found["faults"][:8]


TYPES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
SECTIONS = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"gradient_clipping": 0.1},
    "offload": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "predivide": {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
    "warm-up": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
    "deterministic": {"deterministic": {"enabled": True}, "gradient_accumulation_steps": 2},
    "overflow": {"fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}},
    "rising scale": {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}},
    "Adam": {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1, "betas": [0.8, 0.9]}}},
    **{
        name: {"optimizer": {"type": name, "params": {"lr": 0.01}}}
        for name in ("SGD", "Lion", "Adagrad", "Lamb", "Muon")
    },
}
USES = (
    *("tied", "moe", "frozen", "unused", "unused on rank 1", "plain backward", "client optimizer", "checkpoint"),
    *("twice", "hook", "evaluation", "nan", "zero.Init", "own clipping", "safe calls", "batch norm"),
    "generation",
)


@pytest.mark.parametrize(
    ("dtype", "stage"),
    swept(
        product(TYPES, range(4)),
        lambda dtype, stage: (dtype, stage) in (("fp32", 0), ("bf16", 2), ("fp16", 3), ("fp32", 1)),
    ),
)
def test_it_accuses_no_healthy_run(dtype, stage, tmp_path):
    config = {**TYPES[dtype], "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    verdict = verdict_of(tmp_path, {**config, "zero_optimization": {"stage": stage}})
    assert verdict.as_json()["verdict"] == "equal", verdict.as_json()["faults"][:8]
    assert verdict.num_steps == NUM_STEPS


def is_possible(what, stage, dtype):
    """Whether there is such a run: some sections say themselves in which type the model computes, a stage may refuse
    what scripts do, `zero.Init` is of stage 3, and scripts find gradients at stage 0 in fp32 alone."""
    types = {"autocast": ("fp32",), "overflow": ("fp16",), "rising scale": ("fp16",), "own clipping": ("fp32",)}
    stages = {
        "unused on rank 1": (0, 1, 2),
        "Lamb": (0,),
        "zero.Init": (3,),
        "generation": (3,),
        "own clipping": (0,),
    }
    return dtype in types.get(what, TYPES) and stage in stages.get(what, range(4))


@pytest.mark.parametrize(
    ("what", "stage", "dtype"),
    swept(
        [each for each in product((*SECTIONS, *USES), range(4), TYPES) if is_possible(*each)],
        lambda what, stage, dtype: (
            (stage == 3 and what in ("moe", "tied", "safe calls", "generation") and dtype == "bf16")
            or (what, stage, dtype) in (("own clipping", 0, "fp32"), ("deterministic", 2, "fp32"))
        ),
    ),
)
def test_it_accuses_no_healthy_run_of_what_scripts_do(what, stage, dtype, tmp_path):
    section = SECTIONS.get(what, {})
    zero = {"stage": stage, **section.get("zero_optimization", {})}
    config = {**TYPES[dtype], **section, "zero_optimization": zero}
    verdict = verdict_of(tmp_path, config, (what,) if what in USES else ())
    if what == "overflow" or (what == "nan" and dtype != "fp32"):  # no step is made
        assert ["every step was skipped" in row.name for row in verdict.faults] == [True]
        return
    assert verdict.as_json()["verdict"] == "equal", verdict.as_json()["faults"][:8]
    assert verdict.num_steps == NUM_STEPS


# ---- another configuration ------------------------------------------------------------------------------------------


def verdict_against(folder, config, other, uses=(), path=None, *, heals=False):
    """The verdict on a script by one configuration, against the same script by another one."""
    OtherConfig("other.json", configured(**other)).write(folder)
    run_ranks(2, run_both, path, configured(**config), uses, str(folder), heals, timeout_s=LIMIT_S)
    return read_verdict(folder)


STAGES = [{"zero_optimization": {"stage": stage}} for stage in range(4)]
BF16 = [{**TYPES["bf16"], **stage} for stage in STAGES]
FP16 = [{**TYPES["fp16"], **stage} for stage in STAGES]
HIGH = {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}}
ACCUMULATED = {"gradient_accumulation_steps": 4, "gradient_clipping": 0.1}
HOST = {"device": "cpu"}
OFFLOADED = {"zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}}
WIDE = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
#: the script's configuration, the other one, and what is unusual in the script
PAIRS = {
    "stage 3 against 0": (STAGES[3], STAGES[0], ("zero.Init", "tied")),
    "stage 0 against 3": (STAGES[0], STAGES[3], ("frozen", "batch norm")),
    "stage 1 against 2": (STAGES[1], STAGES[2], ("moe",)),
    "stage 2 against 3": (STAGES[2], STAGES[3], ("moe",)),
    "offload against stage 1": (OFFLOADED, STAGES[1], ("frozen", "zero.Init")),
    "offload against itself": (OFFLOADED, OFFLOADED, ("twice",)),
    "a bucket of another size": ({}, {"zero_optimization": {"reduce_bucket_size": 100}}, ("unused on rank 1",)),
    "bf16, stage 3 against 0": (BF16[3], BF16[0], ()),
    "bf16 against fp32": (BF16[2], STAGES[0], ("tied",)),
    "fp32 against bf16": (STAGES[0], BF16[2], ()),
    "bf16 against fp32, stage 3": (BF16[3], STAGES[0], ("zero.Init",)),
    "autocast against fp32": (SECTIONS["autocast"], {}, ()),
    "fp16, stage 3 against 1": (FP16[3], FP16[1], ()),
    "fp16 against fp32": (FP16[1], STAGES[0], ()),
    "a rising scale": ({**SECTIONS["rising scale"], **STAGES[2]}, FP16[1], ()),
    "a scale that is too high": ({**HIGH, **STAGES[2]}, FP16[0], ()),
    "a scale that is too high against fp32": (HIGH, STAGES[3], ()),
    "accumulation": ({**ACCUMULATED, **STAGES[3]}, {**ACCUMULATED, **STAGES[0]}, ("evaluation",)),
    "wider micro-batches": ({**ACCUMULATED, **STAGES[3]}, {**WIDE, **STAGES[1]}, ("batches",)),
    "narrower micro-batches in bf16": ({**WIDE, **BF16[2]}, {**ACCUMULATED, **BF16[1]}, ("batches",)),
    "safe calls": (STAGES[3], STAGES[1], ("safe calls",)),
    "generation, stage 3 against 0": (STAGES[3], STAGES[0], ("generation", "zero.Init", "tied")),
    "generation, stage 3 against 2": (BF16[3], BF16[2], ("generation", "frozen")),
    "deterministic": ({**SECTIONS["deterministic"], **STAGES[3]}, {**SECTIONS["deterministic"], **STAGES[0]}, ()),
    "deterministic or not": (SECTIONS["deterministic"], {"gradient_accumulation_steps": 2}, ("evaluation",)),
    "client optimizer": (STAGES[2], STAGES[0], ("client optimizer",)),
    "plain backward": (FP16[2], FP16[0], ("plain backward",)),
    "SGD": ({**SGD, **STAGES[3]}, {**SGD, **STAGES[0]}, ("nan",)),
}
QUICK_PAIRS = {"stage 3 against 0", "bf16 against fp32", "offload against stage 1", "fp16, stage 3 against 1"}


@pytest.mark.parametrize("name", swept(PAIRS, QUICK_PAIRS.__contains__))
def test_a_healthy_run_equals_one_by_another_configuration(name, tmp_path):
    config, other, uses = PAIRS[name]
    verdict = verdict_against(tmp_path, config, other, uses)
    assert verdict.as_json()["verdict"] == "equal", verdict.as_json()["faults"][:8]
    assert (verdict.num_steps, verdict.second) == (NUM_STEPS, "other.json")


#: each is a fault of stage 3, which stage 0 does not have
OF_STAGE_3 = ("gathered_in_wrong_order", "stale_gathered_weight", "stale_weight_in_backward")


@pytest.mark.parametrize("name", swept(OF_STAGE_3, lambda name: name == "stale_gathered_weight"))
def test_stage_0_finds_a_bug_of_stage_3(name, tmp_path):
    bug = planted(PLANTED[name])
    other = {**bug.CONFIG, **STAGES[0]}
    verdict = verdict_against(tmp_path, dict(bug.CONFIG), other, getattr(bug, "USES", ()), str(PLANTED[name]))
    assert verdict.as_json()["verdict"] == "differs", verdict.as_json()["worst"]
    assert (verdict.first.kind, verdict.first.name) == bug.FIRST, verdict.as_json()["faults"][:8]


QUICK_BUGS = {"lost_on_one_rank", "skipped_without_overflow", "shard_not_updated", "schedule_moves_twice"}
ON_TWO_RANKS = [name for name, path in PLANTED.items() if getattr(planted(path), "NUM_RANKS", 2) == 2]


@pytest.mark.parametrize("name", swept(ON_TWO_RANKS, QUICK_BUGS.__contains__))
def test_the_same_engine_without_a_bug_finds_it(name, tmp_path):
    bug = planted(PLANTED[name])
    config = dict(bug.CONFIG)
    verdict = verdict_against(tmp_path, config, config, getattr(bug, "USES", ()), str(PLANTED[name]), heals=True)
    assert verdict.as_json()["verdict"] == "differs", verdict.as_json()["worst"]
    assert (verdict.first.kind, verdict.first.name) == bug.FIRST, verdict.as_json()["faults"][:8]


@pytest.mark.parametrize(
    ("config", "other", "uses", "said"),
    swept(
        [
            ({}, WIDE, (), "train_batch_size is 16, and 4 by the configuration of the script"),
            (STAGES[1], FP16[1], (), "other.json: ds_verify: found fp16"),
            ({}, {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, (), "zero_quantized_weights"),
            ({}, {**STAGES[0], "local_sgd": {"enabled": True}}, (), "local_sgd, by which each rank trains a copy"),
        ],
        lambda config, *_: not config,
    ),
)
def test_other_steps_are_refused(config, other, uses, said, tmp_path):
    with pytest.raises(deepspeed.errors.ConfigError, match=said):
        verdict_against(tmp_path, config, other, uses)


@pytest.mark.parametrize(
    ("config", "other", "kind"),
    swept(
        [
            ({}, {"optimizer": {"type": "AdamW", "params": {"lr": 2e-2, "weight_decay": 0.1}}}, "learning rate"),
            ({}, {"gradient_clipping": 0.01}, "weight"),
            (ACCUMULATED, WIDE, "input"),  # with dropout
        ],
        lambda config, other, kind: kind == "weight",
    ),
)
def test_other_training_differs(config, other, kind, tmp_path):
    assert verdict_against(tmp_path, config, other).first.kind == kind
