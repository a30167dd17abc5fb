"""Operations and time by module: what is counted, to whom, and that a model is left as it was."""

import deepspeed
import pytest
import torch
from deepspeed.config.intake import parse_section
from deepspeed.config.monitor import FlopsProfilerConfig
from deepspeed.errors import ConfigError, StateError
from deepspeed.profiling import flops, flops_profiler
from deepspeed.profiling.flops_profiler import (
    FlopsProfiler,
    get_model_profile,
    get_module_duration,
    get_module_flops,
    get_module_macs,
)
from deepspeed.profiling.step_profile import StepProfile, measured_peak
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

LINEAR = 2 * 4 * 8 * 16  # operations of Linear(8, 16) on 4 rows


class Net(nn.Module):
    """A layer, a block with a product of its own, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.again = nn.Linear(16, 16, bias=False)
        self.error = None

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if self.error is not None:
            raise self.error
        return self.again(self.again(x)).square().mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return functional.gelu(self.layer(x)) @ torch.eye(16)


SQUARE = 2 * 4 * 16 * 16
TOTAL = LINEAR + 2 * 2 * SQUARE + 2 * SQUARE
PARAMS = 8 * 16 + 16 + 2 * (16 * 16 + 16) + 16 * 16


def profiled(model, *inputs, **kwargs):
    profiler = FlopsProfiler(model)
    profiler.start_profile(**kwargs)
    model(*inputs)
    profiler.stop_profile()
    return profiler


# ---- counts ---------------------------------------------------------------------------------------------------------


def test_sums_of_modules_are_the_total():
    model = Net()
    profiler = profiled(model, torch.randn(4, 8))
    assert (profiler.get_total_flops(), profiler.get_total_macs()) == (TOTAL, TOTAL // 2)
    assert profiler.get_total_params() == PARAMS
    assert get_module_flops(model.first) == LINEAR
    assert get_module_flops(model.blocks[0].layer) == SQUARE
    assert get_module_flops(model.blocks[0]) == 2 * SQUARE  # its own product too
    assert get_module_flops(model.blocks) == 4 * SQUARE
    assert get_module_macs(model.again) == SQUARE  # both calls
    children = (model.first, model.blocks, model.again)
    assert sum(map(get_module_flops, children)) == TOTAL
    assert 0 < get_module_duration(model.blocks) <= get_module_duration(model)
    assert profiler.get_total_duration() == get_module_duration(model)


def test_calls_add_up_until_reset():
    model = Net()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    assert profiler.started
    model(torch.randn(4, 8))
    model(torch.randn(4, 8))
    assert profiler.get_total_flops() == 2 * TOTAL
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0
    model(torch.randn(4, 8))
    profiler.stop_profile()
    model(torch.randn(4, 8))
    assert profiler.get_total_flops() == TOTAL
    assert not profiler.started
    profiler.end_profile()
    with pytest.raises(StateError, match="get_total_flops: nothing was profiled; call start_profile"):
        profiler.get_total_flops()
    with pytest.raises(StateError, match="print_model_profile: nothing was profiled"):
        profiler.print_model_profile()


def test_what_the_first_count_of_a_process_loads_is_loaded_before_a_module_runs():
    flops._warm_up.cache_clear()
    FlopsProfiler(Net()).start_profile()
    assert flops._warm_up.cache_info().currsize == 1


def test_modules_that_are_ignored_count_as_their_parents():
    model = Net()
    profiler = profiled(model, torch.randn(4, 8), ignore_list=[nn.Linear])
    assert profiler.get_total_flops() == TOTAL
    assert get_module_flops(model.first) == 0
    assert get_module_flops(model.blocks[0]) == 2 * SQUARE


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_counts_do_not_depend_on_gradients(context):
    model = Net()
    with context():
        assert profiled(model, torch.randn(4, 8)).get_total_flops() == TOTAL


@pytest.mark.parametrize(
    ("model", "shape", "macs"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 10, 10), 2 * 100 * 8 * 27),
        (nn.LSTM(8, 16, 2, batch_first=True), (4, 5, 8), 4 * 5 * 4 * 16 * (8 + 16 + 16 + 16)),
        (nn.GRU(8, 16, bidirectional=True), (5, 4, 8), 2 * 4 * 5 * 3 * 16 * (8 + 16)),
        (nn.RNN(8, 16), (5, 4, 8), 4 * 5 * 16 * (8 + 16)),
        (nn.ConvTranspose1d(4, 6, 2, stride=2), (3, 4, 7), 3 * 7 * 4 * 6 * 2),
        (nn.LSTMCell(8, 16), (4, 8), 4 * 64 * (8 + 16)),
        (nn.GRUCell(8, 16), (4, 8), 4 * 48 * (8 + 16)),
    ],
    ids=["Conv2d", "LSTM", "GRU", "RNN", "ConvTranspose1d", "LSTMCell", "GRUCell"],
)
def test_layers_of_torch(model, shape, macs):
    assert get_model_profile(model, shape, print_profile=False, as_string=False)[1] == macs


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


BILINEAR = 4 * 7 * (5 * 6 + 6)  # per row and output x W, then its product with y
ATTENDED = 2 * 4 * 6 * 10 * (8 + 8)
PACKED = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 5, 8), [5, 3, 2], batch_first=True)
#: name: (function, shapes of its arguments, multiply-accumulates by hand)
PRODUCTS = {
    "bilinear": (functional.bilinear, [(4, 5), (4, 6), (7, 5, 6)], BILINEAR),
    "einsum of two": (lambda x, y: torch.einsum("ij,jk->ik", x, y), [(4, 5), (5, 6)], 4 * 5 * 6),
    "einsum of three": (
        lambda x, w, y: torch.einsum("bi,oij,bj->bo", x, w, y),
        [(4, 5), (7, 5, 6), (4, 6)],
        BILINEAR,
    ),
    "einsum of rows": (lambda x, y: torch.einsum("bi,bi->b", x, y), [(4, 5), (4, 5)], 4 * 5),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 2), [(3, 4, 5), (4, 5, 6)], 3 * 20 * 6),
    "baddbmm": (torch.baddbmm, [(3, 4, 6), (3, 4, 5), (3, 5, 6)], 3 * 4 * 5 * 6),
    "addbmm": (torch.addbmm, [(4, 6), (3, 4, 5), (3, 5, 6)], 3 * 4 * 5 * 6),
    "addmv": (torch.addmv, [(4,), (4, 5), (5,)], 4 * 5),
    "mv": (torch.mv, [(4, 5), (5,)], 4 * 5),
    "matmul with a vector": (torch.matmul, [(2, 4, 5), (5,)], 2 * 4 * 5),
    "dot": (torch.dot, [(5,), (5,)], 5),
    "vdot": (torch.vdot, [(5,), (5,)], 5),
    "conv_transpose2d": (
        lambda x, w: functional.conv_transpose2d(x, w, stride=2, groups=2),
        [(2, 4, 5, 5), (4, 3, 3, 3)],
        2 * 25 * 4 * 3 * 9,
    ),
    "attention": (functional.scaled_dot_product_attention, [(2, 4, 6, 8), (2, 4, 10, 8), (2, 4, 10, 8)], ATTENDED),
    "attention with a mask": (
        functional.scaled_dot_product_attention,
        [(2, 4, 6, 8), (2, 4, 10, 8), (2, 4, 10, 8), (6, 10)],
        ATTENDED,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_functions_of_torch(name):
    function, shapes, macs = PRODUCTS[name]
    assert profiled(Calls(function), *map(torch.ones, shapes)).get_total_macs() == macs


def test_modules_of_several_arguments():
    assert profiled(nn.Bilinear(5, 6, 7), torch.ones(4, 5), torch.ones(4, 6)).get_total_macs() == BILINEAR
    assert profiled(nn.LSTM(8, 16, batch_first=True), PACKED).get_total_macs() == 10 * 64 * (8 + 16)
    integers = torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)
    assert profiled(Calls(torch._int_mm), *integers).get_total_macs() == 32 * 16 * 8


def test_the_backward_of_a_bilinear_layer_counts_its_three_gradients():
    inputs = [torch.ones(4, 5, requires_grad=True), torch.ones(4, 6, requires_grad=True)]
    loss = nn.Bilinear(5, 6, 7)(*inputs).sum()
    with flops.create_counter() as counter:
        loss.backward()
    whole = 4 * 7 * 5 * 6
    assert counter.get_total_flops() == 2 * (3 * whole + whole // 7 + whole // 7)


def test_modules_of_torch_jit():
    layers, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), torch.ones(4, 8)
    traced = torch.jit.trace(layers, x)
    assert profiled(traced, x).get_total_flops() == LINEAR
    assert profiled(nn.Sequential(torch.jit.script(layers)), x).get_total_flops() == LINEAR
    for model in (torch.jit.script(layers), torch.jit.freeze(traced.eval())):
        with pytest.raises(ValueError, match="model: found RecursiveScriptModule, a scripted or frozen module, which"):
            get_model_profile(model, (4, 8))
    with pytest.raises(
        ValueError, match="model: found builtin_function_or_method, no module; give the torch.nn.Module"
    ):
        get_model_profile(functional.gelu, (4, 8))


def test_recurrent_layers_of_a_device_get_their_weights_in_a_list():
    from torch import Size

    formulas = {str(operator): formula for operator, formula in flops._FORMULAS.items()}
    (count,) = {formula for operator, formula in formulas.items() if operator.endswith("_rnn")}
    weights = [Size([64, 8]), Size([64, 16]), Size([64]), Size([64])]
    for inputs in (Size([5, 4, 8]), Size([20, 8])):  # padded, and packed
        assert count(inputs, weights, 4, None, Size([1, 4, 16])) == 2 * 20 * 64 * (8 + 16)


@pytest.mark.parametrize("heads_of_keys", [4, 2])
def test_attention_counts_both_products(heads_of_keys):
    class Attention(nn.Module):
        def forward(self, queries, keys):
            return functional.scaled_dot_product_attention(queries, keys, keys, is_causal=True, enable_gqa=True)

    profiler = profiled(Attention(), torch.randn(2, 4, 6, 8), torch.randn(2, heads_of_keys, 6, 8))
    assert profiler.get_total_macs() == 2 * 2 * 4 * 6 * 6 * 8


def test_formulas_of_attention_are_those_of_torch():
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    shapes = [torch.Size((2, 4, 6, 8)), torch.Size((2, 4, 10, 8)), torch.Size((2, 4, 10, 12))]
    grad = torch.Size((2, 4, 6, 12))
    assert flops._attention_flops(*shapes) == sdpa_flop_count(*shapes)
    assert flops._attention_backward_flops(grad, *shapes) == sdpa_backward_flop_count(grad, *shapes)


def test_products_in_groups():
    class Experts(nn.Module):
        def forward(self, tokens, weights, ends):
            return torch._grouped_mm(tokens, weights, offs=ends)

    tokens, weights = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(2, 16, 32, dtype=torch.bfloat16)
    profiler = profiled(Experts(), tokens, weights, torch.tensor([3, 8], dtype=torch.int32))
    assert profiler.get_total_macs() == 8 * 16 * 32


# ---- a model is left as it was --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("planted"), KeyboardInterrupt()])
def test_a_call_that_fails_leaves_nothing_behind(error):
    model = Net()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model.error = error
    with pytest.raises(type(error)):
        model(torch.randn(4, 8))
    profiler.end_profile()
    assert _get_current_dispatch_mode() is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.error = None
    assert profiled(model, torch.randn(4, 8)).get_total_flops() == TOTAL


def test_get_model_profile_gives_the_mode_back(capsys):
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5)).train()
    assert get_model_profile(model, (4, 8), top_modules=2) == ("1.02 K", "512 MACs", "144")
    assert model.training
    text = capsys.readouterr().out
    assert "forward MACs:" in text
    assert "0: Linear" in text


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "found neither input_shape nor args nor kwargs"),
        ({"input_shape": (4, 8), "mode": "train"}, "mode: found 'train'; choose one of 'forward', 'generate'"),
        ({"input_shape": 8}, "input_shape: found 8; give whole numbers"),
        ({"input_shape": (-1, 8)}, r"input_shape: found \(-1, 8\); give whole numbers"),
        ({"args": torch.ones(4, 8)}, "args: found a Tensor; give a list of arguments"),
        ({"args": {"x": torch.ones(4, 8)}}, "args: found a dict; give a list of arguments, and those with names in"),
    ],
)
def test_calls_that_cannot_be_profiled(kwargs, message):
    with pytest.raises(ValueError, match=message):
        get_model_profile(Net(), **kwargs)


class Words(nn.Module):
    """Embeddings, one of which is given its numbers by name, and a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 16)
        self.words, self.bags = nn.Embedding(10, 8), nn.EmbeddingBag(10, 8)

    def forward(self, x):
        return self.layer(self.words(input=x)) + self.layer(self.bags(x)).unsqueeze(1)


def test_embeddings_of_a_shape_read_whole_numbers():
    model = Words()
    figures = get_model_profile(model, (4, 3), print_profile=False, as_string=False)
    assert figures == get_model_profile(
        model, args=[torch.ones(4, 3, dtype=torch.long)], print_profile=False, as_string=False
    )
    assert figures[0] == 3 * LINEAR + LINEAR
    assert not any(module._forward_pre_hooks for module in model.modules())
    model.main_input_name = "input_ids"  # as models of transformers say it
    model.words.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input"].dtype), with_kwargs=True)
    seen = []
    get_model_profile(model, (4, 3), print_profile=False)
    assert set(seen) == {torch.int64}


def test_generate_is_profiled_in_its_place():
    class Writer(Net):
        def generate(self, x, steps):
            for _ in range(steps):
                self(x)

    figures = get_model_profile(
        Writer(), args=[torch.randn(4, 8)], kwargs={"steps": 3}, mode="generate", print_profile=False, as_string=False
    )
    assert figures == (3 * TOTAL, 3 * TOTAL // 2, PARAMS)


# ---- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        ("number_to_string", {0: "0 ", 999: "999 ", 12345: "12.35 K", 2.345e9: "2.35 G", 4e15: "4000 T", 0.5: "500 m"}),
        ("macs_to_string", {0: "0 MACs", 1000: "1 KMACs", 1.5e6: "1.5 MMACs"}),
        ("flops_to_string", {1: "1 FLOPS", 3e12: "3 TFLOPS", 3e-5: "30 uFLOPS"}),
        ("bytes_to_string", {999: "999 B", 1000: "1 KB"}),
        ("params_to_string", {0: "0", 999: "999", 12345: "12.35 K", 2.345e9: "2.35 B", 3e12: "3 T"}),
        ("duration_to_string", {0: "0 s", 2.3e-3: "2.3 ms", 4.5e-6: "4.5 us", 1e-9: "0 us", 65: "65 s"}),
    ],
)
def test_numbers_look_as_in_deepspeed(function, texts):
    to_string = getattr(flops_profiler, function)
    assert {number: to_string(number) for number in texts} == texts


def test_units_can_be_asked_for():
    assert flops_profiler.number_to_string(12345, "M", precision=3) == "0.012 M"
    assert flops_profiler.duration_to_string(0.25, "ms") == "250 ms"
    assert flops_profiler.params_to_string(5e6, "G") == "0.01 B"
    with pytest.raises(ValueError, match="units: found 'Q'; choose one of 'T', 'G'"):
        flops_profiler.number_to_string(1, "Q")


def test_report_goes_to_a_file(tmp_path, capsys):
    model = Net()
    profiler = profiled(model, torch.randn(4, 8))
    path = tmp_path / "new" / "profile.txt"
    profiler.print_model_profile(profile_step=7, module_depth=1, top_modules=1, detailed=False, output_file=str(path))
    text = path.read_text()
    assert "step 7" in text
    depths = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert depths == ["depth", *"000111"]
    assert "modules" not in text.splitlines()
    profiler.print_model_aggregated_profile(module_depth=0)
    shown = capsys.readouterr().out
    assert f"Net {flops_profiler.params_to_string(PARAMS)}" in shown
    assert "Block" not in shown


# ---- a step of an engine --------------------------------------------------------------------------------------------


def train(path, *, stage=0, step=1, num_steps=3, micros=1, model=None, **keys):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micros,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        **keys,
    }
    if path is not None:
        config["flops_profiler"] = {"enabled": True, "profile_step": step, "output_file": str(path)}
    engine, *_ = deepspeed.initialize(model=model or Net(), config=config)
    losses = []
    for index in range(num_steps * micros):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
        with torch.no_grad():
            engine(x)  # an evaluation is no part of a step
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses


def figure(path, name):
    (line,) = (line for line in path.read_text().splitlines() if line.strip().startswith(f"{name}:"))
    return line.split(":")[1].strip()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_step_is_profiled_and_changes_nothing(stage, tmp_path, single_rank):
    path = tmp_path / "profile.txt"
    engine, losses = train(path, stage=stage, micros=2)
    assert figure(path, "forward FLOPs") == flops_profiler.number_to_string(2 * TOTAL)
    weights_only = LINEAR + 2 * SQUARE  # the first layer's input and the constant matrices have no gradient
    assert figure(path, "backward FLOPs") == flops_profiler.number_to_string(2 * (2 * TOTAL - weights_only))
    assert figure(path, "parameters") == flops_profiler.params_to_string(PARAMS)
    assert figure(path, "micro-batches") == "2"
    assert "step 1," in path.read_text()
    assert not engine.flops_profiler.started
    assert _get_current_dispatch_mode() is None
    engine.destroy()
    without, expected = train(None, stage=stage, micros=2)
    without.destroy()
    assert losses == expected
    assert without.flops_profiler is None


def test_first_step_and_one_that_never_comes(tmp_path, single_rank):
    train(tmp_path / "0", step=0, num_steps=1)[0].destroy()
    assert (tmp_path / "0").exists()
    train(tmp_path / "9", step=9)[0].destroy()
    assert not (tmp_path / "9").exists()


def test_a_step_that_fails_is_profiled_from_its_beginning(tmp_path, single_rank):
    path = tmp_path / "profile.txt"
    model = Net()
    engine, _ = train(path, step=2, num_steps=2, model=model)
    model.error = ValueError("planted")
    with pytest.raises(ValueError, match="planted"):
        engine(torch.randn(4, 8))
    assert not engine.flops_profiler.started
    model.error = None
    loss = engine(torch.randn(4, 8))
    engine.backward(loss)
    engine.step()
    assert figure(path, "forward FLOPs") == flops_profiler.number_to_string(TOTAL)
    engine.destroy()


def test_a_file_that_cannot_be_written_ends_no_training(tmp_path, single_rank, caplog):
    (tmp_path / "file").write_text("in the way")
    engine, losses = train(tmp_path / "file" / "profile.txt")
    assert len(losses) == engine.global_steps == 3
    assert "flops_profiler.output_file: " in caplog.text
    assert str(tmp_path / "file") in caplog.text
    assert not engine.flops_profiler.started
    engine.destroy()


def test_a_phase_inside_of_itself_counts_once(tmp_path):
    path = tmp_path / "profile.txt"
    profile = StepProfile(
        FlopsProfiler(Net()), FlopsProfilerConfig(profile_step=0, output_file=str(path)), lambda: 0, {}
    )
    with profile.phase("forward"):
        with profile.phase("forward"):
            profile.profiler.model(torch.randn(4, 8))
        profile.profiler.model(torch.randn(4, 8))
    profile.step_ended(4)
    assert figure(path, "forward FLOPs") == flops_profiler.number_to_string(2 * TOTAL)


def test_a_forward_that_a_backward_repeats_counts_there(tmp_path, single_rank):
    class Repeating(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.again(self.again(x)).square().mean()

    plain, repeating = tmp_path / "plain.txt", tmp_path / "repeating.txt"
    train(plain)[0].destroy()
    train(repeating, model=Repeating())[0].destroy()
    assert figure(repeating, "forward FLOPs") == figure(plain, "forward FLOPs")
    assert figure(repeating, "backward FLOPs") != figure(plain, "backward FLOPs")


def test_the_utilization_of_the_device(tmp_path, single_rank, caplog):
    """With a peak of 10^12 FLOPS an ideal step takes as many picoseconds as it has FLOPs."""
    path = tmp_path / "profile.txt"
    section = {"enabled": True, "profile_step": 2, "output_file": str(path), "peak_tflops": 1}
    keys = {"steps_per_print": 1, "flops_profiler": section}
    engine, _ = train(None, num_steps=4, micros=2, **keys)
    backward = 2 * (2 * TOTAL - (LINEAR + 2 * SQUARE))
    assert engine.tput_timer.ideal_step_s == (2 * TOTAL + backward) / 1e12
    assert figure(path, "peak FLOPS of a device") == "1 TFLOPS"
    assert figure(path, "model FLOPs utilization").endswith("%")
    engine.destroy()
    lines = [line for line in caplog.text.splitlines() if "CurrSamplesPerSec" in line]
    assert [", MFU=" in line for line in lines] == [False, True]  # the first one is of the profiled step
    assert StepProfile(FlopsProfiler(Net()), FlopsProfilerConfig(), lambda: 0, {}).ideal_step_s is None


def test_a_backward_counts_at_most_twice_its_forward():
    profile = StepProfile(FlopsProfiler(Net()), FlopsProfilerConfig(peak_tflops=2), lambda: 0, {})
    profile._backward_flops = 500
    assert profile._utilization(100, 1e-9)["model FLOPs utilization"] == "15.00%"
    assert profile.ideal_step_s == 300 / 2e12


def test_a_peak_is_measured():
    peak = measured_peak(nn.Linear(2, 2))
    assert 1e8 < peak < 1e15
    profile = StepProfile(FlopsProfiler(Net()), FlopsProfilerConfig(peak_tflops="measured"), lambda: 0, {})
    profile._backward_flops = 2
    profile._utilization(1, 1.0)
    assert 3 / 1e15 < profile.ideal_step_s < 3 / 1e8


@pytest.mark.parametrize("peak", ["fast", 0, -1.0, True, [312], {"bf16": 312}])
def test_what_is_no_peak(peak):
    with pytest.raises(ConfigError, match=r"flops_profiler.peak_tflops: found .*; allowed: a number > 0 or .measured."):
        parse_section(FlopsProfilerConfig, {"peak_tflops": peak}, "flops_profiler")
