"""Keys, flags, defaults, names, methods and hooks are those that `interface.json` records: none moves unseen."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
POLICY = "\nCONTRIBUTING.md (Releases) says when an entry may change or go; then run python docs/generate/interface.py"


@pytest.fixture
def generator(monkeypatch):
    folder = ROOT / "docs" / "generate"
    assert all((folder / name).exists() for name in ("interface.py", "completion.py"))
    monkeypatch.syspath_prepend(str(folder))
    import interface

    yield interface
    for name in ("interface", "completion"):
        sys.modules.pop(name, None)


def differences(recorded, found):
    for kind in recorded.keys() | found.keys():
        before, now = recorded.get(kind, {}), found.get(kind, {})
        yield from (f"{kind}: {name} is gone" for name in before.keys() - now.keys())
        yield from (f"{kind}: {name} is new" for name in now.keys() - before.keys())
        common = before.keys() & now.keys()
        yield from (
            f"{kind}: {name} was {before[name]!r}, is {now[name]!r}" for name in common if before[name] != now[name]
        )


def test_nothing_moves_unseen(generator):
    recorded = json.loads(generator.FILE.read_text(encoding="utf-8"))
    found = json.loads(generator.text())
    assert not sorted(differences(recorded, found)), POLICY


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_complete_what_the_parsers_take(generator, shell):
    completion = sys.modules["completion"]
    file = completion.FOLDER / f"completion.{shell}"
    assert file.read_text(encoding="utf-8") == completion.render(shell), "stale: run python docs/generate/completion.py"


def test_a_moved_default_and_a_lost_flag_are_named(generator):
    recorded = json.loads(generator.FILE.read_text(encoding="utf-8"))
    changed = json.loads(json.dumps(recorded))
    changed["keys"]["gradient_clipping"] = 0.5
    del changed["flags"]["ds_verify --ranks"]
    assert sorted(differences(recorded, changed)) == [
        "flags: ds_verify --ranks is gone",
        "keys: gradient_clipping was 1.0, is 0.5",
    ]
