"""`show_layout`: what a rank keeps of the parameters, and what is gathered together. For users."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch.nn import Parameter

from deepspeed.config.precision import dtype_name
from deepspeed.zero.param_marks import ZeroParamStatus
from deepspeed.zero.param_unit import ParamUnit
from deepspeed.zero.strategy import Sharding


@dataclass(frozen=True)
class UnitRow:
    """One line of the table: parameters that are gathered, or reduced, together."""

    module: str  # the innermost module with all of them
    parameters: int
    elements: int
    shard_elements: int  # that this rank updates; in stage 3 also all that it keeps between uses
    bytes: int  # of the weights that this rank keeps between uses
    dtype: str
    ranks: int  # that share the weights, or the gradients
    status: str  # AVAILABLE: whole on this rank


def show_layout(engine: Any) -> list[UnitRow]:
    """Print, on rank 0, and return how the parameters of an engine are divided, in stages 0 to 3.

    Not a collective: any rank may call it, and gets its own rows.

    Args:
        engine: what `deepspeed.initialize` returned.

    Returns:
        One row per unit, parameters that are gathered or reduced together: sizes in elements, and in bytes of the
        weights that this rank keeps between uses.
    """
    rows = list(_rows(engine.sharding, {param: name for name, param in engine.module.named_parameters()}))
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(_as_table(rows), _summary(rows), sep="\n")  # noqa: T201 - what the user asked for
    return rows


def _rows(sharding: Sharding, names: dict[Parameter, str]) -> Iterator[UnitRow]:
    left = dict(names)
    for unit in dict.fromkeys(unit for param in names if (unit := getattr(param, "ds_unit", None)) is not None):
        yield _row_of_unit(unit)
        for param in unit.params:
            left.pop(param, None)
    for group in sharding.groups:
        if group.unit is None:
            start, stop = group.layout.shard(group.rank)
            yield _row_of_whole(group.params, names, stop - start, group.ranks.world_size)
            for param in group.params:
                left.pop(param, None)
    if left:  # what the optimizer does not have
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
    """The longest path that all names of parameters begin with; "(model)" for the root."""
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
