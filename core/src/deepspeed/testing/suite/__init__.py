"""The conformance suite: tests that every accelerator has to pass, and that a vendor's own tests import.

    # tests/test_conformance.py of an extension
    from deepspeed.testing.suite import *

The tests run against the current accelerator: `DS_ACCELERATOR` or `set_accelerator` in the extension's conftest sets
it, or else DeepSpeed finds it. `expected_failures.txt` beside the test file lists known failures. `ds_conformance`
runs the same tests without a file, and writes a report.

Tests belong to levels (`LEVELS`); each level promises more. A vendor's own tests import levels 1 and 2.
`ds_conformance --level` runs higher levels, which need the device exclusively.

May import everything below `runtime`; needs pytest. Read next: `fixtures.py` (the fixtures of tests), any `test_*.py`
(one theme each), `../requirements.py` (when a test is skipped).
"""

import importlib
from typing import Any

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the conformance suite needs pytest: pip install pytest") from error

#: level -> what an accelerator at this level has proven
LEVELS = {1: "trains", 2: "numerics", 3: "speed", 4: "survives faults"}
#: the level that runs by default
DEFAULT_LEVEL = 2
#: theme -> level of its tests, in the order of the run; a theme comes after the themes it depends on
THEMES = {
    **{"identity": 1, "memory": 1, "rng": 2, "streams": 1, "graphs": 1, "dtypes": 2, "environment": 1},
    **{"op_builders": 1, "optimizer_kernels": 2, "tensor_kernels": 2, "generation_kernels": 2},
    **{"communication": 1, "training": 1, "hygiene": 1, "speed": 3, "survival": 4},
}
#: tests whose level differs from their theme's level
_ELSEWHERE = {
    "test_random_is_torchs_module": 1,
    "test_supported_dtypes_agree_with_the_flags": 1,
    "test_amp_is_a_module_of_torch_or_none": 1,
    "test_triton_is_there_if_it_is_promised": 1,
    "test_constructors_of_old_scripts": 1,
    "test_the_same_seed_gives_the_same_bits": 2,
}
#: level -> required tests: at least one case of each test must pass
NEEDED = {
    1: ("test_losses_are_those_of_plain_torch",),
    2: (
        "test_a_seed_repeats_and_another_differs",
        "test_operators_are_right_to_a_few_ulp",
        "test_the_same_seed_gives_the_same_bits",
    ),
    3: (
        "test_share_of_the_copy_bandwidth",
        "test_share_of_the_matmul_rate",
        "test_share_of_the_matmul_rate_in_training",
    ),
    4: (
        "test_a_killed_rank_is_named_and_the_checkpoint_of_before_loads",
        "test_training_goes_on_after_a_step_ran_out_of_memory",
        "test_a_kernel_that_does_not_compile_is_replaced_by_its_reference",
    ),
}
_FIXTURES = ("accelerator", "device", "ds_expected_failure", "ds_undisturbed")


def level_of(test: str, theme: str) -> int | None:
    """Return the level of a test, named with or without its case; None for a test outside the suite."""
    level = THEMES.get(theme)
    return None if level is None else _ELSEWHERE.get(test.partition("[")[0], level)


def chosen(level: int) -> dict[str, Any]:
    """Return name -> fixture or test, for all levels up to this one, in the order of the run."""
    found = {name: getattr(importlib.import_module(f"{__name__}.fixtures"), name) for name in _FIXTURES}
    for theme in THEMES:
        module = importlib.import_module(f"{__name__}.test_{theme}")
        for name in [each for each in vars(module) if each.startswith("test_")]:
            test = getattr(module, name)
            assert found.setdefault(name, test) is test, f"{name} is there twice; rename one"
            if level_of(name, theme) > level:  # type: ignore[operator]
                del found[name]
    return found


def all_tests() -> list[str]:
    """Return the names of the tests of all levels."""
    return [name for name in chosen(max(LEVELS)) if name not in _FIXTURES]


pytest.register_assert_rewrite(*(f"{__name__}.test_{theme}" for theme in THEMES))
globals().update(chosen(DEFAULT_LEVEL))
__all__ = list(chosen(DEFAULT_LEVEL))
