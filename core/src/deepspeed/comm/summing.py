"""The sum of what the ranks contributed, in the order of ranks, so that every rank would compute the same bits.

Used by transports that add by themselves, instead of the library.
"""

import torch

# A low-precision sum of three or more ranks goes through fp32 in blocks that stay in a core's cache (512 KiB).
_BLOCK_NUMEL = 1 << 17


def add_in_rank_order(own: torch.Tensor, others: list[torch.Tensor], rank: int) -> None:
    """`own = x_0 + x_1 + ... + x_{W-1}`, left to right, where `own` is `x_rank` and `others` the rest by rank.

    `others` are overwritten. With three or more low-precision summands the sum runs in fp32 and is rounded once, as
    one addition of two does anyway.
    """
    if own.dtype in (torch.bfloat16, torch.float16) and len(others) > 1:
        _add_in_fp32(own, others, rank)
        return
    # x_0 .. x_{rank-1} add up in the first of them; then own joins (a + b is b + a to the last bit); then the rest.
    if rank > 0:
        for other in others[1:rank]:
            others[0].add_(other)
        own.add_(others[0])
    for other in others[rank:]:
        own.add_(other)


def _add_in_fp32(own: torch.Tensor, others: list[torch.Tensor], rank: int) -> None:
    sum_B = torch.empty(min(_BLOCK_NUMEL, own.numel()), dtype=torch.float32, device=own.device)
    terms = [*others[:rank], own, *others[rank:]]
    for start in range(0, own.numel(), _BLOCK_NUMEL):
        stop = min(start + _BLOCK_NUMEL, own.numel())
        block = sum_B[: stop - start]
        block.copy_(terms[0][start:stop])
        for term in terms[1:]:
            block.add_(term[start:stop])
        own[start:stop].copy_(block)
