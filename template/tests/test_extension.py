"""From the template to an extension that passes: rendered for the simulated device, built, installed, compiled, tested.

One language after the other; `installed.py` says in which environment.
"""

import importlib.util
import shutil
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

import pytest
import torch

_spec = importlib.util.spec_from_file_location("template_installed", Path(__file__).with_name("installed.py"))
installed = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = installed
_spec.loader.exec_module(installed)

COMPILERS = {"cpp": "c++", "cuda": "nvcc", "sycl": "icpx", "own": "c++"}
# languages whose example computes on the simulated device; the others' kernels are for tensors of another one
ON_SIM = ("cpp", "own")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

pytestmark = pytest.mark.skipif(TORCH < (2, 10), reason="the simulated device needs torch 2.9 and the kernel 2.10")


@pytest.fixture(scope="module")
def core_before(language):
    return installed.digest(installed.ROOT / "core")


@pytest.fixture(scope="module")
def extension(language, core_before, tmp_path_factory):
    made = installed.Installed(tmp_path_factory.mktemp(language), language)
    yield made
    made.thaw()


@pytest.fixture
def kernels(language):
    if language == "none":
        pytest.skip("rendered without kernels")


def has_compiler(language):
    return shutil.which(COMPILERS[language]) is not None


def test_the_wheel_carries_sources_and_no_tests(extension, language):
    names = zipfile.ZipFile(extension.wheel).namelist()
    assert {"ds_ext_acme/plugin.py", "ds_ext_acme/py.typed"} <= set(names)
    sources = {name.removeprefix("ds_ext_acme/csrc/lion/") for name in names if "/csrc/lion/" in name}
    own = {"cpp": "lion_kernel.cpp", "cuda": "lion.cu", "sycl": "lion_sycl.cpp", "own": "lion_kernel.acme"}
    assert (own.get(language) in sources) == (language != "none")
    assert "ds_ext_acme/op_builder/device_builder.py" in names or language == "none"
    assert not any("test" in name or name.endswith(".so") for name in names)


def test_the_environment_has_it_by_pip_install_alone(extension):
    told = extension.python(
        "import ds_ext_acme; from deepspeed.accelerator import get_accelerator as g; print(ds_ext_acme.__file__);"
        "print(type(g()).__name__, g().current_device_name(), g().communication_backend_name())"
    ).splitlines()
    assert told[0] == str(extension.site / "ds_ext_acme/__init__.py")
    assert told[1].split() == ["ACME_Accelerator", "acme:0", "acmeccl"]


def test_the_report_says_why_it_was_chosen(extension):
    report = extension.run("python", "-m", "deepspeed.cli.report", "--explain-accelerator").stdout
    assert "acme" in report
    assert "torch_acme is installed" in report


def test_the_op_is_compiled_from_its_own_package(extension, language, kernels, tmp_path):
    """Into a cache that is empty. What the language's compiler makes is registered when it is loaded."""
    program = (
        "import torch; from deepspeed.errors import OpUnavailable; from deepspeed.ops.op_builder import jit, loading\n"
        "from ds_ext_acme.op_builder import FusedLionBuilder\n"
        "builder = FusedLionBuilder()\n"
        "try:\n"
        "    builder.toolchain()\n"
        "except OpUnavailable as error:\n"
        "    print('unavailable', error)\n"
        "else:\n"
        "    print('\\n'.join(builder.sources()))\n"
        "    library = jit.build(builder.describe())\n"
        "    print(library); print(loading.load_operators(library, 'ds_acme').lion_step_.default._schema)\n"
    )
    told = extension.python(program, TORCH_EXTENSIONS_DIR=str(tmp_path)).splitlines()
    if not has_compiler(language):
        assert told[0].startswith(f"unavailable no {'SYCL' if language == 'sycl' else 'CUDA'} compiler")
        assert COMPILERS[language] in told[0]
        pytest.skip(told[0])
    *sources, library, schema = told
    assert len(sources) >= 2
    assert all(source.startswith(str(extension.site / "ds_ext_acme/csrc/lion/")) for source in sources)
    assert library.startswith(str(tmp_path))
    assert schema.startswith("ds_acme::lion_step_(Tensor(a0!)[] params") or "lion_step_(" in schema


def test_the_op_serves_the_front_or_says_why_not(extension, language, kernels):
    program = (
        "from deepspeed.ops import registry; print(registry.kernel('fused_lion') is not None);"
        "print(registry.resolve('fused_lion').source); print(registry.resolve('fused_lion').why())"
    )
    served, source, why, *_ = [*extension.run("python", "-c", program).stdout.splitlines(), ""]
    if language in ON_SIM:
        assert (served, source) == ("True", "device"), why
        return
    assert (served, source) == ("False", "reference")
    if has_compiler(language):
        assert "its kernels read tensors of torch.device" in why
        assert "not of 'acme'" in why
    else:
        assert f"{COMPILERS[language]} was not found" in why


def test_a_wheel_may_carry_the_library(extension, language, kernels, tmp_path):
    if language not in ON_SIM:
        pytest.skip("its kernels are not for this device, so that they are not built ahead")
    wheel = extension.build(tmp_path, DS_BUILD_FUSED_LION="1")
    assert "-py3-none-linux_" in wheel.name
    assert "ds_ext_acme/op_builder/fused_lion_op.so" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.timeout(1200)  # two hundred tests, ranks among them
def test_its_tests_pass_and_the_conformance_suite_among_them(extension, language):
    known = installed.SIMULATED / "expected_failures.txt"  # of the device, which its vendor knows
    if known.is_file():
        shutil.copy(known, extension.project / "tests")
    report = extension.folder / "report.xml"
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(extension.project))
    done = extension.run("python", *words, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    without = [(case.get("name"), case.find("skipped")) for case in cases]
    skipped = {name: skip.get("message") for name, skip in without if skip is not None}
    passed = {(case.get("classname"), case.get("name")) for case in cases if case.get("name") not in skipped}
    conformance = {name for where, name in passed if where.endswith("test_conformance")}
    assert len(conformance) >= 100
    assert all(skipped.values()), "every skip has a reason"
    lion = {name for where, name in passed if where.endswith("test_fused_lion")}
    assert bool(lion) == (language != "none")
    if language in ON_SIM:
        assert not any("formula" in name for name in skipped)


def test_it_trains_without_the_host_extension(extension):
    """`pip install ds-core ds-ext-acme` alone: the reference steps in place of the host's kernels."""
    program = (
        "import deepspeed, torch; from deepspeed.accelerator import get_accelerator as g\n"
        "config = {'train_batch_size': 2, 'optimizer': {'type': 'Lion', 'params': {'lr': 0.01}},"
        " 'zero_optimization': {'stage': 2}}\n"
        "engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 1), config=config)\n"
        "before = engine.module.weight.detach().cpu().clone()\n"
        "engine.backward(engine(torch.ones(2, 4, device=g().current_device_name())).sum()); engine.step()\n"
        "print(engine.module.weight.device, torch.equal(before, engine.module.weight.detach().cpu()))\n"
    )
    assert extension.python(program, DS_PLUGINS_BLOCK="cpu").splitlines()[-1] == "acme:0 False"


def test_nothing_was_written_where_it_is_installed_or_in_core(extension, core_before):
    """The last one: after all of the above."""
    assert installed.digest(extension.site) == extension.frozen
    assert installed.digest(installed.ROOT / "core") == core_before
