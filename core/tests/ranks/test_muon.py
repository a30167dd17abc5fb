"""Muon at every stage against plain torch on one process: each matrix is orthogonalized by one rank alone."""

from itertools import product
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.errors import ConfigError
from deepspeed.ops.muon import Muon
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.zero import GatheredParameters
from deepspeed.zero.fragments import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

STAGES = (0, 1, 2, 3)
NUM_SAMPLES = 12  # of a step, over all ranks and micro-batches
LR, DECAY, BETA, CLIP = 0.05, 0.1, 0.9, 0.5
MATRICES = ("first.weight", "second.weight", "convolution.weight", "last.weight")


class Net(nn.Module):
    """A tied matrix, a convolution, a frozen layer, a parameter without gradients, an embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 10, bias=False)
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.again = nn.Linear(10, 10, bias=False)
        self.again.weight = self.second.weight
        self.convolution = nn.Conv1d(1, 4, 3)
        self.unused = nn.Linear(3, 8)
        self.last = nn.Linear(32, 5)

    def forward(self, tokens):
        x = torch.tanh(self.second(torch.tanh(self.first(self.embed(tokens).mean(1)))))
        x = torch.tanh(self.again(self.frozen(x)))
        x = torch.tanh(self.convolution(x.unsqueeze(1))).flatten(1)
        return (self.last(x) - 1.0).float().square().mean()


def create_net():
    torch.manual_seed(5)
    return Net()


def samples_of(step):
    return torch.randint(7, (NUM_SAMPLES, 3), generator=torch.Generator().manual_seed(step))


def newton_schulz(matrix):
    x = matrix.double() / (matrix.double().norm() + 1e-7)
    x = x.T if len(matrix) > matrix.shape[1] else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.T if len(matrix) > matrix.shape[1] else x).to(matrix.dtype)


def step_plain(net, momenta, heads):
    """Muon in 12 lines, for the matrices."""
    for name in MATRICES:
        param = net.get_parameter(name)
        momentum = momenta.setdefault(name, torch.zeros_like(param))
        momentum.lerp_(param.grad, 1 - BETA)
        update = torch.lerp(param.grad, momentum, BETA).flatten(1)
        blocks = update.chunk(heads.get(name, 1))
        scale = max(1.0, blocks[0].shape[0] / blocks[0].shape[1]) ** 0.5
        direction = torch.cat([newton_schulz(block) for block in blocks]).view(param.shape)
        with torch.no_grad():
            param.mul_(1 - LR * DECAY).sub_(LR * scale * direction)


def train_plain(num_steps, heads=None):
    """Weights after each step, and the momenta after the last one."""
    net, momenta, history = create_net(), {}, []
    rest = [param for name, param in net.named_parameters() if param.requires_grad and name not in MATRICES]
    adam = torch.optim.AdamW(rest, lr=LR, betas=(0.9, 0.95), eps=1e-10, weight_decay=DECAY)
    for step in range(num_steps):
        net.zero_grad()
        net(samples_of(step)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        step_plain(net, momenta, heads or {})
        adam.step()
        history.append({name: param.detach().clone() for name, param in net.named_parameters()})
    return history, momenta


def create_engine(stage, *, net=None, optimizer=None, params=None, zero=None, **keys):
    config = {
        "train_batch_size": NUM_SAMPLES,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 120,
            "stage3_param_persistence_threshold": 11,
            **(zero or {}),
        },
        **keys,
    }
    if optimizer is None:
        # in fp32 "gram" rounds ten times as much, which would hide faults
        given = {"lr": LR, "weight_decay": DECAY, "momentum": BETA, "ns_method": "standard", **(params or {})}
        config["optimizer"] = {"type": "Muon", "params": given}
    return deepspeed.initialize(model=net or create_net(), optimizer=optimizer, config=config)[0]


def train(engine, first, last):
    for step in range(first, last):
        for micro_batch in samples_of(step).chunk(dist.get_world_size())[dist.get_rank()].chunk(2):
            engine.backward(engine(micro_batch))
            engine.step()


def weights_of(engine):
    with GatheredParameters(list(engine.module.parameters())):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def assert_same(found, expected, tolerance=1e-5):
    for name, value in expected.items():
        difference = (found[name].float() - value).abs().max() / value.abs().max().clamp(min=1e-6)
        assert difference <= tolerance, (name, difference.item())


class Counting:
    """Counts the matrices that this rank orthogonalizes, by shape, inside the context."""

    def __enter__(self):
        self.shapes = []
        inner = Muon.direction

        def direction(optimizer, update, *args):
            self.shapes.append(tuple(update.shape))
            return inner(optimizer, update, *args)

        self._patch = mock.patch.object(Muon, "direction", direction)
        self._patch.__enter__()
        return self

    def __exit__(self, *error):
        self._patch.__exit__(*error)

    def of_all_ranks(self):
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.shapes)
        return found


# ---- parity ----------------------------------------------------------------------------------------------------------


def parity_job(stages, num_steps=4):
    history, momenta = train_plain(num_steps)
    wanted = sorted(tuple(create_net().get_parameter(name).shape) for name in MATRICES)
    for stage in stages:
        engine = create_engine(stage)
        train(engine, 0, num_steps - 1)
        with Counting() as counting:
            train(engine, num_steps - 1, num_steps)
        by_rank = counting.of_all_ranks()
        assert sorted(shape for shapes in by_rank for shape in shapes) == wanted, (stage, by_rank)
        assert_same(weights_of(engine), history[-1])
        found = {
            name: safe_get_full_optimizer_state(engine.module.get_parameter(name), "momentum_buffer")
            for name in MATRICES
        }
        assert_same(found, momenta)
        assert engine.basic_optimizer.matrices is None
        engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_stage_trains_like_plain_torch_and_orthogonalizes_each_matrix_once(world_size):
    run_ranks(world_size, parity_job, STAGES)


def batches_job(stage, numel, wanted):
    """`wanted`: collectives of a step with matrices of 100 elements; a batch has at least as many as ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(8)])
    zero = {"stage": stage, "reduce_bucket_size": 100, "stage3_prefetch_bucket_size": 100, "sub_group_size": numel}
    zero["stage3_param_persistence_threshold"] = 0
    config = {"train_batch_size": dist.get_world_size(), "zero_optimization": zero, "optimizer": {"type": "Muon"}}
    engine = deepspeed.initialize(model=net, config=config)[0]
    engine.backward(engine(torch.ones(1, 10) * (1 + dist.get_rank())).square().sum())
    tags, backend = [], type(engine.sharding.backend)

    def seen(inner):
        def called(*args, tag=None, **keys):
            tags.extend([tag] if "Muon" in str(tag) else [])
            return inner(*args, tag=tag, **keys)

        return called

    patches = {name: seen(getattr(backend, name)) for name in ("all_to_all", "all_gather")}
    with mock.patch.multiple(backend, **patches), Counting() as counting:
        engine.step()
    assert len(tags) == wanted, tags
    assert [len(shapes) for shapes in counting.of_all_ranks()] == [8 // dist.get_world_size()] * dist.get_world_size()
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "numel", "wanted"), [(0, 10**9, 1), (0, 1, 4), (3, 10**9, 2), (3, 100, 8), (3, 1, 8)]
)
def test_matrices_are_exchanged_in_batches_and_divided_evenly(stage, numel, wanted):
    run_ranks(2, batches_job, stage, numel, wanted)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def save_job(folder, stage):
    engine = create_engine(stage)
    train(engine, 0, 2)
    engine.save_checkpoint(folder, tag="a")
    engine.destroy()


def resume_job(folder, stages):
    history, momenta = train_plain(4)
    for stage in stages:
        engine = create_engine(stage, net=Net())
        engine.load_checkpoint(folder, tag="a")
        assert_same(weights_of(engine), history[1])
        train(engine, 2, 4)
        assert_same(weights_of(engine), history[3])
        param = engine.module.last.weight
        assert_same({"last.weight": safe_get_full_optimizer_state(param, "momentum_buffer")},
                    {"last.weight": momenta["last.weight"]})  # fmt: skip
        engine.destroy()


@pytest.mark.parametrize(
    ("saved", "world_size", "stages"),
    swept(
        [*product([(2, 3), (1, 1), (3, 0)], (1, 2, 3), [STAGES])],
        lambda saved, world_size, stages: (saved, world_size) in (((2, 3), 3), ((3, 0), 2)),
    ),
)
def test_a_run_resumes_at_another_world_and_stage(tmp_path, saved, world_size, stages):
    run_ranks(saved[0], save_job, str(tmp_path), saved[1])
    run_ranks(world_size, resume_job, str(tmp_path), stages)


# ---- precision, placement, models ------------------------------------------------------------------------------------

SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}  # else stages round other sums
PRECISIONS = {
    "bf16": {"bf16": {"enabled": True}, **SUMS},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6}, **SUMS},
}


def precision_job(precision, stage, zero):
    """Compares with stage 1, where each matrix has one owner."""
    weights = []
    for each, keys in ((1, {}), (stage, zero)):
        engine = create_engine(each, zero=keys, **PRECISIONS.get(precision, {}))
        train(engine, 0, 2)
        assert engine.skipped_steps == 0
        params = dict(engine.module.named_parameters())
        found = {name: safe_get_full_fp32_param(params[name]) for name in (*MATRICES, "first.bias")}
        weights.append({name: value.clone() for name, value in found.items()})
        engine.destroy()
    assert_same(*weights, tolerance=2e-3 if precision != "fp32" else 1e-5)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_low_precision_keeps_momentum_and_master_weights_in_fp32(precision, stage):
    run_ranks(2, precision_job, precision, stage, {})


def offload_job(stage, device, folder, precision):
    with mock.patch("deepspeed.zero.offload.host.HostPlacement.is_needed", staticmethod(lambda device: True)):
        precision_job(precision, stage, {"offload_optimizer": {"device": device, "nvme_path": folder}})


@pytest.mark.parametrize(
    ("stage", "device", "precision"),
    swept(
        product((1, 2, 3), ("cpu", "nvme"), ("fp32", "bf16")),
        lambda stage, device, precision: (stage, device, precision) in ((3, "cpu", "bf16"), (3, "nvme", "fp32")),
    ),
)
def test_offloaded_states_are_updated_alike(tmp_path, stage, device, precision):
    run_ranks(2, offload_job, stage, device, str(tmp_path), precision)


def zero_init_job():
    history, _ = train_plain(3)
    torch.manual_seed(5)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 11}
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": NUM_SAMPLES, "zero_optimization": zero}):
        net = Net()
    engine = create_engine(3, net=net)
    assert [group["use_muon"] for group in engine.basic_optimizer.param_groups] == [True, False]
    with Counting() as counting:
        train(engine, 0, 3)
    assert sum(map(len, counting.of_all_ranks())) == 3 * len(MATRICES)
    assert_same(weights_of(engine), history[-1])
    engine.destroy()


def test_matrices_are_known_under_zero_init():
    run_ranks(2, zero_init_job)


def client_job(stages, as_groups, zero):
    history, _ = train_plain(3)
    for stage in stages:
        net = create_net()
        keys = {"lr": LR, "momentum": BETA, "weight_decay": DECAY, "ns_method": "standard"}
        params = [(name, param) for name, param in net.named_parameters() if param.requires_grad]
        first = [param for name, param in params if name in MATRICES]
        rest = [param for name, param in params if name not in MATRICES]
        groups = [*[{"params": [param], "use_muon": True} for param in first], {"params": rest, "use_muon": False}]
        net.embed.weight.use_muon = False
        engine = create_engine(
            stage, net=net, optimizer=Muon(groups if as_groups else [*first, *rest], **keys), zero=zero
        )
        train(engine, 0, 3)
        assert_same(weights_of(engine), history[-1])
        engine.destroy()


@pytest.mark.parametrize(
    ("world_size", "stages", "as_groups", "zero"),
    [
        (2, (0, 3), True, {}),
        (3, (3,), False, {"sub_group_size": 50}),
        (2, (3,), False, {"mics_shard_size": 1}),
        (2, (3,), True, {"offload_param": {"device": "cpu"}}),
    ],
)
def test_a_clients_muon_trains_alike(world_size, stages, as_groups, zero):
    run_ranks(world_size, client_job, stages, as_groups, zero)


def plain_step_job():
    """At stage 0 in fp32 the engine returns the client's optimizer, whose own step needs no peers."""
    history, _ = train_plain(1)
    config = {"train_batch_size": NUM_SAMPLES, "gradient_clipping": 0, "zero_optimization": {"stage": 0}}
    net = create_net()
    net.embed.weight.use_muon = False
    optimizer = Muon(net.parameters(), lr=LR, momentum=BETA, weight_decay=DECAY, ns_method="standard")
    engine, face, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    engine.backward(engine(samples_of(0).chunk(dist.get_world_size())[dist.get_rank()]))
    nn.utils.clip_grad_norm_(net.parameters(), CLIP)
    if dist.get_rank() == 1:
        face.step()
    dist.barrier()
    if dist.get_rank() == 0:
        face.step()
    assert_same(weights_of(engine), history[-1])
    engine.destroy()


def test_the_clients_optimizer_steps_without_peers_at_stage_0():
    run_ranks(2, plain_step_job)


class Failing(RuntimeError):
    pass


def failure_job(stage):
    """One rank fails while peers wait for its directions: all raise, and all train on after a load."""
    history, _ = train_plain(2)
    engine = create_engine(stage)
    inner = Muon.direction

    def fail(*args):
        raise Failing("out of memory")

    train(engine, 0, 0)
    with (
        mock.patch.object(Muon, "direction", fail if dist.get_rank() == 0 else inner),
        pytest.raises(Exception) as error,
    ):
        train(engine, 0, 1)
    assert isinstance(error.value, Failing) == (dist.get_rank() == 0)
    assert "out of memory" in str(error.value)
    engine.destroy()
    again = create_engine(stage)
    train(again, 0, 2)
    assert_same(weights_of(again), history[-1])
    again.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_fails_to_orthogonalize_ends_the_step_of_all(stage):
    run_ranks(2, failure_job, stage)


def refusal_job():
    net = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Muon(net.parameters(), lr=LR)
    with pytest.raises(ConfigError, match=r"the update of Muon looks at whole .*1 or 2, or deepspeed.ops.muon.Muon"):
        deepspeed.initialize(
            model=net, optimizer=optimizer, config={"train_batch_size": 2, "zero_optimization": {"stage": 3}}
        )


def test_of_torchs_muon_it_says_which_one_runs_at_stage_3():
    run_ranks(1, refusal_job)


# ---- heads -----------------------------------------------------------------------------------------------------------

HEADS = {"second.weight": 5, "first.weight": 2}


def heads_job(stages):
    history, _ = train_plain(3, HEADS)
    for stage in stages:
        net = create_net()
        for name, number in HEADS.items():
            net.get_parameter(name).muon_num_heads = number
        engine = create_engine(stage, net=net, params={"per_head_muon": True})
        train(engine, 0, 3)
        assert_same(weights_of(engine), history[-1])
        engine.destroy()


@pytest.mark.parametrize("world_size", [2, 3])
def test_heads_are_orthogonalized_one_by_one(world_size):
    run_ranks(world_size, heads_job, STAGES)
