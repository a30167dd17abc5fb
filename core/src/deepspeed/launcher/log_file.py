"""One rank's file of `--log_dir`. `output.py` writes into it."""

import os
from pathlib import Path

from deepspeed.errors import ConfigError
from deepspeed.launcher.console import write_all, write_console


class LogFile:
    """One rank's file for both streams. A file that cannot be written any more is dropped, with one warning."""

    def __init__(self, path: Path, appends: bool) -> None:
        self._path = path
        mode = os.O_APPEND if appends else os.O_TRUNC
        try:
            self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o666)
        except OSError as error:
            raise ConfigError(
                f"--log_dir: {path} cannot be written ({error.strerror}); give another directory"
            ) from error

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    def write(self, data: bytes | bytearray) -> None:
        if self._fd is None:
            return
        try:
            write_all(self._fd, data)
        except OSError as error:
            self._warn(error)
            self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            os.close(fd)
        except OSError as error:  # some network file systems say only now that the disk is full
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        write_console(
            2,
            f"deepspeed: warning: {self._path} cannot be written ({error.strerror}); the job goes on, and this rank's "
            "output goes to the console only\n".encode(),
        )
