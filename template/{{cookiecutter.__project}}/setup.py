"""Builds kernels into the wheel when DS_BUILD_OPS=1 or DS_BUILD_<OP>=1 asks for it; all else is in pyproject.toml.

torch and ds-core must be importable then: `DS_BUILD_OPS=1 pip install --no-build-isolation .`. Otherwise neither is
imported, and the kernels are compiled when they are first used.
"""

import os

from setuptools import setup

wanted = any(name.startswith("DS_BUILD_") and value == "1" for name, value in os.environ.items())
if wanted:
    from deepspeed.ops.op_builder.aot import setup_arguments

setup(**(setup_arguments("{{ cookiecutter.__package }}.op_builder") if wanted else {}))
