"""Logging: one logger, quiet by default, each line with its rank.

May import `errors`. Level: `DS_LOG_LEVEL` (a logging level name), or `logger.setLevel(...)`. By default it is just
below WARNING: warnings and errors are shown, and lines of progress (`announce`), which WARNING silences.
"""

import functools
import logging
import os
import sys
from collections.abc import Sequence

from deepspeed.errors import ConfigError, either, environment_int, stated

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_BY_DEFAULT = logging.WARNING - 5  # the level


class _RankFormatter(logging.Formatter):
    """Adds the global rank, which the environment may learn only after import."""

    def format(self, record: logging.LogRecord) -> str:
        record.rank = own_rank()
        return super().format(record)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to today's `sys.stderr`, also after a test or a notebook replaced it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def,override]
        return sys.stderr


def own_rank() -> int:
    """The global rank that the environment gives; 0 where it gives none or no number, which `init_distributed` refuses
    with the reason."""
    try:
        return environment_int("RANK", 0)
    except ConfigError:
        return 0


def _create_logger() -> logging.Logger:
    logger = logging.getLogger("DeepSpeed")
    logger.propagate = False
    level = environment_level()
    logger.setLevel((level if level in LEVELS else "WARNING") if level else _BY_DEFAULT)
    handler = _StderrHandler()
    handler.setFormatter(_RankFormatter("[%(asctime)s] [%(levelname)s] [rank %(rank)s] %(message)s"))
    logger.addHandler(handler)
    if level not in ("", *LEVELS) and own_rank() == 0:
        logger.warning(f"{stated('DS_LOG_LEVEL')}: found no level of that name; taking WARNING. Use {either(LEVELS)}")
    return logger


def environment_level() -> str:
    """The level that `DS_LOG_LEVEL` names, in capitals; "" where it is not set."""
    return os.environ.get("DS_LOG_LEVEL", "").strip().upper()


logger = _create_logger()


def _speaks(ranks: Sequence[int] | None) -> bool:
    """Whether this process is among the global `ranks`; None means rank 0, [-1] every rank."""
    ranks = [0] if ranks is None else ranks
    return -1 in ranks or own_rank() in ranks


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given global `ranks` only; `None` means rank 0, `[-1]` means every rank."""
    if _speaks(ranks):
        logger.log(level, message)


@functools.lru_cache(maxsize=1024)
def warn_once(message: str, ranks: tuple[int, ...] | None = None) -> None:
    """Warn at most once per process and message; `ranks` as in `log_dist`, for what only some of them can know."""
    log_dist(message, ranks, logging.WARNING)


def shows_asked_for() -> bool:
    """Whether lines are shown that the configuration asks for: the level ERROR silences them."""
    return logger.isEnabledFor(logging.WARNING)


def announce(message: str, ranks: Sequence[int] | None = None, *, is_asked_for: bool = False) -> None:
    """Log a line of progress, which is shown by default; the level WARNING silences it.

    Args:
        is_asked_for: by the configuration, as `steps_per_print` does; then only the level ERROR silences it.
    """
    if shows_asked_for() if is_asked_for else logger.isEnabledFor(_BY_DEFAULT):
        report(message, ranks)


def report(message: str, ranks: Sequence[int] | None = None) -> None:
    """Log what the user asked for in the configuration (`wall_clock_breakdown`, ...), whatever the level is."""
    if _speaks(ranks):
        logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, message, (), None))
