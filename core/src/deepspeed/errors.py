"""What can go wrong, as types. Every message says what was asked, what was found and what to do.

    DeepSpeedError
    ├── ConfigError        the user's JSON, arguments or environment   (also a ValueError)
    ├── PluginError        an accelerator or feature plugin            (also a RuntimeError)
    ├── OpUnavailable      a kernel that was asked for by name         (also a RuntimeError)
    ├── CommError          process groups and collectives              (also a RuntimeError)
    ├── CheckpointError    files that are missing, foreign or damaged  (also a RuntimeError)
    ├── StateError         a call that is not legal now                (also a RuntimeError)
    └── AbsentMemberError  a member of DeepSpeed's that is not here    (also an AttributeError)

May import nothing of the project.
"""


class DeepSpeedError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(DeepSpeedError, ValueError):
    """A configuration value is wrong. The message starts with the path of the key."""


class PluginError(DeepSpeedError, RuntimeError):
    """A plugin that was asked for by name is missing or broken."""


class OpUnavailable(DeepSpeedError, RuntimeError):
    """An op has no implementation here; the message lists every "no" with its reason."""


class CommError(DeepSpeedError, RuntimeError):
    """A process group could not be built or a collective was misused."""


class CheckpointError(DeepSpeedError, RuntimeError):
    """A checkpoint cannot be written or read; the message names the file."""


class StateError(DeepSpeedError, RuntimeError):
    """A call came at a moment at which it is not legal, for example `step()` inside a backward."""


class AbsentMemberError(DeepSpeedError, AttributeError):
    """A member of one of DeepSpeed's classes that is not here; the message says what is instead. `hasattr` is False."""


def counted(number: int, noun: str) -> str:
    """A number of things, for messages.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def first_line(error: BaseException) -> str:
    """What `error` says in its first line, for a message of one line; its type when it says nothing."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
