"""`FlopsProfiler` counts operations and measures the time of each module (`deepspeed.profiling.flops_profiler`).

    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss = model(batch)
    profiler.stop_profile()
    profiler.print_model_profile()
    profiler.end_profile()

`get_model_profile` does the same for one call, and `step_profile.py` for one step of an engine (the section
`flops_profiler`). Operations are counted in torch's dispatcher with the formulas of `torch.utils.flop_counter`: matrix
products, convolutions, attention and recurrent layers, however a model calls them. Two operations are one
multiply-accumulate (MAC). Elementwise operations are not counted.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.hooks import RemovableHandle

from deepspeed._absent import absent_members
from deepspeed.errors import StateError
from deepspeed.profiling.breakdown import (
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
    rate,
    text_table,
)
from deepspeed.profiling.timer import Stopwatch, create_stopwatch

__all__ = [
    "FlopsProfiler",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "get_module_duration",
    "get_module_flops",
    "get_module_macs",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]

_MODES = ("forward", "generate")


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Count the scores, and their product with the values, for every head of `query`. Keys may have fewer heads."""
    return int(2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Count the recomputed scores, two gradients of the scores, and two gradients of their product with the values."""
    return int(2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1]))


def _grouped_flops(tokens: Any, weights: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Count a grouped product, which multiplies every row of `tokens` by the matrix of its group.

    With two 2-D operands, the common dimension is divided into groups.
    """
    batch = tokens[0] if len(tokens) == 3 else 1
    return int(2 * batch * tokens[-2] * tokens[-1] * weights[-1])


def _recurrent_flops(inputs: Any, *weights: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Count recurrent layers: one product with every 2-D weight at each position of `inputs`."""
    shapes = weights[0] if isinstance(weights[0][0], Sequence) else weights[:2]
    return 2 * math.prod(inputs[:-1]) * sum(math.prod(shape) for shape in shapes if len(shape) == 2)


def _matrix_vector_flops(matrix: Any, vector: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * math.prod(matrix))


def _added_matrix_vector_flops(_: Any, matrix: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * math.prod(matrix))


def _integer_product_flops(left: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * math.prod(left) * right[-1])


def _added_products_flops(_: Any, left: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * math.prod(left) * right[-1])


def _trilinear_flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Count a product of three tensors, of `nn.Bilinear` and its backward: first of two of them, summed over the first
    of the dimensions, then of the result and the third. Each tensor lacks the dimensions that it is expanded in."""
    shapes, expanded, summed = args[:3], args[3:6], args[6]
    sizes: dict[int, int] = {}
    for shape, lacking in zip(shapes, expanded, strict=True):
        places = (dim for dim in range(len(shape) + len(lacking)) if dim not in lacking)
        sizes.update(zip(places, shape, strict=False))
    whole = math.prod(sizes.values())
    return 2 * (whole + (whole // sizes[summed[0]] if len(summed) > 1 else 0))


_aten = torch.ops.aten
#: operator -> function of the shapes of its arguments, for operators without a formula in torch's counter. Attention is
#: here because torch's formula raises in torch 2.10 if keys have fewer heads, which would fail the profiled step.
_FORMULAS: dict[Any, Callable[..., int]] = {
    **{
        operator: _attention_backward_flops if str(operator).endswith("_backward") else _attention_flops
        for operator in flop_registry
        if "_scaled_dot_product_" in str(operator)
    },
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    _aten._scaled_dot_product_fused_attention_overrideable: _attention_flops,
    _aten._grouped_mm: _grouped_flops,
    _aten._scaled_grouped_mm: _grouped_flops,
    _aten.mkldnn_rnn_layer: _recurrent_flops,
    **dict.fromkeys((_aten.mv, _aten.dot, _aten.vdot), _matrix_vector_flops),
    _aten.addmv: _added_matrix_vector_flops,
    _aten.addbmm: _added_products_flops,
    _aten._int_mm: _integer_product_flops,
    _aten._trilinear: _trilinear_flops,
    # device-specific operators for recurrent layers, named <library>_rnn
    **{
        getattr(_aten, name.removeprefix("aten::")): _recurrent_flops
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and name.endswith("_rnn")
    },
}


def create_counter() -> FlopCounterMode:
    """Return a context that counts operations; `get_total_flops()` has the result."""
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)


class _ModuleRecord:
    """The measurements of one module. FLOPs exclude its submodules, which have their own records."""

    def __init__(self) -> None:
        self.flops = 0
        self.num_running = 0
        self.is_called = False
        self.stopwatch: Stopwatch = create_stopwatch()
        self._duration_s = 0.0

    @property
    def duration_s(self) -> float:
        """Seconds of all calls of the module, including its submodules."""
        self._duration_s += sum(self.stopwatch.collect(wait=True)) / 1e3
        return self._duration_s


_RECORDS: WeakKeyDictionary[Module, _ModuleRecord] = WeakKeyDictionary()


def get_module_flops(module: Module) -> int:
    """Return the operations of a module and all its submodules; 0 if it was not profiled."""
    return sum(_RECORDS[part].flops for part in module.modules() if part in _RECORDS)


def get_module_macs(module: Module) -> int:
    """Return the multiply-accumulates of a module and all its submodules."""
    return get_module_flops(module) // 2


def get_module_duration(module: Module) -> float:
    """Return the seconds of all calls of a profiled module.

    For a module that is never called, such as a ModuleList, return the sum over its children.
    """
    record = _RECORDS.get(module)
    if record is not None and record.is_called:
        return record.duration_s
    return sum(get_module_duration(child) for child in module.children())


@cache
def _warm_up() -> None:
    """Use the counter once: the first use imports parts of torch for seconds, which must not count for a module."""
    with create_counter():
        torch.empty(0).neg()


def _takes_hooks(module: Module) -> bool:
    """Return whether hooks can be registered on a module; one of `torch.jit.script` has an error in their place."""
    return type(module).register_forward_pre_hook is Module.register_forward_pre_hook


def _num_params(module: Module) -> int:
    """Return the number of elements of a module's parameters. Sharded parameters count in full."""
    return sum(getattr(param, "ds_numel", param.numel()) for param in module.parameters())


@absent_members("profiling.flops_profiler.profiler:FlopsProfiler")
class FlopsProfiler:
    """Profiles the calls of a model between `start_profile` and `stop_profile`.

    The measurements of all calls are added. Counting costs some microseconds per operator, which dominates the time of
    very small modules.

    Args:
        model: a module, or an engine.
        ds_engine: the engine that trains the model, as in DeepSpeed; stored in the attribute `ds_engine`.
        recompute_fwd_factor: accepted for old scripts, and ignored: recomputed forwards are counted when they run.

    Raises:
        ValueError: `model` is no module, or one of `torch.jit.script`, which takes no hooks. Such modules inside of the
            model count for the module around them.
    """

    def __init__(self, model: Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        if not isinstance(model, Module) or not _takes_hooks(model):
            kind = "a scripted or frozen module, which takes no hooks" if isinstance(model, Module) else "no module"
            raise ValueError(
                f"model: found {type(model).__name__}, {kind}; give the torch.nn.Module that torch.jit was given, or "
                "one that calls this"
            )
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._handles: list[RemovableHandle] = []
        self._running: list[Module] = []  # the modules whose forward is running, the innermost last
        self._counter: FlopCounterMode | None = None
        self._num_counted = 0  # operations of the counter that are already attributed to a module
        self.is_paused = False  #: True: calls of the model are not profiled

    def start_profile(self, ignore_list: Iterable[type[Module]] | None = None) -> None:
        """Start to profile every call of the model, with all counts at 0.

        Args:
            ignore_list: classes of modules without their own line; their operations count for the parent.
        """
        self.end_profile()
        _warm_up()
        ignored = tuple(ignore_list or ())
        for module in self.model.modules():
            if type(module) not in ignored and _takes_hooks(module):
                _RECORDS[module] = _ModuleRecord()
                self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
                self._handles.append(module.register_forward_hook(self._exit, always_call=True))
        self.started = True

    def stop_profile(self) -> None:
        """Stop profiling. The measurements remain until `end_profile`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leave()
        self.started = False

    def reset_profile(self) -> None:
        """Reset all measurements to 0. A running profile continues."""
        for module in self.model.modules():
            if module in _RECORDS:
                _RECORDS[module] = _ModuleRecord()

    def end_profile(self) -> None:
        """Stop profiling and delete the measurements."""
        self.stop_profile()
        for module in self.model.modules():
            _RECORDS.pop(module, None)

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the operations of all calls.

        Raises:
            StateError: nothing was profiled.
        """
        self._check_profiled("get_total_flops")
        total = get_module_flops(self.model)
        return number_to_string(total) if as_string else total

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Return the multiply-accumulates of all calls. Raises like `get_total_flops`."""
        self._check_profiled("get_total_macs")
        total = get_module_macs(self.model)
        return macs_to_string(total) if as_string else total

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return the seconds of all calls. Waits for the device. Raises like `get_total_flops`."""
        self._check_profiled("get_total_duration")
        total = get_module_duration(self.model)
        return duration_to_string(total) if as_string else total

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the number of parameters. Sharded parameters count in full."""
        total = _num_params(self.model)
        return params_to_string(total) if as_string else total

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the totals, the heaviest classes of modules at each depth, and a line per module.

        Args:
            profile_step: the step number in the title.
            module_depth: the deepest level to list; -1: all levels.
            top_modules: number of classes per level.
            detailed: print one line per module.
            output_file: a file to write (and replace) instead of standard output.

        Raises:
            StateError: nothing was profiled.
        """
        self._check_profiled("print_model_profile")
        write(self.report(profile_step, module_depth, top_modules, detailed), output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the heaviest classes of modules at each depth. See `print_model_profile`."""
        self._check_profiled("print_model_aggregated_profile")
        write("\n".join(_heaviest(self.model, module_depth, top_modules)), None)

    def report(
        self,
        profile_step: int,
        module_depth: int,
        top_modules: int,
        detailed: bool,
        before: Mapping[str, str] | None = None,
        after: Mapping[str, str] | None = None,
    ) -> str:
        """Return the text that `print_model_profile` prints.

        Args:
            before: name -> value of lines before the model's lines in the summary.
            after: name -> value of lines after the model's lines.
        """
        flops, duration_s = get_module_flops(self.model), get_module_duration(self.model)
        summary = {
            **(before or {}),
            "parameters": params_to_string(_num_params(self.model)),
            "forward MACs": macs_to_string(flops // 2),
            "forward FLOPs": number_to_string(flops).rstrip(),
            "forward latency": duration_to_string(duration_s),
            "forward FLOPS": rate(flops, duration_s),
            **(after or {}),
        }
        width = max(map(len, summary)) + 2
        lines = [f"Flops profile of step {profile_step}, on this rank"]
        lines += ["FLOPs: floating-point operations; FLOPS: those per second; MAC: a multiply and an add, two FLOPs"]
        lines += [f"  {name + ':':{width}}{value}" for name, value in summary.items()]
        lines += _heaviest(self.model, module_depth, top_modules)
        if detailed:
            lines += _tree(self.model)
        return "\n".join(lines)

    def _check_profiled(self, call: str) -> None:
        if not any(module in _RECORDS for module in self.model.modules()):
            raise StateError(f"{call}: nothing was profiled; call start_profile(), then the model, then stop_profile()")

    def _enter(self, module: Module, inputs: Any) -> None:
        if self.is_paused:
            return
        if self._counter is None:
            self._counter = create_counter().__enter__()
            self._num_counted = 0
        self._attribute()
        record = _RECORDS[module]
        record.is_called = True
        record.num_running += 1
        if record.num_running == 1:  # measure only the outermost call of a recursive module
            record.stopwatch.start()
        self._running.append(module)

    def _exit(self, module: Module, inputs: Any, outputs: Any) -> None:
        if not self._running or self._running[-1] is not module:  # paused, or the forward began before the profile
            return
        self._attribute()
        self._running.pop()
        self._end(module)
        if not self._running:
            self._leave()

    def _attribute(self) -> None:
        """Attribute the operations counted since the last call to the innermost running module."""
        assert self._counter is not None
        total = self._counter.get_total_flops()
        if self._running:
            _RECORDS[self._running[-1]].flops += total - self._num_counted
        self._num_counted = total

    def _leave(self) -> None:
        """Stop counting: no call is running, or an exception that hooks do not see ended the calls."""
        while self._running:
            self._end(self._running.pop())
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None

    def _end(self, module: Module) -> None:
        record = _RECORDS[module]
        record.num_running -= 1
        if record.num_running == 0:
            record.stopwatch.stop()


def write(text: str, output_file: str | None) -> None:
    """Write a report to a file (creating its folder), or to standard output if there is no file."""
    if not output_file:
        sys.stdout.write(f"{text}\n")
        return
    path = Path(output_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole > 0 else "-"


def _levels(model: Module) -> list[list[Module]]:
    """Return the modules by depth, beginning with the model. A shared module counts at its first depth."""
    levels, seen = [[model]], {model}
    while children := {child: None for module in levels[-1] for child in module.children() if child not in seen}:
        levels.append(list(children))
        seen.update(children)
    return levels


def _heaviest(model: Module, module_depth: int, top_modules: int) -> list[str]:
    """Return lines with the heaviest classes of modules at each depth down to `module_depth` (-1: all)."""
    figures = {
        "parameters": (_num_params, params_to_string),
        "MACs": (get_module_macs, macs_to_string),
        "latency": (get_module_duration, duration_to_string),
    }
    rows = []
    levels = _levels(model)
    for depth, level in enumerate(levels if module_depth < 0 else levels[: module_depth + 1]):
        for name, (measure, to_string) in figures.items():
            by_class: dict[str, float] = {}
            for module in level:
                kind = type(module).__name__
                by_class[kind] = by_class.get(kind, 0.0) + measure(module)
            heaviest = sorted(by_class.items(), key=lambda item: -item[1])[: max(0, top_modules)]
            rows.append([str(depth), name, ", ".join(f"{kind} {to_string(value)}" for kind, value in heaviest)])
    return text_table(f"heaviest classes by depth (top {top_modules})", ["depth", "of", "classes"], rows).splitlines()


def _tree(model: Module) -> list[str]:
    """Return a table with one line per module, indented by depth. A line includes the submodules."""
    all_params, all_macs, all_s = _num_params(model), get_module_macs(model), get_module_duration(model)
    rows = []

    def add(name: str, module: Module, depth: int) -> None:
        params, macs, duration_s = _num_params(module), get_module_macs(module), get_module_duration(module)
        rows.append(
            [
                "  " * depth + (f"{name}: " if name else "") + type(module).__name__,
                *(params_to_string(params), _share(params, all_params)),
                *(macs_to_string(macs), _share(macs, all_macs)),
                *(duration_to_string(duration_s), _share(duration_s, all_s)),
                rate(2 * macs, duration_s),
            ]
        )
        for child_name, child in module.named_children():
            add(child_name, child, depth + 1)

    add("", model, 0)
    columns = ["module", "parameters", "share", "MACs", "share", "latency", "share", "FLOPS"]
    return text_table("modules", columns, rows).splitlines()


def get_model_profile(
    model: Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type[Module]] | None = None,
    mode: str = "forward",
) -> tuple[int, int, int] | tuple[str, str, str]:
    """Profile one call of a model, in evaluation mode.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    >>> get_model_profile(model, (4, 64), print_profile=False, as_string=False)
    (75776, 37888, 9610)

    Args:
        model: any module.
        input_shape: shape of the model's only argument, a tensor of ones in the parameters' dtype. Models of
            transformers that read tokens get whole numbers, and so does every embedding.
        args: list of positional arguments, instead of `input_shape`.
        kwargs: keyword arguments.
        print_profile: also print the tables.
        detailed: see `FlopsProfiler.print_model_profile`.
        module_depth: see `FlopsProfiler.print_model_profile`.
        top_modules: see `FlopsProfiler.print_model_profile`.
        warm_up: number of calls before the measured call.
        as_string: return text with units.
        output_file: see `FlopsProfiler.print_model_profile`.
        ignore_modules: see `FlopsProfiler.start_profile`.
        mode: "forward" calls the model, "generate" its method `generate`.

    Returns:
        Operations, multiply-accumulates, and parameters.

    Raises:
        ValueError: `input_shape`, `args` and `kwargs` are all missing, one of them has another form, `mode` is
            unknown, or `model` takes no hooks (see `FlopsProfiler`).
    """
    if mode not in _MODES:
        raise ValueError(f"mode: found {mode!r}; choose one of {', '.join(map(repr, _MODES))}")
    profiler = FlopsProfiler(model)
    if isinstance(args, torch.Tensor | Mapping):
        raise ValueError(
            f"args: found a {type(args).__name__}; give a list of arguments, and those with names in kwargs"
        )
    args, kwargs = list(args), dict(kwargs or {})
    if input_shape is not None:
        args = [_ones(model, input_shape)]
    elif not (args or kwargs):
        raise ValueError("get_model_profile: found neither input_shape nor args nor kwargs; give what the model takes")
    was_training = model.training
    call: Any = model if mode == "forward" else model.generate
    try:
        model.eval()
        with _numbers_for_embeddings(model) if input_shape is not None else nullcontext():
            for _ in range(warm_up):
                call(*args, **kwargs)
            profiler.start_profile(ignore_modules)
            call(*args, **kwargs)
            profiler.stop_profile()
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        figures = int(profiler.get_total_flops()), int(profiler.get_total_macs()), int(profiler.get_total_params())
    finally:
        profiler.end_profile()
        model.train(was_training)
    if not as_string:
        return figures
    return number_to_string(figures[0]), macs_to_string(figures[1]), params_to_string(figures[2])


def _ones(model: Module, input_shape: Any) -> torch.Tensor:
    is_shape = isinstance(input_shape, Sequence) and all(isinstance(size, int) and size >= 0 for size in input_shape)
    if not is_shape:
        raise ValueError(f"input_shape: found {input_shape!r}; give whole numbers of 0 or more, as (batch, features)")
    first = next((param for param in model.parameters() if param.is_floating_point()), torch.empty(0))
    reads_tokens = getattr(model, "main_input_name", None) == "input_ids"
    return torch.ones(tuple(input_shape), dtype=torch.int64 if reads_tokens else first.dtype, device=first.device)


@contextmanager
def _numbers_for_embeddings(model: Module) -> Iterator[None]:
    """Let the embeddings of a model read ones of any dtype inside the block."""

    def whole(module: Module, args: Any, kwargs: Any) -> Any:
        if args and args[0].is_floating_point():
            return (args[0].long(), *args[1:]), kwargs
        if not args and kwargs["input"].is_floating_point():
            return args, {**kwargs, "input": kwargs["input"].long()}
        return None

    embeddings = [each for each in model.modules() if isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag)]
    handles = [each.register_forward_pre_hook(whole, with_kwargs=True) for each in embeddings]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
