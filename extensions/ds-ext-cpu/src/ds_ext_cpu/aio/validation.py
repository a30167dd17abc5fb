"""`check_equal` implements `validate=True`: it reads the range again with plain file I/O, and compares."""

import errno

import torch

_CHUNK_BYTES = 1 << 24


def check_equal(buffer: torch.Tensor, path: str, offset: int) -> Exception | None:
    """Return None if the file has the bytes of `buffer` at `offset`; else the difference or read error."""
    view = memoryview(buffer.detach().reshape(-1).view(torch.uint8).numpy().data)
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            for start in range(0, len(view), _CHUNK_BYTES):
                wanted = view[start : start + _CHUNK_BYTES]
                found = file.read(len(wanted))
                if found != wanted:
                    return _difference(wanted, found, path, offset + start)
    except OSError as error:
        return error
    return None


def _difference(wanted: memoryview, found: bytes, path: str, offset: int) -> Exception:
    at = next((at for at, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), len(found))
    return OSError(
        errno.EIO, f"validation: the tensor and the file differ from byte {offset + at} of the file on", path
    )
