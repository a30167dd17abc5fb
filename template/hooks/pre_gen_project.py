"""Refuses choices that would render a broken extension; run by cookiecutter before it writes anything."""

import re
import sys

DEVICE_NAME = {{ cookiecutter.device_name|tojson }}
TORCH_DEVICE = {{ cookiecutter.torch_device|tojson }}
DEVICE_MODULE = {{ cookiecutter.device_module|tojson }}
DEVICE_FILES = {{ cookiecutter.device_files|tojson }}
VISIBLE_DEVICES = {{ cookiecutter.visible_devices|tojson }}
COMMUNICATION_BACKEND = {{ cookiecutter.communication_backend|tojson }}
COMPILE_BACKEND = {{ cookiecutter.compile_backend|tojson }}
KERNEL_LANGUAGE = {{ cookiecutter.kernel_language|tojson }}
COMPILER = {{ cookiecutter.compiler|tojson }}
AUTHOR = {{ cookiecutter.author|tojson }}
LICENCE = {{ cookiecutter.licence|tojson }}

# Names of extensions that there are, and of the device without one; torch_device may still be one of them.
_TAKEN = ("cpu", "cuda", "xpu", "npu", "mps", "plain")
_NAME = "[a-z][a-z0-9_]{0,15}"
_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?"


def problems():
    """What is wrong with each choice: (its name, the value found, what it must be)."""
    patterns = (
        ("device_name", DEVICE_NAME, _NAME, "a lower-case name of 1 to 16 letters, digits and '_', a letter first"),
        ("torch_device", TORCH_DEVICE, _NAME, "a device type of torch: lower case, no index"),
        ("device_module", DEVICE_MODULE, _MODULE, "'torch', 'package.module' or 'package.module:function'"),
        ("device_files", DEVICE_FILES, r'(/[^"\\\n]+)?', "an absolute path or pattern, or empty"),
        ("visible_devices", VISIBLE_DEVICES, "[A-Z_][A-Z0-9_]*", "the name of an environment variable"),
        ("communication_backend", COMMUNICATION_BACKEND, r"[a-z][\w]*", "a torch.distributed backend, lower case"),
        ("compile_backend", COMPILE_BACKEND, r"[A-Za-z_][\w-]*", "a torch.compile backend"),
        ("kernel_language", KERNEL_LANGUAGE, "none|cpp|cuda|sycl|own", "one of none, cpp, cuda, sycl, own"),
        ("compiler", COMPILER, r"[\w./+-]+", "one command, without arguments"),
        ("author", AUTHOR, r'[^"\\\n]*\S[^"\\\n]*', "not empty, and free of quotes and backslashes"),
        ("licence", LICENCE, "Apache-2.0|MIT|BSD-3-Clause", "one of Apache-2.0, MIT, BSD-3-Clause"),
    )
    for name, found, pattern, wanted in patterns:
        if not re.fullmatch(pattern, found):
            yield name, found, wanted
    if DEVICE_NAME in _TAKEN:
        wanted = f"another one: ds-ext-{DEVICE_NAME} exists, or the core means something by it"
        yield "device_name", DEVICE_NAME, f"{wanted} (torch_device may be {DEVICE_NAME!r} all the same)"
    if DEVICE_MODULE == "torch" and not DEVICE_FILES:
        wanted = "a pattern when device_module is 'torch': nothing else would tell whether a device is here"
        yield "device_files", DEVICE_FILES, wanted


found = list(problems())
for name, value, wanted in found:
    print(f"{name}: found {value!r}, but it must be {wanted}", file=sys.stderr)
sys.exit(1 if found else 0)
