"""The tests run on this device, whichever other accelerators are installed beside it."""

import os

os.environ.setdefault("DS_ACCELERATOR", "{{ cookiecutter.device_name }}")
