"""The files of core import each other in one direction only, so that each can be read after those that it builds on.

An import within a function counts: it hides a circle, it does not open it. One for annotations alone
(`if TYPE_CHECKING:`) does not count, and neither does the `__init__` of a package that is named only on the way to a
module in it, since it does not lend the file any name.
"""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


def module_name(path, root):
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(node, package):
    """(module, name or "") of each import under `node`, those for annotations aside."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*base, *filter(None, [node.module])])
        yield from ((module, alias.name) for alias in node.names)
    else:
        is_for_annotations = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in node.orelse if is_for_annotations else ast.iter_child_nodes(node):
            yield from imported_names(child, package)


def import_graph(root):
    """Module -> the modules that it imports, of the files under `root`."""
    paths = {module_name(path, root): path for path in root.rglob("*.py")}
    graph = {}
    for name, path in paths.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        targets = {
            f"{module}.{item}" if f"{module}.{item}" in paths else module
            for module, item in imported_names(tree, package)
        }
        graph[name] = (targets & paths.keys()) - {name}
    return graph


def circle(graph):
    """The modules of one circle, in the order of their imports, the first repeated at the end; [] if there is none."""
    done, way = set(), []

    def walk(module):
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return []
        way.append(module)
        for target in sorted(graph[module]):
            if found := walk(target):
                return found
        done.add(way.pop())
        return []

    return next(filter(None, map(walk, sorted(graph))), [])


BETWEEN = "pack.first -> pack.second -> pack.first"


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("import pack.second", "import pack.first", BETWEEN),
        ("from pack import second", "from .first import x", BETWEEN),
        ("def f():\n    from pack.second import x", "class C:\n    from .first import x", BETWEEN),
        ("from pack.second import x", "if TYPE_CHECKING:\n    pass\nelse:\n    from pack import first", BETWEEN),
        ("from pack.second import x", "if TYPE_CHECKING:\n    from pack.first import x", ""),
        ("from pack.second import x", "import pack.third, os", ""),
        ("from pack.second import x", "from pack import x", "pack -> pack.first -> pack.second -> pack"),
    ],
)
def test_what_counts(tmp_path, first, second, found):
    files = {"__init__": "from pack.first import x", "first": first, "second": second, "third": "import math"}
    (tmp_path / "pack").mkdir()
    for name, text in files.items():
        (tmp_path / "pack" / f"{name}.py").write_text(text)
    assert " -> ".join(circle(import_graph(tmp_path))) == found


def test_core_imports_in_one_direction():
    graph = import_graph(SOURCE)
    assert "deepspeed.config.base" in graph["deepspeed.config.root"], "the files of core were not found"
    assert " -> ".join(circle(graph)) == ""
