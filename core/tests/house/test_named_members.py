"""Pages, docstrings and comments name members that exist: no `Class.member` outlives a renaming.

A class that the repository does not define, or that derives from one, is not checked.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("core", "extensions", "compat", "examples", "benchmarks", "template", "docs")
REFERENCE = re.compile(r"`([A-Z]\w*)\.([a-z_]\w*)[`(]")
#: pages about other names: those of DeepSpeed that are missing here, and former names of ours
OF_OTHER_NAMES = {"compatibility.md", "decisions"}


def files(suffix):
    """The repository's files of that suffix that are checked."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob(f"*{suffix}")]
    found += ROOT.glob(f"*{suffix}")
    return [path for path in found if not OF_OTHER_NAMES & set(path.parts) and path.name != "CHANGELOG.md"]


def members_of(node):
    """The names that a class statement defines: methods, and attributes of the class and of `self`."""
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in {"self", "cls"}:
            yield each.attr
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id


class Classes:
    """`Classes` holds the members and the bases of every class in some sources, by class name."""

    def __init__(self, sources):
        self.members, self.bases = defaultdict(set), defaultdict(set)
        for source in sources:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef):
                    self.members[node.name].update(members_of(node))
                    self.bases[node.name].update(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)

    def lack(self, name, member, seen=()):
        """Whether the class and its bases are all known, and none has the member."""
        if name not in self.members or member in self.members[name]:
            return False
        return all(base in seen or self.lack(base, member, (*seen, name)) for base in self.bases[name])

    def unknown_in(self, text):
        """The references in `text` to members that do not exist."""
        return [f"{name}.{member}" for name, member in REFERENCE.findall(text) if self.lack(name, member)]


def test_members_that_are_named_exist():
    texts = {path: path.read_text(encoding="utf-8") for suffix in (".py", ".md") for path in files(suffix)}
    classes = Classes(text for path, text in texts.items() if "src" in path.parts and "{{" not in str(path))
    found = {str(path.relative_to(ROOT)): classes.unknown_in(text) for path, text in texts.items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_member_that_is_gone_is_found():
    classes = Classes(["class A:\n    x = 1\n    def f(self): self.y = 2\nclass B(A): pass\nclass C(dict): pass"])
    assert classes.unknown_in("`A.x`, `A.f`, `A.f()`, `A.y`, `B.x`, `C.any`, `Other.any`") == []
    assert classes.unknown_in("`A.g`, `B.h()`, `B.x(1)`") == ["A.g", "B.h"]
