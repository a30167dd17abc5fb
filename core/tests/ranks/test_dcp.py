"""Training goes on from FSDP2 here, and from here in FSDP2, through torch.distributed.checkpoint."""

from itertools import product

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.checkpoint.convert import convert
from deepspeed.checkpoint.dcp_file import DcpFolder
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

NUM_SAMPLES = 6
STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """A tied weight, a frozen layer, a buffer, a convolution; no number of ranks divides it."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.block = nn.Linear(7, 7)
        self.mix = nn.Conv1d(7, 7, 3, padding=1)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens_BT):
        self.calls += 1
        x = torch.tanh(self.frozen(self.tokens(tokens_BT)))
        logits_BTV = self.head(self.mix(self.block(x).mT).mT)
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flip(1).flatten())


def groups_of(net):
    return [
        {"params": [net.tokens.weight, *net.mix.parameters()]},
        {"params": list(net.block.parameters()), "weight_decay": 0.0},
    ]


def mean_loss(loss):
    mean = loss.detach().double()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def samples(step):
    tokens = torch.randint(11, (NUM_SAMPLES, 6), generator=torch.Generator().manual_seed(step))
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


class Fsdp2:
    """A run of plain torch."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.net = Net()
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(self.net.block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        self.optimizer = torch.optim.AdamW(groups_of(self.net), lr=1e-2)

    def train(self, first, last):
        losses = []
        for step in range(first, last):
            loss = self.net(samples(step))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(mean_loss(loss))
        return losses

    def state(self, flat):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        optimizer = get_optimizer_state_dict(self.net, self.optimizer, options=options)
        if flat:  # as torchtitan saves it
            return {**get_model_state_dict(self.net), "optimizer": optimizer}
        return {"model": get_model_state_dict(self.net), "optim": optimizer}

    def load(self, folder):
        state = self.state(flat=False)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self.net, state["model"])
        set_optimizer_state_dict(self.net, self.optimizer, state["optim"])


def create_engine(stage, seed=1, **more):
    torch.manual_seed(seed)
    config = {
        "train_batch_size": NUM_SAMPLES,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        **more,
    }
    net = Net()
    optimizer = torch.optim.AdamW(groups_of(net), lr=1.0)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def train(engine, first, last):
    losses = []
    for step in range(first, last):
        loss = engine(samples(step))
        engine.backward(loss)
        engine.step()
        losses.append(mean_loss(loss))
    return losses


def save_with_fsdp2(folder):
    run = Fsdp2()
    run.train(0, 3)
    dcp.save({**run.state(flat=False), "epoch": 2, "seen": torch.tensor(18)}, checkpoint_id=f"{folder}/nested")
    dcp.save(run.state(flat=True), checkpoint_id=f"{folder}/flat")
    return run.train(3, 6)


def load_here(folder, tag, stage, unbroken):
    engine = create_engine(stage)
    path, client = engine.load_checkpoint(folder, tag)
    assert path == f"{folder}/{tag}"
    assert client == ({"epoch": 2, "seen": torch.tensor(18)} if tag == "nested" else {})
    assert engine.global_steps == 3
    assert engine.module.calls == 3
    assert [group["lr"] for group in engine.optimizer.param_groups] == [1e-2, 1e-2]
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [1e-2, 0.0]
    assert train(engine, 3, 6) == pytest.approx(unbroken, rel=1e-5)
    engine.destroy()


@pytest.fixture(scope="module")
def of_fsdp2(tmp_path_factory):
    """The folder of checkpoints of a run of two ranks, and its losses afterwards."""
    folder = str(tmp_path_factory.mktemp("fsdp2"))
    return folder, run_ranks(2, save_with_fsdp2, folder)[0]


@pytest.mark.parametrize(
    ("world_size", "stage", "tag"),
    swept(
        product((1, 2, 3), STAGES, ("nested", "flat")),
        lambda world, stage, tag: (tag == "nested") == (world < 3) and (world + stage) % 2 == 1,
    ),
)
def test_losses_continue_from_fsdp2(of_fsdp2, world_size, stage, tag):
    folder, unbroken = of_fsdp2
    run_ranks(world_size, load_here, folder, tag, stage, unbroken)


def load_weights(folder, stage, flags):
    engine = create_engine(stage)
    engine.load_checkpoint(folder, "nested", **flags)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        found = {name: value.clone() for name, value in engine.module.state_dict().items()}
    expected = {name: torch.empty_like(value) for name, value in found.items()}
    dcp.load({"model": expected}, checkpoint_id=f"{folder}/nested")
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert not any(engine.optimizer.state.values())
    train(engine, 3, 4)
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "flags"),
    swept(
        product(STAGES, ({"load_optimizer_states": False}, {"load_module_only": True})),
        lambda stage, flags: (stage in (0, 3)) == ("load_module_only" in flags),
    ),
)
def test_weights_alone_load_from_fsdp2(of_fsdp2, stage, flags):
    run_ranks(2, load_weights, of_fsdp2[0], stage, flags)


def save_boxes(folder):
    """Columns on each rank, and a tensor whose elements do not lie in the order of its dimensions."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    whole = torch.arange(7.0 * 5 * 3).view(7, 5, 3)
    columns = distribute_tensor(whole, mesh, [Shard(1)])
    dcp.save({"columns": columns, "turned": whole.permute(2, 0, 1)}, checkpoint_id=folder)


def test_any_range_of_any_box_is_read(tmp_path):
    run_ranks(2, save_boxes, str(tmp_path))
    whole = torch.arange(7.0 * 5 * 3).view(7, 5, 3)
    tensors = DcpFolder(tmp_path).tensors
    for name, expected in (("columns", whole), ("turned", whole.permute(2, 0, 1))):
        assert torch.equal(tensors[name].whole(), expected)
        flat = expected.reshape(-1)
        for start, stop in ((0, 0), (0, 1), (4, 17), (14, 15), (14, 31), (90, 105)):
            assert torch.equal(tensors[name].read(start, stop - start), flat[start:stop]), (name, start, stop)


def save_here(folder, stage, more):
    engine = create_engine(stage, seed=0, **more)
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-2
    train(engine, 0, 3)
    engine.save_checkpoint(folder, "step3", client_state={"epoch": 2})
    losses = train(engine, 3, 6)
    engine.destroy()
    return losses


def load_in_fsdp2(folder, unbroken, tolerance):
    run = Fsdp2(seed=1)
    run.load(f"{folder}/dcp")
    assert [group["lr"] for group in run.optimizer.param_groups] == [1e-2, 1e-2]
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [1e-2, 0.0]
    assert run.train(3, 6) == pytest.approx(unbroken, rel=tolerance)
    flat = Fsdp2(seed=1).state(flat=True)
    dcp.load(flat, checkpoint_id=f"{folder}/torchtitan")  # each entry must be there
    assert flat["optimizer"]["param_groups.tokens.weight.lr"] == 1e-2
    engine = create_engine(2)
    engine.load_checkpoint(f"{folder}/dcp")
    assert train(engine, 3, 6) == pytest.approx(unbroken, rel=tolerance)
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "precision"),
    swept(product(STAGES, ("fp32", "bf16")), lambda stage, precision: (stage, precision) in {(0, "fp32"), (3, "bf16")}),
)
def test_losses_continue_in_fsdp2(tmp_path, stage, precision):
    more = {} if precision == "fp32" else {precision: {"enabled": True}}
    unbroken = run_ranks(2, save_here, str(tmp_path / "saved"), stage, more)[0]
    for form in ("dcp", "torchtitan"):
        convert(tmp_path / "saved", tmp_path / form, form)
    run_ranks(2, load_in_fsdp2, str(tmp_path), unbroken, 1e-5 if precision == "fp32" else 1e-2)
