"""Writes vendor_api.json: what of torch_npu this extension calls, as a wheel of torch_npu states it.

    pip download --no-deps torch-npu==2.13.0 && unzip torch_npu-*.whl -d unpacked
    python tests/vendor_api.py unpacked

Schemas of operators are read as text from the vendor's library, signatures of `torch.npu` from its Python sources:
nothing is imported, so that neither CANN nor a device is needed.
"""

import ast
import json
import re
import sys
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")

OPERATORS = (
    "npu_apply_adam_w",
    "npu_apply_adam_w.out",
    "npu_layer_norm_eval",
    "npu_rms_norm",
    "npu_add_rms_norm",
    "npu_gelu",
    "npu_rotary_mul",
)

# What the base of accelerators and NPU_Accelerator ask of torch.npu; of a class, what makes an object.
FUNCTIONS = (
    *("is_available", "device_count", "set_device", "current_device", "device", "synchronize", "_lazy_call", "init"),
    *("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "initial_seed"),
    *("Stream", "stream", "current_stream", "default_stream", "Event", "NPUGraph", "graph"),
    *("empty_cache", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_stats", "reset_peak_memory_stats", "get_device_properties", "mem_get_info"),
    *("is_bf16_supported", "get_cann_version"),
)


def read_schemas(library):
    """Operator -> schema, from the text in a shared library."""
    text = Path(library).read_bytes()
    found = {}
    for name in OPERATORS:
        pattern = rb"\0(" + re.escape(name.encode()) + rb"\([ -~]*\) -> [ -~]*)\0"
        (found[name],) = {match.decode() for match in re.findall(pattern, text)}
    return found


def read_signatures(folder):
    """Function or class -> its parameters with their defaults, from the sources of one package."""
    found = {}
    for path in sorted(Path(folder).glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
                found[node.name] = _parameters(node.args)
            elif isinstance(node, ast.ClassDef) and node.name in FUNCTIONS:
                makers = [each for each in node.body if getattr(each, "name", None) in ("__new__", "__init__")]
                found[node.name] = _parameters(makers[0].args, skipped=1) if makers else "()"
    return {name: found[name] for name in FUNCTIONS}


def _parameters(arguments, skipped=0):
    """As `inspect.signature` writes them, without annotations."""
    for each in (*arguments.args, *arguments.kwonlyargs):
        each.annotation = None
    arguments.args = arguments.args[skipped:]
    return f"({ast.unparse(arguments)})"


def main(unpacked):
    package = Path(unpacked) / "torch_npu"
    version = re.search(r"__version__ = '([^']+)'", (package / "version.py").read_text()).group(1)
    facts = {
        "torch_npu": version,
        "operators": read_schemas(package / "lib" / "libtorch_npu.so"),
        "torch.npu": read_signatures(package / "npu"),
    }
    FILE.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
