"""Print how an engine's parameters are divided, and estimate a stage's memory before training.

`show_layout` prints what a rank keeps of the parameters, and which parameters are gathered together.

`estimate_zero2_...` and `estimate_zero3_...` count model states for Adam in mixed precision: a 16-bit weight and its
gradient take 2 bytes each, the fp32 master weight and two states 12 bytes. Stage 2 shards everything except the weight.
Stage 3 also shards the weight, but the largest layer is whole while it is used, with its gradient. In host memory the
gradient takes 4 bytes. Activations and buffers of the allocator and of collectives are not included.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch.nn import Module, Parameter

from deepspeed.comm.values import dtype_name
from deepspeed.errors import counted
from deepspeed.zero.param_marks import ZeroParamStatus
from deepspeed.zero.param_unit import ParamUnit, shape_of
from deepspeed.zero.sharding import Sharding


@dataclass(frozen=True)
class UnitRow:
    """`UnitRow` is one line of the table: parameters that are gathered or reduced together."""

    module: str  # the innermost module that contains all of them
    parameters: int
    elements: int
    shard_elements: int  # elements that this rank updates; in stage 3 also what it keeps between uses
    bytes: int  # bytes of the weights that this rank keeps between uses
    dtype: str
    ranks: int  # number of ranks that share the weights or the gradients
    status: str  # AVAILABLE: whole on this rank


def show_layout(engine: Any) -> list[UnitRow]:
    """Print (on rank 0) and return how the parameters of an engine are divided, in stages 0 to 3.

    Not a collective: any rank may call it and gets its own rows.

    Args:
        engine: the result of `deepspeed.initialize`.

    Returns:
        One row per unit, that is per set of parameters that are gathered or reduced together: sizes in elements, and in
        bytes of the weights that this rank keeps between uses.
    """
    rows = list(_rows(engine.sharding, {param: name for name, param in engine.module.named_parameters()}))
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(_as_table(rows), _summary(rows), sep="\n")  # noqa: T201 - what the user asked for
    return rows


def _rows(sharding: Sharding, names: dict[Parameter, str]) -> Iterator[UnitRow]:
    left = dict(names)
    for sharded in dict.fromkeys(its for param in names if (its := getattr(param, "ds_unit", None)) is not None):
        yield _row_of_unit(sharded)
        for param in sharded.params:
            left.pop(param, None)
    for unit in sharding.units:
        if unit.sharded is None:
            yield _row_of_whole(unit.params, names, unit.layout.shard_numel, unit.ranks.world_size)
            for param in unit.params:
                left.pop(param, None)
    if left:  # parameters that the optimizer does not have
        yield _row_of_whole(list(left), names, 0, 1)


def _row_of_unit(unit: ParamUnit) -> UnitRow:
    return UnitRow(
        module=_module_of(unit.names),
        parameters=len(unit.params),
        elements=unit.layout.numel,
        shard_elements=unit.shard_S.numel(),
        bytes=unit.kept_bytes,
        dtype=dtype_name(unit.shard_S.dtype),
        ranks=unit.ranks.world_size,
        status=unit.status.name,
    )


def _row_of_whole(params: Sequence[Parameter], names: dict[Parameter, str], owned: int, num_ranks: int) -> UnitRow:
    return UnitRow(
        module=_module_of([names.get(param, "") for param in params]),
        parameters=len(params),
        elements=sum(param.numel() for param in params),
        shard_elements=owned,
        bytes=sum(param.numel() * param.itemsize for param in params),
        dtype=", ".join(sorted({dtype_name(param.dtype) for param in params})),
        ranks=num_ranks,
        status=ZeroParamStatus.AVAILABLE.name,
    )


def _module_of(names: Sequence[str]) -> str:
    """Return the longest path with which all parameter names begin; "(model)" for the root."""
    paths = [name.split(".")[:-1] for name in names]
    first = paths[0]
    length = next((n for n in range(len(first), 0, -1) if all(path[:n] == first[:n] for path in paths)), 0)
    return ".".join(first[:length]) or "(model)"


def _summary(rows: Sequence[UnitRow]) -> str:
    kept, updated = sum(row.bytes for row in rows), sum(row.shard_elements for row in rows)
    elements = sum(row.elements for row in rows)
    return f"this rank keeps {kept:,} bytes of weights between uses, and updates {updated:,} of {elements:,} elements"


def _as_table(rows: Sequence[UnitRow]) -> str:
    head = tuple(field.name.replace("_", " ") for field in fields(UnitRow))
    lines = [head, *(tuple(f"{cell:,}" if isinstance(cell, int) else cell for cell in astuple(row)) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    is_number = [isinstance(cell, int) for cell in astuple(rows[0])] if rows else [False] * len(head)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    )


_GIB = 2**30


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Estimate the memory of stage 2 in bytes: (host memory per node, memory per device).

    Args:
        total_params: number of elements of all parameters.
        num_gpus_per_node: number of devices per node.
        num_nodes: number of nodes.
        cpu_offload: whether optimizer states are offloaded to host memory.
        additional_buffer_factor: factor on host memory for other allocations.
    """
    total_gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        device_bytes = 2 * total_params
        host_bytes = total_params * max(4 * total_gpus, 16) * additional_buffer_factor
    else:
        device_bytes = 2 * total_params + int(14 * total_params / total_gpus)
        host_bytes = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host_bytes), int(device_bytes)


def estimate_zero2_model_states_mem_needs_all_live(
    model: Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of `estimate_zero2_model_states_mem_needs` for an existing model."""
    total_params = sum(param.numel() for param in model.parameters())  # a shared parameter is listed once
    estimate_zero2_model_states_mem_needs_all_cold(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of `estimate_zero2_model_states_mem_needs` for a number of parameters."""
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {counted(num_nodes, 'node')}, {counted(num_gpus_per_node, 'GPU')} per node.",
        f"SW: Model with {int(total_params / 1e6)}M total params.",
        "  per CPU  |  per GPU |   Options",
    ]
    for cpu_offload in (True, False):
        host_bytes, device_bytes = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor
        )
        device = "cpu" if cpu_offload else "none"
        lines.append(f" {host_bytes / _GIB:7.2f}GB | {device_bytes / _GIB:6.2f}GB | offload_optimizer={device}")
    print("\n".join(lines))  # noqa: T201 - what the user asked for


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Estimate the memory of stage 3 in bytes: (host memory per node, memory per device, of it for the largest layer).

    Args:
        total_params: number of elements of all parameters.
        largest_layer_params: number of elements of the largest layer.
        num_gpus_per_node: number of devices per node.
        num_nodes: number of nodes.
        cpu_offload: whether optimizer states are offloaded to host memory.
        cpu_offload_params: whether parameter shards are offloaded too; only with `cpu_offload`.
        zero_init: whether the model is built in `zero.Init`; else every rank builds the whole model in host memory.
        additional_buffer_factor: factor on host memory for other allocations.
    """
    layer_bytes = 4 * largest_layer_params
    sharded_bytes = (0 if cpu_offload_params else 2) if cpu_offload else 16
    device_bytes = layer_bytes + int(sharded_bytes * total_params / (num_nodes * num_gpus_per_node))
    offloaded_bytes = total_params * ((18 if cpu_offload_params else 16) / num_nodes if cpu_offload else 0)
    built_bytes = 4 * num_gpus_per_node * (largest_layer_params if zero_init else total_params)
    return int(max(offloaded_bytes, built_bytes) * additional_buffer_factor), device_bytes, layer_bytes


def estimate_zero3_model_states_mem_needs_all_live(
    model: Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of `estimate_zero3_model_states_mem_needs` for an existing model, sharded or not."""
    total_params = sum(shape_of(param).numel() for param in model.parameters())
    largest_layer_params = max(
        sum(shape_of(param).numel() for param in module.parameters(recurse=False)) for module in model.modules()
    )
    estimate_zero3_model_states_mem_needs_all_cold(
        total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of `estimate_zero3_model_states_mem_needs` for numbers of parameters."""
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {counted(num_nodes, 'node')}, {counted(num_gpus_per_node, 'GPU')} per node.",
        f"SW: Model with {int(total_params / 1e6)}M total params, "
        f"{int(largest_layer_params / 1e6)}M largest layer params.",
        "  per CPU  |  per GPU |   Options",
    ]
    for cpu_offload, cpu_offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host_bytes, device_bytes, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                cpu_offload,
                cpu_offload_params,
                zero_init,
                additional_buffer_factor,
            )
            lines.append(
                f" {host_bytes / _GIB:7.2f}GB | {device_bytes / _GIB:6.2f}GB | "
                f"offload_param={_home(cpu_offload_params)}, offload_optimizer={_home(cpu_offload)}, "
                f"zero_init={int(zero_init)}"
            )
    print("\n".join(lines))  # noqa: T201 - what the user asked for


def _home(is_offloaded: bool) -> str:
    return "cpu " if is_offloaded else "none"
