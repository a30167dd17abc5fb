"""{{ cookiecutter.device_name }} as a DeepSpeed accelerator. Read next: `plugin.py` (the only door), then `accelerator.py`."""
