"""The cache of built libraries: one folder of the user, one folder within it per content, each with its manifest.

    <cache>/cpu_adam_3f…/cpu_adam_3f….so    the library
    <cache>/cpu_adam_3f…/manifest.json      what it was built from, its size and sha256
    <cache>/cpu_adam_3f….lock               held while one process builds
    <cache>/cpu_adam_3f….failed.json        what the last build said, if it failed; `.log` has the whole output

A library is code that runs as this user, so a folder that someone else can write is refused, not used.
"""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.errors import OpUnavailable
from deepspeed.log import logger
from deepspeed.ops.op_builder.spec import BuildSpec

MANIFEST = "manifest.json"
#: a process that a launcher started has one of them: the launchers of torch and ours, Open MPI, Intel MPI, Slurm
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


@dataclass(frozen=True)
class Manifest:
    """What lies beside a library: what it was made of, and how it looks if it is whole.

    Attributes:
        library: its file name.
        library_bytes, sha256: of that file.
        sources: their paths.
        extra: files outside the scan that the compiler says it read (path -> sha256); a change there is a change.
        commands: the lines that built it, for a reader.
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
    sources: list[str]
    extra: dict[str, str] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, spec: BuildSpec, library: Path, commands: list[list[str]], extra: list[Path]) -> "Manifest":
        """The manifest of a library that was just built."""
        content = library.read_bytes()
        return cls(
            name=spec.name,
            library=library.name,
            library_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            source_digest=spec.source_digest,
            content=spec.content,
            torch=spec.torch,
            python=spec.python,
            target=spec.target,
            cpu=spec.cpu,
            op_namespace=spec.op_namespace,
            stable_abi=spec.stable_abi,
            min_torch=spec.min_torch,
            compiler=spec.toolchain.summary if spec.toolchain else "",
            sources=[str(path) for path in spec.sources],
            extra={str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in extra},
            commands=commands,
        )

    @classmethod
    def read(cls, path: Path) -> "Manifest | None":
        """None when the file is missing or cut."""
        try:
            found = json.loads(path.read_text())
            return cls(**{name: found[name] for name in (part.name for part in dataclasses.fields(cls))})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Write, and do not return before it is on the disk."""
        _write_down(path, json.dumps(dataclasses.asdict(self), indent=1).encode())

    def flaw(self, folder: Path) -> str | None:
        """Why the library in `folder` cannot be used; None when it is whole."""
        library = folder / self.library
        try:
            content = library.read_bytes()
        except OSError as error:
            return f"{library} cannot be read: {error.strerror}"
        if len(content) != self.library_bytes:
            return f"{library} has {len(content)} bytes, but {self.library_bytes} were written"
        if hashlib.sha256(content).hexdigest() != self.sha256:
            return f"{library} is not what was written (its sha256 differs)"
        for name, digest in self.extra.items():
            try:
                same = hashlib.sha256(Path(name).read_bytes()).hexdigest() == digest
            except OSError:
                same = False
            if not same:
                return f"{name}, which {library} was built from, has changed"
        return None


class Cache:
    """A folder of libraries that belongs to this user. Get one by `Cache.open()`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls) -> "Cache":
        """The cache of this user, its folder made (mode 0700) if need be.

        `$TORCH_EXTENSIONS_DIR`; else `ds-core/ops` under `$XDG_CACHE_HOME` or `~/.cache`; else, with no home that can
        be written, `ds-core-ops-<user id>` under the temporary directory.

        Raises:
            OpUnavailable: the folder cannot be made, or another user owns or can write it.
        """
        chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
        if chosen:
            return cls(_make(Path(chosen).expanduser().absolute()))
        places = [*_home_folder(), Path(tempfile.gettempdir()).absolute() / f"ds-core-ops-{os.geteuid()}"]
        for place in places[:-1]:
            try:
                made = _make(place)
            except _CannotMake as error:
                logger.info("%s; using %s for built ops", error, places[-1])
            else:
                if os.access(made, os.W_OK):
                    return cls(made)
        return cls(_make(places[-1]))

    def entry(self, spec: BuildSpec) -> Path:
        """The folder of one content; it exists only with a finished library in it."""
        return self.folder / spec.entry

    def beside(self, spec: BuildSpec, suffix: str) -> Path:
        """The file `<entry><suffix>` beside that folder."""
        return self.folder / f"{spec.entry}{suffix}"

    def find(self, spec: BuildSpec) -> Path | None:
        """The library of `spec` if it is there and whole.

        Without a compiler the key is not known; then any library of the same content will do.
        """
        if spec.toolchain is not None:
            return self._whole(self.entry(spec), spec)
        for folder in sorted(self.folder.glob(f"{spec.label}_*")):
            found = self._whole(folder, spec) if folder.is_dir() and folder.suffix != ".tmp" else None
            if found is not None:
                return found
        return None

    def _whole(self, folder: Path, spec: BuildSpec) -> Path | None:
        manifest = Manifest.read(folder / MANIFEST)
        if manifest is None or manifest.content != spec.content:
            return None
        if manifest.extra and manifest.sources != [str(path) for path in spec.sources]:
            return None  # it holds for the folder that it was built from, and for no copy of it
        flaw = manifest.flaw(folder)
        if flaw is None:
            return folder / manifest.library
        logger.info("op %r: %s; it is built again", spec.name, flaw)
        return None

    def make_build_folder(self, spec: BuildSpec) -> Path:
        """A new folder on the same file system; those that killed builders left are removed. Call it locked."""
        for old in self.folder.glob(f"{spec.entry}.*.tmp"):
            shutil.rmtree(old, ignore_errors=True)  # one that stays costs space only
        return Path(tempfile.mkdtemp(prefix=f"{spec.entry}.", suffix=".tmp", dir=self.folder))

    def publish(self, spec: BuildSpec, built: Path, manifest: Manifest) -> Path:
        """Make the finished library visible, whole or not at all. Call it locked. Returns its path."""
        manifest.write(built / MANIFEST)
        _sync(built / manifest.library)
        _sync(built)
        entry = self.entry(spec)
        if entry.exists():  # damaged, or built from a header that has changed: a folder is not renamed onto a full one
            shutil.rmtree(entry)
        built.rename(entry)
        _sync(self.folder)
        self.beside(spec, ".failed.json").unlink(missing_ok=True)
        self.beside(spec, ".log").unlink(missing_ok=True)
        return entry / manifest.library

    def write_failure(self, spec: BuildSpec, first_error: str, output: str) -> Path:
        """Remember that a build failed, for the others of this job. Returns the file with the whole output."""
        log = self.beside(spec, ".log")
        _write_down(log, output.encode())
        record = {"error": first_error, "log": str(log), "pid": os.getpid(), "job": this_job(), "time": time.time()}
        _write_down(self.beside(spec, ".failed.json"), json.dumps(record).encode())
        return log

    def failure(self, spec: BuildSpec, asked_at: float) -> dict[str, Any] | None:
        """The failure of the same content in this job, or since `asked_at` (`time.time()`); None: build it."""
        try:
            record = json.loads(self.beside(spec, ".failed.json").read_text())
            ours = record["job"] == this_job() or record["time"] >= asked_at
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record if ours else None


class _CannotMake(OpUnavailable):
    """A folder that cannot be made; another place may do."""


def this_job() -> str:
    """What the ranks of one launch on one machine have in common; a process that no launcher started is its own job."""
    launched = any(os.environ.get(name) for name in _LOCAL_RANK)
    process = os.getppid() if launched else os.getpid()
    try:  # a process id alone comes back after a while
        started = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    return f"{os.uname().nodename} {process} {started}"


def _home_folder() -> list[Path]:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):
        return [Path(cache) / "ds-core" / "ops"]
    home = os.environ.get("HOME", "")
    return [Path(home) / ".cache" / "ds-core" / "ops"] if os.path.isabs(home) and os.path.isdir(home) else []


def _make(folder: Path) -> Path:
    """The folder, made and checked."""
    try:
        for place in (*reversed(folder.parents), folder):  # a folder on the way, too, is ours alone, whatever the umask
            if not place.exists():
                place.mkdir(mode=0o700, exist_ok=True)
        state = folder.stat()
        link_owner = folder.lstat().st_uid
    except OSError as error:
        raise _CannotMake(f"the folder for built ops, {folder}, cannot be made: {error.strerror}") from error
    advice = "give TORCH_EXTENSIONS_DIR a folder of your own"
    for owner in (state.st_uid, link_owner):
        if owner not in (os.geteuid(), 0):
            raise OpUnavailable(
                f"the folder for built ops, {folder}, belongs to user {owner}, not to {os.geteuid()}: what is loaded "
                f"from there could be someone else's code; {advice}"
            )
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OpUnavailable(
            f"the folder for built ops, {folder}, can be written by others (mode {stat.S_IMODE(state.st_mode):04o}): "
            f"what is loaded from there could be someone else's code; `chmod go-w {folder}`, or {advice}"
        )
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise OpUnavailable(
                f"the folder for built ops, {folder}, lies in {parent}, where everybody may rename it (mode "
                f"{stat.S_IMODE(mode):04o}); {advice}"
            )
    return folder


def is_full(error: OSError) -> bool:
    """Whether a write failed for want of space."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _write_down(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
