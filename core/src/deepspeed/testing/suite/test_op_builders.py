"""Op builders: each builder of the accelerator loads its op, or gives the reason why it cannot on this machine."""

from typing import Any

import pytest

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.ops import registry
from deepspeed.ops.implementations import call_quietly, construct, incompatible, own_builders
from deepspeed.ops.registry import OPS


def test_each_builder_gives_its_op_or_says_why_not(accelerator: DeepSpeedAccelerator) -> None:
    builders = own_builders()
    if not builders:
        pytest.skip("the accelerator brings no op builder")
    failures = {name: failure for name, kind in builders.items() if (failure := _failure(kind))}
    assert not failures


def _failure(kind: Any) -> str | None:
    """Return why a builder fails: it cannot be created, gives no reason, or does not load its op. None: it works."""
    builder, reason = construct(kind)
    if builder is None:
        return reason
    reason = incompatible(builder)
    if reason is not None:
        return "is_compatible() is False without a reason" if "gives no reason" in reason else None
    try:
        loaded = call_quietly(builder.load)
    except Exception as error:  # noqa: BLE001 - a vendor's builder may raise anything
        return f"is_compatible() is True, and load() raised {type(error).__name__}: {error}"
    return "load() returned None" if loaded is None else None


def test_a_builder_is_found_by_its_name(accelerator: DeepSpeedAccelerator) -> None:
    assert accelerator.get_op_builder("NoSuchBuilder") is None
    assert accelerator.create_op_builder("NoSuchBuilder") is None
    for name, kind in own_builders().items():
        found = accelerator.get_op_builder(name)
        if found is not None:  # None: only the plugin's hook knows the builder
            assert found is kind
            assert isinstance(accelerator.create_op_builder(name), found)


def test_a_kernel_is_the_builders_own_op(accelerator: DeepSpeedAccelerator) -> None:
    served = {registry.op_of(kind, name) for name, kind in own_builders().items()}
    for op in sorted(served & set(OPS)):
        loaded, resolution = registry.kernel(op), registry.resolve(op)
        if loaded is not None and resolution.source == "device":
            assert all(hasattr(loaded, name) for name in OPS[op].operators), op
            assert registry.kernel(op) is loaded  # cached
