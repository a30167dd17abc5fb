"""The optimizer's step in batches: which shards it sees, with which gradients, and what is rounded back."""

import pytest
import torch
from deepspeed.ops.optimizer import ReferenceOptimizer
from deepspeed.zero.layout import Fragment
from deepspeed.zero.unit import ParamShard
from deepspeed.zero.update import OptimizerUpdate, UpdateBatch, multiply, takes_one_pass, turned_around


def make_shard(index, numel, *, dtype=torch.float32, grad_dtype=None, grad=1.0):
    weight = torch.full((numel,), 1.0, dtype=dtype)
    master = weight if dtype == torch.float32 else weight.float()
    reduced = torch.full((numel,), grad, dtype=grad_dtype or dtype)
    return ParamShard(index, 0, Fragment(index, 0, 0, numel, 0), weight, master, reduced)


def make_update(shards, used=None, per_batch=1, lr=0.5):
    optimizer = torch.optim.SGD([shard.master for shard in shards], lr=lr)
    batches = [UpdateBatch(shards[i : i + per_batch], [i]) for i in range(0, len(shards), per_batch)]
    return OptimizerUpdate(optimizer, batches, used or [True] * len(shards)), batches


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_fp32_is_updated_in_place_with_scaled_gradients(scale):
    shards = [make_shard(0, 2, grad=2.0), make_shard(1, 3, grad=4.0)]
    update, batches = make_update(shards)
    assert list(update.step(scale)) == batches
    assert shards[0].weight.tolist() == [1 - 0.5 * 2 * scale] * 2
    assert shards[1].weight.tolist() == [1 - 0.5 * 4 * scale] * 3
    assert all(shard.master.grad is None for shard in shards)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("per_batch", [1, 2, 3])
def test_low_precision_widens_and_rounds_back(scale, per_batch):
    shards = [make_shard(i, numel, dtype=torch.bfloat16, grad=1.0 + i) for i, numel in enumerate((2, 5, 1))]
    update, _ = make_update(shards, per_batch=per_batch, lr=0.1)
    for _ in update.step(scale):
        pass
    for index, shard in enumerate(shards):
        wanted = 1 - torch.tensor(0.1) * (1.0 + index) * scale
        torch.testing.assert_close(shard.master, wanted.expand_as(shard.master))
        assert torch.equal(shard.weight, shard.master.bfloat16())
        assert shard.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_on_the_device_gives_what_a_number_gives(dtype):
    scale = torch.tensor(0.3)  # fp32, which bf16 would round
    found, expected = ([make_shard(0, 3, dtype=dtype, grad=1.7)] for _ in range(2))
    for shards, factor in ((found, scale), (expected, scale.item())):
        for _ in make_update(shards)[0].step(factor):
            pass
    assert torch.equal(found[0].master, expected[0].master)


def test_low_precision_gradients_are_multiplied_in_fp32_and_rounded_once():
    gradients = torch.linspace(-2.0, 3.0, 64).bfloat16()
    scale = torch.tensor(0.0531)
    expected = (gradients.float() * scale).bfloat16()
    multiply(gradients, scale)
    assert torch.equal(gradients, expected)


def test_gradients_that_are_wide_already_are_used_as_they_are():
    shards = [
        make_shard(0, 2, dtype=torch.bfloat16, grad_dtype=torch.float32, grad=1.0),
        make_shard(1, 2, dtype=torch.bfloat16),
    ]
    update, _ = make_update(shards, per_batch=2)
    for _ in update.step(0.5):
        pass
    assert shards[0].master.tolist() == shards[1].master.tolist() == [0.75, 0.75]


def test_a_shard_that_no_rank_used_is_left_alone():
    shards = [make_shard(0, 2), make_shard(1, 2)]
    update, batches = make_update(shards, used=[False, True], per_batch=1)
    optimizer = update._optimizer
    optimizer.param_groups[0]["momentum"] = 0.9
    assert list(update.step(1.0)) == batches, (
        "all ranks gather the units of every batch, also of one without a shard to update"
    )
    assert shards[0].weight.tolist() == [1.0, 1.0]
    assert shards[0].master not in optimizer.state
    assert shards[1].master in optimizer.state


def test_a_batch_is_yielded_when_its_weights_are_final():
    shards = [make_shard(0, 1), make_shard(1, 1)]
    update, _ = make_update(shards)
    seen = [[shard.weight.item() for shard in shards] for _ in update.step(1.0)]
    assert seen == [[0.5, 1.0], [0.5, 0.5]]


def test_shards_of_any_shape():
    shard = make_shard(0, 6, dtype=torch.bfloat16)
    shard.weight, shard.master, shard.grad = (each.view(2, 3) for each in (shard.weight, shard.master, shard.grad))
    update, _ = make_update([shard])
    list(update.step(1.0))
    assert shard.weight.flatten().tolist() == [0.5] * 6


class Spy(torch.optim.SGD):
    """Notes which tensors its groups hold at each step."""

    def step(self, closure=None):
        self.__dict__.setdefault("seen", []).append([list(group["params"]) for group in self.param_groups])
        if self.__dict__.get("fails"):
            raise RuntimeError("in the step")
        return super().step(closure)


@pytest.mark.parametrize("fails", [False, True])
def test_the_optimizer_sees_the_shards_of_the_batch_and_keeps_its_groups(fails):
    shards = [make_shard(i, 1) for i in range(3)]
    shards[2].param_group = 1
    masters = [shard.master for shard in shards]
    optimizer = Spy([{"params": masters[:2]}, {"params": masters[2:], "lr": 0.25}], lr=0.5)
    optimizer.fails = fails
    update = OptimizerUpdate(optimizer, [UpdateBatch(shards[:1], []), UpdateBatch(shards[1:], [])], [True] * 3)
    if fails:
        with pytest.raises(RuntimeError, match="in the step"):
            list(update.step(1.0))
    else:
        list(update.step(1.0))
        assert [[len(group) for group in groups] for groups in optimizer.seen] == [[1, 0], [1, 1]]
        assert [shard.weight.item() for shard in shards] == [0.5, 0.5, 0.75]
    assert [group["params"] for group in optimizer.param_groups] == [masters[:2], masters[2:]]


class OnePassSGD(ReferenceOptimizer):
    """Plain gradient descent that says it has a kernel, and counts its operator calls."""

    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})
        self.calls = 0

    def update_params(self, params, group):
        for param in params:
            param.sub_(group["lr"] * param.grad)

    def has_one_pass(self, group):
        return True

    def update_one_pass(self, params, grads, copies, scale, group):
        self.calls += 1
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            assert param.grad is None
            param.sub_(group["lr"] * scale * grad.float())
            if copies:
                copies[index].copy_(param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pass_writes_masters_and_weights(dtype):
    shards = [make_shard(i, numel, dtype=dtype, grad=1.0 + i) for i, numel in enumerate((2, 5, 1))]
    optimizer = OnePassSGD([shard.master for shard in shards])
    for _ in OptimizerUpdate(optimizer, [UpdateBatch(shards, [])], [True, True, False]).step(0.25):
        pass
    assert optimizer.calls == 1
    for index, shard in enumerate(shards):
        wanted = 1 - 0.5 * 0.25 * (1.0 + index) if index < 2 else 1.0
        assert shard.master.tolist() == [wanted] * shard.master.numel()
        assert torch.equal(shard.weight, shard.master.to(dtype))
        assert shard.grad[0] == 1.0 + index, "the gradient is not scaled in memory"
    assert all(param is shard.master for param, shard in zip(optimizer.param_groups[0]["params"], shards, strict=True))


def test_one_pass_with_shards_in_several_groups():
    shards = [make_shard(0, 2), make_shard(1, 3)]
    shards[1].param_group = 1
    optimizer = OnePassSGD([{"params": [shards[0].master]}, {"params": [shards[1].master], "lr": 0.25}])
    for _ in OptimizerUpdate(optimizer, [UpdateBatch([shard], []) for shard in shards], [True, True]).step(1.0):
        pass
    assert [shard.weight[0].item() for shard in shards] == [0.5, 0.75]
    assert optimizer.calls == 2, "a group without shards in a batch is not called"


def test_a_subclass_with_an_update_of_its_own_is_not_bypassed():
    class Mine(OnePassSGD):
        def update_params(self, params, group):
            for param in params:
                param.zero_()

    class Stepping(OnePassSGD):
        def step(self, closure=None):
            return super().step(closure)

    param = torch.ones(1)
    assert takes_one_pass(OnePassSGD([param]))
    assert not takes_one_pass(Mine([param]))
    assert not takes_one_pass(Stepping([param]))
    assert not takes_one_pass(torch.optim.SGD([param]))
    shard = make_shard(0, 2)
    for _ in OptimizerUpdate(Mine([shard.master]), [UpdateBatch([shard], [])], [True]).step(1.0):
        pass
    assert shard.weight.tolist() == [0.0, 0.0]


def test_a_hook_before_the_step_sees_gradients():
    shard = make_shard(0, 2, grad=3.0)
    optimizer = OnePassSGD([shard.master])
    seen = []
    optimizer.register_step_pre_hook(
        lambda it, args, kwargs: seen.append(it.param_groups[0]["params"][0].grad.tolist())
    )
    for _ in OptimizerUpdate(optimizer, [UpdateBatch([shard], [])], [True]).step(1.0):
        pass
    assert seen == [[3.0, 3.0]]


def test_a_hook_that_reads_no_gradients_leaves_the_one_pass():
    optimizer = OnePassSGD([torch.ones(1)])

    def reduce(*_):
        pass

    optimizer.register_step_pre_hook(reduce)
    assert not takes_one_pass(optimizer)
    reduce.reads_no_gradients = True
    assert takes_one_pass(optimizer)


def test_batches_turned_around_finish_each_unit_with_its_first_shard():
    shards = [make_shard(i, 2) for i in range(5)]
    # unit 0: shards 0 to 2; unit 1: none on this rank; unit 2: shard 3; unit 3: shard 4, in the batch of unit 2
    batches = [UpdateBatch(shards[:2], [], started=[0]), UpdateBatch(shards[2:3], [0, 1], started=[1])]
    batches.append(UpdateBatch(shards[3:], [2, 3], started=[2, 3]))
    around = turned_around(batches)
    assert [batch.shards for batch in around] == [shards[3:], shards[2:3], shards[:2]]
    assert [batch.finished for batch in around] == [[3, 2], [1], [0]]
    assert turned_around(around) == batches
