"""Real text that every machine has: the source of its own Python standard library, as bytes."""

import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

# Tests repeat themselves, and installed packages differ from machine to machine.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


class Corpus:
    """The text of every *.py of the standard library, in the order of their paths; each tenth file is validation.

    Args:
        megabytes: at most so much of the text, for a quick look (None: all, about 12 MB).
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
        """Nats per byte of a guess that knows only how often each byte occurs: -sum p ln p."""
        share = torch.bincount(self.train, minlength=256).double() / len(self.train)
        share = share[share > 0]
        return -(share * share.log()).sum().item()


def draw_batch(text: Tensor, batch: int, sequence_length: int, seed: int) -> tuple[Tensor, Tensor]:
    """`batch` random windows: tokens and next tokens, both (batch, sequence_length) int64.

    The same seed gives the same batch, so a resumed run goes on with the batches it would have had.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - sequence_length - 1, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(sequence_length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
