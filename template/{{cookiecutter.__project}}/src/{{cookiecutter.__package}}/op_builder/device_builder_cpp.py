"""What all builders of this device share: where the sources are, which torch they need, how they are compiled."""

from deepspeed.ops.op_builder import OpBuilder
from deepspeed.ops.op_builder.spec import make_kernel_path

{{ cookiecutter.device_name }}_kernel_path, {{ cookiecutter.device_name }}_kernel_include = make_kernel_path("{{ cookiecutter.__package }}")


class DeviceOpBuilder(OpBuilder):
    """One library of torch operators in the namespace `ds_{{ cookiecutter.device_name }}`, through torch's stable ABI.

    The machine's C++ compiler builds it. Your runtime library comes in by `include_paths`, `extra_ldflags` and
    `libraries_args`.
    """

    op_namespace = "ds_{{ cookiecutter.device_name }}"
    min_torch = "2.10"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or self.NAME)

    def absolute_name(self) -> str:
        return f"{{ cookiecutter.__package }}.op_builder.{self.NAME}_op"

    def include_paths(self) -> list[str]:
        return [{{ cookiecutter.device_name }}_kernel_include("csrc")]

    def cxx_args(self) -> list[str]:
        # no contraction: the same formula gives the same bits here and in torch
        return ["-O3", "-std=c++20", "-fvisibility=hidden", "-ffp-contract=off"]
