"""Tags: the names of checkpoints, the file `latest` that holds the newest one, and the check that ranks share one."""

from collections.abc import Callable, Sequence
from pathlib import Path

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.durable import disk_error, sync_folder, write_file
from deepspeed.checkpoint.index import check_regular
from deepspeed.checkpoint.location import reason_of
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.log import logger

_RESERVED = (layout.LATEST_FILE, layout.SCRIPT_FILE)
_MAX_NAME_BYTES = 255  # of a folder
_MAX_TAG_BYTES = 200  # file systems allow 255, of which `.<tag>.staging` needs some


def check_tag(tag: object) -> str:
    """The tag as a string that can name a folder; `ConfigError` when it cannot. Called before a load."""
    name = str(tag)
    if len(name.encode(errors="replace")) > _MAX_NAME_BYTES:
        raise ConfigError(f"tag: {name[:40]!r}... has {len(name)} characters, and a folder's name is shorter.")
    if not name or name.startswith(".") or name in _RESERVED or any(c in name for c in "/\\\0\n"):
        raise ConfigError(
            f"tag: {name!r} cannot name a checkpoint's folder. Use a plain name such as 'global_step100', "
            f"without slashes or a leading dot, and not one of {', '.join(_RESERVED)}."
        )
    return name


def check_new_tag(tag: object) -> str:
    """`check_tag` for a save, which also refuses names that would be hard to load again."""
    name = check_tag(tag)
    if name != name.strip() or not name.isprintable():
        raise ConfigError(
            f"tag: {name!r} begins or ends with a space, or has characters that cannot be printed; the file "
            f"{layout.LATEST_FILE!r} could not name it safely. Use a plain name such as 'global_step100'."
        )
    size = len(name.encode())
    if size > _MAX_TAG_BYTES:
        raise ConfigError(f"tag: {name[:40]!r}... has {size} bytes; use at most {_MAX_TAG_BYTES}.")
    return name


def read_latest(load_dir: Path) -> str | None:
    """The tag in `<load_dir>/latest`, or None when there is no such file.

    White space around it is an editor's, except where a folder has exactly that name.
    """
    path = load_dir / layout.LATEST_FILE
    check_regular(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {reason_of(error)}. Correct it, or pass a tag.") from error
    try:
        stripped, exact = check_tag(text.strip()), text.rstrip("\n")
        return exact if exact != stripped and layout.whole_folder(load_dir / check_tag(exact)) else stripped
    except ConfigError as error:
        raise CheckpointError(
            f"{path} holds {text[:200]!r}, which is no tag. Write one of {layout.tags_in(load_dir)} into it, or pass a "
            "tag."
        ) from error


def write_latest(save_dir: Path, tag: str) -> None:
    """Let `<save_dir>/latest` name `tag`: the last act of a save, and atomic."""
    draft = layout.draft_file(save_dir / tag)
    write_file(save_dir / layout.LATEST_FILE, lambda file: file.write(tag.encode()), draft)
    try:
        sync_folder(save_dir)
    except OSError as error:
        raise disk_error("make durable", save_dir, error) from error


def validate_tag(tag: object, mode: str, all_gather: Callable[[str], Sequence[str]]) -> str:
    """Check that all ranks save under one tag (config `checkpoint.tag_validation`). Called by every rank before a save.

    Args:
        tag: this rank's tag.
        mode: "Ignore" compares nothing, "Warn" warns, "Fail" raises `CheckpointError`; in any case of letters.
        all_gather: gets this rank's tag and returns every rank's, in rank order. Not called for "Ignore".

    Returns the tag as a string.
    """
    name = check_new_tag(tag)
    wanted = mode.upper()
    if wanted not in ("IGNORE", "WARN", "FAIL"):
        raise ConfigError(f"checkpoint.tag_validation: found {mode!r}, allowed are 'Ignore', 'Warn' and 'Fail'.")
    if wanted == "IGNORE":
        return name
    tags = list(all_gather(name))
    if wanted == "FAIL":
        check_same_tags(tags)
    elif len(set(tags)) > 1:
        logger.warning(_different(tags))
    return name


def check_same_tags(tags: Sequence[str]) -> None:
    """Refuse to save one checkpoint under several tags, one per rank: no folder would have the files of all ranks.
    Called by every rank with those of all, in rank order."""
    if len(set(tags)) > 1:
        raise CheckpointError(_different(tags))


def _different(tags: Sequence[str]) -> str:
    return (
        "the ranks were asked to save one checkpoint under different tags: "
        f"{', '.join(f'rank {rank}: {found!r}' for rank, found in enumerate(tags))}. "
        "Compute the tag from something that all ranks share, such as the global step."
    )
