"""`ALL_OPS` and `__compatible_ops__`: every op that has a builder for the accelerator in force, computed when read.

Also the old address `deepspeed.ops.op_builder.all_ops`. For reports and tests; a front asks `ops.registry` for one op.
"""

from typing import Any

from deepspeed.errors import OpUnavailable

__all__ = ["ALL_OPS"]  # noqa: F822 - see __getattr__


def all_ops() -> dict[str, Any]:
    """Op name -> an instance of the builder that serves it, or would if it were compatible. Compiles nothing."""
    from deepspeed.ops import builders

    found = {}
    for class_name in builders.builder_names():
        try:
            builder = builders.create_builder(class_name)
        except OpUnavailable:  # no builder: the op is not among "all ops" of this accelerator
            continue
        found[builders.op_of(builder, class_name)] = builder
    return found


def compatible_ops() -> dict[str, bool]:
    """Op name -> whether it has a kernel for the accelerator in force on this machine.

    Every documented op is there, so that `__compatible_ops__["async_io"]` answers False where nobody has a builder.
    """
    from deepspeed.ops import builders
    from deepspeed.ops.documented import OPS

    answers = dict.fromkeys(OPS, False)
    answers.update({op: builders.incompatible(builder) is None for op, builder in all_ops().items()})
    return answers


def __getattr__(name: str) -> Any:
    if name == "ALL_OPS":
        return all_ops()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
