"""Compression under the engine: each stage trains as a plain loop, and checkpoints keep step, scores and masks.

Mixture of Quantization, below, does so with its schedules.
"""

import copy

import deepspeed
import pytest
import torch
from deepspeed.compression import compression_scheduler, init_compression, redundancy_clean
from deepspeed.compression.compress import get_compression_config
from deepspeed.errors import ConfigError, StateError
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.quantize import Quantizer
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.zero import GatheredParameters
from torch import nn

STEPS, BATCH = 6, 4
MOQ_BATCH = 2  # of a rank


def technique(params, modules, related=None, **shared):
    group = {"params": params, "modules": modules} | ({"related_modules": related} if related else {})
    return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": {"g1": group}}


def settings(stage=0, **keys):
    return {
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.05}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "compression_training": {
            "weight_quantization": technique(
                {"start_bits": 8, "target_bits": 4, "quantization_period": 1}, ["*"], schedule_offset=2
            ),
            "activation_quantization": technique({"bits": 8}, ["2"], range_calibration="dynamic", schedule_offset=1),
            "sparse_pruning": technique({"dense_ratio": 0.5}, ["2"], method="topk", schedule_offset=1),
            "row_pruning": technique({"dense_ratio": 0.5}, ["0"], [["2"]], method="topk", schedule_offset=3),
        },
        **keys,
    }


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(BATCH, 10, generator=generator) for _ in range(count)]
    return [(value[:, :6], value[:, 6:]) for value in values]


def train(engine, count=STEPS, start=0):
    rank = deepspeed.comm.get_rank()
    for x, y in batches(count)[start:]:
        mine = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
        engine.backward(nn.functional.mse_loss(engine(x[mine]), y[mine]))
        engine.step()


def values_of(engine):
    with GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def create(stage, offloaded=()):
    config = settings(stage)
    config["zero_optimization"] |= {f"offload_{what}": {"device": "cpu"} for what in offloaded}
    return deepspeed.initialize(model=init_compression(build(), config), config=config)[0]


def job(stage, offloaded, folder):
    engine = create(stage, offloaded)
    train(engine, 4)
    engine.save_checkpoint(folder, tag="four")
    at_four = values_of(engine)
    train(engine, STEPS, start=4)
    done = values_of(engine)
    steps = engine.compression_scheduler.training_steps
    engine.destroy()
    other = create(stage, offloaded)
    other.load_checkpoint(folder, tag="four")
    loaded = values_of(other)
    with torch.no_grad():
        other(batches()[0][0])
    quantizer = other.module[0].weight_quantizer
    state = (quantizer.num_bits, other.module[0].row_pruning_enabled, other.compression_scheduler.training_steps)
    train(other, STEPS, start=4)
    again = values_of(other)
    other.destroy()
    return {"done": done, "four": at_four, "loaded": loaded, "again": again, "steps": steps, "state": state}


def plain(config=None):
    config = settings() if config is None else config
    model = init_compression(build(), config)
    scheduler = compression_scheduler(model, get_compression_config(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for x, y in batches():
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model


@pytest.mark.parametrize(
    ("stage", "offloaded"),
    swept(
        [(0, ()), (1, ()), (2, ()), (3, ()), (1, ("optimizer",)), (2, ("optimizer",)), (3, ("optimizer", "param"))],
        lambda stage, offloaded: stage == 0 or offloaded == ("optimizer", "param"),
    ),
)
def test_a_stage_trains_as_a_plain_loop_and_goes_on_from_its_checkpoint(tmp_path, stage, offloaded):
    model = plain()
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    for found in run_ranks(2, job, stage, offloaded, str(tmp_path)):
        torch.testing.assert_close(found["done"], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["loaded"], found["four"], rtol=0, atol=0)
        torch.testing.assert_close(found["again"], found["done"], rtol=1e-5, atol=1e-6)
        assert found["steps"] == STEPS
        assert found["state"] == (6, True, 4)
    trained = init_compression(build(), settings())
    trained.load_state_dict(found["done"])
    x = batches()[0][0]
    smaller = redundancy_clean(trained, settings())
    assert smaller[0].weight.shape == (4, 6)
    torch.testing.assert_close(smaller(x), model.eval()(x), rtol=1e-3, atol=1e-4)


def compiled_job(stage):
    engine = create(stage)
    engine.compile(backend="aot_eager")
    train(engine)
    found = values_of(engine)
    engine.destroy()
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 3])
def test_a_compiled_engine_compresses_as_a_plain_loop(stage):
    expected = {name: value.detach() for name, value in plain().state_dict().items()}
    for found in run_ranks(2, compiled_job, stage, timeout_s=300):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def in_every_layer():
    """The settings of what every stage of a pipeline has: row pruning needs a related layer beside the layer."""
    config = settings(train_batch_size=BATCH, train_micro_batch_size_per_gpu=BATCH)
    section = config["compression_training"]
    del section["row_pruning"]
    for asked in section.values():
        asked["different_groups"]["g1"]["modules"] = ["*"]
    return config


def pipeline_job():
    config = in_every_layer()
    shape = {"num_stages": 2, "loss_fn": nn.functional.mse_loss, "partition_method": "uniform"}
    model = init_compression(PipelineModule(layers=list(build()), **shape), config)
    engine = deepspeed.initialize(model=model, config=config)[0]
    for batch in batches():
        engine.train_batch(iter([batch]))
    found = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    with pytest.raises(ConfigError, match="a pattern for a pipeline is to name layers of every stage"):
        init_compression(PipelineModule(layers=list(build()), **shape), settings())
    return found


def test_a_pipeline_whose_every_stage_is_compressed_trains_as_a_plain_loop():
    first, last = run_ranks(2, pipeline_job)
    expected = {name: value.detach() for name, value in plain(in_every_layer()).state_dict().items()}
    assert first
    assert last
    torch.testing.assert_close(first | last, expected, rtol=1e-4, atol=1e-5)


def masked_job(folder):
    """Masks of method l1 are rank 0's, and are saved."""
    config = settings(2, compression_training={"sparse_pruning": technique({"dense_ratio": 0.5}, ["*"], method="l1")})
    torch.manual_seed(deepspeed.comm.get_rank() if deepspeed.comm.is_initialized() else 0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    engine = deepspeed.initialize(model=init_compression(model, config), config=config)[0]
    mask = engine.module[0].sparse_pruning_mask.clone()
    train(engine, 2)
    engine.save_checkpoint(folder)
    engine.module[0].sparse_pruning_mask.fill_(True)
    engine.load_checkpoint(folder)
    found = engine.module[0].sparse_pruning_mask.clone()
    engine.destroy()
    return mask, found


def test_masks_are_alike_on_all_ranks_and_in_the_checkpoint(tmp_path):
    (one, loaded), (other, _) = run_ranks(2, masked_job, str(tmp_path))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(loaded, one)
    assert one.sum() == one.numel() / 2


def refused_job():
    with pytest.raises(ConfigError, match="weight_quantization: found '0', which is not prepared"):
        deepspeed.initialize(model=build(), config=settings())
    config = settings(3)
    engine = deepspeed.initialize(model=init_compression(build(), config), config=config)[0]
    with pytest.raises(ConfigError, match="redundancy_clean: found sharded weights, such as '.+save_16bit_model"):
        redundancy_clean(engine, config)
    engine.destroy()
    return True


def test_what_was_not_prepared_or_is_sharded_is_refused():
    assert run_ranks(2, refused_job) == [True, True]


def test_a_copy_of_the_model_compresses_itself():
    model = plain()
    x = batches()[0][0]
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))


# ---- blocks by snip_momentum ----------------------------------------------------------------------------------------


def block_settings(stage=0, **keys):
    shared = {
        **{"enabled": True, "method": "snip_momentum", "block_pattern": "4x1", "dense_ratio": 0.25},
        **{"schedule_offset": 1, "schedule_offset_end": 5, "schedule_offset_stride": 2, **keys},
    }
    config = settings(stage)
    config["compression_training"] = {"sparse_pruning": {"shared_parameters": shared, "different_groups": {}}}
    return config


def blocks_of(model):
    return [model[0].sparse_pruning_mask.clone(), model[2].sparse_pruning_mask.clone()]


def block_job(stage, folder):
    config = block_settings(stage)
    engine = deepspeed.initialize(model=init_compression(build(), config), config=config)[0]
    train(engine, 3)
    engine.save_checkpoint(folder)
    train(engine, STEPS, start=3)
    done = blocks_of(engine.module), values_of(engine)
    engine.load_checkpoint(folder)
    train(engine, STEPS, start=3)
    again = blocks_of(engine.module), values_of(engine)
    engine.destroy()
    return done, again


def plain_blocks():
    """The same in a loop: scores of |w g| with a momentum, and blocks of 4 outputs that go by a cubic schedule."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    masks, scores = (
        [start(w) for w in (model[0].weight, model[2].weight)] for start in (torch.ones_like, torch.zeros_like)
    )
    for step, (x, y) in enumerate(batches(), 1):
        weights = [(layer.weight * mask) for layer, mask in zip((model[0], model[2]), masks, strict=True)]
        hidden = nn.functional.linear(x, weights[0], model[0].bias).relu()
        loss = nn.functional.mse_loss(nn.functional.linear(hidden, weights[1], model[2].bias), y)
        grads = torch.autograd.grad(loss, weights, retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scores = [0.9 * s + (w * g).abs().detach() for s, w, g in zip(scores, weights, grads, strict=True)]
        if step in (1, 3, 5):
            means = [each.reshape(-1, 4, each.shape[1]).mean(1) for each in scores]
            every = torch.cat([each.flatten() for each in means]).sort().values
            num_gone = int(0.75 * (1 - (1 - (step - 1) / 4) ** 3) * len(every))
            if num_gone:
                masks = [(each > every[num_gone - 1]).repeat_interleave(4, 0).float() for each in means]
    return model, masks


@pytest.mark.parametrize("stage", swept([0, 1, 2, 3], lambda stage: stage in (0, 3)))
def test_blocks_go_as_in_a_plain_loop(tmp_path, stage):
    model, masks = plain_blocks()
    for (blocks, values), again in run_ranks(2, block_job, stage, str(tmp_path)):
        torch.testing.assert_close([each.float() for each in blocks], masks)
        torch.testing.assert_close({name: values[name] for name in model.state_dict()}, model.state_dict())
        torch.testing.assert_close(again, (blocks, values), rtol=1e-5, atol=1e-6)
    assert sum(each.sum() for each in masks) == 80 - 4 * 15  # 15 of 20 blocks


def test_blocks_in_a_loop_of_ones_own_stay_gone_when_cleaned():
    config = block_settings()
    model = plain(config)
    masks = plain_blocks()[1]
    torch.testing.assert_close([each.float() for each in blocks_of(model)], masks)
    x = batches()[0][0]
    expected = model.eval()(x)
    smaller = redundancy_clean(model, config)
    torch.testing.assert_close(smaller(x), expected)
    assert (smaller[0].weight[masks[0] == 0] == 0).all()
    assert "sparse_snip_scores" not in str(smaller.state_dict().keys())


def test_blocks_that_do_not_divide_a_weight_are_named():
    config = block_settings(block_pattern="3x1")
    with pytest.raises(ConfigError, match=r"block_pattern: found '3x1', which does not divide the 8 x 6 weight of '0'"):
        compression_scheduler(init_compression(build(), config), get_compression_config(config))


# ---- Mixture of Quantization ----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def moq_settings(stage=0, kind="bf16", eigenvalue=None, **keys):
    section = {
        "enabled": True,
        "quantize_groups": 2,
        "quantize_bits": {"start_bits": 8, "target_bits": 4},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 2},
    }
    return {
        "train_micro_batch_size_per_gpu": MOQ_BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 0.05}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        **({kind: {"enabled": True}} if kind else {}),
        **({"eigenvalue": {"enabled": True, "layer_name": "layers", **eigenvalue}} if eigenvalue is not None else {}),
        "quantize_training": {**section, **keys},
    }


def moq_batches(count):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(2 * MOQ_BATCH, 10, generator=generator).bfloat16() for _ in range(count)]
    return [(value[:, :6], value[:, 6:]) for value in values]


def part(rank):
    return slice(rank * MOQ_BATCH, (rank + 1) * MOQ_BATCH)


def moq_engine(config):
    return deepspeed.initialize(model=Net(), config=config)[0]


def moq_train(engine, count, first=0):
    """Train, and return the bits and the periods of each weight after each step."""
    found, mine = [], part(deepspeed.comm.get_rank())
    for x, y in moq_batches(count)[first:]:
        outputs = engine(x[mine])
        engine.backward(nn.functional.mse_loss(outputs, y[mine].to(outputs)))  # torch 2.10 needs one type
        engine.step()
        found.append({name: (p.start_bits, p.q_period) for name, p in engine.module.named_parameters() if p.dim() > 1})
    return found


def weights_of(engine):
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def masters_of(engine):
    return {name: safe_get_full_fp32_param(param).clone() for name, param in engine.module.named_parameters()}


def moq_plain(count, num_ranks):
    """The same training in a loop over torch's optimizer, with master weights."""
    model = Net()
    masters = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
    params = dict(model.bfloat16().named_parameters())
    optimizer, quantizer = torch.optim.Adam(masters.values(), lr=0.05), Quantizer(q_groups=2)
    for param in params.values():
        param.start_bits, param.target_bits, param.q_period = 8, 4, 1
    for step, (x, y) in enumerate(moq_batches(count), 1):
        losses = [nn.functional.mse_loss(model(x[part(rank)]), y[part(rank)]) for rank in range(num_ranks)]
        grads = [torch.autograd.grad(loss, list(params.values())) for loss in losses]
        for master, *each in zip(masters.values(), *grads, strict=True):
            master.grad = (sum(each) / num_ranks).float()
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params.values(), masters.values(), strict=True):
                param.copy_(master)
        if step >= 2:
            quantizer.quantize([params.values()], False, False)
    return params, masters


def moq_trained(stage):
    engine = moq_engine(moq_settings(stage))
    bits = [each["head.weight"] for each in moq_train(engine, 8)]
    result = bits, weights_of(engine), masters_of(engine)
    engine.destroy()
    return result


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", swept([0, 1, 2], lambda stage: stage in (0, 2)))
def test_the_engine_trains_as_a_plain_loop(stage, num_ranks):
    params, masters = moq_plain(8, num_ranks)
    for bits, weights, own in run_ranks(num_ranks, moq_trained, stage):
        assert bits == [(8, 1), (7, 2), (6, 4), (6, 4), *[(5, 8)] * 4]
        for name, param in params.items():
            torch.testing.assert_close(weights[name], param.detach(), rtol=0, atol=0)
            torch.testing.assert_close(own[name], masters[name].detach(), rtol=1e-5, atol=1e-6)
        assert not torch.equal(weights["head.weight"], own["head.weight"].bfloat16())  # masters stay unrounded


def resumed(stage, kind, folder):
    """Train, save, go on, and go on from the checkpoint: mixed or stochastic, with eigenvalues of every second step."""
    mixed = {"fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.2}}
    keys = mixed if kind == "fp16" else {"quantize-algo": {"rounding": "stochastic"}}
    config = moq_settings(stage, kind, {"gas_boundary_resolution": 2}, **keys)
    config |= {"fp16": {"enabled": True, "loss_scale": 8, "auto_cast": True}} if kind == "fp16" else {}
    engine, other = moq_engine(config), None
    moq_train(engine, 4)
    engine.save_checkpoint(folder)
    saved = weights_of(engine)
    bits = moq_train(engine, 8, first=4)
    done = weights_of(engine)
    engine.destroy()
    other = moq_engine(config)
    other.load_checkpoint(folder)
    loaded = weights_of(other)
    again = moq_train(other, 8, first=4)
    result = saved, loaded, bits, again, done, weights_of(other)
    other.destroy()
    return result


@pytest.mark.parametrize(("stage", "kind"), [(0, "fp16"), (1, "bf16"), (2, "bf16")])
def test_a_run_goes_on_from_its_checkpoint(stage, kind, tmp_path):
    first, second = run_ranks(2, resumed, stage, kind, str(tmp_path))
    saved, loaded, bits, again, done, resumed_done = first
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    assert again == bits
    torch.testing.assert_close(resumed_done, done, rtol=0, atol=0)
    torch.testing.assert_close(second[4], done, rtol=0, atol=0)  # all ranks round alike


def with_eigenvalues(eigenvalue):
    engine = moq_engine(moq_settings(2, eigenvalue=eigenvalue))
    bits = moq_train(engine, 2)[-1]
    found = dict(engine._training.moq.block_eigenvalue)
    shares = {name: found[id(param)] for name, param in engine.module.named_parameters() if id(param) in found}
    engine.destroy()
    return bits, shares


def test_eigenvalues_stretch_the_periods_of_their_layers():
    """All ranks have the mean of the ranks' estimates, and the sharpest layer waits five times as long."""
    (bits, shares), (others, other_shares) = run_ranks(2, with_eigenvalues, {"max_iter": 8})
    assert (bits, shares) == (others, other_shares)
    assert shares.keys() == {"layers.0.weight", "layers.1.weight"}
    assert max(share for share, _ in shares.values()) == 1.0
    factors = {name: 1 + int(4 * share) for name, (share, _) in shares.items()}
    assert bits == {name: (7, 2 * factors.get(name, 1)) for name in [*shares, "head.weight"]}  # that one: in no layer
    weights = run_ranks(2, weights_after_two, {"max_iter": 8})[0]
    torch.testing.assert_close(weights, run_ranks(2, weights_after_two, None)[0], rtol=0, atol=0)


def weights_after_two(eigenvalue):
    """Estimates leave the gradients, and the chance of the script, as they are."""
    engine = moq_engine(moq_settings(1, eigenvalue=eigenvalue))
    torch.manual_seed(2)
    moq_train(engine, 2)
    result = weights_of(engine), torch.get_rng_state()
    engine.destroy()
    return result


def layers_job(in_forward):
    """`compression_training` rounds after steps where there are masters."""
    config = moq_settings(1)
    del config["quantize_training"]
    shared = {"enabled": True, "schedule_offset": 2, "quantize_groups": 2, "quantize_weight_in_forward": in_forward}
    params = {"start_bits": 8, "target_bits": 4, "quantization_period": 1}
    config["compression_training"] = {
        "weight_quantization": {"shared_parameters": shared, "different_groups": {"g": {"params": params}}}
    }
    engine = deepspeed.initialize(model=init_compression(Net(), config), config=config)[0]
    bits = [] if in_forward else [each["head.weight"] for each in moq_train(engine, 8)]
    enabled = engine.module.head.weight_quantization_enabled
    result = bits, weights_of(engine), enabled
    if not in_forward:
        with torch.no_grad():
            x = moq_batches(1)[0][0]
            before = engine(x)
            torch.testing.assert_close(redundancy_clean(engine.module, config)(x), before, rtol=0.1, atol=0.1)
    engine.destroy()
    return result


def test_layers_of_compression_are_rounded_after_steps():
    params, _ = moq_plain(8, 1)
    ((bits, weights, enabled),) = run_ranks(1, layers_job, False)
    assert (bits[-1], enabled) == ((5, 8), False)
    torch.testing.assert_close(weights, {name: param.detach() for name, param in params.items()}, rtol=0, atol=0)
    assert len(run_ranks(1, layers_job, True)) == 1


def refused(config):
    try:
        model = init_compression(Net(), config) if "compression_training" in config else Net()
        engine = deepspeed.initialize(model=model, config=config)[0]
    except ConfigError as error:
        return str(error)
    x, y = moq_batches(1)[0]
    with pytest.raises(StateError) as raised:
        nn.functional.mse_loss(engine(x), y).backward()
    return str(raised.value)


def refusals():
    layers = {"weight_quantization": {"shared_parameters": {"enabled": True}, "different_groups": {"g": {}}}}
    only = {name: value for name, value in moq_settings().items() if name != "quantize_training"}
    return {
        "fp32": refused(moq_settings(kind=None)),
        "stage": refused(moq_settings(3)),
        "both": refused({**moq_settings(kind=None), "compression_training": layers}),
        "alone": refused({**only, "eigenvalue": {"enabled": True}}),
        "layers": refused(moq_settings(eigenvalue={"layer_name": "nothing"})),
        "plain": refused(moq_settings(eigenvalue={})),
        "groups": refused(moq_settings(quantize_groups=5)),
        "bits": refused(moq_settings(quantize_bits={"start_bits": 4, "target_bits": 8})),
        "modules": refused(moq_settings(modules=["nothing"])),
        "type": refused(moq_settings(**{"quantize_type": "asymmetric", "quantize-algo": {"q_type": "symmetric"}})),
        "twice": refused(twice()),
    }


def twice():
    config = moq_settings(eigenvalue={})
    config["quantize_training"]["eigenvalue"] = {"enabled": True, "layer_name": "head"}
    return config


def test_what_cannot_be_rounded_is_refused():
    (said,) = run_ranks(1, refusals)
    assert "no master weight keeps its updates" in said["fp32"]
    assert "quantize_training: found it at stage 3" in said["stage"]
    assert "together with compression_training.weight_quantization; keep one" in said["both"]
    assert "only Mixture of Quantization follows eigenvalues" in said["alone"]
    assert "eigenvalue.layer_name: found 'nothing'" in said["layers"]
    assert "call engine.backward(loss)" in said["plain"]
    assert "of 48 elements, which 5 groups do not divide" in said["groups"]
    assert "target_bits: found 8, above start_bits 4" in said["bits"]
    assert "quantize_training.modules: found 'nothing'" in said["modules"]
    assert "quantize_type: found 'asymmetric'" in said["type"]
    assert "quantize_training.eigenvalue: found other values" in said["twice"]
