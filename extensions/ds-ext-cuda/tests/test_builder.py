"""CUDAOpBuilder: which nvcc, for which CUDA and which GPUs, by which commands; with a stand-in for nvcc."""

import re
import sys
from pathlib import Path

import pytest
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.current import reset_accelerator
from deepspeed.errors import ConfigError, OpUnavailable
from deepspeed.ops import registry
from deepspeed.ops.op_builder import jit
from deepspeed.ops.op_builder.aot import build_ahead
from ds_ext_cuda.accelerator import CUDA_Accelerator
from ds_ext_cuda.op_builder import CUDAOpBuilder, architectures, cuda_op_builder
from ds_ext_cuda.op_builder.toolkit import find_toolkit

# Answers as nvcc does; compiles by writing an object of the host's compiler, and appends each command to `commands`.
NVCC = """#!{python}
import pathlib, subprocess, sys
here = pathlib.Path(__file__).resolve().parent.parent
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("nvcc: NVIDIA (R) Cuda compiler driver\\nCuda compilation tools, release {release}, V{release}.88")
elif arguments == ["--list-gpu-code"]:
    print("sm_75\\nsm_80\\nsm_90\\nsm_90a\\nsm_100")
elif "--dryrun" in arguments:
    print(f'#$ TOP={{here}}/bin/..', file=sys.stderr)
    print(f'#$ LIBRARIES=  "-L{{here}}/bin/../stubs" "-L{{here}}/bin/../somewhere"', file=sys.stderr)
else:
    with open(here / "commands", "a") as log:
        log.write(" ".join(arguments) + "\\n")
    source = here / "empty.cpp"
    source.write_text("")
    subprocess.run(["c++", "-fPIC", "-c", source, "-o", arguments[arguments.index("-o") + 1]], check=True)
"""


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A stand-in for a toolkit, as `CUDA_HOME`; returns its folder."""

    def make(release="13.0"):
        home = tmp_path / f"cuda-{release}"
        for folder in ("bin", "somewhere"):
            (home / folder).mkdir(parents=True)
        nvcc = home / "bin" / "nvcc"
        nvcc.write_text(NVCC.format(python=sys.executable, release=release))
        nvcc.chmod(0o755)
        (home / "somewhere" / "libcudart_static.a").write_bytes(b"!<arch>\n")
        monkeypatch.setenv("CUDA_HOME", str(home))
        return home

    for variable in ("TORCH_CUDA_ARCH_LIST", "DS_SKIP_CUDA_CHECK", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    return make


@pytest.fixture
def torch_with(monkeypatch):
    """A torch that was built with this CUDA, as the builder sees it."""

    def pretend(cuda):
        answer = (None, "torch 2.13.0+cpu is built without CUDA") if cuda is None else (cuda, f"torch 2.13.0+cu{cuda}")
        monkeypatch.setattr(cuda_op_builder, "cuda_of_torch", lambda: answer)

    return pretend


@pytest.fixture
def op(tmp_path):
    """A builder of a small op."""
    source = tmp_path / "small.cu"
    source.write_text("#include <torch/csrc/stable/library.h>\n")

    class SmallBuilder(CUDAOpBuilder):
        BUILD_VAR, NAME = "DS_BUILD_SMALL", "small"

        def sources(self):
            return [str(source)]

    return SmallBuilder()


def flags(*names):
    """nvcc's flags for `80`, `90`, `90+PTX`."""
    wanted = []
    for name in names:
        number, _, ptx = name.partition("+")
        wanted.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        wanted += [f"-gencode=arch=compute_{number},code=compute_{number}"] if ptx else []
    return wanted


# ----- which toolkit -------------------------------------------------------------------------------------------------


def test_cuda_home_names_the_toolkit(toolkit):
    home = toolkit("12.8")
    found = find_toolkit()
    assert found.nvcc == str(home / "bin" / "nvcc")
    assert (found.version, found.version_name) == ((12, 8), "12.8")
    assert found.codes == {75, 80, 90, 100}
    assert found.libraries == home / "somewhere"


def test_a_cuda_home_without_nvcc_is_not_passed_over(toolkit, tmp_path, monkeypatch, op, torch_with):
    torch_with("13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    assert not op.is_compatible()
    assert (
        op.reason
        == f"no CUDA toolkit: CUDA_HOME is '{tmp_path}/gone', and there is no program {tmp_path}/gone/bin/nvcc"
    )


def test_no_toolkit_is_one_line(monkeypatch, op, torch_with, tmp_path, toolkit):
    torch_with("13.0")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("ds_ext_cuda.op_builder.toolkit._DEFAULT_HOME", str(tmp_path))
    with pytest.raises(OpUnavailable, match=r"nvcc is neither on PATH nor in .*/bin, and CUDA_HOME is not set$"):
        op.load()
    assert "\n" not in op.reason


def test_a_toolkit_that_is_too_old_or_half_there_says_so(toolkit):
    toolkit("11.8")
    with pytest.raises(OpUnavailable, match=r"is of CUDA 11\.8, and torch's headers need 12\.0 or newer"):
        find_toolkit()
    (toolkit("12.1") / "somewhere" / "libcudart_static.a").unlink()
    with pytest.raises(OpUnavailable, match=r"has no libcudart_static\.a; install"):
        find_toolkit()


# ----- for which CUDA ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cuda", "same"), [("13.0", True), ("13.2", False), (None, True)])
def test_minor_versions_may_differ(toolkit, torch_with, op, cuda, same):
    home = toolkit("13.0")
    torch_with(cuda)
    assert cuda_op_builder.assert_no_cuda_mismatch() is same
    assert cuda_op_builder.installed_cuda_version() == (13, 0)
    assert op.toolchain().command == (str(home / "bin" / "nvcc"),)


def test_another_major_version_is_refused_by_saying_both(toolkit, torch_with, op, monkeypatch):
    home = toolkit("13.0")
    torch_with("12.6")
    assert not op.is_compatible()
    assert op.reason == (
        f"{home}/bin/nvcc is of CUDA 13.0, and torch 2.13.0+cu12.6 is built with CUDA 12.6; set CUDA_HOME to a "
        "toolkit 12.x, or DS_SKIP_CUDA_CHECK=1 to try all the same"
    )
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    assert op.is_compatible()


def test_a_torch_without_cuda_cannot_load_and_can_compile(toolkit, torch_with, op, monkeypatch, tmp_path):
    toolkit()
    torch_with(None)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    assert not op.is_compatible()
    assert op.reason == "torch 2.13.0+cpu is built without CUDA"
    with pytest.raises(OpUnavailable, match=r"op 'small' cannot be built here: torch .* is built without CUDA"):
        op.load()
    assert op.compile_only().is_file()


# ----- for which GPUs ------------------------------------------------------------------------------------------------


def test_without_a_list_the_usual_gpus_and_ptx_for_later_ones(toolkit, op):
    toolkit()
    assert op.compute_capability_args() == flags("80", "90", "100+PTX")
    assert op.compute_capability_args("7.5;8.0+PTX") == flags("75", "80+PTX")


@pytest.mark.parametrize(
    ("stated", "wanted"),
    [
        ("9.0", ["90"]),
        ("8.0;9.0+PTX", ["80", "90+PTX"]),
        ("8.0 9.0a", ["80", "90a"]),
        ("Hopper", ["90+PTX"]),
        ("Turing 10.0", ["75+PTX", "100"]),
    ],
)
def test_the_list_of_the_environment_wins(toolkit, op, monkeypatch, stated, wanted):
    toolkit()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", stated)
    assert op.compute_capability_args("8.0") == flags(*wanted)


def test_a_list_that_cannot_be_is_refused(toolkit, op, monkeypatch):
    toolkit()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;sm_90")
    with pytest.raises(
        ConfigError, match=r"TORCH_CUDA_ARCH_LIST: found 'sm_90' .* is written as 9\.0, 9\.0a or 9\.0\+PTX"
    ):
        op.compute_capability_args()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "6.1")
    with pytest.raises(
        OpUnavailable, match=r"compiles for no GPU of capability 6\.1; it does for 7\.5, 8\.0, 9\.0, 10\.0"
    ):
        op.compute_capability_args()


@pytest.mark.parametrize(
    ("cards", "wanted"),
    [
        ([(9, 0), (9, 0)], ["90"]),
        ([(9, 0), (8, 0)], ["80", "90"]),
        ([(12, 0)], ["100+PTX"]),
        ([(8, 6)], ["80+PTX"]),
        ([], ["80", "90", "100+PTX"]),
    ],
)
def test_an_op_that_is_compiled_at_its_first_use_is_for_the_cards_here(toolkit, op, monkeypatch, cards, wanted):
    toolkit()
    monkeypatch.setattr(cuda_op_builder, "_capabilities", lambda: cards)
    op.jit_mode = True
    assert op.compute_capability_args() == flags(*wanted)
    op.jit_mode = False
    assert op.compute_capability_args() == flags("80", "90", "100+PTX")


def test_a_toolkit_before_a_gpu_compiles_for_those_that_it_knows():
    assert [one.capability for one in architectures.default(frozenset({70, 80, 90}))] == ["8.0", "9.0"]
    assert architectures.default(frozenset({70, 80, 90}))[-1].ptx
    assert architectures.default(frozenset({70}))[-1].capability == "7.0"


def test_an_op_leaves_gpus_out(toolkit, op, monkeypatch):
    toolkit()
    seen = []
    monkeypatch.setattr(op, "filter_ccs", lambda ccs: seen.append(ccs) or [cc.split(".") for cc in ccs if cc >= "9"])
    assert op.compute_capability_args("8.0;9.0+PTX") == flags("90+PTX")
    assert seen == [["8.0", "9.0+PTX"]]
    monkeypatch.setattr(op, "filter_ccs", lambda ccs: [])
    with pytest.raises(OpUnavailable, match=r"op 'small' runs on none of 8\.0, 9\.0"):
        op.compute_capability_args("8.0;9.0+PTX")


@pytest.mark.parametrize(
    ("entry", "cards"),
    [
        ("8.0", [(8, 0), (8, 6), (8, 9)]),
        ("8.6", [(8, 6), (8, 9)]),
        ("9.0+PTX", [(9, 0), (10, 0), (12, 0)]),
        ("9.0a", [(9, 0)]),
    ],
)
def test_which_cards_run_what_was_compiled_for_one(entry, cards):
    known = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    (one,) = architectures.parse(entry)
    assert [card for card in known if one.runs_on(card)] == cards


def test_without_a_toolkit_the_cache_serves_the_cards_that_it_was_compiled_for(
    toolkit, op, monkeypatch, tmp_path, torch_with
):
    toolkit()
    torch_with("13.0")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_op_builder, "_capabilities", lambda: [(9, 0)])
    library = op.prepare()
    assert jit.find(op.describe()) == library
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert op.is_compatible()
    assert jit.find(op.describe()) == library
    monkeypatch.setattr(cuda_op_builder, "_capabilities", lambda: [(8, 0)])
    assert not op.is_compatible()
    assert op.reason.startswith("no CUDA toolkit")


def test_a_library_of_a_wheel_for_other_cards_is_passed_over(toolkit, op, monkeypatch, tmp_path, torch_with, caplog):
    toolkit()
    torch_with("13.0")
    package = tmp_path / "site" / "ds_small_wheel"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(op, "absolute_name", lambda: "ds_small_wheel.small_op")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0")
    build_ahead(op, package / "small_op.so")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    caplog.set_level("INFO", logger="DeepSpeed")
    for cards, is_taken in (([(8, 6), (9, 0)], True), ([(10, 0)], False), ([], True)):
        monkeypatch.setattr(cuda_op_builder, "_capabilities", lambda cards=cards: cards)
        assert (op._load_prebuilt() is not None) is is_taken, cards
    assert "the prebuilt one is for 8.0;9.0, and here is 10.0; it is compiled" in caplog.text


# ----- by which commands ---------------------------------------------------------------------------------------------


def test_nvcc_compiles_and_the_hosts_compiler_links(toolkit, op, monkeypatch, tmp_path, torch_with):
    home = toolkit()
    torch_with("13.0")
    monkeypatch.setenv("CXX", "g++")
    compile_line = op.compile_command(op.toolchain(), tmp_path / "small.cu", tmp_path / "small.o", op.cxx_args())
    assert compile_line[:3] == [str(home / "bin" / "nvcc"), "-ccbin", "g++"]
    assert compile_line[-4:] == ["-c", str(tmp_path / "small.cu"), "-o", str(tmp_path / "small.o")]
    assert {"-DUSE_CUDA", "-std=c++20", "--fmad=false", *flags("80", "90", "100+PTX")} <= set(compile_line)
    assert "-fPIC,-fvisibility=hidden" in compile_line

    link_line = op.link_command(op.toolchain(), [tmp_path / "a.o"], tmp_path / "a.so", ["-Wl,--as-needed", "-ltorch"])
    assert link_line[:2] == ["g++", "-shared"]
    # needed whether a symbol of it is used or not: it brings libtorch_cuda into scope
    assert link_line.index("-Wl,--no-as-needed") < link_line.index("-ltorch") < link_line.index("-Wl,--as-needed")
    assert [f"-L{home}/somewhere", "-lcudart_static"] == link_line[-5:-3]


@pytest.mark.parametrize(
    ("chosen", "options"),
    [
        ("g++ -m64 -g0", ["-ccbin", "g++", "-Xcompiler=-m64", "-Xcompiler=-g0"]),
        ("env g++", ["-ccbin", "g++"]),
        ("env g++ -m64", ["-ccbin", "g++", "-Xcompiler=-m64"]),
    ],
)
def test_a_host_compiler_with_a_launcher_or_flags_is_given_to_nvcc(
    toolkit, op, monkeypatch, torch_with, chosen, options
):
    toolkit()
    torch_with("13.0")
    monkeypatch.setenv("CXX", chosen)
    compile_line = op.compile_command(op.toolchain(), Path("small.cu"), Path("small.o"), [])
    assert compile_line[1 : 1 + len(options)] == options
    assert not any(word.startswith("-Xcompiler=") for word in compile_line[1 + len(options) :])


def test_a_library_is_compiled_once_for_each_list_of_gpus(toolkit, op, monkeypatch, tmp_path, torch_with):
    home = toolkit()
    torch_with(None)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    first = op.compile_only()
    assert op.compile_only() == first
    assert len((home / "commands").read_text().splitlines()) == 1
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    second = op.compile_only()
    assert second != first
    commands = (home / "commands").read_text().splitlines()
    assert re.findall(r",code=(\w+)", commands[0]) == ["sm_80", "sm_90", "sm_100", "compute_100"]
    assert re.findall(r",code=(\w+)", commands[1]) == ["sm_90"]
    # the same sources and flags: a wheel's library is for whichever list it was built with
    assert jit.find(op.describe()) == second


def test_sources_and_headers_are_absolute_files_of_the_package():
    assert Path(cuda_op_builder.cuda_kernel_path("adam/fused_adam.cu")).is_file()
    assert cuda_op_builder.cuda_kernel_path("csrc/adam/fused_adam.cu").endswith("csrc/adam/fused_adam.cu")
    assert Path(cuda_op_builder.cuda_kernel_include("common")).is_dir()
    with pytest.raises(OpUnavailable, match="there is no file"):
        cuda_op_builder.cuda_kernel_path("adam/none.cu")


def test_without_a_toolkit_an_op_runs_in_torch_and_one_line_says_so(monkeypatch, tmp_path, toolkit, torch_with, caplog):
    toolkit()
    torch_with("13.0")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "_logged", set())
    set_accelerator(CUDA_Accelerator())
    try:
        registry.reset()
        for _ in range(2):
            assert registry.kernel("fused_adam") is None
    finally:
        reset_accelerator()
        registry.reset()
    (line,) = [record.getMessage() for record in caplog.records if "fused_adam" in record.getMessage()]
    assert "op 'fused_adam' runs on its torch reference" in line
    assert "no CUDA toolkit: CUDA_HOME is '/nowhere', and there is no program /nowhere/bin/nvcc" in line
    assert "\n" not in line
