"""Small models with what sharding, offload and checkpoints can get wrong; no number of ranks divides their sizes.

Seed torch before building one. Shape legend: B batch, T time, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class OddMLP(nn.Module):
    """5 numbers to 3: a scalar, and parameters that are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)))
        self.unused = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 5] to [B, 3]."""
        hidden: torch.Tensor = self.middle(torch.tanh(self.first(x)))
        return self.last(hidden * self.gain)


class CheckpointedMLP(nn.Module):
    """7 numbers to a loss: layers that run again in the backward, a frozen one, and one that is never used."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(7, 7) for _ in range(num_layers)))
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.unused = nn.Linear(4, 6)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 7] to the mean square of the outputs."""
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return self.last(self.frozen(x)).float().square().mean()


class TiedLM(nn.Module):
    """11 tokens to a loss: a tied weight, a frozen layer, a scalar, parameters that are never used, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.block = nn.Linear(7, 7)
        self.unused = nn.Linear(7, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy, in nats, of the tokens in reverse."""
        self.calls += 1
        x = torch.tanh(self.frozen(self.tokens(tokens_BT))) * self.gain
        logits_BTV = self.head(self.block(x))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT.flip(1).flatten())
