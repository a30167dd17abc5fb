"""{{ cookiecutter.device_name }} as a DeepSpeed accelerator. Read next: `plugin.py` (the entry point), then `accelerator.py`."""
