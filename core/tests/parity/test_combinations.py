"""Combinations that nobody has thought of: drawn by a seeded generator, beside plain torch on one rank.

A draw is a layout, how it is trained, and what a script does in between: it evaluates, fails and repeats, changes the
batch size, puts values into parameters, saves and goes on elsewhere. Losses, norms and weights are to be those of a
loop over one model in plain torch, or the draw is refused with a reason. A draw depends on its number alone:

    pytest core/tests/parity/test_combinations.py -m '' -k 'draw-17-'
"""

import random
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.activation import checkpointing
from deepspeed.errors import CommError, ConfigError
from deepspeed.moe.layer import MoE
from deepspeed.parallel import groups
from deepspeed.parallel.model_part import part_held
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEAD, LENGTH, BATCH = 13, 16, 4, 8, 2
NUM_LAYERS, NUM_EXPERTS = 3, 2
STEPS, SEED, LR, SHRINK = 4, 7, 0.2, 0.9
SALT = 182_000_000  # with which the draws of every run have the corners that were wrong once, each several times
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

RECOMPUTES = ("reentrant", "not reentrant", "host", "contiguous", "partitioned")
BETWEEN = ("scores", "evaluation")
EVENTS = ("batch size", "batch size within a step", "assignment", "resume", "failed forward", "failed backward")


# ---- a draw ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """What a run may change when it goes on elsewhere."""

    stage: int = 0
    offload: str = ""  # "", "optimizer", or "all" of stage 3
    schedule: str = "1f1b"  # of a pipeline
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Draw:
    number: int
    sizes: dict[str, int]  # of the mesh
    place: Place
    later: Place  # after "resume"
    ep: int = 0  # 0: no experts
    precision: str = "fp32"
    num_micros: int = 1
    clip: float = 0.0
    optimizer: str = "sgd"
    tied: bool = False
    frozen: bool = False
    hooked: bool = False
    recomputes: str | None = None
    by_user: bool = False  # loss.backward() instead of engine.backward(loss)
    forwards_first: bool = False  # all forwards of a step before its backwards
    between: str | None = None  # between a forward and its backward; of a pipeline, between batches
    events: dict[int, str] = field(default_factory=dict)  # before a step; failures: in it
    divides_vocabulary: bool = False
    other_engine: bool = False  # built later, with another mesh
    compares: bool = False  # copies of weights, before each update
    times_ranks: bool = False

    def size(self, axis):
        return self.sizes.get(axis, 1)

    @property
    def world(self):
        product = 1
        for size in self.sizes.values():
            product *= size
        return product

    @property
    def places(self):
        return [self.place] + [self.later] * ("resume" in self.events.values())

    @property
    def interleaves(self):
        """Whether a schedule needs as many micro-batches as stages, or a multiple."""
        return self.size("pp") > 1 and any(each.schedule == "interleaved" for each in self.places)

    @property
    def refusal(self):
        """A part of the reason for which it is refused, else ""."""
        if self.size("pp") > 1 and any(each.schedule == "zero_bubble" and each.stage == 3 for each in self.places):
            return 'use "1f1b", or stage 2'
        return ""

    def __str__(self):
        axes = "".join(f"{axis}{size}" for axis, size in self.sizes.items() if size > 1) or "alone"
        return f"draw-{self.number}-{axes}-{self.precision}-stage{self.place.stage}"


LAYOUTS = {
    1: [{"dp": 1}],
    2: [{"dp": 2}, {"dp": 2}, {"tp": 2}, {"tp": 2}, {"pp": 2}, {"pp": 2}, {"sp": 2}],
    4: [{"dp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 4}, {"dp": 2, "sp": 2}, {"tp": 4}],
}


def draw(number, world=2):
    """The draw of a number: the same on every machine."""
    dice = random.Random(SALT + 1000 * world + number)
    sizes = dice.choice(LAYOUTS[world])
    is_pipe, is_tensor = sizes.get("pp", 1) > 1, sizes.get("tp", 1) > 1
    ep = dice.choice((0, 0, 1, 2)) if sizes.get("dp", 1) % 2 == 0 and not is_pipe and len(sizes) == 1 else 0
    precision = dice.choice(("fp32", "fp32", "fp32", "bf16", "fp16"))
    has_hooks = dice.random() < (0.6 if is_pipe else 0.3) and not is_tensor
    return Draw(
        number,
        sizes,
        draw_place(dice, sizes),
        draw_place(dice, sizes),
        ep=ep,
        precision=precision,
        num_micros=dice.choice((1, 2, 3)) + is_pipe,
        clip=dice.choice((0.0, 0.0, 0.3)),
        optimizer=dice.choice(("sgd", "sgd", "adamw")),
        tied=dice.random() < 0.4 and not is_tensor,
        frozen=dice.random() < 0.3,
        hooked=has_hooks,
        recomputes=dice.choice((None, None, *RECOMPUTES, *["partitioned"] * 2 * is_tensor)),
        by_user=dice.random() < 0.3 and precision != "fp16" and not is_pipe,
        forwards_first=dice.random() < 0.4 and not is_pipe,
        between=dice.choice((None, *BETWEEN)),
        events=draw_events(dice, is_pipe),
        divides_vocabulary=dice.random() < 0.3 and is_tensor,
        other_engine=dice.random() < 0.4 and not is_pipe,
        compares=dice.random() < 0.5,
        times_ranks=dice.random() < 0.5,
    )


def draw_place(dice, sizes):
    stage = dice.choice((0, 1, 2, 3))
    offload = dice.choice(("", "", "optimizer", "all"))
    offload = "" if stage == 0 else "optimizer" if stage < 3 and offload else offload
    schedule = dice.choice(("1f1b", "zero_bubble", "zero_bubble", *["interleaved"] * (sizes.get("pp", 1) == 2)))
    if schedule == "zero_bubble" and stage == 3 and dice.random() < 0.8:  # refused, which a few draws show
        stage, offload = 2, "optimizer" if offload else ""
    return Place(stage, offload, schedule, dice.random() < 0.75 and sizes.get("tp", 1) > 1)


def draw_events(dice, is_pipe):
    allowed = [each for each in EVENTS if not is_pipe or each not in ("batch size within a step", "failed backward")]
    return {step: dice.choice(allowed) for step in range(1, STEPS) if dice.random() < 0.7}


# ---- the model -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """With the names that the tensor-parallel plan "llama" divides."""

    def __init__(self, sp):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        group = groups._get_sequence_parallel_group() if sp > 1 else None
        self.attend = self.local if group is None else DistributedAttention(self.local, group, 2, 1)

    @staticmethod
    def local(*heads):
        heads = (each.transpose(1, 2) for each in heads)
        return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)

    def forward(self, hidden_states):
        heads = (layer(hidden_states).unflatten(-1, (-1, HEAD)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.attend(*heads).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate_proj = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, hidden_states):
        return self.down_proj(torch.tanh(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


def expert():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Layer(nn.Module):
    def __init__(self, sp=1, ep=0):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn = Attention(sp)
        self.mlp = Mlp() if ep == 0 else MoE(WIDTH, expert, NUM_EXPERTS, ep_size=ep, k=1, drop_tokens=False)

    def forward(self, hidden_states):
        hidden = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        update = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + (update if isinstance(self.mlp, Mlp) else update[0])


def as_logits(embedding, hidden):
    return F.linear(hidden, embedding.weight)


def parts(sp=1, ep=0):
    """(name in Net, how to build it); the number of a part is its seed, and its name in a pipeline."""
    return [
        ("embed_tokens", LayerSpec(nn.Embedding, VOCABULARY, WIDTH)),
        *((f"layers.{at}", LayerSpec(Layer, sp, ep if at == 1 else 0)) for at in range(NUM_LAYERS)),
        ("norm", LayerSpec(nn.LayerNorm, WIDTH)),
        ("lm_head", LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False)),
    ]


class Net(nn.Module):
    """tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, case, sp=1, ep=0):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=WIDTH // HEAD, model_type="llama")
        self.layers = nn.ModuleList()
        for number, (name, spec) in enumerate(parts(sp, ep)):
            torch.manual_seed(SEED + number)
            if name.startswith("layers"):
                self.layers.append(spec.build())
            else:
                self.add_module(name, spec.build())
        if case.tied:
            self.lm_head.weight = self.embed_tokens.weight
        if case.frozen:
            self.layers[0].self_attn.requires_grad_(False)
        self.loss_function = _causal_loss
        self.loss_type = "ForCausalLM"
        self.run = run_plainly

    def get_input_embeddings(self):
        return self.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, labels):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = self.run(layer, hidden)
        logits = self.lm_head(self.norm(hidden))
        return self.loss_function(logits=logits, labels=None, vocab_size=VOCABULARY, shift_labels=labels)


def _causal_loss(logits, labels, vocab_size, shift_labels):
    return F.cross_entropy(logits.float().flatten(0, 1), shift_labels.flatten())


def loss_fn(logits, labels):
    return _causal_loss(logits, None, VOCABULARY, labels)


def run_plainly(layer, hidden):
    return layer(hidden)


def run_reentrant(layer, hidden):
    return checkpoint(layer, hidden, use_reentrant=True)


def run_not_reentrant(layer, hidden):
    return checkpoint(layer, hidden, use_reentrant=False)


def runner(recomputes):
    """How a layer is run with some kind of activation checkpointing."""
    if recomputes in (None, "reentrant", "not reentrant"):
        return {None: run_plainly, "reentrant": run_reentrant, "not reentrant": run_not_reentrant}[recomputes]
    options = {
        "host": {"checkpoint_in_cpu": True},
        "contiguous": {"contiguous_checkpointing": True, "num_checkpoints": 60},
        "partitioned": {"partition_activations": True},
    }
    checkpointing.configure(None, **options[recomputes])
    return checkpointing.checkpoint


def halve(grad):
    return grad / 2


def add_hooks(case, named):
    """Hooks of users on a weight of a linear layer and on one of a norm."""
    for name, param in named:
        if case.hooked and name in ("layers.1.self_attn.q_proj.weight", "layers.2.input_layernorm.weight"):
            param.register_hook(halve)


def tokens(step, micro, dp_rank):
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + dp_rank)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return ids, ids.roll(1, 1)


def num_micros(case, step):
    """Micro-batches of a step, which an event may change."""
    numbers = [case.num_micros]
    for at in range(1, STEPS):
        event = case.events.get(at, "")
        numbers.append(numbers[-1] % 3 + 1 if event.startswith("batch size") else numbers[-1])
    return numbers[step] * (case.size("pp") if case.interleaves else 1)


def create_optimizer(case, params):
    if case.optimizer == "sgd":
        return torch.optim.SGD(params, lr=LR, momentum=0.5)
    return torch.optim.AdamW(params, lr=LR / 10, weight_decay=0.1, eps=1e-2)  # eps: no gradient is rounding alone


# ---- plain torch -----------------------------------------------------------------------------------------------------


def reference(case):
    """Losses, norms, weights, and how far these went; with fp32 weights beside a model of another precision."""
    dtype = DTYPES[case.precision]
    model = Net(case, ep=1 if case.ep else 0)
    masters = {name: param.detach().clone() for name, param in model.named_parameters()}
    first = {name: value.clone() for name, value in masters.items()}
    model = model.to(dtype)
    model.run = runner(case.recomputes if case.recomputes == "reentrant" else None)
    params = dict(model.named_parameters())
    add_hooks(case, model.named_parameters())
    trained = [master.requires_grad_() for name, master in masters.items() if params[name].requires_grad]
    optimizer = create_optimizer(case, trained)
    losses, norms = [], []
    for step in range(STEPS):
        total, micros = 0.0, num_micros(case, step)
        if case.events.get(step) == "assignment":
            for master in masters.values():
                master.data.mul_(SHRINK)
        for name, master in masters.items():
            params[name].data.copy_(master.data)
        for micro in range(micros):
            for dp_rank in range(case.size("dp")):
                loss = model(*tokens(step, micro, dp_rank)) / (micros * case.size("dp"))
                loss.backward()
                total += loss.item()
        for name, master in masters.items():
            if params[name].requires_grad:
                master.grad = params[name].grad.float()
                params[name].grad = None
        norms.append(nn.utils.clip_grad_norm_(trained, case.clip or float("inf")).item())
        optimizer.step()
        losses.append(total)
    weights = {name: master.detach() for name, master in masters.items()}
    moved = max(float((weights[name] - first[name]).abs().max()) for name in weights)
    return losses, norms, weights, moved


# ---- the engine ------------------------------------------------------------------------------------------------------


def config_of(case, place, step):
    offloads = {"offload_optimizer": {"device": "cpu"}} if place.offload else {}
    offloads |= {"offload_param": {"device": "cpu"}} if place.offload == "all" else {}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": num_micros(case, step),
        "gradient_clipping": case.clip,
        "zero_optimization": {"stage": place.stage, "stage3_param_persistence_threshold": 0, **offloads},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "watch": {"compare_weights_every": int(case.compares), "slow_rank_window": 2 * case.times_ranks},
    }
    if case.precision != "fp32":
        config[case.precision] = {"enabled": True, **({"loss_scale": 64} if case.precision == "fp16" else {})}
    if case.size("tp") > 1:
        config["tensor_parallel"] = {
            "autotp_size": case.size("tp"),
            "preset_model": "llama",
            "sequence_parallel": place.sequence_parallel,
            "vocab_parallel_lm_head": case.divides_vocabulary,
        }
    if case.size("pp") > 1:
        config["pipeline"] = {"schedule": place.schedule}
    return config


def pipeline_of(case, schedule):
    specs = [spec for _, spec in parts()]
    if case.tied:
        specs[0] = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH)
        specs[-1] = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=as_logits)
    recomputing = {}
    if case.recomputes is not None:
        recomputing = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Layer"]}
        recomputing["activation_checkpoint_func"] = runner(case.recomputes)
    model = PipelineModule(
        specs,
        num_stages=case.size("pp"),
        loss_fn=loss_fn,
        seed_layers=True,
        base_seed=SEED,
        partition_method="uniform",
        interleave=2 if schedule == "interleaved" else 1,
        **recomputing,
    )
    if case.frozen and hasattr(model, "1"):
        getattr(model, "1").self_attn.requires_grad_(False)
    return model


def name_in_net(case, name):
    """The name in `Net` of a parameter of the engine's module."""
    if case.size("pp") == 1:
        return name
    part, _, rest = name.partition(".")
    if part == "tied_modules":
        return f"embed_tokens.{rest.partition('.')[2]}"
    return f"{parts()[int(part)][0]}.{rest}"


class Run:
    """One rank's training, by the events of a draw."""

    def __init__(self, case, folder):
        self.case, self.folder = case, folder
        self.engine = self.build(case.place, 0)
        self.other = self.build_other() if case.other_engine else None

    def build(self, place, step):
        case = self.case
        # before each model, whose layers ask `groups`, which answers for the engine built last
        groups.set_mesh({axis: size for axis, size in case.sizes.items() if size > 1 or axis == "dp"})
        if case.size("pp") > 1:
            model = pipeline_of(case, place.schedule)
        else:
            model = Net(case, sp=case.size("sp"), ep=case.ep)
            model.run = runner(case.recomputes)
        engine = deepspeed.initialize(
            model=model,
            config=config_of(case, place, step),
            optimizer=lambda params: create_optimizer(case, params),
        )[0]
        add_hooks(case, ((name_in_net(case, name), param) for name, param in engine.module.named_parameters()))
        return engine

    def build_other(self):
        config = {"train_micro_batch_size_per_gpu": BATCH, "optimizer": {"type": "SGD", "params": {"lr": LR}}}
        axis = "dp" if self.case.size("tp") > 1 else "tp"
        return deepspeed.initialize(model=nn.Linear(2, 2), config=config, mesh_param={axis: self.case.world})[0]

    def data(self, step, micro):
        own = tokens(step, micro, self.engine.mesh.rank("dp"))
        sp = self.case.size("sp")
        return tuple(each.chunk(sp, dim=1)[self.engine.mesh.rank("sp")] for each in own)

    def train(self):
        losses, norms = [], []
        for step in range(STEPS):
            event = self.case.events.get(step, "")
            self.prepare(step, event)
            if self.case.size("pp") > 1:
                losses.append(self.batch(step, event))
            else:
                losses.append(self.micro_batches(step, event))
            norms.append(float(self.engine.get_global_grad_norm()))
            assert self.engine.global_steps == step + 1
        return losses, norms

    def prepare(self, step, event):
        """What comes before a step."""
        engine = self.engine
        if event == "batch size":
            engine.set_train_batch_size(num_micros(self.case, step) * BATCH * self.case.size("dp"))
        elif event == "assignment":
            self.assign()
        elif event == "resume":
            engine.save_checkpoint(self.folder, tag=f"step{step}")
            engine.destroy()
            self.engine = self.build(self.case.later, step)
            self.engine.load_checkpoint(self.folder, tag=f"step{step}")

    def assign(self):
        """Values into parameters, as averaging or pruning puts them there."""
        params = list(self.engine.module.parameters())
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            for param in params:
                if param.numel():
                    param.data = param.data * SHRINK

    def micro_batches(self, step, event):
        case, engine = self.case, self.engine
        micros = num_micros(case, step)
        if event.startswith("failed"):
            self.fail(step, event)
        total, waiting, is_first = 0.0, [], True
        next_micros = num_micros(case, step + 1) if step + 1 < STEPS else micros
        for micro in range(micros):
            loss = engine(*self.data(step, micro))
            total += loss.item() / micros
            waiting.append(loss)
            self.look(step)
            if not case.forwards_first or micro == micros - 1:
                for each in waiting:
                    each.backward() if case.by_user else engine.backward(each)
                    if is_first and case.events.get(step + 1) == "batch size within a step":
                        engine.set_train_batch_size(next_micros * BATCH * case.size("dp"))
                    is_first = False
                    engine.step()
                waiting = []
        return total

    def look(self, step):
        """A forward between another one and its backward."""
        engine = self.engine
        if self.case.between is None:
            return
        if self.case.between == "evaluation":
            engine.eval()
        with torch.no_grad():
            engine(*self.data(step, 99))
        engine.train()

    def fail(self, step, event):
        """The last micro-batch of the step fails on every rank; then the step is repeated."""
        layer = self.engine.module.layers[1]
        micros = num_micros(self.case, step)
        for micro in range(micros if event == "failed backward" else 1):
            is_last = event == "failed forward" or micro == micros - 1
            hook = (
                layer.register_forward_hook(fail_backward if event == "failed backward" else fail) if is_last else None
            )
            try:
                self.engine.backward(self.engine(*self.data(step, micro)))
                assert not is_last
                self.engine.step()
            except MemoryError:
                assert is_last
            finally:
                if hook is not None:
                    hook.remove()

    def batch(self, step, event):
        """Of a pipeline."""
        engine = self.engine
        micros = num_micros(self.case, step)
        data = [self.data(step, micro) for micro in range(micros)]
        if event == "failed forward":
            layers = [each for each in engine.module.modules() if isinstance(each, Layer)]
            hooks = [layer.register_forward_pre_hook(fail) for layer in layers]
            with pytest.raises((MemoryError, CommError)):  # a stage without such a layer hears of it
                engine.train_batch(iter(data))
            for hook in hooks:
                hook.remove()
        loss = engine.train_batch(iter(data)).item()
        if self.case.between is not None:
            engine.eval_batch(iter(data))
        return loss

    def weights(self):
        """By name in `Net` the fp32 weights of this rank, with their part of the whole."""
        found = {}
        for name, param in self.engine.module.named_parameters():
            value = deepspeed.utils.safe_get_full_fp32_param(param) if param.requires_grad else None
            if value is None:
                with deepspeed.zero.GatheredParameters([param]):
                    value = param.detach().clone().float()
            part = part_held(param)
            found[part.name if part and part.name else name_in_net(self.case, name)] = (value.cpu(), part)
        return found


def fail(*_):
    raise MemoryError("no memory for this batch")


def fail_backward(_, __, output):
    if output.requires_grad:  # else it is computed again with gradients
        output.register_hook(fail)


def train_job(case, folder):
    try:
        run = Run(case, folder)
    except ConfigError as error:
        return "refused", str(error)
    try:
        losses, norms = run.train()
    except ConfigError as error:
        return "refused", str(error)
    weights = run.weights()
    run.engine.destroy()
    return losses, norms, weights


# ---- the tests -------------------------------------------------------------------------------------------------------


def check(case, folder):
    results = run_ranks(case.world, train_job, case, folder)
    shown = "\n".join(f"{name}: {value}" for name, value in asdict(case).items())
    if case.refusal:
        for result in results:
            assert result[0] == "refused", shown
            assert case.refusal in result[1], shown
        return
    assert all(result[0] != "refused" for result in results), f"{results}\n{shown}"
    losses, norms, whole, moved = reference(case)
    is_exact = case.precision == "fp32"
    mean = torch.tensor([result[0] for result in results]).mean(0).tolist()
    assert mean == pytest.approx(losses, rel=1e-4 if is_exact else 5e-2), shown
    seen = set()
    for _, own_norms, own in results:
        assert own_norms == pytest.approx(norms, rel=1e-3 if is_exact else 0.1), shown
        for name, (value, part) in own.items():
            wanted = whole[name] if value.shape == whole[name].shape else part.take(whole[name])
            worst = float((value - wanted).abs().max())
            assert worst <= (2e-5 if is_exact else 0.1 * moved), f"{name}: {worst}, moved {moved}\n{shown}"
            seen.add(name)
    assert seen == set(whole), shown


IN_EVERY_RUN = 40
DRAWS = [draw(number) for number in range(600)]
DRAWS += [draw(number, 1) for number in range(150)] + [draw(number, 4) for number in range(250)]


@pytest.mark.parametrize(
    "case", swept(DRAWS, lambda case: case.world == 2 and case.number < IN_EVERY_RUN), ids=[str(case) for case in DRAWS]
)
def test_a_combination_trains_as_plain_torch_does(case, tmp_path):
    check(case, str(tmp_path))
