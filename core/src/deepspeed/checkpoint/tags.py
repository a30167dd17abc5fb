"""Tags: the names of checkpoints, the files that all tags of a directory share, and the facts in the index of each tag.

All tags share `latest`, which names the newest one, and `zero_to_fp32.py`, one program that is joined from several
files of this folder. `saved_tags` lists the tags of a directory for `plan_prune` and for `ds_ckpt`. `last_good_tag`
finds a tag to offer after a load found damage: all ranks look together for another tag that is whole.
"""

import ast
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.durable import disk_error, sync_folder, write_file
from deepspeed.checkpoint.index import Index, check_content, check_regular, check_size, fault_in_table, read_index
from deepspeed.checkpoint.layout import is_remote, location, reason_of, store_failures
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.log import logger

if TYPE_CHECKING:  # it imports torch, and the writer process lists tags too
    from deepspeed.checkpoint.checkpointer import Gather


_RESERVED = (layout.LATEST_FILE, layout.SCRIPT_FILE)
_MAX_NAME_BYTES = 255  # of a folder
_MAX_TAG_BYTES = 200  # file systems allow 255, of which `.<tag>.staging` needs some


def check_tag(tag: object) -> str:
    """Return the tag as a string that can name a folder; raise `ConfigError` if it cannot. Called before a load."""
    name = str(tag)
    num_bytes = len(name.encode(errors="replace"))
    if num_bytes > _MAX_NAME_BYTES:
        raise ConfigError(
            f"tag: {name[:40]!r}... has {num_bytes} bytes, and a folder's name has at most {_MAX_NAME_BYTES}."
        )
    if not name or name.startswith(".") or name in _RESERVED or any(c in name for c in "/\\\0\n"):
        raise ConfigError(
            f"tag: {name!r} cannot name a checkpoint's folder. Use a plain name such as 'global_step100', "
            f"without slashes or a leading dot, and not one of {', '.join(_RESERVED)}."
        )
    return name


def check_new_tag(tag: object) -> str:
    """Check a tag for a save: `check_tag`, and refuse names that would be hard to load again."""
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
    """Return the tag in `<load_dir>/latest`, or None if there is no such file.

    White space around the tag is dropped, unless a folder has exactly that name.
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
    """Let `<save_dir>/latest` name `tag`: the last step of a save, and atomic."""
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
        mode: "Ignore" compares nothing, "Warn" warns, "Fail" raises `CheckpointError`; in upper or lower case.
        all_gather: takes this rank's tag and returns every rank's, in rank order. Not called for "Ignore".

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
    Every rank calls it with the tags of all ranks, in rank order."""
    if len(set(tags)) > 1:
        raise CheckpointError(_different(tags))


def _different(tags: Sequence[str]) -> str:
    return (
        "the ranks were asked to save one checkpoint under different tags: "
        f"{', '.join(f'rank {rank}: {found!r}' for rank, found in enumerate(tags))}. "
        "Compute the tag from something that all ranks share, such as the global step."
    )


@dataclass(frozen=True)
class SavedTag:
    """One tag, described by its folder and its index, without reading the files."""

    name: str
    folder: Path
    """The folder in which the tag's whole version lies; see `layout.whole_folder`."""
    index: Index | None
    """Without the lists of tensors. None for a checkpoint that has none, or has one that cannot be read (`trouble`)."""
    trouble: str
    """The reason why the index cannot be read; else empty."""

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the checkpoint's files have now."""
        return sum(path.stat().st_size for path in self.folder.iterdir() if layout.is_own_file(path.name))

    @cached_property
    def saved_at(self) -> datetime:
        """The time at which the tag was saved; without an index, at which its folder was last changed."""
        if self.index is not None and self.index.saved.get("at"):
            return datetime.fromisoformat(self.index.saved["at"]).astimezone()
        return datetime.fromtimestamp(self.folder.stat().st_mtime).astimezone()

    def faults(self, *, content: bool, advance: Callable[[int], object] | None = None) -> dict[str, str]:
        """Return the fault of each file that is missing or damaged, by name; without an index, `trouble`, if any.

        Args:
            content: read the files and compare their checksums, and read the lists of tensors; False: compare only
                sizes.
            advance: as for `checksums_of`.
        """
        if self.index is None:
            return {layout.INDEX_FILE: self.trouble} if self.trouble else {}
        found = {entry.name: self.fault_in(entry.name, content=content, advance=advance) for entry in self.index.files}
        if content:
            found[layout.INDEX_FILE] = self.fault_in_table
        return {name: fault for name, fault in found.items() if fault}

    @cached_property
    def fault_in_table(self) -> str:
        """The fault that is in the index's lists of tensors, which are read for this; empty when there is none."""
        try:
            index = read_index(self.folder)
        except CheckpointError as error:
            return str(error)
        fault = fault_in_table(index) if index is not None else ""
        return f"{self.folder / layout.INDEX_FILE}: {fault}. Load another tag." if fault else ""

    def fault_in(self, name: str, *, content: bool, advance: Callable[[int], object] | None = None) -> str:
        """Return the fault of one file of the index; empty if there is none."""
        assert self.index is not None
        entry = self.index.entry(name)
        assert entry is not None
        try:
            if content:
                check_content(self.folder / name, entry, self.index, advance)
            else:
                check_size(self.folder / name, entry)
        except CheckpointError as error:
            return str(error)
        return ""


def saved_tags(directory: Path, wanted: Collection[str] | None = None) -> list[SavedTag]:
    """Return the tags in `directory`, oldest first; with `wanted`, only these, without looking at the others."""
    names = [name for name in layout.tags_in(directory, layout.is_own_file) if wanted is None or name in wanted]
    found = [tag for name in names if (tag := _look(directory, name))]
    return sorted(found, key=lambda tag: tag.saved_at)  # stable: tags of one moment stay in the order of their numbers


def _look(directory: Path, name: str) -> SavedTag | None:
    """Return the tag; None if another job has just removed its folder, or if it has only a foreign `index.json`."""
    folder = layout.whole_folder(directory / name)
    if folder is None:
        return None
    try:
        return SavedTag(name, folder, read_index(folder, with_tensors=False), "")
    except CheckpointError as error:
        has_states = any(layout.is_checkpoint_file(path.name) for path in folder.iterdir())
        return SavedTag(name, folder, None, str(error)) if has_states else None


def last_good_tag(
    gather: "Gather", directory: Path, damaged: str, *, lists: bool, share: tuple[int, int]
) -> str | None:
    """Return the newest tag of `directory`, except `damaged`, whose files are all as they were saved, or None.

    Each file is read by one rank. Every rank calls it.

    Args:
        gather: as for `Checkpointer`.
        lists: whether this rank lists the tags; exactly one does.
        share: this rank, and the number of ranks.
    """
    listed = gather(json.dumps(_newest_first(directory)) if lists else None)
    for name in json.loads(next(filter(None, listed))):
        if name != damaged and not any(gather(_fault_in_share(directory, name, share))):
            return str(name)
    return None


def newest_first(directories: Sequence[str], wanted: str | None) -> list[tuple[int, str]]:
    """Return the tags to try in a load from several directories: the number of the directory and the name, of tags
    that were saved last first, and of copies of one save the nearest first.

    Left out are tags without states, and tags that were saved after the one which `latest` of their directory names.

    Args:
        directories: the nearest first.
        wanted: list this tag only, whatever `latest` names.

    Raises:
        CheckpointError: a directory cannot be read, and no other one has a tag.
    """
    found: list[tuple[float, int, str]] = []
    failures: list[CheckpointError] = []
    for number, directory in enumerate(directories):
        try:
            with store_failures(directory):
                found += [(-tag.saved_at.timestamp(), number, tag.name) for tag in _named(directory, wanted)]
        except CheckpointError as error:
            failures.append(error)
        except OSError as error:
            failures.append(CheckpointError(f"cannot read {directory}: {reason_of(error)}. Correct its permissions."))
    if failures and not found:
        raise failures[0]
    for failure in failures:
        logger.warning("%s. Its tags are not looked at", str(failure).rstrip("."))
    return [(number, name) for _, number, name in sorted(found)]


def _named(directory: str, wanted: str | None) -> list[SavedTag]:
    """Return the tags of `newest_first` in one directory."""
    path = location(directory)
    names = None if wanted is None else [check_tag(wanted)]
    listed, latest = saved_tags(path, names), None if wanted is not None else read_latest(path)
    tags = [tag for tag in listed if not tag.trouble]
    for tag in listed:
        if tag.trouble:
            logger.warning("%s", tag.trouble)
    if wanted is not None:
        return tags
    last = next((tag.saved_at for tag in tags if tag.name == latest), None)
    if last is None:  # a kill, or a hand, has removed it
        return tags if latest is not None else []
    return [tag for tag in tags if tag.saved_at <= last]


def _newest_first(directory: Path) -> list[str]:
    try:
        return [tag.name for tag in reversed(saved_tags(directory)) if tag.index is not None]
    except OSError:  # the error of the load is the one to raise
        return []


def _fault_in_share(directory: Path, name: str, share: tuple[int, int]) -> str | None:
    """Return the first fault that this rank finds in its share of a tag's files; None if there is none."""
    rank, world_size = share
    try:
        tag = next(iter(saved_tags(directory, [name])), None)
    except OSError as error:
        return str(error)
    if tag is None or tag.index is None:
        return "it is not there any more"
    faults = (tag.fault_in(entry.name, content=True) for entry in tag.index.files[rank::world_size])
    return next(filter(None, faults), None)


@dataclass(frozen=True)
class PrunePlan:
    """`PrunePlan` lists the tags to remove and the tags to keep, those of the fewest steps first."""

    removed: list[SavedTag]
    kept: dict[str, str]
    """Every other tag -> why it stays."""


def plan_prune(directory: Path, keep_last: int, newest: str | None = None, needed: Collection[str] = ()) -> PrunePlan:
    """Find the tags of `directory` to remove, so that the `keep_last` last complete ones stay. Changes nothing.

    Tags are in the order of their global steps, since clocks may be set back; tags of equal or unknown steps are in the
    order in which they were saved. A tag is complete if every file of its index is there with its size, and, for
    tags that stay, if the lists of tensors in the index fit. Never removed: the tag that `latest` names, folders that a
    symbolic link in the directory leads to, links, folders without a readable index (other programs' and older
    checkpoints), and folders that hold other files too.

    Args:
        newest: a tag that was saved just now; it stays, whatever the steps of others are.
        needed: tags that are being copied to a farther tier; they stay, too.

    Raises `CheckpointError` if `latest` cannot be read.
    """
    assert keep_last >= 1
    latest, linked = read_latest(directory), _linked_in(directory)
    removed: list[SavedTag] = []
    kept: dict[str, str] = {}
    num_complete = 0
    for tag in sorted(saved_tags(directory), key=lambda tag: _place(tag, newest), reverse=True):
        is_recent = num_complete < keep_last
        if is_recent and tag.index is not None and not tag.faults(content=False):
            num_complete += tag.name == newest or not tag.fault_in_table
        why = _why_never(tag, directory)
        if not why and tag.name == latest:
            why = "named by latest"
        elif not why and is_recent:
            why = f"one of the last {keep_last}"
        elif not why and tag.name in needed:
            why = "being copied"
        elif not why and tag.folder.resolve() in linked:
            why = "a link leads to it"
        if why:
            kept[tag.name] = why
        else:
            removed.append(tag)
    return PrunePlan(removed[::-1], dict(reversed(kept.items())))


def _place(tag: SavedTag, newest: str | None) -> tuple[bool, int, datetime]:
    steps = tag.index.saved.get("global_steps") if tag.index is not None else None
    return tag.name == newest, -1 if steps is None else steps, tag.saved_at


def _why_never(tag: SavedTag, directory: Path) -> str:
    if tag.folder != directory / tag.name or tag.folder.is_symlink():
        return "a link, or a save that is not finished"
    if tag.index is None:
        return tag.trouble or f"it has no {layout.INDEX_FILE}"
    listed = {entry.name for entry in tag.index.files}
    names = [path.name for path in tag.folder.iterdir()]
    foreign = [name for name in names if name not in listed and not layout.is_own_file(name)]
    return f"it holds other files: {', '.join(sorted(foreign))}" if foreign else ""


def _linked_in(directory: Path) -> set[Path]:
    """Return the paths that the symbolic links in `directory` lead to."""
    return {path.resolve() for path in directory.iterdir() if path.is_symlink()}


#: in the order in which the program has them; the docstring of the last one becomes the program's
_FILES = ("consolidate_files.py", "consolidate_join.py", "consolidate.py")
_OWN = "deepspeed.checkpoint.consolidate"


def script() -> bytes:
    """Return the program, which needs torch and the standard library: the files without imports of each other."""
    folder = Path(__file__).parent
    texts = [(folder / name).read_text(encoding="utf-8") for name in _FILES]
    about = ast.get_docstring(ast.parse(texts[-1]), clean=False)
    return "\n\n".join([f'#!/usr/bin/env python3\n"""{about}"""\n', *map(_without_imports, texts)]).encode()


def _without_imports(text: str) -> str:
    """Return a file without its imports of the others."""
    lines = text.split("\n")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OWN):
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(lines)


def write_script(folder: Path) -> None:
    """Put `zero_to_fp32.py` beside the tag's `folder`: a program that runs without this package."""
    source = script()
    target = folder.with_name(layout.SCRIPT_FILE)
    if target.is_file() and target.read_bytes() == source:
        return
    write_file(target, lambda file: file.write(source), layout.draft_file(folder))
    if is_remote(target):
        return
    try:
        target.chmod(0o755)
    except OSError as error:
        raise disk_error("make executable", target, error) from error
