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

# The simulated device, as a vendor would describe it.
SIM = {
    "device_name": "acme",
    "torch_device": "sim",
    "device_module": "ds_ext_sim.torch_sim:install",
    "device_files": "",
    "visible_devices": "SIM_VISIBLE_DEVICES",
    "communication_backend": "simccl",
    "compile_backend": "eager",
}


class Installed:
    """One rendered extension, installed."""

    def __init__(self, folder: Path, language: str) -> None:
        self.folder, self.language = folder, language
        self.project = self._render()
        self.wheel = self._build()
        self.site = self._install()
        self.frozen = digest(self.site)

    def run(self, *words: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command of the environment, outside of the sources; `words` begin with a program of it."""
        removed = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_OPS_DISABLE", "DS_BUILD_OPS"}
        inherited = {name: value for name, value in os.environ.items() if name not in removed}
        path = os.pathsep.join([str(self.folder / "tools"), str(self.folder / "env/bin"), os.environ["PATH"]])
        simulated = os.pathsep.join([str(SIMULATED), *filter(None, [os.environ.get("PYTHONPATH")])])
        given = {"PATH": path, "PYTHONPATH": simulated, "PYTHONDONTWRITEBYTECODE": "1", "DS_ACCELERATOR": "acme"}
        program = self.folder / "env/bin" / words[0]
        command = [str(program) if program.exists() else words[0], *words[1:]]
        done = subprocess.run(
            command,
            cwd=self.folder / "elsewhere",
            env={**inherited, **given, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}:\n{done.stdout}\n{done.stderr}"
        return done

    def python(self, program: str, **environment: str) -> str:
        """What a program prints."""
        return self.run("python", "-c", program, **environment).stdout.strip()

    def _render(self) -> Path:
        config = self.folder / "cookiecutter.yaml"
        config.write_text(f"replay_dir: {self.folder / 'replay'}\ncookiecutters_dir: {self.folder / 'cloned'}\n")
        choices = [f"{name}={value}" for name, value in {**SIM, "kernel_language": self.language}.items()]
        words = ["--no-input", "--config-file", str(config), "-o", str(self.folder), str(TEMPLATE), *choices]
        succeed(sys.executable, "-m", "cookiecutter", *words)
        return self.folder / "ds-ext-acme"

    def _build(self) -> Path:
        sources = shutil.copytree(self.project, self.folder / "sources")
        words = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(self.folder))
        succeed(sys.executable, "-m", "pip", *words, str(sources))
        shutil.rmtree(sources)  # nothing but the wheel may serve from here on
        (wheel,) = self.folder.glob("*.whl")
        return wheel

    def _install(self) -> Path:
        (self.folder / "elsewhere").mkdir()
        (self.folder / "tools").mkdir()
        if self.language == "own":
            compiler = self.folder / "tools/acme-cc"
            compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "acme-cc 1.0" && exit\nexec c++ -x c++ "$@"\n')
            compiler.chmod(0o755)
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


def succeed(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}"
