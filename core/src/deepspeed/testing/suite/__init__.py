"""The conformance suite: what every accelerator has to do, as tests that a vendor's own tests import.

    # tests/test_conformance.py of an extension
    from deepspeed.testing.suite import *

The tests run against the current accelerator: `DS_ACCELERATOR`, or `set_accelerator` in the extension's conftest, or
the one that is found. `expected_failures.txt` beside that file lists what is known to fail. `ds_conformance` runs the
same without a file, and writes a report.

May import everything below `runtime`; needs pytest. Read next: `fixtures.py` (what tests are given), any `test_*.py`
(one theme each), `../requirements.py` (when a test is skipped).
"""

import importlib

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the conformance suite needs pytest: pip install pytest") from error

#: themes in the order in which they are run: what others stand on comes first
THEMES = (
    *("identity", "memory", "rng", "streams", "graphs", "dtypes", "environment"),
    *("op_builders", "optimizer_kernels", "tensor_kernels", "generation_kernels"),
    *("communication", "training", "hygiene", "completeness"),
)
_FIXTURES = ("accelerator", "device", "ds_expected_failure", "ds_undisturbed")

__all__: list[str] = []


def _export(module_name: str, names: tuple[str, ...] | None = None) -> None:
    module = importlib.import_module(f"{__name__}.{module_name}")
    for name in names or [each for each in vars(module) if each.startswith("test_")]:
        found = getattr(module, name)
        assert name not in globals() or globals()[name] is found, f"{name} is there twice; rename one"
        globals()[name] = found
        if name not in __all__:
            __all__.append(name)


pytest.register_assert_rewrite(*(f"{__name__}.test_{theme}" for theme in THEMES))
_export("fixtures", _FIXTURES)
for _theme in THEMES:
    _export(f"test_{_theme}")
