"""The cache of built libraries: a folder of the user with one folder per build, each with a manifest.

    <cache>/cpu_adam_3f….9a…/cpu_adam_3f….so    the library; 9a… differs for every build, so no name is reused
    <cache>/cpu_adam_3f….9a…/manifest.json      its inputs, its size and sha256
    <cache>/cpu_adam_3f….<owner>.….tmp          a running build, or a build whose process was killed
    <cache>/cpu_adam_3f….lock                   held while one process builds
    <cache>/cpu_adam_3f….log                    the last build, if it failed: a line of JSON, then the full output

A library is code that runs as this user, so only this user and root may be able to write it. The lock only saves work:
without working file locks, several processes build the same content at once, and no process touches files that another
one uses. A finished folder never changes. The cache removes only folders of processes that have ended, or folders that
nobody has touched for a day.

The lock ends with its process. The mark in the name of a temporary folder identifies the process. `filelock` works only
where `flock` works: on a file system that refuses `flock` (Lustre without the mount option), it waits for a file that a
killed process has left, while this code lets several processes build the same content. A lock does not protect the
folders either, because some file systems do not share locks between machines (NFS with `local_lock`)."""

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from deepspeed.errors import OpUnavailable, counted
from deepspeed.log import logger, warn_once
from deepspeed.ops.op_builder.spec import BuildSpec, this_cpu_digest

_IN_NAME = re.compile(r"\.([0-9a-f]{12})-(\d+)-(\d+)\.")
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(path: Path, on_wait: Callable[[str, float], None]) -> Iterator[None]:
    """Hold the lock file at `path` (`flock`: the system releases it when the holder dies, even by SIGKILL).

    The file is not removed: otherwise two processes could lock two files of the same name. On a file system without
    locks the body runs unlocked, which only costs a second compile: see the module docstring.

    Args:
        path: a file in an existing folder.
        on_wait: called repeatedly while another process holds the lock, with the holder ("process 12 on host") and the
            seconds waited so far.

    Raises:
        OSError: the file cannot be created or written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    held = False
    try:
        held = _acquire(descriptor, on_wait)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        yield
    finally:
        if held:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if a forked process has the descriptor too
        os.close(descriptor)


def _acquire(descriptor: int, on_wait: Callable[[str, float], None]) -> bool:
    """Wait for the lock. Return False if the file system has no locks."""
    start = time.monotonic()
    pause_s = 0.005
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait(
                os.pread(descriptor, 200, 0).decode(errors="replace") or "another process", time.monotonic() - start
            )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
            return False
        else:
            return True


# ----- temporary folders ----------------------------------------------------------------------------------------------


def owner_mark() -> str:
    """Return the unique mark `<machine>-<process id>-<start time>` of this process."""
    return f"{_this_machine()}-{os.getpid()}-{started_at(os.getpid()) or 0}"


def has_owner(name: str) -> bool:
    """Return whether a file name has an owner mark: `<anything>.<mark>.<anything>`."""
    return _IN_NAME.search(name) is not None


def owner_has_ended(name: str) -> bool:
    """Return whether a file name's owner is known to have ended. Owners on other machines are never known to."""
    mark = _IN_NAME.search(name)
    return mark is not None and mark[1] == _this_machine() and (started_at(int(mark[2])) or "0") != mark[3]


def started_at(pid: int) -> str | None:
    """Return the start time of process `pid`, because ids are reused; None if there is no process or it is a zombie."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if os.path.exists("/proc/self/stat") else _started_without_proc(pid)
    return None if after_name[0] in ("Z", "X") else after_name[19]


def _started_without_proc(pid: int) -> str | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(int(process.create_time()))
    except psutil.NoSuchProcess:
        return None


@lru_cache(maxsize=1)
def _this_machine() -> str:
    """Return a digest of host name, boot and pid namespace. Process ids are comparable only if it is equal."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [os.uname().nodename]
    parts += [boot.read_text().strip()] if boot.exists() else []
    parts += [os.readlink(namespace)] if namespace.is_symlink() else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


_ADVICE = "give TORCH_EXTENSIONS_DIR a folder of your own"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class CannotMake(OpUnavailable):
    """A folder cannot be created; the caller may try another place."""


def private_folder(folder: Path) -> Path:
    """Create `folder` with mode 0700 if necessary, check its owner and permissions, and return it.

    Args:
        folder: an absolute path.

    Raises:
        CannotMake: the folder cannot be created.
        OpUnavailable: another user owns the folder, can write or rename it, or can change a link in its path.
    """
    try:
        for place in (*reversed(folder.parents), folder):  # new parents get mode 0700 too, whatever the umask
            if not place.exists():
                place.mkdir(mode=0o700, exist_ok=True)
        resolved = folder.resolve()
    except OSError as error:
        raise CannotMake(f"the folder for built ops, {folder}, cannot be made: {error.strerror}") from error
    _check_owner(folder, resolved)
    _check_way(folder, resolved)
    return folder


def distrust(path: Path) -> str | None:
    """Return why another user could have written `path`, a file or folder of the cache; None if nobody could.

    A symbolic link is never trusted: the cache creates none.
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


MANIFEST = "manifest.json"
#: a folder that was not touched for this time is unused, even if another machine created it
_OLD_S = 24 * 3600.0
#: launchers set one of these variables: torch's and our launcher, Open MPI, Intel MPI, Slurm
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


@dataclass(frozen=True)
class Manifest:
    """The description of a built library in a file next to it: the inputs of the build, and size and digest.

    Attributes:
        library: the library's file name.
        library_bytes, sha256: size and digest of the library.
        commands: the commands that built it, for information.
    """

    name: str
    library: str
    library_bytes: int
    sha256: str
    source_digest: str
    content: str
    torch: str
    python: str
    target: str
    cpu: str
    op_namespace: str | None
    stable_abi: bool
    min_torch: str | None
    compiler: str
    commands: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, spec: BuildSpec, library: Path, commands: list[list[str]]) -> "Manifest":
        """Create the manifest of a new library."""
        content = library.read_bytes()
        of_spec = ("name", "source_digest", "content", "torch", "python", "target", "cpu")
        return cls(
            **{name: getattr(spec, name) for name in (*of_spec, "op_namespace", "stable_abi", "min_torch")},
            library=library.name,
            library_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            compiler=spec.toolchain.summary if spec.toolchain else "",
            commands=commands,
        )

    @classmethod
    def read(cls, path: Path) -> "Manifest | None":
        """Read a manifest. Return None if the file is missing or incomplete."""
        try:
            found = json.loads(path.read_text())
            return cls(**{name: found[name] for name in (part.name for part in dataclasses.fields(cls))})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Write the manifest atomically."""
        _write_down(path, json.dumps(dataclasses.asdict(self), indent=1).encode())

    def flaw(self, folder: Path) -> str | None:
        """Return why the library in `folder` cannot be used; None if it is intact."""
        library = folder / self.library
        try:
            content = library.read_bytes()
        except OSError as error:
            return f"{library} cannot be read: {error.strerror}"
        if len(content) != self.library_bytes:
            return f"{library} has {counted(len(content), 'byte')}, but {self.library_bytes} were written"
        if hashlib.sha256(content).hexdigest() != self.sha256:
            return f"{library} is not what was written (its sha256 differs)"
        return None


class BuildFailure(NamedTuple):
    """A failed build: its first error, the process that ran it, and the file with the full output."""

    error: str
    pid: int
    log: Path


class Cache:
    """A folder of built libraries that belongs to this user. `Cache.open()` returns it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls) -> "Cache":
        """Return the cache of this user. Creates its folder (mode 0700) if necessary.

        The folder is `$TORCH_EXTENSIONS_DIR`, else `ds-core/ops` in `$XDG_CACHE_HOME` or `~/.cache`, else (without a
        writable home) `ds-core-ops-<user id>` in the temporary directory.

        Raises:
            OpUnavailable: the folder cannot be created, or another user owns it or can write it.
        """
        chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
        if chosen:
            return cls(private_folder(Path(chosen).expanduser().absolute()))
        places = [*_home_folder(), Path(tempfile.gettempdir()).absolute() / f"ds-core-ops-{os.geteuid()}"]
        for place in places[:-1]:
            try:
                made = private_folder(place)
            except CannotMake as error:
                logger.info("%s; using %s for built ops", error, places[-1])
            else:
                if os.access(made, os.W_OK):
                    return cls(made)
        return cls(private_folder(places[-1]))

    def beside(self, spec: BuildSpec, suffix: str) -> Path:
        """Return the path `<entry><suffix>` in the cache's folder."""
        return self.folder / f"{spec.entry}{suffix}"

    def find(self, spec: BuildSpec) -> Path | None:
        """Return the library of `spec` if it exists, is intact, and only this user can write it; else None.

        Without a compiler the key is unknown, so any library of the same content is accepted.
        """
        pattern = f"{spec.label}_*" if spec.toolchain is None else f"{spec.entry}*"
        candidates = (self._library_in(folder, spec) for folder in self._finished(pattern))
        return next((library for library in candidates if library is not None), None)

    def make_build_folder(self, spec: BuildSpec) -> Path:
        """Create a temporary folder in the cache, named after this process. Removes folders of dead processes."""
        self._remove_leftovers(spec)
        return Path(tempfile.mkdtemp(prefix=f"{spec.entry}.{owner_mark()}.", suffix=".tmp", dir=self.folder))

    def install(self, spec: BuildSpec, built: Path, manifest: Manifest) -> Path:
        """Move the finished library into the cache atomically, under a unique name. Return its path.

        If another process has finished the same library meanwhile (without working locks), return that one instead.
        """
        found = self.find(spec)
        if found is not None:
            return found
        library = built / manifest.library
        library.chmod(0o755)  # the linker uses the umask, which may allow others to write
        manifest.write(built / MANIFEST)
        entry = self.folder / f"{spec.entry}.{secrets.token_hex(6)}"
        built.rename(entry)  # after a power failure, the sha256 detects data that did not reach the disk
        self.beside(spec, ".log").unlink(missing_ok=True)
        return entry / manifest.library

    def write_failure(self, spec: BuildSpec, first_error: str, output: str) -> Path:
        """Record a failed build for the other ranks of this job. Return the file, which has the full output."""
        record = {"error": first_error, "pid": os.getpid(), "job": this_job(), "time": time.time()}
        log = self.beside(spec, ".log")
        _write_down(log, f"{json.dumps(record)}\n\n{output}".encode())
        return log

    def failure(self, spec: BuildSpec, asked_at: float) -> BuildFailure | None:
        """Return the failure of the same build in this job, or since `asked_at` (`time.time()`); None means: build."""
        log = self.beside(spec, ".log")
        try:
            with log.open(errors="replace") as file:
                record = json.loads(file.readline())
            is_ours = record["job"] == this_job() or record["time"] >= asked_at
            return BuildFailure(str(record["error"]), int(record["pid"]), log) if is_ours else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _finished(self, pattern: str) -> list[Path]:
        """Return the folders of finished builds."""
        return sorted(path for path in self.folder.glob(pattern) if path.suffix != ".tmp" and path.is_dir())

    def _library_in(self, folder: Path, spec: BuildSpec) -> Path | None:
        """Return the library of a finished build if it matches `spec`, is trusted and intact; else None."""
        manifest = Manifest.read(folder / MANIFEST)
        if manifest is None or manifest.content != spec.content or manifest.cpu not in ("", this_cpu_digest()):
            return None
        library = folder / manifest.library
        try:
            doubt = distrust(folder) or distrust(folder / MANIFEST) or distrust(library)
        except OSError:  # another process removed it
            return None
        if doubt is not None:
            warn_once(f"op {spec.name!r}: {doubt}, so it could be someone else's code; it is built again", (-1,))
            return None
        flaw = manifest.flaw(folder)
        if flaw is not None:
            logger.info("op %r: %s; it is built again", spec.name, flaw)
        return library if flaw is None else None

    def _remove_leftovers(self, spec: BuildSpec) -> None:
        """Remove builds of processes that have ended, and damaged libraries of `spec` after a day.

        A folder that cannot be removed only costs space.
        """
        for path in self.folder.glob("*.tmp"):
            if owner_has_ended(path.name) or (has_owner(path.name) and _is_old(path)):
                shutil.rmtree(path, ignore_errors=True)
        for path in self._finished(f"{spec.entry}*"):
            manifest = Manifest.read(path / MANIFEST)
            if (manifest is None or manifest.flaw(path)) and _is_old(path):
                shutil.rmtree(path, ignore_errors=True)


def this_job() -> str:
    """Return an id that the ranks of one launch on one machine share. A process without a launcher has its own id."""
    launched = any(os.environ.get(name) for name in _LOCAL_RANK)
    process = os.getppid() if launched else os.getpid()
    return f"{os.uname().nodename} {process} {started_at(process) or ''}"


def _is_old(folder: Path) -> bool:
    """Return whether `folder` and the entries directly in it have not changed for `_OLD_S` seconds."""
    try:
        newest = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:  # another process is changing it
        return False
    return time.time() - newest > _OLD_S


def _home_folder() -> list[Path]:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):
        return [Path(cache) / "ds-core" / "ops"]
    home = os.environ.get("HOME", "")
    return [Path(home) / ".cache" / "ds-core" / "ops"] if os.path.isabs(home) and os.path.isdir(home) else []


def is_full(error: OSError) -> bool:
    """Return whether a write failed because of a full disk, a quota or a file size limit."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _write_down(path: Path, content: bytes) -> None:
    """Write the file atomically: another process may read it, or write a file of the same name."""
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
