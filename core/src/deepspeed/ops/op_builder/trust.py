"""Whose files are loaded: a library is code that runs as this user, so nobody but this user and root may write it."""

import os
import stat
from pathlib import Path

from deepspeed.errors import OpUnavailable

_ADVICE = "give TORCH_EXTENSIONS_DIR a folder of your own"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class CannotMake(OpUnavailable):
    """A folder that cannot be made; another place may do."""


def private_folder(folder: Path) -> Path:
    """`folder`, made with mode 0700 if need be, and checked.

    Args:
        folder: absolute.

    Raises:
        CannotMake: it cannot be made.
        OpUnavailable: another user owns it, can write or rename it, or can change a link on the way.
    """
    try:
        for place in (*reversed(folder.parents), folder):  # a folder on the way, too, is ours alone, whatever the umask
            if not place.exists():
                place.mkdir(mode=0o700, exist_ok=True)
        resolved = folder.resolve()
    except OSError as error:
        raise CannotMake(f"the folder for built ops, {folder}, cannot be made: {error.strerror}") from error
    _check_owner(folder, resolved)
    _check_way(folder, resolved)
    return folder


def distrust(path: Path) -> str | None:
    """Return why what is at `path`, a file or folder of the cache, could be someone else's; None when it is ours alone.

    A symbolic link is never ours: the cache makes none.
    """
    state = path.lstat()
    if stat.S_ISLNK(state.st_mode):
        return f"{path} is a symbolic link"
    if not _is_ours(state.st_uid):
        return f"{path} belongs to user {state.st_uid}, not to {os.geteuid()}"
    if state.st_mode & _OTHERS:
        return f"{path} can be written by others (mode {_octal(state)})"
    return None


def _check_owner(folder: Path, resolved: Path) -> None:
    links = [place for place in (folder, *folder.parents) if place.is_symlink()]
    for place in (resolved, *links):
        owner = place.lstat().st_uid
        if not _is_ours(owner):
            shown = f"{folder}," if place in (folder, resolved) else f"{folder}, has the link {place} on its way, which"
            raise OpUnavailable(
                f"the folder for built ops, {shown} belongs to user {owner}, not to {os.geteuid()}: what is loaded "
                f"from there could be someone else's code; {_ADVICE}"
            )


def _check_way(folder: Path, resolved: Path) -> None:
    state = resolved.stat()
    if state.st_mode & _OTHERS:
        raise OpUnavailable(
            f"the folder for built ops, {folder}, can be written by others (mode {_octal(state)}): what is loaded from "
            f"there could be someone else's code; `chmod go-w {folder}`, or {_ADVICE}"
        )
    for parent in dict.fromkeys((*folder.parents, *resolved.parents)):
        state = parent.stat()
        if state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX:
            raise OpUnavailable(
                f"the folder for built ops, {folder}, lies in {parent}, where everybody may rename it (mode "
                f"{_octal(state)}); {_ADVICE}"
            )


def _is_ours(owner: int) -> bool:
    return owner in (os.geteuid(), 0)


def _octal(state: os.stat_result) -> str:
    return f"{stat.S_IMODE(state.st_mode):04o}"
