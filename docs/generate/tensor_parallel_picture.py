"""Draw docs/images/tensor_parallel.svg: `python docs/generate/tensor_parallel_picture.py [--check]`.

The weights of a Llama layer, each with the part of every rank, as the plan in `deepspeed.tensor_parallel` cuts them.
`docs/tests` fails when the picture and the code differ.
"""

import sys
from pathlib import Path

from deepspeed.tensor_parallel.plans import PLANS
from deepspeed.tensor_parallel.ranges import cut_dim, share_heads
from torch.distributed.tensor import Shard

PICTURE = Path(__file__).parents[1] / "images" / "tensor_parallel.svg"
RANKS, HIDDEN, WIDE, HEADS, KEYS, HEAD = 3, 96, 160, 8, 4, 12
# path: (rows, columns) of the weight, which is [out, in]
WEIGHTS = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KEYS * HEAD, HIDDEN),
    "self_attn.v_proj": (KEYS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (WIDE, HIDDEN),
    "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
}
COLORS = ("#4477aa", "#ccbb44", "#ee6677")
GAP, TOP, LEFT = 24, 60, 16


def render() -> str:
    """The whole file."""
    plan = PLANS["llama"](None)
    shares = share_heads(HEADS, KEYS, RANKS, "attention")
    lines, x = [], LEFT
    for path, (rows, columns) in WEIGHTS.items():
        rule = plan.rule_for(path)
        assert rule is not None
        assert isinstance(rule.weight, Shard)
        dim = rule.weight.dim
        total = (rows, columns)[dim]
        cuts = cut_dim(rule, total, path, shares, num_ranks=RANKS, grain=1)
        lines.append(_text(x, TOP - 24, path.rpartition(".")[2]))
        lines.append(_text(x, TOP - 10, f"Shard({dim}): {'column' if dim == 0 else 'row'}"))
        for cut, color in zip(cuts, COLORS, strict=True):
            for start, stop in cut.ranges:
                at, size = (
                    ((x, TOP + start), (columns, stop - start))
                    if dim == 0
                    else (
                        (x + start, TOP),
                        (stop - start, rows),
                    )
                )
                lines.append(_rectangle(at, size, color))
        x += max(columns, 100) + GAP
    bottom = TOP + WIDE + 36
    for rank, (color, share) in enumerate(zip(COLORS, shares, strict=True)):
        at = LEFT + 260 * rank
        lines.append(_rectangle((at, bottom - 11), (14, 14), color))
        lines.append(_text(at + 20, bottom, f"rank {rank}: {share.num_queries} query, {share.num_keys} key heads"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{x}" height="{bottom + 20}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>", ""])


def _rectangle(at: tuple[int, int], size: tuple[int, int], color: str) -> str:
    return (
        f'<rect x="{at[0]}" y="{at[1]}" width="{size[0]}" height="{size[1]}" fill="{color}" stroke="white" '
        'stroke-width="1"/>'
    )


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}" font-size="12">{text}</text>'


def main() -> int:
    """Write the picture, or with --check say whether it is as written."""
    text = render()
    if "--check" in sys.argv[1:]:
        is_same = PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == text
        if not is_same:
            print(f"{PICTURE} differs from the code; run python docs/generate/tensor_parallel_picture.py")
        return 0 if is_same else 1
    PICTURE.write_text(text, encoding="utf-8")
    print(f"wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
