"""Real text that every machine has: the source of the Python standard library, as bytes."""

import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

# Tests are repetitive, and installed packages differ between machines.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


class Corpus:
    """The text of all *.py files of the standard library, sorted by path. Every tenth file is validation data.

    Args:
        megabytes: stop after this amount of text, for a quick run (None: all, about 12 MB).
    """

    def __init__(self, megabytes: float | None = None) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(p for p in folder.rglob("*.py") if not _LEFT_OUT & set(p.relative_to(folder).parts))
        limit = math.inf if megabytes is None else megabytes * 1e6
        train, validation = bytearray(), bytearray()
        for number, path in enumerate(files):
            if len(train) + len(validation) >= limit:
                break
            (validation if number % 10 == 9 else train).extend(path.read_bytes())
        self.num_files = len(files)
        self.train = torch.frombuffer(train, dtype=torch.uint8)  # (bytes,) uint8
        self.validation = torch.frombuffer(validation, dtype=torch.uint8)

    def unigram_entropy(self) -> float:
        """Return the entropy of the byte frequencies in nats per byte: -sum p ln p."""
        share = torch.bincount(self.train, minlength=256).double() / len(self.train)
        share = share[share > 0]
        return -(share * share.log()).sum().item()


def draw_batch(text: Tensor, batch: int, sequence_length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return `batch` random windows: tokens and next tokens, both (batch, sequence_length) int64.

    The same seed gives the same batch, so a resumed run gets the same batches as an uninterrupted run.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - sequence_length - 1, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(sequence_length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
