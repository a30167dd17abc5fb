"""Size and speed of models that `redundancy_clean` made smaller: `python benchmarks/compression.py [--width 768]`.

Prints for rows, heads and channels: bytes of the state dict and median milliseconds of a forward without gradients, for
the original and the smaller model.
"""

import argparse
import io
import statistics
import time
from collections import OrderedDict

import torch
from deepspeed.compression import init_compression, redundancy_clean
from torch import Tensor, nn


class Block(nn.Module):
    """A block with attention of separate projections and a feed-forward."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        parts = (each(x).unflatten(-1, (self.num_heads, -1)) for each in (self.query, self.key, self.value))
        q, k, v = (part.transpose(1, 2) for part in parts)
        x = x + self.dense(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(self.up(x).relu())


def technique(name: str, modules: list[str], related: list[str], **shared: object) -> dict[str, object]:
    """Return a configuration that keeps half of `modules`."""
    group = {"params": {"dense_ratio": 0.5}, "modules": modules, "related_modules": [related]}
    settings = {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"g": group}}
    return {"compression_training": {name: settings}}


def num_bytes(model: nn.Module) -> int:
    """Return the bytes of the saved state dict."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return len(file.getvalue())


@torch.no_grad()
def forward_ms(model: nn.Module, x: Tensor, repeats: int) -> float:
    """Return the median milliseconds of a forward."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        model(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) * 1e3


def main() -> None:
    """Print one line per technique."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    width = options.width

    def convolutions() -> nn.Module:
        layers: dict[str, nn.Module] = {"conv1": nn.Conv2d(64, 256, 3), "bn1": nn.BatchNorm2d(256)}
        layers |= {"relu": nn.ReLU(), "conv2": nn.Conv2d(256, 64, 3)}
        return nn.Sequential(OrderedDict(layers))

    def block() -> nn.Module:
        return Block(width, 12)

    tokens, images = torch.randn(4, 128, width), torch.randn(4, 64, 28, 28)
    cases = {
        "rows": (block, tokens, technique("row_pruning", ["up"], ["down"], method="topk")),
        "heads": (block, tokens, technique("head_pruning", ["dense"], ["query", "key", "value"], num_heads=12)),
        "channels": (convolutions, images, technique("channel_pruning", ["conv1"], ["conv2", "bn1"], method="topk")),
    }
    print(f"{'':10}{'bytes':>12}{'smaller':>12}{'share':>8}{'ms':>9}{'smaller':>9}{'speedup':>9}")
    for name, (build, x, config) in cases.items():
        model = build().eval()
        before = num_bytes(model), forward_ms(model, x, options.repeats)
        smaller = redundancy_clean(init_compression(model, config), config)
        after = num_bytes(smaller), forward_ms(smaller, x, options.repeats)
        print(
            f"{name:10}{before[0]:12}{after[0]:12}{after[0] / before[0]:8.2f}"
            f"{before[1]:9.2f}{after[1]:9.2f}{before[1] / after[1]:9.2f}"
        )


if __name__ == "__main__":
    main()
