"""Builders of this device's kernels: one file per op here, beside one folder of sources in `csrc/`.

The core finds this package beside the accelerator's module. Read next: `device_builder.py` (what builders share), then
`lion.py`; to add an op, add its class below.
"""

from {{ cookiecutter.__package }}.op_builder.device_builder import (
    DeviceOpBuilder,
    {{ cookiecutter.device_name }}_kernel_include,
    {{ cookiecutter.device_name }}_kernel_path,
)
from {{ cookiecutter.__package }}.op_builder.lion import FusedLionBuilder

__all__ = [
    "DeviceOpBuilder",
    "FusedLionBuilder",
    "{{ cookiecutter.device_name }}_kernel_include",
    "{{ cookiecutter.device_name }}_kernel_path",
]
