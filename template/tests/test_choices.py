"""What cookiecutter makes of the choices: refused with a reason, or code that is clean and short whatever the name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parents[1]
LICENCES = {"Apache-2.0": "Apache License", "MIT": "MIT License", "BSD-3-Clause": "BSD 3-Clause License"}
# device_module of a device that torch knows, of a package that is imported, of one with a function to call
MODULES = ("torch", "torch_xyz", "xyz.torch_device:install")


def cookiecutter(folder, **choices):
    """Run as a user does, but for the questions. Keeps its records in `folder`."""
    config = folder / "cookiecutter.yaml"
    config.write_text(f"replay_dir: {folder / 'replay'}\ncookiecutters_dir: {folder / 'cloned'}\n")
    words = ["--no-input", "--config-file", str(config), "-o", str(folder), str(TEMPLATE)]
    choices = [f"{name}={value}" for name, value in choices.items()]
    command = [sys.executable, "-m", "cookiecutter", *words, *choices]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rendered(folder, **choices):
    done = cookiecutter(folder, **choices)
    assert done.returncode == 0, done.stderr
    (project,) = folder.glob("ds-ext-*")
    return project


@pytest.mark.parametrize(
    ("choice", "value", "message"),
    [
        ("device_name", "XYZ", "device_name: found 'XYZ', but it must be a lower-case name"),
        ("device_name", "x-y", "device_name: found 'x-y', but it must be"),
        ("device_name", "a_name_that_is_too_long", "1 to 16 letters"),
        ("device_name", "cpu", "another one: ds-ext-cpu exists"),
        ("device_name", "cuda", "(torch_device may be 'cuda' all the same)"),
        ("torch_device", "xyz:0", "torch_device: found 'xyz:0', but it must be a device type of torch"),
        ("device_module", "torch xyz", "device_module: found 'torch xyz', but it must be 'torch', 'package.module'"),
        ("device_files", "dev/xyz", "device_files: found 'dev/xyz', but it must be an absolute path"),
        ("visible_devices", "xyz devices", "visible_devices: found 'xyz devices', but it must be the name of"),
        ("communication_backend", "", "communication_backend: found '', but it must be a torch.distributed backend"),
        ("compiler", "xyz-cc -O3", "compiler: found 'xyz-cc -O3', but it must be one command, without arguments"),
        ("author", 'The "xyz" people', "author: found 'The \"xyz\" people', but it must be not empty, and free of"),
        ("author", " ", "author: found ' '"),
    ],
)
def test_a_wrong_choice_is_refused_by_name(tmp_path, choice, value, message):
    done = cookiecutter(tmp_path, **{choice: value})
    assert done.returncode != 0
    assert message in done.stderr
    assert list(tmp_path.glob("ds-ext-*")) == []


def test_all_wrong_choices_are_told_at_once(tmp_path):
    done = cookiecutter(tmp_path, device_module="torch", device_files="", author="", compile_backend="")
    assert "device_files: found '', but it must be a pattern when device_module is 'torch'" in done.stderr
    assert "author: found ''" in done.stderr
    assert "compile_backend: found ''" in done.stderr


def test_every_question_is_worded_and_explained():
    asked = json.loads((TEMPLATE / "cookiecutter.json").read_text())
    questions = {name for name in asked if not name.startswith("_")}
    assert asked["__prompts__"].keys() == questions
    page = (TEMPLATE.parent / "docs/howto/write-an-extension.md").read_text()
    assert {name for name in questions if f"`{name}`" not in page} == set()
    assert len(questions) == 11, "the page says how many"


@pytest.mark.parametrize("licence", LICENCES)
def test_the_licence_is_the_chosen_one(tmp_path, licence):
    project = rendered(tmp_path, licence=licence, author="Ada Löve & Söhne's")
    assert (project / "LICENSE").read_text().lstrip().startswith(LICENCES[licence])
    assert licence == "Apache-2.0" or "Ada Löve & Söhne's" in (project / "LICENSE").read_text()
    assert f'license = "{licence}"' in (project / "pyproject.toml").read_text()
    assert not (project / "licences").exists()


@pytest.mark.parametrize("module", MODULES)
def test_a_device_without_kernels_takes_at_most_60_lines(tmp_path, module):
    project = rendered(tmp_path, device_module=module)
    files = sorted((project / "src").rglob("*.py"))
    assert [path.name for path in files] == ["__init__.py", "accelerator.py", "plugin.py"]
    assert sum(len(path.read_text().splitlines()) for path in files) <= 60
    assert not (project / "setup.py").exists()


@pytest.mark.parametrize(("name", "module"), [("q", MODULES[0]), ("xyz", MODULES[2]), ("a_name_of_16_let", MODULES[1])])
def test_rendered_code_is_laid_out_well_whatever_the_name(tmp_path, language, name, module):
    known = {"cuda": "cuda", "sycl": "xpu"}.get(language, "zzz") if module == "torch" else name
    choices = {"device_name": name, "device_module": module, "torch_device": known}
    project = rendered(tmp_path, kernel_language=language, **choices)
    assert [path for path in project.rglob("*") if path.is_file() and "{" + "%" in path.read_text()] == []
    succeeds(project, "ruff", "check", ".")
    succeeds(project, "ruff", "format", "--check", ".")
    kernels = [str(path) for path in project.rglob("csrc/**/*") if path.suffix in (".cpp", ".h", ".cu")]
    assert bool(kernels) == (language != "none")
    if kernels:
        succeeds(project, "clang-format", "--dry-run", "--Werror", *kernels)


@pytest.fixture(scope="session")
def types_cache(tmp_path_factory):
    """What mypy found out about torch, once for all languages."""
    return tmp_path_factory.mktemp("types")


def test_rendered_code_is_typed(tmp_path, language, types_cache):
    project = rendered(tmp_path, kernel_language=language)
    succeeds(project, "mypy", "--cache-dir", str(types_cache))


@pytest.mark.parametrize("module", MODULES)
def test_a_device_that_torch_calls_otherwise_says_so(tmp_path, module):
    (tmp_path / "own").mkdir()
    own = rendered(tmp_path / "own", device_module=module)
    assert "impersonates" not in (own / "src/ds_ext_xyz/plugin.py").read_text()
    project = rendered(tmp_path, device_module=module, torch_device="cuda")
    plugin = (project / "src/ds_ext_xyz/plugin.py").read_text()
    assert plugin.count('impersonates="cuda")') == plugin.count("Offer(") - plugin.count("available=False") > 0
    succeeds(project, "ruff", "format", "--check", ".")


def succeeds(project, tool, *words):
    command = [str(Path(sys.executable).with_name(tool)), *words]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{tool}:\n{done.stdout}\n{done.stderr}"


def test_ds_core_may_come_from_a_repository(tmp_path):
    """It is on no index: nox and CI take it from `DS_CORE_URL`."""
    project = rendered(tmp_path)
    assert "DS_CORE_URL: ${{ vars.DS_CORE_URL }}" in (project / ".github/workflows/ci.yml").read_text()
    program = "import noxfile; print(*noxfile._ds_core(), sep='\\n')"
    for url, wanted in (
        ("", [""]),
        (
            "git+https://host/owner/ds-core@main",
            [
                "ds-core @ git+https://host/owner/ds-core@main#subdirectory=core",
                "ds-ext-cpu @ git+https://host/owner/ds-core@main#subdirectory=extensions/ds-ext-cpu",
            ],
        ),
    ):
        environment = {**os.environ, "DS_CORE_URL": url}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=project, env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.rstrip("\n").split("\n") == wanted
