"""What turns `docs/` and the pages beside it into the site of `mkdocs.yml`, without a change of any page.

Pages are written for GitHub: links lead out of `docs/`, lists follow their sentence without a blank line and nest by
the width of their mark, and the word after a fence's language is for our tests. MkDocs calls the `on_...` functions:
files outside of `docs/` that pages link to become pages below `repository/`, code too; public names get the pages of
`reference/api/`; what Python-Markdown reads otherwise than GitHub is written its way.
"""

import ast
import itertools
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "core/src"
OUTSIDE = "repository"  # the folder of the site for what is not in docs/
START = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "core/README.md", "compat/deepspeed/README.md")
LINK = re.compile(r"(?:\[(?P<name>[\w./-]+\.md)\]|(?<=\]))\((?P<target>[^)\s#]*)(?P<anchor>(?:#[^)\s]*)?)\)")
FENCED = re.compile(r"^( *)```.*?^\1```$\n?", flags=re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"( *)([-*]|\d+\.)( +)")
OF_THE_CODE = re.compile(r"^Read |\bStart reading\b|\b[Mm]ay\simport\b")
FIELDS = re.compile(r"^(Fields|Class attributes.*):$", flags=re.MULTILINE)
EXAMPLE = re.compile(r"(?:^ *>>> .*\n(?:^ *\S.*\n?)*)(?:\n(?: *>>> .*\n)(?:^ *\S.*\n?)*)*", flags=re.MULTILINE)
LANGUAGES = {".py": "python", ".json": "json", ".cpp": "cpp", ".h": "cpp", ".cu": "cuda", ".sh": "sh"}

# modules that users import by another name
KNOWN_AS = {
    "deepspeed.activation.checkpointing": "deepspeed.checkpointing",
    "deepspeed.checkpoint.consolidate": "deepspeed.utils.zero_to_fp32",
}
# shown before the others of a page, which are functions, then classes
FIRST = ("initialize", "DeepSpeedEngine", "init_distributed", "init_inference", "get_accelerator", "MoE", "Init")
IN_PARTS = ("DeepSpeedAccelerator",)  # classes whose bases are no pages of their own
# page of reference/api -> title, then packages, of which all public names are shown, and names `module:name`
API: dict[str, tuple[str, tuple[str, ...]]] = {
    "deepspeed": ("deepspeed", ("deepspeed",)),
    "comm": ("deepspeed.comm", ("deepspeed.comm",)),
    "zero": (
        "deepspeed.zero",
        (
            "deepspeed.zero",
            "deepspeed.zero.tools:estimate_zero2_model_states_mem_needs_all_live",
            "deepspeed.zero.tools:estimate_zero3_model_states_mem_needs_all_live",
            "deepspeed.zero.tools:estimate_zero2_model_states_mem_needs_all_cold",
            "deepspeed.zero.tools:estimate_zero3_model_states_mem_needs_all_cold",
        ),
    ),
    "checkpoint": (
        "deepspeed.checkpoint",
        (
            "deepspeed.checkpoint",
            "deepspeed.checkpoint.consolidate:get_fp32_state_dict_from_zero_checkpoint",
            "deepspeed.checkpoint.consolidate:load_state_dict_from_zero_checkpoint",
            "deepspeed.checkpoint.consolidate:convert_zero_checkpoint_to_fp32_state_dict",
            "deepspeed.checkpoint.convert:convert",
            "deepspeed.checkpoint.ds_to_universal:ds_to_universal",
        ),
    ),
    "activation": (
        "deepspeed.checkpointing",
        tuple(
            f"deepspeed.activation.checkpointing:{name}"
            for name in ("configure", "is_configured", "reset", "checkpoint", "non_reentrant_checkpoint")
        ),
    ),
    "pipe": ("deepspeed.pipe", ("deepspeed.pipe", "deepspeed.pipe.schedule")),
    "moe": (
        "deepspeed.moe",
        ("deepspeed.moe.layer:MoE", "deepspeed.moe.layer:MOELayer", "deepspeed.moe.gate:TopKGate"),
    ),
    "sequence": (
        "deepspeed.sequence",
        (
            "deepspeed.sequence.layer:DistributedAttention",
            "deepspeed.sequence.ring:RingAttention",
            "deepspeed.sequence.blockwise:ChunkedAttention",
            "deepspeed.sequence.hugging_face:UlyssesSPAttentionHF",
            "deepspeed.sequence.batches:UlyssesSPDataLoaderAdapter",
            "deepspeed.sequence.loss:mean_over_sequence",
            "deepspeed.sequence.loss:vocab_sequence_parallel_cross_entropy",
            "deepspeed.sequence.tiled:TiledMLP",
            "deepspeed.sequence.tiled:TiledFusedLogitsLoss",
        ),
    ),
    "linear": ("deepspeed.linear", ("deepspeed.linear",)),
    "inference": ("deepspeed.inference", ("deepspeed.inference",)),
    "ops": (
        "deepspeed.ops",
        tuple(
            f"deepspeed.ops.{name}"
            for name in ("adam", "adagrad", "lion", "lamb", "muon", "quantizer", "fp_quantizer", "aio", "registry")
        ),
    ),
    "data": ("deepspeed.data", ("deepspeed.data",)),
    "profiling": ("deepspeed.profiling", ("deepspeed.profiling",)),
    "accelerator": ("deepspeed.accelerator", ("deepspeed.accelerator",)),
    "plugins": ("deepspeed.plugins", ("deepspeed.plugins", "deepspeed.plugins.hookspecs")),
    "testing": (
        "deepspeed.testing",
        (
            "deepspeed.testing.distributed",
            "deepspeed.testing.requirements",
            "deepspeed.testing.suite",
        ),
    ),
}


class HouseStyle(griffe.Extension):
    """Writes docstrings as mkdocstrings, which calls it, reads them: examples, from `>>>` on, in fences, and fields of
    dataclasses as attributes."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = FIELDS.sub(lambda match: f"Attributes: {match[1].replace('`', '')}:", obj.docstring.value) + "\n"
            obj.docstring.value = EXAMPLE.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that `docs/` does not hold: those of the repository, of the API, and the list of decisions."""
    for path in _outside_pages():
        content = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, _site_name(path), content=content if _is_page(path) else _code(path)))
    files.append(File.generated(config, "decisions/index.md", content=_list_of(DOCS / "decisions")))
    for name, content in _api_pages():
        files.append(File.generated(config, f"reference/api/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write the page Python-Markdown's way, with links to pages of the site."""
    origin = _repository_name(page.file.src_uri)
    if page.file.src_uri.startswith("reference/api/") or not _is_page(origin):
        return markdown

    def lead(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match["target"]))
        name = f"[{_title(ROOT / path)}]" if match["name"] else ""
        return f"{name}({_target(match['target'], origin, page.file.src_uri)}{match['anchor']})"

    done = 0
    text = ""
    for fence in FENCED.finditer(markdown):
        text += LINK.sub(lead, markdown[done : fence.start()])
        text += re.sub(r"\A( *```\w+).*", r"\1", fence[0])
        done = fence.end()
    text += LINK.sub(lead, markdown[done:])
    return _lists(text)


def _is_page(path: str) -> bool:
    return path.endswith(".md")


def _site_name(path: str) -> str:
    """The name in the site of a file of the repository."""
    if path == "docs" or path.startswith("docs/"):
        return path.removeprefix("docs").removeprefix("/")
    return f"{OUTSIDE}/{path}" if _is_page(path) else f"{OUTSIDE}/{path}.md"


def _repository_name(site_name: str) -> str:
    """The file of the repository that a page of the site shows; a page of code has `.md` behind its name."""
    if not site_name.startswith(f"{OUTSIDE}/"):
        return f"docs/{site_name}"
    path = site_name.removeprefix(f"{OUTSIDE}/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def _linked(text: str, folder: str) -> Iterator[str]:
    """The files of the repository that a page in `folder` links to."""
    for target in (match["target"] for match in LINK.finditer(FENCED.sub("", text))):
        if target and "://" not in target and not target.startswith("mailto:"):
            yield posixpath.normpath(posixpath.join(folder, target))


def _outside_pages() -> list[str]:
    """The files outside of `docs/` that its pages, and these files in turn, link to."""
    waiting = [*START, *sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))]
    waiting += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("extensions/*/README.md"))
    found: dict[str, None] = {}
    while waiting:
        path = waiting.pop()
        if path in found or not (ROOT / path).is_file():
            continue
        found[path] = None
        if _is_page(path):
            waiting += _linked((ROOT / path).read_text(encoding="utf-8"), posixpath.dirname(path))
    return sorted(path for path in found if not path.startswith("docs/"))


def _target(target: str, origin: str, site_name: str) -> str:
    """Where a link of `origin` leads in the site."""
    if not target or "://" in target or target.startswith("mailto:"):
        return target
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    if (ROOT / path).is_dir():
        path += "/README.md" if (ROOT / path / "README.md").exists() else "/index.md"
    return posixpath.relpath(_site_name(path), posixpath.dirname(site_name) or ".")


def _code(path: str) -> str:
    """A page that shows a file of code."""
    fence = "`" * 5
    text = (ROOT / path).read_text(encoding="utf-8")
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n{fence} {{ .{language} }}\n{text}\n{fence}\n"


def _title(page: Path) -> str:
    """The first line of a page, which is its heading."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _list_of(folder: Path) -> str:
    """A page that lists the pages of `folder` by their titles."""
    rows = []
    for path in sorted(folder.glob("*.md")):
        rows.append(f"* [{_title(path)}]({path.name})")
    return f"# {folder.name.capitalize()}\n\n" + "\n".join(rows) + "\n"


def _lists(markdown: str) -> str:
    """Lists as Python-Markdown reads them: after a blank line, and four spaces deeper for each level."""
    lines: list[str] = []
    depths: list[int] = []  # where the text of each open item begins
    fence = ""
    blank = True
    for line in markdown.split("\n"):
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        if not text:
            lines.append("")
            blank = True
            continue
        item = None if fence else ITEM.match(line)
        if not fence:
            # a line that is not indented goes on with the item, unless a blank line, a heading or a table ends it
            while depths and indent < depths[-1] and (item or blank or text[0] in "#|`"):
                depths.pop()
        level = len(depths)
        if item:
            if not blank and level == 0 and lines and not lines[-1].startswith(" ") and not ITEM.match(lines[-1]):
                lines.append("")  # the first item below a sentence
            depths.append(item.end())
            lines.append(" " * 4 * level + text)
        elif level:
            deeper = max(0, indent - depths[-1]) if fence or text.startswith("```") else 0
            lines.append(" " * (4 * level + deeper) + text)
        else:
            lines.append(line)
        if text.startswith("```"):
            fence = "" if fence else "```"
        blank = False
    return "\n".join(lines)


def _api_pages() -> Iterator[tuple[str, str]]:
    """Name and text of each page of `reference/api`, its list of them first."""
    rows = ["# API", "", "What users and plugins import, from the docstrings. Names load when they are first used.", ""]
    shown: dict[str, str] = {}
    pages = []
    for page, (title, sources) in API.items():
        lines = [f"# {title}", ""]
        names = []
        elsewhere = []
        for source in sources:
            if ":" not in source:
                lines += [_introduction(source), ""]
            for name, address in _public(source):
                if address in shown:
                    elsewhere.append(f"[`{name}`]({shown[address]}.md#{address})")
                    continue
                shown[address] = page
                label = name.rpartition(".")[2]
                lines += [f"::: {address}", "    options:", f"      heading: {name}", f"      toc_label: {label}"]
                lines += ["      inherited_members: true", ""] if label in IN_PARTS else [""]
                names.append(f"[`{name.removeprefix(f'{title}.')}`]({page}.md#{address})")
        if elsewhere:
            lines += ["Shown on other pages: " + ", ".join(elsewhere) + ".", ""]
        rows += [f"## [{title}]({page}.md)", "", ", ".join(names), ""]
        pages.append((page, "\n".join(lines)))
    yield "index", "\n".join(rows)
    yield from pages


def _introduction(module: str) -> str:
    """The first paragraphs of a module's docstring, up to that on imports, which readers of its code need."""
    docstring = ast.get_docstring(ast.parse(_file_of(module).read_text(encoding="utf-8"))) or ""
    return "\n\n".join(itertools.takewhile(lambda text: not OF_THE_CODE.search(text), docstring.split("\n\n")))


def _public(source: str) -> Iterator[tuple[str, str]]:
    """Imported name and address of the public classes and functions of a package, a module or `module:name`."""
    module, _, name = source.partition(":")
    if name:
        yield f"{KNOWN_AS.get(module, module)}.{name}", f"{module}.{name}"
        return
    for name, address in sorted(_names(module).items(), key=_place):
        where = address.replace(":", ".")
        if ":" in address and _is_definition(*address.split(":")):
            yield f"{module}.{name}", where


def _place(item: tuple[str, str]) -> tuple[int, bool, str]:
    name = item[0]
    return FIRST.index(name) if name in FIRST else len(FIRST), name[0].isupper(), name


def _names(module: str) -> dict[str, str]:
    """Public name -> `module:name`, from the source of a module: its tables, imports and definitions."""
    found: dict[str, str] = {}
    exported: list[str] | None = None
    for statement in ast.parse(_file_of(module).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and statement.module and statement.module.startswith("deepspeed."):
            found |= {each.asname or each.name: f"{statement.module}:{each.name}" for each in statement.names}
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found[statement.name] = f"{module}:{statement.name}"
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            table = _literal(statement.value)
            if not isinstance(target, ast.Name) or table is None:
                continue
            if target.id == "_NAMES":
                found |= table
                exported = list(table)
            elif target.id == "_MODULES":
                found |= {each: f"{module}.{part}:{each}" for part, each in _words(table)}
            elif target.id == "__all__":
                exported = list(table)
    public = exported if exported is not None else [each for each, at in found.items() if at.startswith(f"{module}:")]
    return {name: found[name] for name in public if name in found and not name.startswith("_")}


def _words(table: dict[str, str]) -> Iterator[tuple[str, str]]:
    for part, names in table.items():
        for name in names.split():
            yield part, name


def _literal(value: ast.expr | None) -> Any:
    """The value of an expression of literals; None for another."""
    try:
        return ast.literal_eval(value) if value is not None else None
    except ValueError:
        return None


def _is_definition(module: str, name: str) -> bool:
    """Whether the name is a class or a function with a docstring in that module; old addresses count as none."""
    if not _file_of(module).exists():
        return False
    for statement in ast.parse(_file_of(module).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
            return ast.get_docstring(statement) is not None
    return False


def _file_of(module: str) -> Path:
    base = SOURCE / module.replace(".", "/")
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
