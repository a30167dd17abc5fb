"""One name, one class: a reader who looks for a class of core finds one."""

import ast
from collections import defaultdict
from pathlib import Path

import deepspeed

SOURCE = Path(deepspeed.__file__).parent
#: name -> why two classes of core have it
SEVERAL = {
    "ElasticityConfig": "DeepSpeed's class, and the section of the configuration",
    "Init": "DeepSpeed's zero.Init and linear.Init",
    "Mesh": "the planner's, on paper (deepspeed.planning), and the one of ranks",
    "QuantizationConfig": "DeepSpeed's of inference and of deepspeed.linear",
    "QuantizedLinear": "DeepSpeed's of deepspeed.linear, and the packed layer of inference",
    "Quantizer": "DeepSpeed's of deepspeed.runtime.quantize and of deepspeed.ops.fp_quantizer",
    "Training": "the planner's, on paper (deepspeed.planning), and the engine's",
    "CheckpointError": "zero_to_fp32.py runs without this package",
    "JoinedTensor": "zero_to_fp32.py runs without this package",
    "_Held": "zero_to_fp32.py runs without this package",
}


def classes_by_name():
    found = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(SOURCE)))
    return found


def test_each_class_has_a_name_of_its_own():
    several = {name: paths for name, paths in classes_by_name().items() if len(paths) > 1}
    assert {name: paths for name, paths in several.items() if name not in SEVERAL} == {}
    assert sorted(set(SEVERAL) - set(several)) == [], "these have names of their own by now"
