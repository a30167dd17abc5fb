"""Logging: one logger, quiet by default, each line with its rank. The last functions are DeepSpeed's, for scripts.

May import `errors`. Level: `DS_LOG_LEVEL` (a logging level name), or `logger.setLevel(...)`. The default level is just
below WARNING: it shows warnings, errors and progress (`announce`); the level WARNING silences progress.
"""

import functools
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from deepspeed.errors import ConfigError, either, environment_int, stated

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_BY_DEFAULT = logging.WARNING - 5  # the default level


class _RankFormatter(logging.Formatter):
    """`_RankFormatter` adds the global rank, which may be set in the environment only after import."""

    def format(self, record: logging.LogRecord) -> str:
        record.rank = own_rank()
        return super().format(record)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """`_StderrHandler` writes to the current `sys.stderr`, even after a test or a notebook replaced it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def,override]
        return sys.stderr


def own_rank() -> int:
    """Return the global rank from the environment; 0 if it has no (valid) number, for which `init_distributed` raises
    an error."""
    try:
        return environment_int("RANK", 0)
    except ConfigError:
        return 0


def _create_handler() -> _StderrHandler:
    handler = _StderrHandler()
    handler.setFormatter(_RankFormatter("[%(asctime)s] [%(levelname)s] [rank %(rank)s] %(message)s"))
    return handler


def _create_logger() -> logging.Logger:
    logger = logging.getLogger("DeepSpeed")
    logger.propagate = False
    level = environment_level()
    logger.setLevel((level if level in LEVELS else "WARNING") if level else _BY_DEFAULT)
    logger.addHandler(_create_handler())
    if level not in ("", *LEVELS) and own_rank() == 0:
        logger.warning(f"{stated('DS_LOG_LEVEL')}: found no level of that name; taking WARNING. Use {either(LEVELS)}")
    return logger


def environment_level() -> str:
    """Return the level in `DS_LOG_LEVEL`, in capitals; "" if it is not set."""
    return os.environ.get("DS_LOG_LEVEL", "").strip().upper()


logger = _create_logger()


def _speaks(ranks: Sequence[int] | None) -> bool:
    """Return whether this process is among the global `ranks`; None means rank 0, [-1] every rank."""
    ranks = [0] if ranks is None else ranks
    return -1 in ranks or own_rank() in ranks


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given global `ranks` only; `None` means rank 0, `[-1]` means every rank."""
    if _speaks(ranks):
        logger.log(level, message)


@functools.lru_cache(maxsize=1024)
def warn_once(message: str, ranks: tuple[int, ...] | None = None) -> None:
    """Warn at most once per process and message; `ranks` as in `log_dist`, if only some ranks can know the reason."""
    log_dist(message, ranks, logging.WARNING)


def shows_asked_for() -> bool:
    """Return whether lines that the configuration requests are shown: the level ERROR silences them."""
    return logger.isEnabledFor(logging.WARNING)


def announce(message: str, ranks: Sequence[int] | None = None, *, is_asked_for: bool = False) -> None:
    """Log a line of progress. It is shown by default; the level WARNING silences it.

    Args:
        is_asked_for: whether the configuration requests it (`steps_per_print`, say); then only ERROR silences it.
    """
    if shows_asked_for() if is_asked_for else logger.isEnabledFor(_BY_DEFAULT):
        report(message, ranks)


def report(message: str, ranks: Sequence[int] | None = None) -> None:
    """Log a line that the configuration requests (`wall_clock_breakdown`, ...), whatever the level is."""
    if _speaks(ranks):
        logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, message, (), None))


log_levels = {name.lower(): getattr(logging, name) for name in LEVELS}


class LoggerFactory:
    """`LoggerFactory` creates loggers with our format."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Return the logger `name`, which writes to stderr from `level` on. A second call adds no second handler.

        Raises:
            ValueError: if there is no name.
        """
        if name is None:
            raise ValueError("create_logger: found no name; give one")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        if not any(isinstance(handler, _StderrHandler) for handler in made.handlers):
            made.addHandler(_create_handler())
        return made


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the number of a level, in any case: `"info"` -> 20.

    Raises:
        ValueError: if there is no level of that name.
    """
    if log_level_str.lower() not in log_levels:
        raise ValueError(f"log level: found {log_level_str!r}; use {either(tuple(log_levels))}")
    return log_levels[log_level_str.lower()]


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of `custom_logger`, or of our logger, by its name."""
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    """Return the level of our logger as a number."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Return whether the level of our logger is `max_log_level_str` or lower.

    Raises:
        ValueError: if there is no level of that name.
    """
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


@functools.lru_cache(maxsize=1024)
def warning_once(*args: Any, **kwargs: Any) -> None:
    """Call `logger.warning` at most once per process and message."""
    logger.warning(*args, **kwargs)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Call `log_dist` at most once per process and message."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@functools.lru_cache(maxsize=1024)
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """Return `message` with a rank prefix on the global `ranks`, as in `log_dist`; None on others."""
    return f"[Rank {own_rank()}] {message}" if _speaks(ranks) else None


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print `message` with the rank to stdout, only on the global `ranks`; as in `log_dist`."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        sys.stdout.write(f"{text}\n")


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: Any = None) -> None:
    """Write `message` with `"rank"` as JSON to the file `path`, only on the global `ranks`; as in `log_dist`.

    Raises:
        ValueError: if there is no path.
    """
    if not _speaks(ranks):
        return
    if path is None:
        raise ValueError("print_json_dist: found no path; give the file to write")
    with open(path, "w", encoding="utf-8") as file:
        json.dump({**message, "rank": own_rank()}, file)


def print_configuration(args: Any, name: str) -> None:
    """Log the sorted attributes of `args` under `name`, one per line."""
    logger.info(f"{name}:")
    for attribute in sorted(vars(args)):
        logger.info(f"  {attribute} {'.' * (29 - len(attribute))} {getattr(args, attribute)}")
