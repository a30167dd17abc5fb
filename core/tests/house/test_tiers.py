"""`make test-all` runs all that `make test` runs, with every corner that is marked `sweep`."""

import importlib.util
from pathlib import Path

import nox

NOXFILE = Path(__file__).parents[3] / "noxfile.py"
# no tests, or a covering set of them
WITHOUT_SWEEPS = {"lint", "types", "examples", "sanitize", "torch(oldest)", "torch(newest)", "libraries"}


class Session:
    """Notes what is queued: name -> the words for it."""

    posargs = ("-x",)

    def __init__(self):
        self.queued = {}

    def notify(self, name, posargs=()):
        self.queued[name] = tuple(posargs)


def test_every_session_of_make_test_is_in_it():
    spec = importlib.util.spec_from_file_location("noxfile_of_the_test", NOXFILE)
    noxfile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(noxfile)
    session = Session()
    noxfile.test_all.func(session)
    for name in nox.options.sessions:
        matching = [queued for queued in session.queued if queued == name or queued.startswith(f"{name}(")]
        assert matching, f"{name} is not in test-all"
    for name, words in session.queued.items():
        assert words == (() if name in WITHOUT_SWEEPS else ("-m", "", "-x")), name


def test_the_sweep_is_deselected_by_default(pytestconfig):
    assert "not sweep" in " ".join(pytestconfig.getini("addopts"))
