"""The operator `adam_step_` and the Adam fronts that call it, against the torch reference and torch's own classes."""

import copy

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.adam.adam import adam_step, create_state
from deepspeed.ops.optimizer import OnePass
from torch.nn import Parameter

NUMBERS = {"lr": 3e-2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
MODES = {"adam_w_mode": True, "bias_correction": True, "maximize": False}
REFERENCE_GROUP = {
    "lr": 3e-2,
    "betas": (0.8, 0.95),
    "eps": 1e-6,
    "weight_decay": 0.1,
    "fused": False,
    "foreach": False,
    **MODES,
}


@pytest.fixture
def adam(step_ops):
    return step_ops.operator("cpu_adam", "adam_step_")


def _both(adam, step_ops, numel, dtypes, *, grad_scale=1.0, num_steps=3, **modes):
    """(tensors of the operator, tensors of the reference) after some steps: param, m, v, step, copy."""
    param_dtype, grad_dtype, copy_dtype = dtypes
    param = step_ops.numbers(numel, param_dtype)
    wanted = param.clone()
    state = create_state(wanted, amsgrad=False, state_dtype=torch.float32)
    m, v, step = step_ops.zeros(numel), step_ops.zeros(numel), torch.tensor(0.0)
    rounded = None if copy_dtype is None else step_ops.zeros(numel, copy_dtype)
    for seed in range(1, num_steps + 1):
        grad = step_ops.numbers(numel, grad_dtype, seed=seed)
        copies = [] if rounded is None else [rounded]
        numbers = {**NUMBERS, **MODES, **modes, "grad_scale": grad_scale}
        adam([param], [grad], [m], [v], [step], copies, **numbers)
        wide = grad.float() * grad_scale
        if param_dtype == torch.float32:
            adam_step([wanted], [state], {**REFERENCE_GROUP, **modes}, [wide])
        else:  # the reference would round the gradient, too
            wide_param = wanted.float()
            adam_step([wide_param], [state], {**REFERENCE_GROUP, **modes}, [wide])
            wanted.copy_(wide_param)
    return (param, m, v, step, rounded), (wanted, state["exp_avg"], state["exp_avg_sq"], state["step"])


@pytest.mark.parametrize("decoupled", [True, False])
def test_equals_the_reference(adam, step_ops, numel, dtypes, decoupled):
    (param, m, v, step, rounded), wanted = _both(adam, step_ops, numel, dtypes, adam_w_mode=decoupled)
    for found, reference in zip((param, m, v, step), wanted, strict=True):
        step_ops.assert_close(found, reference)
    if rounded is not None:  # of the unrounded value, where the parameter itself is a half
        step_ops.assert_copied(param, rounded)


@pytest.mark.parametrize(
    "modes", [{"bias_correction": False}, {"maximize": True}, {"maximize": True, "adam_w_mode": False}]
)
@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
def test_modes_and_scale_equal_the_reference(adam, step_ops, modes, grad_scale):
    dtypes = (torch.float32, torch.bfloat16, None)
    found, wanted = _both(adam, step_ops, 1000, dtypes, grad_scale=grad_scale, **modes)
    for one, reference in zip(found[:4], wanted, strict=True):
        step_ops.assert_close(one, reference)


def test_large_betas_interpolate_from_the_other_end(adam, step_ops):
    """torch.lerp changes its formula where the weight of the gradient is 0.5 or more."""
    param, m, v = step_ops.numbers(100), step_ops.numbers(100, seed=2), step_ops.zeros(100)
    grad, wanted = step_ops.numbers(100, seed=1), torch.lerp(m, step_ops.numbers(100, seed=1), 0.75)
    adam([param], [grad], [m], [v], [torch.tensor(0.0)], [], **{**NUMBERS, **MODES, "beta1": 0.25, "grad_scale": 1.0})
    torch.testing.assert_close(m, wanted, rtol=1e-6, atol=1e-7)


def test_one_call_takes_tensors_of_all_kinds_and_any_shape(adam, step_ops):
    shapes = [(7,), (), (3, 5), (0,), (33, 65)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float32]
    params = [step_ops.numbers(torch.Size(s).numel(), d).view(s) for s, d in zip(shapes, dtypes, strict=True)]
    alone = [param.clone() for param in params]
    grads = [torch.ones(shape) for shape in shapes]

    def states():
        return [[torch.zeros(s) for s in shapes], [torch.zeros(s) for s in shapes], [torch.tensor(0.0) for _ in shapes]]

    adam(params, grads, *states(), [], **NUMBERS, **MODES, grad_scale=1.0)
    for index, param in enumerate(alone):
        lists = [[items[index]] for items in states()]
        adam([param], [grads[index]], *lists, [], **NUMBERS, **MODES, grad_scale=1.0)
        assert torch.equal(param, params[index])
    adam([], [], [], [], [], [], **NUMBERS, **MODES, grad_scale=1.0)


@pytest.mark.parametrize("pieces", [(5000, 65537), (3, 40000), (64, 1024)])
def test_a_result_depends_on_neither_shards_nor_threads(adam, step_ops, pieces):
    whole, grad = step_ops.numbers(65537), step_ops.numbers(65537, torch.bfloat16, seed=1)
    sharded, m, v = whole.clone(), step_ops.zeros(65537), step_ops.zeros(65537)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        adam([whole], [grad], [m], [v], [torch.tensor(0.0)], [], **NUMBERS, **MODES, grad_scale=0.5)
    finally:
        torch.set_num_threads(threads)
    cuts = [0, *pieces, 65537]
    for begin, end in zip(cuts, cuts[1:], strict=False):
        part, its_grad = sharded[begin:end], grad[begin:end]
        lists = [[part], [its_grad], [torch.zeros_like(part)], [torch.zeros_like(part)], [torch.tensor(0.0)], []]
        adam(*lists, **NUMBERS, **MODES, grad_scale=0.5)
    assert torch.equal(whole, sharded)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spreads_as_in_the_reference(adam, step_ops, value):
    for numel in (5, 40):
        grad = step_ops.numbers(numel, seed=1)
        grad[numel // 2] = value
        param = step_ops.numbers(numel)
        wanted, state = param.clone(), create_state(param, amsgrad=False)
        m, v = step_ops.zeros(numel), step_ops.zeros(numel)
        rounded = step_ops.zeros(numel, torch.bfloat16)
        adam([param], [grad], [m], [v], [torch.tensor(0.0)], [rounded], **NUMBERS, **MODES, grad_scale=1.0)
        adam_step([wanted], [state], REFERENCE_GROUP, [grad])
        step_ops.assert_close(param, wanted)
        step_ops.assert_close(m, state["exp_avg"])
        step_ops.assert_close(v, state["exp_avg_sq"])
        assert rounded.isnan().tolist() == param.isnan().tolist()
        assert param.isnan().sum() == 1


def test_copies_are_rounded_as_torch_rounds(adam, step_ops):
    """Ties, subnormal numbers, overflow and signs: a step that changes nothing (lr 0) copies the parameter."""
    bits = torch.cat([torch.arange(-(2**31), 2**31, 65521 * 7), torch.arange(0x38000000, 0x38800000, 0x800)])
    param = bits.to(torch.int32).view(torch.float32)
    param = param[param.isfinite()].contiguous()
    numbers = {**NUMBERS, **MODES, "lr": 0.0, "grad_scale": 1.0}
    for dtype in (torch.bfloat16, torch.float16):
        rounded = torch.zeros_like(param, dtype=dtype)
        lists = [[torch.zeros_like(param)] for _ in range(3)]
        adam([param], *lists, [torch.tensor(0.0)], [rounded], **numbers)
        assert torch.equal(rounded.view(torch.int16), param.to(dtype).view(torch.int16))


def test_refuses_wrong_arguments_by_name(adam, step_ops):
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "copies")
    lists = {name: [torch.ones(5)] for name in names} | {"steps": [torch.tensor(3.0)]}
    step_ops.check_refusals(lambda **given: adam(**given, **NUMBERS, **MODES, grad_scale=1.0), lists)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_opcheck(adam, step_ops, grad_dtype):
    params = [step_ops.numbers(20), step_ops.numbers(3)]
    lists = [[step_ops.zeros(20), step_ops.zeros(3)] for _ in range(2)]
    grads = [step_ops.numbers(20, grad_dtype), step_ops.numbers(3, grad_dtype)]
    copies = [step_ops.zeros(20, torch.bfloat16), step_ops.zeros(3, torch.bfloat16)]
    steps = [torch.tensor(0.0), torch.tensor(0.0)]
    for its_copies in (copies, []):
        torch.library.opcheck(
            adam.default, (params, grads, *lists, steps, its_copies), {**NUMBERS, **MODES, "grad_scale": 1.0}
        )


def test_meta_tensors_are_taken_without_data(adam):
    lists = [[torch.zeros(5, device="meta")] for _ in range(4)]
    adam(*lists, [torch.zeros((), device="meta")], [], **NUMBERS, **MODES, grad_scale=1.0)


# ----- the fronts ----------------------------------------------------------------------------------------------------


def _params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(64,), (16, 5), (0,), (1,)]]


def _train(optimizer, params, num_steps=3, first_seed=1):
    for seed in range(first_seed, first_seed + num_steps):
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def _calls(optimizer, monkeypatch):
    """How many parameters each operator call takes, from now on."""
    calls = []
    original = type(optimizer).run_kernel

    def run_kernel(self, operator, lists, numbers):
        calls.append(len(lists[0]))
        original(self, operator, lists, numbers)

    monkeypatch.setattr(type(optimizer), "run_kernel", run_kernel)
    return calls


@pytest.mark.parametrize("front", [FusedAdam, DeepSpeedCPUAdam])
@pytest.mark.parametrize("decoupled", [True, False])
def test_fronts_call_the_operator_once_per_group_and_equal_torch(front, decoupled, monkeypatch):
    ours, theirs = _params(), _params()
    arguments = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    mode = "adam_w_mode" if front is FusedAdam else "adamw_mode"
    optimizer = front([{"params": ours[:2]}, {"params": ours[2:]}], **arguments, **{mode: decoupled})
    calls = _calls(optimizer, monkeypatch)
    _train(optimizer, ours)
    torch_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    _train(torch_class(theirs, **arguments, fused=True), theirs)
    assert calls == [2, 2] * 3
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("direction", ["from torch", "to torch"])
def test_state_is_exchanged_with_torch(direction, fused, monkeypatch):
    a, b = _params(), _params()
    ours = DeepSpeedCPUAdam(a, lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(b, lr=1e-2, weight_decay=0.1, fused=fused)
    calls = _calls(ours, monkeypatch)
    first, second = (theirs, ours) if direction == "from torch" else (ours, theirs)
    first_params, second_params = (b, a) if direction == "from torch" else (a, b)
    _train(first, first_params)
    with torch.no_grad():
        for target, source in zip(second_params, first_params, strict=True):
            target.copy_(source)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    state = second.state_dict()["state"][0]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert (state["step"].dtype, state["step"].shape, state["step"].item()) == (torch.float32, (), 3.0)
    _train(first, first_params, first_seed=9)
    _train(second, second_params, first_seed=9)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
    # a group that says fused=False asks for torch's own loop
    assert bool(calls) is (fused or direction == "to torch")


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"capturable": True}, {"foreach": True}, {"fused": False}])
def test_options_that_the_operator_lacks_run_in_torch(options, monkeypatch):
    params = _params()
    optimizer = DeepSpeedCPUAdam([{"params": params, **options}], lr=1e-2)
    calls = _calls(optimizer, monkeypatch)
    assert not optimizer.takes_one_pass
    if "capturable" not in options:  # which torch allows on accelerators only
        _train(optimizer, params)
    assert calls == []


def test_tensors_that_the_operator_refuses_run_in_torch(monkeypatch):
    plain, wide = Parameter(torch.ones(6)), Parameter(torch.ones(6, dtype=torch.float64))
    turned = Parameter(torch.ones(4, 5).t())
    half = Parameter(torch.ones(6, dtype=torch.bfloat16))
    optimizer = DeepSpeedCPUAdam([plain, wide, turned, half], lr=0.5, fp32_optimizer_states=False)
    calls = _calls(optimizer, monkeypatch)
    for param in (plain, wide, turned, half):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert calls == [1]
    for param in (plain, wide, turned, half):
        torch.testing.assert_close(param.float(), torch.full(param.shape, 0.5))
        assert optimizer.state[param]["step"].item() == 1


def test_no_kernel_without_one(monkeypatch):
    monkeypatch.setenv("DS_OPS_DISABLE", "cpu_adam")
    params = _params()
    optimizer = DeepSpeedCPUAdam(params)
    assert not optimizer.takes_one_pass
    calls = _calls(optimizer, monkeypatch)
    _train(optimizer, params)
    assert calls == []
    assert FusedAdam(params).takes_one_pass


def test_autograd_hears_of_the_update():
    weight = Parameter(torch.ones(8))
    optimizer = DeepSpeedCPUAdam([weight], lr=0.1)
    loss = (weight * weight).sum()
    weight.grad = torch.ones(8)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_learning_rate_may_be_a_tensor_and_change():
    a, b = _params(), _params()
    lr = torch.tensor(1e-2)
    ours, theirs = DeepSpeedCPUAdam(a, lr=lr), DeepSpeedCPUAdam(b, lr=1e-2)
    _train(ours, a)
    _train(theirs, b)
    lr.fill_(0.5)
    theirs.param_groups[0]["lr"] = 0.5
    _train(ours, a, first_seed=7)
    _train(theirs, b, first_seed=7)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("front", [FusedAdam, DeepSpeedCPUAdam])
def test_one_pass_equals_cast_scale_step_and_copy(front):
    masters, wanted = _params(), _params()
    weights = [master.detach().bfloat16() for master in masters]
    ours, theirs = front(masters, lr=1e-2, weight_decay=0.1), front(wanted, lr=1e-2, weight_decay=0.1)
    assert ours.takes_one_pass
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        grads = [torch.randn(param.shape, generator=generator).bfloat16() for param in masters]
        ours.step(one_pass=OnePass([grads], [weights], 0.25))
        for param, grad in zip(wanted, grads, strict=True):
            param.grad = grad.float() * 0.25
        theirs.step()
    for master, weight, reference in zip(masters, weights, wanted, strict=True):
        assert torch.equal(master, reference)
        assert torch.equal(weight, reference.bfloat16())


def test_one_pass_serves_what_the_operator_refuses_too():
    """States in bf16 beside bf16 parameters, as FusedAdam keeps them, are updated by torch."""
    half = Parameter(torch.ones(6, dtype=torch.bfloat16))
    optimizer = FusedAdam([half], lr=0.5)
    assert optimizer.takes_one_pass
    optimizer.step(one_pass=OnePass([[torch.ones(6)]], [[]], 0.5))
    torch.testing.assert_close(half.float(), torch.full((6,), 0.5))
    assert optimizer.state[half]["exp_avg"].dtype == torch.bfloat16


def test_copies_of_what_runs_in_torch():
    turned, weight = Parameter(torch.ones(4, 5).t()), torch.zeros(5, 4, dtype=torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([turned], lr=0.5)
    optimizer.step(one_pass=OnePass([[torch.ones(5, 4)]], [[weight]], 0.5))
    assert torch.equal(weight, torch.full((5, 4), 0.5, dtype=torch.bfloat16))


def test_a_gradient_that_is_refused_leaves_the_whole_group_as_it_was():
    dense, table = Parameter(torch.ones(8)), Parameter(torch.ones(4, 2))
    optimizer = DeepSpeedCPUAdam([dense, table], lr=0.1)
    dense.grad, table.grad = torch.ones(8), torch.ones(4, 2).to_sparse(1)
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(8))
    assert optimizer.state[dense]["step"] == 0


def test_a_moment_that_was_replaced_between_steps_is_looked_at_again():
    params, wanted = _params(), _params()
    ours, theirs = DeepSpeedCPUAdam(params, lr=1e-2), torch.optim.AdamW(wanted, lr=1e-2, weight_decay=0.0)
    for step in range(3):
        for param, other in zip(params, wanted, strict=True):
            param.grad = torch.full_like(param, 1.0 + step)
            other.grad = param.grad.clone()
        ours.step()
        theirs.step()
        moment = ours.state[params[0]]["exp_avg"]  # no longer contiguous: torch steps with it, not the kernel
        ours.state[params[0]]["exp_avg"] = torch.stack([moment, moment], -1)[..., 0]
    assert not ours.state[params[0]]["exp_avg"].is_contiguous()
    for param, other in zip(params, wanted, strict=True):
        torch.testing.assert_close(param, other)
