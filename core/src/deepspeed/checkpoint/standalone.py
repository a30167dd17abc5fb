"""`zero_to_fp32.py`: one program out of several files of this folder. Imports no torch."""

import ast
from pathlib import Path

#: in the order in which the program has them; the first says what it is
_FILES = ("consolidate_files.py", "consolidate_join.py", "consolidate.py")
_OWN = "deepspeed.checkpoint.consolidate"


def script() -> bytes:
    """The program, which needs torch and the standard library: the files without their imports of each other."""
    folder = Path(__file__).parent
    texts = [(folder / name).read_text(encoding="utf-8") for name in _FILES]
    about = ast.get_docstring(ast.parse(texts[-1]), clean=False)
    return "\n\n".join([f'#!/usr/bin/env python3\n"""{about}"""\n', *map(_without_imports, texts)]).encode()


def _without_imports(text: str) -> str:
    """A file without its imports of the others."""
    lines = text.split("\n")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OWN):
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(lines)
