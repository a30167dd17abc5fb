"""Small models for tests: a GPT in plain torch, a model with one weight, and models with difficult cases for sharding.
`make_engine` creates an engine for a test in one line.

The GPT, which the demo and the benchmarks use too, is a pre-norm decoder with learned positions, causal attention and a
GELU MLP, initialized like nanoGPT and GPT-2. No number of ranks divides the sizes of the odd models. Seed torch before
creating a model: `torch.manual_seed(0); GPT(GPTConfig())`.

Shape legend: B batch, T time, D width, H heads, K width of a head (D / H), V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from deepspeed.engine.engine import DeepSpeedEngine


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`. The defaults are a byte-level model of 0.4 M parameters."""

    vocab_size: int = 256
    sequence_length: int = 128
    num_layers: int = 2
    num_heads: int = 4
    width: int = 128
    tie_embeddings: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")


class Scale(nn.Module):
    """A model with one weight, initially 0; the gradient of `model(x)` is x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x times the weight."""
        return self.weight * x


def tiny_gpt(**changes: Any) -> "GPT":
    """Return the tests' model: 30 thousand parameters, a vocabulary of 64. `changes` are arguments of `GPTConfig`."""
    sizes = {"vocab_size": 64, "sequence_length": 16, "num_layers": 2, "num_heads": 2, "width": 32}
    return GPT(GPTConfig(**{**sizes, **changes}))


class Attention(nn.Module):
    """Causal self-attention of one block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, 3, self.num_heads, D // self.num_heads)
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)
        return self.out(y_BHTK.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x_BTD)))
        return x_BTD + self.dropout(self.mlp_out(hidden))


class GPT(nn.Module):
    """Next-token model over `config.vocab_size` tokens."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._initialize()
        if config.tie_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[B, T, V]`, or with targets (-100: ignored) the mean cross-entropy in nats, computed in fp32."""
        T = tokens_BT.shape[1]
        if self.config.sequence_length < T:
            raise ValueError(f"{T} tokens were given, the model has positions for {self.config.sequence_length}")
        x_BTD = self.tokens(tokens_BT) + self.positions(torch.arange(T, device=tokens_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())

    @torch.no_grad()
    def sample(
        self,
        tokens_BT: torch.Tensor,
        num_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Return `tokens_BT` with `num_tokens` more; temperature 0 takes the most likely token. Keeps the mode.

        `generator` may be on the host, even if the model is on a device.
        """
        was_training = self.training
        self.eval()
        drawn_on = tokens_BT.device if generator is None else generator.device
        for _ in range(num_tokens):
            logits_BV = self(tokens_BT[:, -self.config.sequence_length :])[:, -1].float()
            if temperature == 0:
                next_B1 = logits_BV.argmax(-1, keepdim=True)
            else:
                probabilities_BV = F.softmax(logits_BV / temperature, -1).to(drawn_on)
                next_B1 = torch.multinomial(probabilities_BV, 1, generator=generator).to(tokens_BT.device)
            tokens_BT = torch.cat([tokens_BT, next_B1], dim=1)
        self.train(was_training)
        return tokens_BT

    def num_parameters(self) -> int:
        """Return the number of parameter elements; a tied weight counts once."""
        return sum(p.numel() for p in self.parameters())

    def _initialize(self) -> None:
        """Normal(0, 0.02), and 0.02 / sqrt(2 L) where a block adds to the residual stream (GPT-2, section 2.3)."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, weight in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp_out.weight")):
                nn.init.normal_(weight, std=residual_std)


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
        """Return the mean cross-entropy, in nats, of the tokens in reverse."""
        self.calls += 1
        x = torch.tanh(self.frozen(self.tokens(tokens_BT))) * self.gain
        logits_BTV = self.head(self.block(x))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT.flip(1).flatten())


DEFAULTS = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "gradient_clipping": 0.0,  # like plain torch, to which results are compared
    "steps_per_print": float("inf"),
}
SMALL_BUCKETS = {"reduce_bucket_size": 20}
"""Buckets of so few elements that the parameters of a test's model fill several."""


def make_engine(
    model: nn.Module, stage: int = 0, *, arguments: dict[str, Any] | None = None, **keys: Any
) -> "DeepSpeedEngine":
    """Return the engine of `deepspeed.initialize(model=model, config=..., **arguments)` on this rank.

    Args:
        model: the model, which is trained in place.
        stage: ZeRO stage, 0 to 3.
        arguments: further arguments of `initialize`.
        keys: keys of the config that override `DEFAULTS`; None omits a key. `zero_optimization` is merged with the
            stage and `SMALL_BUCKETS`.

    Raises:
        ConfigError: see `initialize`.
    """
    import deepspeed

    zero = {"stage": stage, **SMALL_BUCKETS, **keys.pop("zero_optimization", {})}
    config = {**DEFAULTS, "zero_optimization": zero, **keys}
    config = {name: value for name, value in config.items() if value is not None}
    engine: DeepSpeedEngine = deepspeed.initialize(model=model, config=config, **(arguments or {}))[0]
    return engine


def weight_of(engine: "DeepSpeedEngine") -> float:
    """Return the weight of an engine's `Scale`. A collective."""
    import deepspeed

    (weight,) = engine.module.parameters()
    with deepspeed.zero.GatheredParameters(weight):
        return weight.item()
