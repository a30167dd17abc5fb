"""Names, signatures and defaults of DeepSpeed's sdists as data: `python deepspeed_names.py FOLDER [--check]`.

FOLDER has the sdists `deepspeed-0.19.6.tar.gz` and `deepspeed-0.19.8.tar.gz`, as `pip download` leaves them. They are
parsed, not imported; nothing but names, signatures and defaults is kept:

    core/src/deepspeed/compatibility/names.json     module -> public name -> what it is, of both versions
    core/tests/compat/deepspeed_names.json          for tests: signatures, members of classes, keys and their defaults

A name that a module defines is a "class", a "def" or a "value". A package (an `__init__.py`) also has re-exports: names
that it imports, one by one or by `*`, and the submodules that are imported along with it. Of a re-export the address
is kept where DeepSpeed defines it, "module:name", or "module" for a whole module. Names that come from Python, torch
or another library (`deepspeed.comm.torch`) are no names of DeepSpeed, and are left out wherever they turn up; so are
the imports of modules that are no packages, which serve the module itself.

`nox -s deepspeed` downloads the sdists and runs this with `--check`.
"""

import ast
import itertools
import json
import sys
import tarfile
from collections.abc import Collection, Iterator, Mapping
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

# Folders beside the package of which it has copies: some of its modules import from the one or the other.
_COPIES = {"accelerator": "deepspeed.accelerator", "op_builder": "deepspeed.ops.op_builder"}


def walk(sdist: Path) -> tuple[dict[str, ast.Module], set[str]]:
    """Module -> its syntax tree, of all modules in the package of an sdist; and which of them are packages."""
    modules, packages = {}, set()
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = Path(member.name)
            if path.suffix == ".py" and len(path.parts) > 2 and path.parts[1] == "deepspeed":
                content = archive.extractfile(member)
                assert content is not None
                whole = ".".join(path.with_suffix("").parts[1:])
                name = whole.removesuffix(".__init__")
                modules[name] = ast.parse(content.read())
                if name != whole:
                    packages.add(name)
    return modules, packages


def public(tree: ast.Module) -> dict[str, ast.AST]:
    """Public names that a module defines."""
    return {name: node for name, node in _definitions(tree).items() if not name.startswith("_")}


def _definitions(tree: ast.Module) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.setdefault(node.name, node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, node)
    return found


class Imports:
    """The imports of all modules of an sdist, and the names that packages have from them."""

    def __init__(self, modules: Mapping[str, ast.Module], packages: Collection[str]) -> None:
        self._modules, self._packages = modules, packages
        self._definitions = {module: _definitions(tree) for module, tree in modules.items()}
        # module -> name there -> module and name it is imported from; the name is "" for a whole module
        self._taken: dict[str, dict[str, tuple[str, str]]] = {module: {} for module in modules}
        self._stars: dict[str, list[str]] = {module: [] for module in modules}
        self._imported: dict[str, set[str]] = {}  # module -> those that its import imports, packages around them too
        for module, tree in modules.items():
            named = {module}
            for node in _statements(tree.body):
                if isinstance(node, ast.ImportFrom):
                    named |= self._take_from(module, node)
                elif isinstance(node, ast.Import):
                    named |= self._take(module, node)
            self._imported[module] = {outer for each in named for outer in _enclosing(each)} & modules.keys()

    def reexports(self, package: str) -> dict[str, str]:
        """Public name of DeepSpeed that a package has and does not define -> "module:name", or "module"."""
        names = self._names(package)
        found = {name: self._origin(package, name) for name in names - self._definitions[package].keys()}
        for module in self._loaded_with(package):
            parent, _, name = module.rpartition(".")
            if parent == package and name not in names:
                found[name] = module
        return {name: address for name, address in found.items() if address and not name.startswith("_")}

    def unbound(self) -> Iterator[tuple[str, str]]:
        """Module and name, where a module imports what no statement binds: op_builder sets its builders in a loop."""
        for base, name in {each for taken in self._taken.values() for each in taken.values()}:
            if base in self._modules and name not in {"", *self._names(base)} and f"{base}.{name}" not in self._modules:
                yield base, name

    def _take_from(self, module: str, node: ast.ImportFrom) -> set[str]:
        """Note the names of a `from ... import`. Returns the modules it imports."""
        base = self._absolute(module, node)
        for alias in node.names:
            if alias.name != "*":
                self._taken[module].setdefault(alias.asname or alias.name, (base, alias.name))
            elif base in self._modules:
                self._stars[module].append(base)
        return {base, *(f"{base}.{alias.name}" for alias in node.names)}

    def _take(self, module: str, node: ast.Import) -> set[str]:
        """Note the names of an `import`. Returns the modules it imports."""
        for alias in node.names:
            top = alias.name.partition(".")[0]
            name, whole = (alias.asname, alias.name) if alias.asname else (top, top)
            self._taken[module].setdefault(name, (whole, ""))
        return {alias.name for alias in node.names}

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that a `from` names."""
        if not node.level:
            top, *below = (node.module or "").split(".")
            return ".".join([_COPIES.get(top, top), *below])
        around = module.split(".")
        around = around[: len(around) - node.level + (module in self._packages)]
        return ".".join([*around, *([node.module] if node.module else [])])

    def _origin(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> str:
        """The address where a name of a module is defined; "" if that is outside of DeepSpeed."""
        if name in self._definitions[module]:
            return f"{module}:{name}"
        if (module, name) not in seen:
            seen |= {(module, name)}
            if name in self._taken[module]:
                base, original = self._taken[module][name]
                if base not in self._modules:
                    return ""
                return self._origin(base, original, seen) if original else base
            for base in self._stars[module]:
                if name in self._exported(base):
                    return self._origin(base, name, seen)
        return f"{module}.{name}" if f"{module}.{name}" in self._modules else f"{module}:{name}"

    def _names(self, module: str, seen: frozenset[str] = frozenset()) -> set[str]:
        """Names that a module defines or imports, of other libraries too."""
        if module in seen:
            return set()
        starred = (self._exported(base, seen | {module}) for base in self._stars[module])
        return {*self._definitions[module], *self._taken[module]}.union(*starred)

    def _exported(self, module: str, seen: frozenset[str] = frozenset()) -> set[str]:
        """Names that `from module import *` takes."""
        listed = self._definitions[module].get("__all__")
        if isinstance(listed, ast.Assign):
            return set(ast.literal_eval(listed.value))
        return {name for name in self._names(module, seen) if not name.startswith("_")}

    def _loaded_with(self, module: str) -> set[str]:
        """Every module that an import of this one imports."""
        loaded: set[str] = set()
        waiting = {module}
        while waiting:
            loaded |= waiting
            waiting = set().union(*(self._imported[each] for each in waiting)) - loaded
        return loaded


def _enclosing(module: str) -> Iterator[str]:
    """A module, and the packages around it: their import comes before its own."""
    return itertools.accumulate(module.split("."), lambda outer, name: f"{outer}.{name}")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module that run, those inside of `if` and `try` included."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _statements(node.orelse)
        elif isinstance(node, ast.If | ast.Try):
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
        modules, packages = walk(folder / f"deepspeed-{version}.tar.gz")
        imports = Imports(modules, packages)
        found: dict[str, Any] = {"defaults": dict(sorted(defaults(modules).items())), "modules": {}}
        for module, tree in sorted(modules.items()):
            own = names.setdefault(module, {})
            detail = found["modules"][module] = {}
            for name, node in sorted(public(tree).items()):
                own.setdefault(name, kind(node))
                if isinstance(node, ast.ClassDef):
                    detail[name] = members(node)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    detail[name] = signature(node)
            for name, address in imports.reexports(module).items() if module in packages else ():
                own.setdefault(name, address)
        for module, name in imports.unbound():
            names[module].setdefault(name, "value")
        details[version] = found
    return {NAMES: _text(names), DETAILS: _text(details)}


def _text(value: Mapping[str, Any]) -> str:
    """JSON with a line for each entry of the two outer levels, so that a change is one line."""
    return json.dumps(value, indent=None, sort_keys=True, separators=(",", ":")).replace('},"', '},\n"') + "\n"


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python docs/generate/deepspeed_names.py FOLDER [--check]; FOLDER has DeepSpeed's sdists")
    rendered = render(Path(sys.argv[1]))
    if "--check" in sys.argv[2:]:
        stale = [path.name for path, text in rendered.items() if not path.exists() or path.read_text() != text]
        sys.exit(f"stale: {', '.join(stale)}; run docs/generate/deepspeed_names.py" if stale else None)
    for path, text in rendered.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
