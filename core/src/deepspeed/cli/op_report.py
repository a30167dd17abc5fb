"""The ops of `ds_report`: who serves each, whether it is built, why no better place does. Compiles on `--build` only.

prebuilt    came in the wheel
cached      compiled before, on this machine or one that shares its folder
not built   compiled when it is first used (seconds)
by itself   its builder compiles by means of its own, when it is first used
reference   torch's operators
"""

from typing import Any

from deepspeed.cli.build import warm
from deepspeed.errors import OpUnavailable
from deepspeed.ops import registry
from deepspeed.ops.implementations import implemented
from deepspeed.ops.op_builder import OpBuilder, jit, loading


def collect_ops() -> list[dict[str, Any]]:
    """One row per op for the current accelerator, those that have a builder first.

    Keys: `op`, `front` (what users import, or None), `offered` (a place has a builder, or could not be read),
    `builder` (import path of the class that serves, or None), `source` ("device", "host", "plugin", "reference"),
    `state` (see above; "failed" when its builder broke, or no place serves it and one could not be read), `library`
    (path, or None), `rejected` ([place, reason] of each better place), `remark` (of the builder: why nothing is built,
    or what it chose for this machine).
    """
    return sorted((_row(op) for op in registry.op_names()), key=lambda row: (not row["offered"], row["op"]))


def build_ops() -> list[dict[str, Any]]:
    """Compile every op that has a kernel here and is not built yet, as its first use would. Called by `--build`.

    Returns:
        The rows of `collect_ops` afterwards; one that could not be built says so in `remark`, its `state` is "failed".
    """
    outcomes = [warm(op) for op in registry.op_names()]
    failures = {outcome.op: outcome.detail for outcome in outcomes if outcome.state == "failed"}
    rows = collect_ops()
    for row in rows:
        if row["op"] in failures:
            row["state"], row["remark"] = "failed", failures[row["op"]]
    return rows


def _row(op: str) -> dict[str, Any]:
    resolution = registry.resolve(op)
    builder = resolution.builder
    kind = type(builder)
    front = registry.OPS[op].front if op in registry.OPS else ""
    state, library, remark = ("reference", None, "") if builder is None else _state(builder)
    if builder is None and resolution.failed:  # what the place that failed would have served is unknown
        state = "failed"
    return {
        "op": op,
        "front": f"deepspeed.ops.{front}" if front else None,
        "offered": state != "reference" or bool(implemented(registry.builder_name(op))),
        "builder": None if builder is None else f"{kind.__module__}.{kind.__qualname__}",
        "source": resolution.source,
        "state": state,
        "library": library,
        "rejected": [list(rejection) for rejection in resolution.rejected],
        "remark": remark,
    }


def _state(builder: Any) -> tuple[str, str | None, str]:
    """(state, library, remark) of a builder that serves its op. Compiles nothing."""
    if not isinstance(builder, OpBuilder) or type(builder).load is not OpBuilder.load:
        return "by itself", None, ""
    try:
        spec = builder.describe()
        chosen = builder.remark()
        library, remark = loading.find(builder.absolute_name(), spec)
        if library is not None:
            return "prebuilt", str(library), chosen
        if type(builder).jit_load is not OpBuilder.jit_load:
            return "by itself", None, remark
        library = jit.find(spec)
    except OpUnavailable as error:
        return "failed", None, str(error)
    except Exception as error:  # noqa: BLE001 - a vendor's sources() and flags, whatever they raise
        return "failed", None, f"{type(error).__name__}: {error}"
    remark = "; ".join(filter(None, (remark, chosen)))
    return ("not built", None, remark) if library is None else ("cached", str(library), remark)
