"""Draw docs/images/experts.svg: where the tokens of two ranks go, by the gate and the sort of `deepspeed.moe`.

`python experts.py [--check]`. Two ranks, 8 tokens each, 4 experts over the 2 ranks, k = 1, capacity 2 per rank.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from deepspeed.moe.dispatch import sort_by_expert
from deepspeed.moe.gate import TopKGate

_FILE = Path(__file__).parents[1] / "images/experts.svg"
NUM_RANKS, NUM_TOKENS, NUM_EXPERTS, CELL = 2, 8, 4, 30
COLORS = ("#4878a8", "#d98b3a", "#5a9f68", "#b05a78")
LEFT, SORTED, RECEIVED, TOP = 20, 250, 480, 60
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
    'font-family="sans-serif" font-size="13">\n'
    '<rect width="100%" height="100%" fill="white"/>\n'
)


def render() -> str:
    """The picture's text."""
    gate = TopKGate(4, NUM_EXPERTS, capacity_factor=1.0, min_capacity=1, use_rts=False)
    generator = torch.Generator().manual_seed(4)
    lines = [_text(LEFT, 24, "tokens, by the expert that"), _text(LEFT, 42, "the gate chose")]
    lines += [_text(SORTED, 24, "sorted by expert;"), _text(SORTED, 42, "the rest is dropped")]
    lines += [_text(RECEIVED, 24, "after the all-to-all,"), _text(RECEIVED, 42, "sorted by expert again")]
    arriving: list[list[tuple[int, str, float]]] = [[] for _ in range(NUM_RANKS)]
    step = (NUM_TOKENS + 1.5) * CELL
    for rank in range(NUM_RANKS):
        top = TOP + rank * step
        routing = gate.route(torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator))
        choices, counts = sort_by_expert(routing)
        experts = routing.experts[:, 0].tolist()
        kept = choices[: int(counts.sum())].tolist()
        for token, expert in enumerate(experts):
            lines += _cell(LEFT, top + token * CELL, expert, f"{rank}.{token}", faded=token not in kept)
        for row, token in enumerate(kept):
            y, expert = top + row * CELL, experts[token]
            lines += _cell(SORTED, y, expert, f"{rank}.{token}")
            lines.append(_line(LEFT + 60, top + token * CELL, SORTED, y, expert))
            arriving[expert * NUM_RANKS // NUM_EXPERTS].append((expert, f"{rank}.{token}", y))
        lines.append(_text(LEFT, top + NUM_TOKENS * CELL + 14, f"rank {rank}, capacity {routing.capacity}"))
    for rank, rows in enumerate(arriving):
        top = TOP + rank * step
        for row, (expert, name, y_from) in enumerate(sorted(rows)):
            lines += _cell(RECEIVED, top + row * CELL, expert, name)
            lines.append(_line(SORTED + 60, y_from, RECEIVED, top + row * CELL, expert))
            lines.append(_text(RECEIVED + 72, top + row * CELL + 18, f"expert {expert}"))
        lines.append(_text(RECEIVED, top + NUM_TOKENS * CELL + 14, f"rank {rank} holds experts {_held(rank)}"))
    head = _HEAD.format(width=RECEIVED + 200, height=round(TOP + NUM_RANKS * step))
    return head + "\n".join(lines) + "\n</svg>\n"


def _held(rank: int) -> str:
    own = NUM_EXPERTS // NUM_RANKS
    return " and ".join(str(expert) for expert in range(rank * own, (rank + 1) * own))


def _cell(x: float, y: float, expert: int, name: str, *, faded: bool = False) -> Iterable[str]:
    fill = f'fill="{COLORS[expert]}"' + (' fill-opacity="0.25" stroke-dasharray="3"' if faded else "")
    yield f'<rect x="{x}" y="{y:g}" width="60" height="{CELL - 4}" rx="4" {fill} stroke="{COLORS[expert]}"/>'
    yield _text(x + 18, y + 18, name, color="#333333" if faded else "white")


def _line(x1: float, y1: float, x2: float, y2: float, expert: int) -> str:
    middle = CELL / 2 - 2
    ends = f'x1="{x1}" y1="{y1 + middle:g}" x2="{x2}" y2="{y2 + middle:g}"'
    return f'<line {ends} stroke="{COLORS[expert]}" stroke-width="1.5" stroke-opacity="0.7"/>'


def _text(x: float, y: float, text: str, color: str = "#333333") -> str:
    return f'<text x="{x}" y="{y:g}" fill="{color}">{text}</text>'


if __name__ == "__main__":
    picture = render()
    if "--check" in sys.argv[1:]:
        is_stale = not _FILE.exists() or _FILE.read_text(encoding="utf-8") != picture
        sys.exit(f"stale: {_FILE.name}; run python docs/generate/experts.py" if is_stale else None)
    _FILE.write_text(picture, encoding="utf-8")
