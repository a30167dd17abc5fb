"""Core names no device: what a device is called is known to its extension alone (architecture, floors)."""

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "deepspeed"
WORDS = (
    *("cuda", "hip", "sycl", "npu", "xpu", "mps", "hpu", "musa", "mlu", "mtia", "rocm", "ascend", "gaudi", "metal"),
    *("nccl", "rccl", "hccl", "xccl", "ccl", "oneccl", "nvtx", "nvml", "nvcc", "icpx", "cudnn", "cann", "ptx"),
)
#: a word by itself or as a part of a name (`torch.cuda`, `CUDA_HOME`), not within another word (`ship`, `input`)
PATTERN = re.compile(rf"(?<![a-z])(?:{'|'.join(WORDS)})(?![a-z])", re.IGNORECASE)
CAMEL_CASE = re.compile(r"Cuda(?![a-z])|CUDA|NCCL|Nccl(?![a-z])|Sycl(?![a-z])|(?<![A-Z])(?:CCL|NPU|XPU|MPS)(?=[A-Z])")

#: the files that carry old names, and the names that they may carry: DeepSpeed's documented ones
OLD_NAMES = {
    # the tracker of random states, as Megatron-LM and DeepSpeed call it
    "activation/checkpointing.py": {
        *("CudaRNGStatesTracker", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"),
    },
    "cli/report.py": {"CUDA"},  # in a heading that people look for
    "config/inference.py": {"enable_cuda_graph"},
    "ops/documented.py": {"CCLCommBuilder", "deepspeed_ccl_comm"},
    # methods of DeepSpeed's OpBuilder that builders written for it call and extend
    "ops/op_builder/builder.py": {"nvcc_args", "is_rocm_pytorch", "installed_rocm_version", "hip"},
}
#: public names of DeepSpeed's as data, read from its sdists; no code
LISTS_OF_OLD_NAMES = {SOURCE / "compatibility/names.json", SOURCE / "compatibility/members.json"}


def names_with_device_words(text):
    found = {match.start() for pattern in (PATTERN, CAMEL_CASE) for match in pattern.finditer(text)}
    return {name.group() for name in re.finditer(r"\w+", text) if any(name.start() <= at < name.end() for at in found)}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("torch.cuda.synchronize()", {"cuda"}),
        ("if name == 'NCCL':", {"NCCL"}),
        ("enable_cuda_graph: Flag", {"enable_cuda_graph"}),
        ("class CudaStream: ...", {"CudaStream"}),
        ("MPSBuilder, torch.mps, XPU_Accelerator", {"MPSBuilder", "mps", "XPU_Accelerator"}),
        ("os.environ['CUDA_HOME'], ASCEND_NPU0", {"CUDA_HOME", "ASCEND_NPU0"}),
        ("ship the input; a relationship of inputs; num_gpus; micro_batch_size_per_gpu", set()),
    ],
)
def test_what_counts(text, names):
    assert names_with_device_words(text) == names


def test_no_device_word_in_core():
    """Neither in a file, whatever its kind, nor in its name."""
    found = {
        str(path.relative_to(SOURCE)): names
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so") and path not in LISTS_OF_OLD_NAMES
        if (names := names_with_device_words(f"{path.relative_to(SOURCE)}\n{path.read_text(encoding='utf-8')}"))
    }
    unexpected = {file: names - OLD_NAMES.get(file, set()) for file, names in found.items()}
    assert {file: names for file, names in unexpected.items() if names} == {}
    assert {file: OLD_NAMES[file] - found.get(file, set()) for file in OLD_NAMES} == dict.fromkeys(OLD_NAMES, set())
    assert len(OLD_NAMES) <= 5
