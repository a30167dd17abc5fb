"""The entry point of this extension: hooks only. torch is imported once the device was chosen, not to look for it."""
{%- set sought = cookiecutter.__module.split('.')[0] %}
{%- set poses = '' if cookiecutter.torch_device == cookiecutter.device_name else ', impersonates="' ~ cookiecutter.torch_device ~ '"' %}

{% if cookiecutter.__module != 'torch' -%}
import importlib.util
{% endif -%}
{% if cookiecutter.device_files -%}
from glob import glob
{% endif -%}
from typing import TYPE_CHECKING

from deepspeed.plugins import Offer, hookimpl

if TYPE_CHECKING:
    from {{ cookiecutter.__package }}.accelerator import {{ cookiecutter.__NAME }}_Accelerator

DS_PLUGIN_API = ">=1,<2"


@hookimpl
def ds_probe() -> Offer:
    """Whether a device is here, told by what a driver leaves behind; quick, and without a context on the device."""
{%- if cookiecutter.__module != 'torch' %}
    if importlib.util.find_spec("{{ sought }}") is None:
        return Offer("{{ cookiecutter.device_name }}", available=False, reason="{{ sought }} is not installed")
{%- endif %}
{%- if cookiecutter.device_files %}
    found = len(glob("{{ cookiecutter.device_files }}"))
    reason = f"{found} of {{ cookiecutter.device_files }}"
    return Offer("{{ cookiecutter.device_name }}", priority=100, available=found > 0, reason=reason{{ poses }})
{%- else %}
    return Offer("{{ cookiecutter.device_name }}", priority=100, reason="{{ sought }} is installed"{{ poses }})
{%- endif %}


@hookimpl
def ds_accelerator() -> "{{ cookiecutter.__NAME }}_Accelerator":
    """The accelerator. Called once, when this extension was chosen."""
    from {{ cookiecutter.__package }}.accelerator import {{ cookiecutter.__NAME }}_Accelerator

    return {{ cookiecutter.__NAME }}_Accelerator()
