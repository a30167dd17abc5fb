"""Names, signatures and defaults of DeepSpeed's sdists as data: `python deepspeed_names.py FOLDER [--check]`.

FOLDER has the sdists `deepspeed-0.19.6.tar.gz` and `deepspeed-0.19.8.tar.gz`, as `pip download` leaves them. They are
parsed, not imported; nothing but names, signatures and defaults is kept:

    core/src/deepspeed/compatibility/names.json     module -> public name -> "class", "def" or "value", of both versions
    core/tests/compat/deepspeed_names.json          for tests: signatures, members of classes, keys and their defaults

`nox -s deepspeed` downloads the sdists and runs this with `--check`.
"""

import ast
import itertools
import json
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VERSIONS = ("0.19.6", "0.19.8")  # the pinned one, and the newest whose names are taken
ROOT = Path(__file__).parents[2]
NAMES = ROOT / "core/src/deepspeed/compatibility/names.json"
DETAILS = ROOT / "core/tests/compat/deepspeed_names.json"

# Sections that are pydantic models there: class -> dotted key. Others are constants in pairs, X and X_DEFAULT.
_MODELS = {
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module",
    "TPTrainingConfig": "tensor_parallel",
    "CompileConfig": "compile",
    "CommsLoggerConfig": "comms_logger",
    "TensorBoardConfig": "tensorboard",
    "WandbConfig": "wandb",
    "CSVConfig": "csv_monitor",
    "CometConfig": "comet",
    "HybridEngineConfig": "hybrid_engine",
    "DeepSpeedFlopsProfilerConfig": "flops_profiler",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
    "ZenFlowConfig": "zero_optimization.zenflow",
    "DeepSpeedInferenceConfig": "inference",
}


# Sections that a function reads key by key.
_READERS = {"parse_autoep_config": "expert_parallel", "get_pipeline_config": "pipeline"}
_SECTIONS = {*_READERS.values()}


def walk(sdist: Path) -> dict[str, ast.Module]:
    """Module -> its syntax tree, of all modules in the package of an sdist."""
    modules = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = Path(member.name)
            if path.suffix == ".py" and len(path.parts) > 2 and path.parts[1] == "deepspeed":
                content = archive.extractfile(member)
                assert content is not None
                name = ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
                modules[name] = ast.parse(content.read())
    return modules


def public(tree: ast.Module, is_package: bool) -> dict[str, ast.AST]:
    """Names that a module defines, and those that a package takes from its own modules."""
    found: dict[str, ast.AST] = {}
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.setdefault(node.name, node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, node)
        elif isinstance(node, ast.ImportFrom) and is_package and (node.level or (node.module or "").startswith("deep")):
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, node)
    return {name: node for name, node in found.items() if not name.startswith("_") and name != "*"}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those inside of `if` and `try` included."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)
            yield from _statements(node.orelse)
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)
        else:
            yield node


def kind(node: ast.AST) -> str:
    """ "class", "def" or "value"."""
    if isinstance(node, ast.ClassDef):
        return "class"
    return "def" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else "value"


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[list[str]]:
    """[name, default as text] of each parameter; "" without a default, names of the rest with their stars."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [""] * (len(plain) - len(arguments.defaults)) + [ast.unparse(each) for each in arguments.defaults]
    result = [[one.arg, default] for one, default in zip(plain, defaults, strict=True)]
    if arguments.vararg:
        result.append([f"*{arguments.vararg.arg}", ""])
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        result.append([one.arg, ast.unparse(default) if default is not None else ""])
    if arguments.kwarg:
        result.append([f"**{arguments.kwarg.arg}", ""])
    return result


def members(node: ast.ClassDef) -> dict[str, Any]:
    """Public members of a class and of its objects: the signature of a method, None of anything else."""
    found: dict[str, Any] = dict.fromkeys(_attributes(node))
    for part in _statements(node.body):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            is_property = any(
                "property" in ast.unparse(each) or "setter" in ast.unparse(each) for each in part.decorator_list
            )
            if part.name == "__init__" or not part.name.startswith("_"):
                found[part.name] = None if is_property else signature(part)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id[0] != "_":
            found[part.target.id] = None
    return found


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Public attributes that the methods of a class assign to `self`."""
    methods = (each for each in _statements(node.body) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    for part in itertools.chain.from_iterable(map(ast.walk, methods)):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and not part.attr.startswith("_"):
            if isinstance(part.value, ast.Name) and part.value.id == "self":
                yield part.attr


def defaults(modules: Mapping[str, ast.Module]) -> dict[str, Any]:
    """Dotted key -> default, of the sections that are classes, and of the constants in pairs by module."""
    found: dict[str, Any] = {}
    for name, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in _MODELS:
                found.update(_fields(node, _MODELS[node.name]))
            elif isinstance(node, ast.FunctionDef) and node.name in _READERS:
                found.update(_gets(node, _READERS[node.name]))
        if name.endswith(("constants", "activation_checkpointing.config")):
            found.update(_pairs(name, tree))
    return found


def _gets(node: ast.FunctionDef, path: str) -> Iterator[tuple[str, Any]]:
    """Keys that a function gets from a dict with a default, and those of a dict of defaults in it."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "get":
            if len(part.args) == 2 and isinstance(part.args[0], ast.Constant) and part.args[0].value not in _SECTIONS:
                yield f"{path}.{part.args[0].value}", _default(part.args[1])[0]
        elif isinstance(part, ast.Dict):
            for name, value in zip(part.keys, part.values, strict=True):
                if isinstance(name, ast.Constant):
                    yield f"{path}.{name.value}", _default(value)[0]


def _fields(node: ast.ClassDef, path: str) -> Iterator[tuple[str, Any]]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            default, alias = _default(part.value)
            yield f"{path}.{alias or part.target.id}", default


def _default(node: ast.expr | None) -> tuple[Any, str]:
    """The default of a field, and its name in the JSON if that is another; text where it is no literal."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Field":
        words = {word.arg: word.value for word in node.keywords}
        alias = ast.literal_eval(words["alias"]) if "alias" in words else ""
        inner = node.args[0] if node.args else words.get("default", words.get("default_factory"))
        return _default(inner)[0], alias
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pp_int":
        return _default(node.args[0])
    try:
        return (None if node is None else ast.literal_eval(node)), ""
    except ValueError:
        return ast.unparse(node), ""  # type: ignore[arg-type]


def _pairs(module: str, tree: ast.Module) -> Iterator[tuple[str, Any]]:
    values = {}
    for node in _statements(tree.body):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value, _ = _default(node.value)
            values[node.targets[0].id] = values.get(value, value) if isinstance(value, str) else value
    for name, value in values.items():
        if f"{name}_DEFAULT" in values and isinstance(value, str):
            yield f"{module}:{name}={value}", values[f"{name}_DEFAULT"]


def render(folder: Path) -> dict[Path, str]:
    """File -> its whole text."""
    names: dict[str, dict[str, str]] = {}
    details: dict[str, Any] = {}
    for version in VERSIONS:
        modules = walk(folder / f"deepspeed-{version}.tar.gz")
        packages = {module.rpartition(".")[0] for module in modules}
        found: dict[str, Any] = {"defaults": dict(sorted(defaults(modules).items())), "modules": {}}
        for module, tree in sorted(modules.items()):
            own = names.setdefault(module, {})
            detail = found["modules"][module] = {}
            for name, node in sorted(public(tree, module in packages).items()):
                own.setdefault(name, kind(node))
                if isinstance(node, ast.ClassDef):
                    detail[name] = members(node)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    detail[name] = signature(node)
        details[version] = found
    return {NAMES: _text(names), DETAILS: _text(details)}


def _text(value: Mapping[str, Any]) -> str:
    """JSON with a line for each entry of the two outer levels, so that a change is one line."""
    return json.dumps(value, indent=None, sort_keys=True, separators=(",", ":")).replace('},"', '},\n"') + "\n"


if __name__ == "__main__":
    rendered = render(Path(sys.argv[1]))
    if "--check" in sys.argv[2:]:
        stale = [path.name for path, text in rendered.items() if not path.exists() or path.read_text() != text]
        sys.exit(f"stale: {', '.join(stale)}; run docs/generate/deepspeed_names.py" if stale else None)
    for path, text in rendered.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
