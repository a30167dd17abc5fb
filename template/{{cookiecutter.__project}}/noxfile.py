"""Every task of this repository; CI only calls it. `nox -s tests -- -k lion` passes words on to pytest."""

{% if cookiecutter.__has_kernels -%}
from pathlib import Path

{% endif -%}
import nox

nox.options.sessions = ["lint", "types", "tests"]


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
    session.install("mypy", ".[test]")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Everything in tests/, the conformance suite among it, on this machine's device."""
    session.install(".[test,host-ops]")
    session.run("pytest", *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """A report for users: what the accelerator can do, and how it passed."""
    session.install(".[test,host-ops]")
    session.run("ds_conformance", *session.posargs, env={"DS_ACCELERATOR": "{{ cookiecutter.device_name }}"})


@nox.session
def wheel(session: nox.Session) -> None:
    """The wheel, in dist/."""
    session.run("python", "-m", "pip", "wheel", "--no-deps", "-w", "dist", ".")
