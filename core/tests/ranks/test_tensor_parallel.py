"""Models divided over tensor-parallel ranks: what is no matter of a model family (those are in tests/parity)."""

import copy
import math
from types import SimpleNamespace
from unittest import mock

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.errors import ConfigError
from deepspeed.parallel import groups
from deepspeed.parallel.model_part import part_held
from deepspeed.tensor_parallel.ranges import spread
from deepspeed.tensor_parallel.ranks import TensorRanks, ranks_of
from deepspeed.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.zero.param_marks import ZeroParamStatus
from deepspeed.zero.param_unit import ParamUnit, unit_of
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, WIDE, HEADS, KEYS, SIZE = 12, 20, 4, 4, 3


class Attention(nn.Module):
    def __init__(self, heads=HEADS, keys=KEYS):
        super().__init__()
        self.num_key_value_groups = heads // keys
        self.q_proj = nn.Linear(WIDTH, heads * SIZE)
        self.k_proj = nn.Linear(WIDTH, keys * SIZE)
        self.v_proj = nn.Linear(WIDTH, keys * SIZE)
        self.o_proj = nn.Linear(heads * SIZE, WIDTH)
        self.dropout = 0.0

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (y.repeat_interleave(self.num_key_value_groups, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, wide=WIDE):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Model(nn.Module):
    """A block of attention and feed-forward, of no family that a table knows."""

    def __init__(self, heads=HEADS, keys=KEYS, wide=WIDE, rate=0.0, recomputes=False):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=keys)
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.attention, self.mlp = Attention(heads, keys), FeedForward(wide)
        self.norm = nn.LayerNorm(WIDTH)
        self.residual_dropout = nn.Dropout(rate)
        self.attention.dropout = rate
        self.recomputes = recomputes

    def block(self, x):
        x = x + self.residual_dropout(self.attention(self.norm(x)))
        return x + self.residual_dropout(self.mlp(self.norm(x)))

    def forward(self, x):
        x = self.inputs(x)
        x = checkpoint(self.block, x, use_reentrant=False) if self.recomputes else self.block(x)
        return x.square().mean()


def build(**keys):
    torch.manual_seed(3)
    return Model(**keys)


def config_of(**keys):
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, **keys}


def sample(step, dp_rank=0):
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(10 * step + dp_rank))


# ---- plans ---------------------------------------------------------------------------------------------------------

OWN_PLAN = {
    "attention.q_proj": "colwise",
    "attention.k_proj": "colwise",
    "attention.v_proj": "colwise",
    "attention.o_proj": "rowwise",
    "mlp.up": "colwise",
    "mlp.down": "rowwise",
    "inputs": "colwise_gather_output",
    "norm": "embedding_rowwise",  # of which the vocabulary has its own rule
}
SPECS = {
    "layer_specs": [
        {"patterns": [r".*\.[qkv]_proj\.weight$", r".*up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.o_proj\.weight$", r".*down\.weight$"], "partition_type": "row"},
        {"patterns": [".*norm.*", "inputs.*"], "partition_type": "skip"},
    ]
}


def plan_job(kind):
    """20 steps with an optimizer that was made before the model was divided, beside the whole model."""
    model = build()
    if kind == "own plan":
        model.config.base_model_tp_plan = OWN_PLAN
    if dist.get_rank() == 1:  # the weights of the first rank count
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    whole = build()
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    section = {"partition_config": SPECS} if kind == "partition config" else {}
    config = config_of(tensor_parallel={"autotp_size": dist.get_world_size(), **section})
    if kind == "tp_model_init":
        assert deepspeed.tp_model_init(model, dist.get_world_size(), torch.float32, config=config) is model
        config.pop("tensor_parallel")
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(20):
        engine.backward(engine(sample(step)))
        engine.step()
        whole(sample(step)).backward()
        theirs.step()
        theirs.zero_grad()
    divided = set()
    for (path, param), (_, expected) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        part = part_held(param)
        torch.testing.assert_close(param, expected if part is None else part.take(expected), rtol=1e-5, atol=1e-6)
        if part is not None:
            divided.add(path)
    engine.destroy()
    groups.reset()
    return divided


ATTENTION = {f"attention.{name}_proj.{what}" for name in "qkv" for what in ("weight", "bias")} | {
    "attention.o_proj.weight"
}
MLP = {"mlp.up.weight", "mlp.up.bias", "mlp.down.weight"}


@pytest.mark.parametrize("kind", ["structure", "own plan", "partition config", "tp_model_init"])
def test_every_way_to_a_plan(kind):
    more = {"inputs.weight", "inputs.bias"} if kind == "own plan" else set()
    assert run_ranks(3, plan_job, kind) == [ATTENTION | MLP | more] * 3


# ---- what a block costs ---------------------------------------------------------------------------------------------


def count_job():
    """Elements of each all-reduce of the ranks that hold the model."""
    engine = deepspeed.initialize(model=build(), config=config_of(tensor_parallel={"autotp_size": 2}))[0]
    ranks = ranks_of(engine.module)
    with mock.patch.object(ranks.backend, "all_reduce", wraps=ranks.backend.all_reduce) as all_reduce:
        loss = engine(sample(0))
        forward = len(all_reduce.mock_calls)
        engine.backward(loss)
        with torch.no_grad():
            engine(sample(1))
        numels = [call.args[0].numel() for call in all_reduce.call_args_list]
    engine.destroy()
    return numels[:forward], numels[forward:]


def test_a_block_sums_once_in_forward_and_once_in_backward():
    activations = [sample(0).numel()] * 2  # of attention, and of feed-forward
    norm = [1]
    assert run_ranks(2, count_job) == [(activations, activations + norm + activations)] * 2


# ---- random numbers -------------------------------------------------------------------------------------------------


def dropout_job(recomputes):
    """Gradients of what all ranks have; what was drawn inside and outside of the divided blocks."""
    torch.manual_seed(dist.get_rank())  # a user who did not seed alike
    model = build(rate=0.5, recomputes=recomputes)
    torch.manual_seed(100 + dist.get_rank())
    engine = deepspeed.initialize(model=model, config=config_of(tensor_parallel={"autotp_size": 2}))[0]
    torch.manual_seed(7)
    drawn = []
    model.mlp.act.register_forward_hook(lambda *_: drawn.append(torch.rand(4)))
    loss = engine(sample(0))
    loss.backward()
    grads = [param.grad.clone() for param in (model.inputs.weight, model.norm.weight, model.mlp.down.bias)]
    after = torch.rand(4)
    grads += [param.grad.clone() for param in (model.attention.q_proj.weight, model.mlp.up.weight)]
    engine.destroy()
    return loss.detach(), grads, drawn, after


def test_dropout_agrees_outside_of_blocks_and_differs_inside():
    (loss, grads, (drawn,), after), (other_loss, other_grads, (other_drawn,), other_after) = run_ranks(
        2, dropout_job, False
    )
    assert torch.equal(loss, other_loss)
    assert torch.equal(after, other_after)
    for grad, other in zip(grads[:3], other_grads[:3], strict=True):
        assert torch.equal(grad, other)
    assert not torch.equal(drawn, other_drawn)


def test_a_block_that_is_computed_again_draws_the_same_numbers():
    for once, again in zip(run_ranks(2, dropout_job, False), run_ranks(2, dropout_job, True), strict=True):
        assert torch.equal(once[0], again[0])
        torch.testing.assert_close(again[1], once[1])
        assert torch.equal(again[2][0], once[2][0])
        assert all(torch.equal(drawn, again[2][0]) for drawn in again[2])


# ---- cross entropy --------------------------------------------------------------------------------------------------


def cross_entropy_job(dtype):
    """Losses and the gradient of this rank's logits, and those of torch."""
    num_tokens, vocabulary = 6, 10
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, vocabulary, generator=generator).mul(20).to(dtype).requires_grad_()
    targets = torch.tensor([0, 9, -100, 4, 3, 7])
    weights = torch.arange(1.0, num_tokens + 1)
    expected = F.cross_entropy(logits.float(), targets, reduction="none")
    (expected * weights).sum().backward()
    ranks = TensorRanks(dist.get_world_group(), None)
    start, stop = spread(vocabulary, ranks.world_size)[ranks.rank]
    own = logits.detach()[:, start:stop].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(own, targets, ranks, start=start)
    (losses * weights).sum().backward()
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(own.grad, logits.grad[:, start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_of_divided_logits(dtype):
    run_ranks(3, cross_entropy_job, dtype)


def outside_job(dtype):
    ranks = TensorRanks(dist.get_world_group(), None)
    start, stop = spread(10, ranks.world_size)[ranks.rank]
    own = torch.zeros(2, stop - start, dtype=dtype)
    for target, vocabulary in [(10, 10), (10, None), (-1, 10), (-101, 10), (2**40, 10)]:
        targets = torch.tensor([3, target])
        with pytest.raises(IndexError, match=f"found target {target}, and the vocabulary has the tokens 0 to 9"):
            vocab_parallel_cross_entropy(own, targets, ranks, start=start, vocabulary=vocabulary)
    losses = vocab_parallel_cross_entropy(own, torch.tensor([-1, 9]), ranks, start=start, ignore_index=-1)
    assert losses[0] == 0
    assert losses[1].item() == pytest.approx(math.log(10), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_targets_outside_of_divided_logits(dtype):
    run_ranks(3, outside_job, dtype)


# ---- models that zero.Init built -------------------------------------------------------------------------------------

STAGE_3 = {"stage": 3, "stage3_param_persistence_threshold": 0}


def built_sharded_job(kind):
    """20 steps of tp 2 x dp 2 from a model whose weights are nowhere whole, beside the whole model."""
    whole, config = build(keys=1), config_of(zero_optimization=STAGE_3, tensor_parallel={"autotp_size": 2})
    groups_of_init = {}
    if kind == "over dp":  # other peers than those that divide the model
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        groups_of_init = {"data_parallel_group": pairs[dist.get_rank() % 2]}
    with deepspeed.zero.Init(config_dict_or_path=config, **groups_of_init):
        model = build(keys=1)
        if kind == "inside":
            with pytest.raises(ConfigError, match="asked to divide the parameter weight inside the context"):
                deepspeed.tp_model_init(model, 2)
    if kind == "over dp" and dist.get_rank() in (1, 3):  # the weights of the first tensor-parallel rank count
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=1), torch.no_grad():
            for param in model.parameters():
                param.zero_()
    were_whole = []
    gather = ParamUnit.gather

    def counted(unit):
        gather(unit)
        units = {unit_of(param) for param in model.parameters()} - {None}
        were_whole.append(sum(each.status is ZeroParamStatus.AVAILABLE for each in units))

    with mock.patch.object(ParamUnit, "gather", counted):
        if kind == "tp_model_init":
            deepspeed.tp_model_init(model, 2, torch.float64)
            assert {param.dtype for param in model.parameters()} == {torch.float64}
            deepspeed.tp_model_init(model, 2, torch.float32)
            config.pop("tensor_parallel")
        else:
            deepspeed.tp_model_init(model, 2)
    assert set(were_whole) == {1}
    assert all(param.numel() == 0 for param in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(20):
        engine.backward(engine(sample(step, engine.mesh.rank("dp"))))
        engine.step()
        (sum(whole(sample(step, dp_rank)) for dp_rank in range(2)) / 2).backward()
        theirs.step()
        theirs.zero_grad()
    for (path, param), (_, expected) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([param]):
            part = part_held(param)
            own = expected if part is None else part.take(expected)
            torch.testing.assert_close(param.data, own.data, rtol=1e-5, atol=1e-6, msg=path)
    engine.destroy()
    groups.reset()


@pytest.mark.parametrize(
    "kind", swept(["over all", "over dp", "tp_model_init", "inside"], lambda kind: kind != "inside")
)
def test_a_model_that_zero_init_built_is_divided(kind):
    run_ranks(4, built_sharded_job, kind)


# ---- what does not fit ----------------------------------------------------------------------------------------------


def refused(model, **section):
    with pytest.raises(ConfigError) as caught:
        deepspeed.initialize(model=model, config=config_of(tensor_parallel={"autotp_size": 2, **section}))
    assert all(part_held(param) is None for param in model.parameters())
    return str(caught.value)


def refused_job():
    messages = {
        "heads": refused(build(heads=1, keys=1)),
        "features": refused(build(wide=13), tp_grain_size=20),
        "size": refused(build(), autotp_size=4),
        "preset": refused(build(), preset_model="llama4x"),
        "pattern": refused(build(), partition_config={"layer_specs": [{"patterns": ["nothing"]}]}),
        "type": refused(build(), partition_config={"layer_specs": [{"patterns": ["x"], "partition_type": "diagonal"}]}),
        "names": refused(build(), preset_model="llama"),
        "structure": refused(nn.Sequential(nn.Linear(4, 4))),
        "older form": refused(build(), tp={"tp_size": 3}),
        "loss": refused(build(), vocab_parallel_lm_head=True),
        "stack": refused(build(), sequence_parallel=True),
    }
    odd = build(heads=6, keys=4)
    messages["key heads"] = refused(odd)
    styled = build()
    styled.config.base_model_tp_plan = {**OWN_PLAN, "mlp.up": "moe_tp_experts"}
    messages["style"] = refused(styled)
    other = build(wide=20 + dist.get_rank())
    messages["other model"] = refused(other)
    return messages


def test_what_does_not_fit_is_refused_on_every_rank_with_its_numbers():
    first, second = run_ranks(2, refused_job)
    assert first == second
    for name, text in {
        "heads": "found 1 query head and 1 key and value heads for tensor parallelism over 2 ranks, which leaves 2 "
        "ranks to 1 query head of one key head; use at most 1 rank",
        "features": "mlp.up: found 13 features to divide over 2 tensor-parallel ranks in multiples of 20; use at",
        "size": "tensor_parallel.autotp_size: pp 1 x dp 1 x sp 1 x tp 4 = 4, but the world has 2 ranks",
        "preset": "tensor_parallel.preset_model: found 'llama4x'; the presets are bert, bloom, ",
        "pattern": "no pattern matches a weight of Model, whose weights have names such as inputs.weight",
        "type": "layer_specs[0].partition_type: found 'diagonal'; the types are row, column, skip",
        "names": "no layer of Model is named as the plan 'llama' expects (self_attn.q_proj, ",
        "structure": "the structure of Sequential does not show which of its layers can be divided",
        "older form": "tensor_parallel: found autotp_size 2 and tp.tp_size 3; give one",
        "loss": "tensor_parallel.vocab_parallel_lm_head: Model does not take its loss from loss_function",
        "stack": "tensor_parallel.sequence_parallel: the plan 'by structure' does not say in which layers of Model",
        "key heads": "found 6 query heads and 4 key and value heads; the first must be a multiple of the second",
        "style": "divides mlp.up as 'moe_tp_experts', and the styles that are known here are colwise, ",
        "other model": "has the parameter mlp.up.weight (20, 12) where rank 1 has mlp.up.weight (21, 12)",
    }.items():
        assert text in first[name], (name, first[name])
    assert "Describe its layers in tensor_parallel.partition_config" in first["structure"]


def inputs_job():
    engine = deepspeed.initialize(model=build(), config=config_of(tensor_parallel={"autotp_size": 2}))[0]
    with pytest.raises(ConfigError, match="ranks 0 and 1 of a group of 2 got different inputs; ranks that hold the"):
        engine(sample(0, dp_rank=dist.get_rank()))
    engine.destroy()


def copied_job(asks_again):
    """A copy of a divided model, which has new parameters, trains as the divided one; so does a module around it."""
    config = config_of(
        tensor_parallel={"autotp_size": 3}, optimizer={"type": "Adam", "params": {"lr": 0.1}}, gradient_clipping=0.1
    )
    seen = []
    model = deepspeed.tp_model_init(build(keys=2), 3, config=config)
    if not asks_again:
        del config["tensor_parallel"]
    for kind in ("copied", "copied and wrapped", "divided"):
        each = model if kind == "divided" else copy.deepcopy(model)
        wrapped = nn.Sequential(each) if kind == "copied and wrapped" else each
        engine = deepspeed.initialize(model=wrapped, config=config)[0]
        engine.backward(engine(sample(0)))
        engine.step()
        seen.append((float(engine.get_global_grad_norm()), each.attention.k_proj.weight.detach().clone()))
        engine.destroy()
    groups.reset()
    norm, weight = seen.pop()
    for other_norm, other_weight in seen:
        assert norm == other_norm
        assert torch.equal(weight, other_weight)
    whole = build(keys=2)
    whole(sample(0)).backward()
    assert norm == pytest.approx(torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item(), rel=1e-5)


@pytest.mark.parametrize("asks_again", [True, False])
def test_a_copy_of_a_divided_model_is_divided(asks_again):
    run_ranks(3, copied_job, asks_again)


def test_ranks_of_one_model_that_get_different_samples_are_told():
    run_ranks(2, inputs_job)
