"""The records of the table. May import nothing of the project."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class State(enum.Enum):
    """`State` says whether a documented name works, works differently, or is not here yet."""

    WORKS = "works"
    DIFFERS = "differs"
    NOT_YET = "not yet"


@dataclass(frozen=True)
class Feature:
    """A feature that is not here yet.

    Args:
        title: subject of the sentence "... is not in this version".
        instead: what to do without it, as an instruction.
    """

    title: str
    instead: str

    def explain(self, asked: str) -> str:
        """The message for a user of `asked`."""
        return f"{asked}: {self.title} is not in this version of ds-core; {self.instead}"


@dataclass(frozen=True)
class Module:
    """A documented module of a feature that is not here yet. It imports; its names refuse when they are used.

    Args:
        feature: key of FEATURES.
        classes: names that can be subclassed and given to isinstance.
        functions: names that raise when they are called.
        errors: exceptions, for `except` clauses.
        forwards: name -> "module:name" below `deepspeed`, for what another module has.
    """

    feature: str
    classes: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    forwards: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Every name that can be imported from it, except its submodules."""
        return sorted({*self.classes, *self.functions, *self.errors, *self.forwards})


@dataclass(frozen=True)
class Default:
    """A key of the configuration whose default is not that of the pinned version, and why."""

    ours: object
    theirs: object
    reason: str


@dataclass(frozen=True)
class EngineMethod:
    """A documented method of the engine that is not here yet, and what to do instead of calling it."""

    name: str
    instead: str

    def explain(self) -> str:
        """The message for a user of the method."""
        return f"{self.name}: this method of DeepSpeed's engine is not in this version of ds-core; {self.instead}"


@dataclass(frozen=True)
class Row:
    """One line of the page: a documented name, its state, and one sentence."""

    area: str
    name: str
    state: State
    sentence: str

    @property
    def is_address(self) -> bool:
        """Whether the name is what Python can look up, such as `deepspeed.zero.Init`."""
        return self.name.startswith("deepspeed.") and all(part.isidentifier() for part in self.name.split("."))
