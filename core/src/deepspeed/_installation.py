"""Find out how this copy of ds-core was installed: from where, how to install more from there, and whether files of
DeepSpeed itself overwrite its files.

Messages that name a package to install, `initialize` and `ds_report` use it. May import nothing of the project.
"""

import json
import shlex
from typing import Any
from urllib.parse import unquote, urlparse

import importlib_metadata

_FOLDERS = {"ds-core": "core", "deepspeed": "compat/deepspeed"}


def origin() -> dict[str, Any]:
    """Return pip's record of where it installed ds-core from (PEP 610); {} if that was an index."""
    try:
        record = importlib_metadata.distribution("ds-core").read_text("direct_url.json")
    except importlib_metadata.PackageNotFoundError:
        return {}
    return dict(json.loads(record)) if record else {}


def pip_install(requirement: str) -> str:
    """Return the command that installs a distribution of this project from the source of ds-core.

    The source is an index, git, or a checkout.

    Args:
        requirement: such as `ds-ext-cpu` or `ds-core[mpi]`.

    >>> pip_install("ds-ext-cpu").startswith("pip install ")
    True
    """
    name, bracket, extras = requirement.partition("[")
    folder = _FOLDERS.get(name, f"extensions/{name}")
    source = origin()
    url, git = str(source.get("url", "")), source.get("vcs_info", {})
    if git:
        revision = git.get("requested_revision") or git.get("commit_id")
        return f'pip install "{requirement} @ {git["vcs"]}+{url}@{revision}#subdirectory={folder}"'
    root = unquote(urlparse(url).path).removesuffix("/").removesuffix("/core")
    if url.startswith("file:") and root != unquote(urlparse(url).path):
        return f"pip install {shlex.quote(f'{root}/{folder}{bracket}{extras}')}"
    return f"pip install {shlex.quote(requirement)}"


def foreign_deepspeed() -> str | None:
    """Return the version of an installed distribution `deepspeed` that is not ours, or None.

    It owns the same files as ds-core. So the distribution that was installed last runs, mixed with files of the other.
    Our version contains `+core`.
    """
    for distribution in importlib_metadata.distributions(name="deepspeed"):
        if "+core" not in distribution.version:
            return str(distribution.version)
    return None


def foreign_files_warning(version: str) -> str:
    """Return the warning for the version of DeepSpeed that `foreign_deepspeed` found."""
    return (
        f"DeepSpeed itself ({version}) is installed over the files of ds-core, and what runs is a mixture of both: "
        f"pip uninstall deepspeed, then {pip_install('ds-core')} --force-reinstall --no-deps, and "
        f"{pip_install('deepspeed')} --no-deps, by which libraries find it"
    )
