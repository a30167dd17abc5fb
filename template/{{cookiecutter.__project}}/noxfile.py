"""Every task of this repository; CI only calls it. `nox -s tests -- -k lion` passes words on to pytest."""

import os
{%- if cookiecutter.__has_kernels %}
from pathlib import Path
{%- endif %}

import nox

nox.options.sessions = ["lint", "types", "tests"]

# The repository of ds-core as pip takes it, "git+https://host/owner/ds-core@main"; empty where an index has ds-core.
DS_CORE_URL = os.environ.get("DS_CORE_URL", "")


def _ds_core() -> list[str]:
    """ds-core and the kernels for host memory as requirements, from `DS_CORE_URL` if it is set."""
    folders = {"ds-core": "core", "ds-ext-cpu": "extensions/ds-ext-cpu"}
    return [f"{name} @ {DS_CORE_URL}#subdirectory={folder}" for name, folder in folders.items() if DS_CORE_URL]


@nox.session
def lint(session: nox.Session) -> None:
    """Style and layout of Python{{ ' and of kernels' if cookiecutter.__has_kernels else '' }}."""
    session.install("ruff"{{ ', "clang-format"' if cookiecutter.__has_kernels else '' }})
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
{%- if cookiecutter.__has_kernels %}
    kernels = [str(path) for path in Path("src").rglob("csrc/**/*") if path.suffix in (".cpp", ".h", ".cu")]
    session.run("clang-format", "--dry-run", "--Werror", *kernels)
{%- endif %}


@nox.session
def types(session: nox.Session) -> None:
    """Types, by mypy as pyproject.toml sets it up."""
    session.install("mypy", *_ds_core(), ".[test]")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Everything in tests/, the conformance suite among it, on this machine's device."""
    session.install(*_ds_core(), ".[test,host-ops]")
    session.run("pytest", *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """A report for users: what the accelerator can do, and how it passed."""
    session.install(*_ds_core(), ".[test,host-ops]")
    session.run("ds_conformance", *session.posargs, env={"DS_ACCELERATOR": "{{ cookiecutter.device_name }}"})


@nox.session
def wheel(session: nox.Session) -> None:
    """The wheel, in dist/."""
    session.run("python", "-m", "pip", "wheel", "--no-deps", "-w", "dist", ".")
