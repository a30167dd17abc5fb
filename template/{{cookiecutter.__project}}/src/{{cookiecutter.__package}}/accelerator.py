"""{{ cookiecutter.__NAME }}_Accelerator: what differs from the base, which asks `torch.{{ cookiecutter.torch_device }}` for all else."""

from deepspeed.accelerator import DeepSpeedAccelerator


class {{ cookiecutter.__NAME }}_Accelerator(DeepSpeedAccelerator):
    """Any method of the base may be overridden here; the reference page of the accelerator lists them."""

    _name = "{{ cookiecutter.torch_device }}"
    _communication_backend_name = "{{ cookiecutter.communication_backend }}"
    _compile_backend = "{{ cookiecutter.compile_backend }}"
{%- if cookiecutter.__module != 'torch' %}

    def __init__(self) -> None:
{%- if cookiecutter.__install %}
        from {{ cookiecutter.__module }} import {{ cookiecutter.__install }}

        {{ cookiecutter.__install }}()
{%- else %}
        import {{ cookiecutter.__module }}  # noqa: F401 - registers torch.{{ cookiecutter.torch_device }}
{%- endif %}
{%- endif %}

    def visible_devices_envs(self) -> list[str]:
        return ["{{ cookiecutter.visible_devices }}"]
