"""Where checkpoints are: a folder, or a URL of an object store, as one kind of path. Imports no torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from deepspeed.errors import CheckpointError, ConfigError, DeepSpeedError


def location(directory: "str | Path") -> Path:
    """`directory` as a path: of `pathlib`, or for a URL such as `s3://bucket/run` one of `universal_pathlib`, which has
    the methods of `pathlib` over fsspec.

    Raises:
        ConfigError: a package that the URL needs is not installed, or fsspec does not know the protocol; or
            `directory` is neither text nor a path.
    """
    if not isinstance(directory, str | os.PathLike) and not hasattr(directory, "iterdir"):
        raise ConfigError(f"directory of a checkpoint: found {directory!r}; give a folder or a URL")
    url = str(directory)
    if "://" not in url or not isinstance(directory, str):
        return cast(Path, directory) if hasattr(directory, "iterdir") else Path(directory)
    try:
        from upath import UPath
    except ImportError:
        raise ConfigError(
            f"{url}: checkpoints in an object store need the packages fsspec and universal_pathlib, which are not "
            "installed; pip install fsspec universal-pathlib, or give a folder"
        ) from None
    try:
        path = UPath(url, use_listings_cache=False)  # other ranks write there too
        path.fs  # noqa: B018 - imports the package of the protocol
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{url}: fsspec cannot open it: {error}") from error
    return cast(Path, path)


def is_remote(path: Path) -> bool:
    """Whether `location` made it of a URL: no renames and no locks are there, and a write of an object is atomic."""
    return not isinstance(path, Path)


@contextmanager
def store_failures(directory: object) -> Iterator[None]:
    """Name the store where the client of an object store fails: each has errors of its own, and few say what to do.

    Raises:
        CheckpointError: in place of such an error, where `directory` is a URL.
    """
    try:
        yield
    except DeepSpeedError:
        raise
    except Exception as error:
        of_client = isinstance(error, OSError) or type(error).__module__ != "builtins"
        if "://" not in str(directory) or not of_client:
            raise
        raise CheckpointError(
            f"{directory}: the store failed: {reason_of(error)}. Check its address, the credentials, the permissions "
            "of the bucket and the network."
        ) from error


def reason_of(error: Exception) -> str:
    """What failed, in one line: stores raise `OSError`s without a number, and time-outs without a text."""
    text = getattr(error, "strerror", None) or str(error).strip()
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}{text and f': {text}'}"


def local_folder(path: "str | Path", what: str) -> Path:
    """`path` for what works in folders only; `what` completes "cannot ...".

    Raises:
        CheckpointError: it is a URL.
    """
    if "://" in str(path) and not isinstance(path, Path):
        raise CheckpointError(
            f"cannot {what} {path}, a URL: only folders can be used here. Copy it to or from a folder."
        )
    return Path(path)
