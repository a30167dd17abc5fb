"""Builder of the example op: the step of the optimizer Lion, one call for all parameters."""

from {{ cookiecutter.__package }}.op_builder.device_builder import DeviceOpBuilder
from {{ cookiecutter.__package }}.op_builder.device_builder import {{ cookiecutter.device_name }}_kernel_path as kernel_path


class FusedLionBuilder(DeviceOpBuilder):
    """`torch.ops.ds_{{ cookiecutter.device_name }}.lion_step_`, which `deepspeed.ops.lion.FusedLion` calls on this device."""

    BUILD_VAR = "DS_BUILD_FUSED_LION"
    NAME = "fused_lion"

    def sources(self) -> list[str]:
{%- if cookiecutter.kernel_language == 'cpp' %}
        names = ("fused_lion.cpp", "lion_staged.cpp", "lion_kernel.cpp")
{%- elif cookiecutter.kernel_language == 'own' %}
        names = ("fused_lion.cpp", "lion_staged.cpp", "lion_kernel.{{ cookiecutter.device_name }}")
{%- elif cookiecutter.kernel_language == 'cuda' %}
        names = ("fused_lion.cpp", "lion.cu")
{%- else %}
        names = ("fused_lion.cpp", "lion_sycl.cpp")
{%- endif %}
        return [kernel_path(f"lion/{name}") for name in names]

    def register_fakes(self) -> None:
        from deepspeed.ops.fakes import register_fakes

        register_fakes("ds_{{ cookiecutter.device_name }}", "lion_step_")
