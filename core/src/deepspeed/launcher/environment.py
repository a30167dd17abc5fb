"""The file of environment variables that every rank is given.

Lines `NAME=VALUE`, in `.deepspeed_env` in the home directory and in the working directory (which wins), or in the one
file that `DS_ENV_FILE` names. `runner.main` applies it before the ranks start; it overrides the environment.
`exported` says which variables travel to other hosts.
"""

import os
import re
from collections.abc import Mapping

from deepspeed.errors import ConfigError

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]

# `[A-Z]+CL_`: collective libraries, whichever the device's vendor brings
_EXPORTED = re.compile(r"[A-Z]+CL_|PYTHON|MV2|UCX|MLFLOW|DS_|DEEPSPEED_")


def exported(environment: Mapping[str, str], from_files: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environment` that ranks on other hosts are given, and those of the files, which win."""
    travelling = {name: value for name, value in environment.items() if _EXPORTED.match(name)}
    return dict(sorted({**travelling, **from_files}.items()))


def read_environment_files() -> dict[str, str]:
    """The variables of all files that exist. A `DS_ENV_FILE` with a folder in it is one file, looked up as it stands.

    Raises:
        ConfigError: a line without `=`, or `DS_ENV_FILE` names a file that does not exist.
    """
    asked = os.environ.get("DS_ENV_FILE")
    name = asked or ".deepspeed_env"
    folders = [""] if os.path.dirname(name) else DEEPSPEED_ENVIRONMENT_PATHS
    files = [path for path in (os.path.join(folder, name) for folder in folders) if os.path.isfile(path)]
    if asked and not files:
        raise ConfigError(f"DS_ENV_FILE={asked}: no such file; unset it, or write lines NAME=VALUE into it")
    variables: dict[str, str] = {}
    for path in files:
        variables.update(_read(path))
    return variables


def _read(path: str) -> dict[str, str]:
    variables = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            name, equals, value = text.partition("=")
            if not equals or not name.strip():
                raise ConfigError(f"{path}, line {number}: found {text!r}; write NAME=VALUE")
            variables[name.strip()] = value.strip()
    return variables
