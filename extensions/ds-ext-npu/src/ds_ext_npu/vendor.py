"""Find the vendor's package `torch_npu` and its devices, and load the package.

`obstacle` imports nothing, so that a half-installed package gives a reason instead of a crash. `load` imports.

A trap: `torch_npu` registers itself with torch, and `import torch` loads it unless TORCH_DEVICE_BACKEND_AUTOLOAD=0. So
if a library of CANN is missing, `import torch` fails in every program of that environment.
"""

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from deepspeed.errors import PluginError

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"

# CANN's libraries that torch_npu is linked against.
LIBRARIES = ("libhccl.so", "libascendcl.so")
_DEVICES = Path("/dev")
_LOADER_CACHE = Path("/etc/ld.so.cache")
_LOADER_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


def obstacle(
    environment: Mapping[str, str] = os.environ, devices: Path = _DEVICES, loader_cache: Path = _LOADER_CACHE
) -> str | None:
    """Return the reason why no NPU can be used, in one line; None if there is no obstacle. Called by `ds_probe`.

    Imports nothing, loads no library and opens no device.

    Args:
        environment, devices, loader_cache: the places to search; tests replace them.
    """
    spec = importlib.util.find_spec("torch_npu")
    if spec is None:
        return "torch_npu is not installed; pip install torch-npu in the version of your torch"
    if spec.origin is None:
        return f"torch_npu is a folder without a package, {list(spec.submodule_search_locations or ())}; reinstall it"
    if num_devices(environment, devices) == 0:
        seen = environment.get(VISIBLE, "")
        return f"no device: {VISIBLE}={seen} leaves none" if _files(devices) else f"no device: no {devices}/davinci*"
    own = [str(Path(place) / "lib") for place in spec.submodule_search_locations or ()]
    missing = _missing_libraries([*own, *_loader_folders(environment)], loader_cache)
    if missing:
        return (
            f"torch_npu is installed, and {', '.join(missing)} of CANN is in no folder of LD_LIBRARY_PATH: source "
            "CANN's set_env.sh. Until then TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps `import torch` from loading torch_npu"
        )
    return None


def num_devices(environment: Mapping[str, str] = os.environ, devices: Path = _DEVICES) -> int:
    """Return the number of devices `/dev/davinci<number>` that ASCEND_RT_VISIBLE_DEVICES lets this process use.

    The vendor reads comma-separated numbers up to the first entry that is no number, for example a space. An empty
    variable counts as unset here.
    """
    found = len(_files(devices))
    listed = environment.get(VISIBLE, "")
    if not listed:
        return found
    usable = re.match(r"(?:\d+(?:,|$))*(?:\d+)?", listed)
    return min(found, len(re.findall(r"\d+", usable.group()))) if usable else 0


def load() -> ModuleType:
    """Import and return `torch_npu`. The import registers the device and `torch.npu` with torch.

    Raises:
        PluginError: the import raised any exception; the message quotes its first line.
    """
    try:
        import torch_npu
    except Exception as error:  # a vendor's package: a missing library is ImportError, OSError or RuntimeError
        first = (str(error).strip().splitlines() or [""])[0]
        raise PluginError(
            f"torch_npu cannot be imported: {type(error).__name__}: {first}; is it made for this torch, and was CANN's "
            "set_env.sh sourced?"
        ) from error
    module: ModuleType = torch_npu
    return module


def _files(devices: Path) -> list[Path]:
    return sorted(devices.glob("davinci[0-9]*"))  # not davinci_manager


def _loader_folders(environment: Mapping[str, str]) -> list[str]:
    listed = environment.get("LD_LIBRARY_PATH", "").split(":")
    return [*filter(None, listed), *_LOADER_FOLDERS]


def _missing_libraries(folders: list[str], loader_cache: Path) -> list[str]:
    """Return the libraries that the dynamic loader would not find. Loads none, because that would run their code."""
    try:
        cached = loader_cache.read_bytes()
    except OSError:
        cached = b""
    return [
        name
        for name in LIBRARIES
        if not any((Path(folder) / name).exists() for folder in folders) and b"\0" + name.encode() + b"\0" not in cached
    ]
