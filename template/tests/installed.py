"""The rendered extension in an environment of its own: what `test_extension.py` is given.

    render -> wheel -> fresh environment -> its site-packages are frozen

The environment is a venv with nothing in it but the extension. A `.pth` file lends it what runs these tests (torch,
ds-core, pytest), which are large and the same; `site.addsitedir` rather than a bare path, so that editable installs
count as well.
"""

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "template"
SIMULATED = ROOT / "core/tests/simulated"

# A vendor's device, and the package that makes it known to torch: the simulated device under the vendor's name.
CHOICES = {"device_name": "acme", "device_files": "", "compile_backend": "eager"}
TORCH_ACME = """
from ds_ext_sim import torch_sim
torch_sim.install("acme", library="acmeccl", visible_devices_env="ACME_VISIBLE_DEVICES")
"""


class Installed:
    """One rendered extension, installed."""

    def __init__(self, folder: Path, language: str) -> None:
        self.folder, self.language = folder, language
        self.project = self._render()
        self._bring_vendors_tools()
        self.wheel = self.build(folder)
        self.site = self._install()
        self.frozen = digest(self.site)

    def run(self, *words: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command of the environment, outside of the sources; `words` begin with a program of it."""
        program = self.folder / "env/bin" / words[0]
        command = [str(program) if program.exists() else words[0], *words[1:]]
        done = subprocess.run(
            command,
            cwd=self.folder / "elsewhere",
            env={**self._environment(), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}:\n{done.stdout}\n{done.stderr}"
        return done

    def python(self, program: str, **environment: str) -> str:
        """What a program prints."""
        return self.run("python", "-c", program, **environment).stdout.strip()

    def _environment(self) -> dict[str, str]:
        """With the vendor's package and compiler, and without what a launcher or a user left."""
        removed = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_OPS_DISABLE", "DS_BUILD_OPS"}
        inherited = {name: value for name, value in os.environ.items() if name not in removed}
        path = os.pathsep.join([str(self.folder / "tools"), str(self.folder / "env/bin"), os.environ["PATH"]])
        vendors = [str(self.folder / "vendor"), str(SIMULATED)]
        searched = os.pathsep.join([*vendors, *filter(None, [os.environ.get("PYTHONPATH")])])
        given = {"PATH": path, "PYTHONPATH": searched, "DS_ACCELERATOR": "acme"}
        return {**inherited, **given, "PYTHONDONTWRITEBYTECODE": "1"}

    def _render(self) -> Path:
        config = self.folder / "cookiecutter.yaml"
        config.write_text(f"replay_dir: {self.folder / 'replay'}\ncookiecutters_dir: {self.folder / 'cloned'}\n")
        choices = [f"{name}={value}" for name, value in {**CHOICES, "kernel_language": self.language}.items()]
        words = ["--no-input", "--config-file", str(config), "-o", str(self.folder), str(TEMPLATE), *choices]
        succeed(sys.executable, "-m", "cookiecutter", *words)
        return self.folder / "ds-ext-acme"

    def build(self, folder: Path, **environment: str) -> Path:
        """The wheel in `folder`. Its sources are gone afterwards, so that nothing but the wheel can serve."""
        sources = shutil.copytree(self.project, folder / "sources")
        words = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder))
        succeed(sys.executable, "-m", "pip", *words, str(sources), **{**self._environment(), **environment})
        shutil.rmtree(sources)
        (wheel,) = folder.glob("*.whl")
        return wheel

    def _bring_vendors_tools(self) -> None:
        for name in ("elsewhere", "tools", "vendor"):
            (self.folder / name).mkdir()
        (self.folder / "vendor/torch_acme.py").write_text(TORCH_ACME)
        if self.language == "own":
            compiler = self.folder / "tools/acme-cc"
            compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "acme-cc 1.0" && exit\nexec c++ -x c++ "$@"\n')
            compiler.chmod(0o755)

    def _install(self) -> Path:
        environment = self.folder / "env"
        venv.create(environment, symlinks=True)
        (site,) = environment.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        pip = (sys.executable, "-m", "pip", "--python", str(environment / "bin/python"))
        succeed(*pip, "install", "--quiet", "--no-deps", "--no-index", str(self.wheel))
        for path in [site, *site.rglob("*")]:  # root may write all the same; the digest would tell
            path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
        return site

    def thaw(self) -> None:
        """Let the folder be removed."""
        for path in [self.site, *self.site.rglob("*")]:
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


def digest(folder: Path) -> dict[str, str]:
    """Path -> content of every file below `folder`, without what Python and tools keep for themselves."""
    kept = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _of_tools(path)]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


def _of_tools(path: Path) -> bool:
    return any(part in ("__pycache__", ".pytest_cache") or part.endswith(".egg-info") for part in path.parts)


def succeed(*command: str, **environment: str) -> None:
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}"
