"""`DistributedAttention` runs any attention over sequences that are divided among ranks (Ulysses, arXiv 2309.14509).

    attention = DistributedAttention(local_attention, engine.mesh.group("sp"), scatter_idx=2, gather_idx=1)
    y_BTHK = attention(q_BTHK, k_BTHK, v_BTHK, 0)     # T: this rank's tokens; H: all heads

A layer has two all-to-alls. The first gathers all tokens of this rank's heads; then the local attention runs; the
second gathers all heads of this rank's tokens. Key and value may have fewer heads than the query (grouped heads), and
the ranks need not divide the heads evenly; see `exchange.py`.
"""

from typing import Any

import torch
from torch.distributed import ProcessGroup

from deepspeed._absent import absent_members, complete
from deepspeed.errors import ConfigError, counted
from deepspeed.sequence.exchange import HeadDivision, channel, check_layout, divide_heads, gather_heads, scatter_heads


@absent_members("sequence.layer:DistributedAttention")
class DistributedAttention(torch.nn.Module):
    """Ulysses around a local attention.

    Args:
        local_attention: called as `local_attention(query, key, value, *args, **kwargs)` with all tokens and this rank's
            heads, in the layout of the inputs; returns the context in that layout, or with heads and their width merged
            in dim `scatter_idx`. If the rank's heads do not form equal groups, key and value are repeated to match the
            query's heads.
        sequence_process_group: the ranks that share a sequence, in the order of its parts.
        scatter_idx: the dim of heads; ranks divide it during the local attention.
        gather_idx: the dim of tokens; ranks divide it outside.
        sp_stream: accepted for DeepSpeed's signature. One collective sends query, key and value, so there is no second
            collective to overlap on another stream.
    """

    def __init__(
        self,
        local_attention: Any,
        sequence_process_group: ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(sequence_process_group, ProcessGroup):
            raise ConfigError(
                f"sequence_process_group: found {sequence_process_group!r}; give a process group, such as "
                "deepspeed.utils.groups._get_sequence_parallel_group()"
            )
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx = scatter_idx
        self.gather_idx = gather_idx
        self.sp_stream = sp_stream

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the context of this rank's tokens, equal to the local attention over the whole sequence.

        Args:
            query: 4-D: batch, this rank's tokens, heads and their width, in the order of the dim indices.
            key: the same layout with its own number of heads.
            value: as `key`.
            batch_dim_idx: accepted; the layout follows from `scatter_idx` and `gather_idx`.
            rotary_pos_emb: cosines and sines that broadcast against query and key with all tokens; see
                `apply_rotary_pos_emb`.
            args: for the local attention.
            kwargs: for the local attention.

        Raises:
            ValueError: on every rank, if shapes differ between ranks, or there are fewer heads than ranks.
        """
        dims = {"sequence_dim": self.gather_idx, "head_dim": self.scatter_idx}
        backend = channel(self.spg)
        check_layout(backend, (query, key, value), "DistributedAttention")
        heads = divide_heads(query.shape[self.scatter_idx], key.shape[self.scatter_idx], backend.world_size)
        parts = (heads.query, heads.key_value, heads.key_value)
        query, key, value = scatter_heads(backend, (query, key, value), parts, **dims)
        key, value = (repeat_heads(each, heads, backend.rank, self.scatter_idx) for each in (key, value))
        if rotary_pos_emb is not None:
            query, key = (apply_rotary_pos_emb(each, *rotary_pos_emb) for each in (query, key))
        num_own = query.shape[self.scatter_idx]
        context = self.local_attn(query, key, value, *args, **kwargs)
        width, rest = divmod(context.shape[self.scatter_idx], num_own)
        if rest:
            raise ValueError(
                f"DistributedAttention: the local attention returned the shape {tuple(context.shape)}; its dim "
                f"{self.scatter_idx} must be a multiple of this rank's {counted(num_own, 'head')}"
            )
        by_rank = [(start * width, stop * width) for start, stop in heads.query]
        return gather_heads(backend, context, by_rank, **dims)


class _SeqAllToAll:
    """DeepSpeed's single exchange: `_SeqAllToAll.apply(group, tensor, scatter_idx, gather_idx)`."""

    @staticmethod
    def apply(
        group: ProcessGroup,
        input: torch.Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int = 0,
        *others: Any,
    ) -> torch.Tensor:
        """Divide dim `scatter_idx` among the ranks and gather dim `gather_idx`; differentiable.

        Args:
            group: the ranks that share the sequence.
            input: has equal shapes on all ranks; dim `scatter_idx` is a multiple of the number of ranks.
            scatter_idx: the dim that is whole before, and divided after.
            gather_idx: the dim that is divided before, and whole after.
            batch_dim_idx: accepted; the layout follows from the other two.
            others: DeepSpeed's stream, handle and direction; accepted, since the call is complete when it returns.

        Raises:
            ValueError: if dim `scatter_idx` is not a multiple of the ranks, or shapes differ.
        """
        backend = channel(group)
        check_layout(backend, (input,), "_SeqAllToAll")
        size, rest = divmod(input.shape[scatter_idx], backend.world_size)
        if rest:
            raise ValueError(
                f"_SeqAllToAll: found {input.shape[scatter_idx]} in dim {scatter_idx}, which {backend.world_size} "
                "ranks cannot divide; use DistributedAttention for uneven heads"
            )
        parts = [(rank * size, (rank + 1) * size) for rank in range(backend.world_size)]
        return scatter_heads(backend, (input,), (parts,), sequence_dim=gather_idx, head_dim=scatter_idx)[0]


def single_all_to_all(
    input: torch.Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: ProcessGroup,
    async_op: bool = False,
    handle: Any = None,
    type: Any = None,
) -> torch.Tensor:
    """Call `_SeqAllToAll.apply` with DeepSpeed's order of arguments; `handle` and `type` belong to `async_op`.

    Raises:
        ValueError: see `_SeqAllToAll.apply`; also for `async_op`.
    """
    if async_op:
        raise ValueError("single_all_to_all: found async_op True; the exchange is complete when it returns, omit it")
    return _SeqAllToAll.apply(group, input, scatter_idx, gather_idx, batch_dim_idx)


def repeat_heads(tensor: torch.Tensor, heads: HeadDivision, rank: int, head_dim: int) -> torch.Tensor:
    """Repeat key or value heads to one per query head if the heads of `rank` do not form equal groups."""
    if heads.is_grouped(rank):
        return tensor
    return tensor.index_select(head_dim, torch.tensor(heads.local_kv_index(rank), device=tensor.device))


def apply_rotary_pos_emb(t: torch.Tensor, freqs_cos: torch.Tensor, freqs_sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding to the halves of the first R features of each head (arXiv 2104.09864, section 3.4.2).

    Args:
        t: [..., K]; the last dim is a head's width.
        freqs_cos: broadcasts against t[..., :R]; R <= K features are rotated.
        freqs_sin: as `freqs_cos`.
    """
    num_rotated = freqs_cos.shape[-1]
    rotated, kept = t[..., :num_rotated], t[..., num_rotated:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * freqs_cos + torch.cat((-second, first), dim=-1) * freqs_sin
    return torch.cat((rotated.to(t.dtype), kept), dim=-1)


complete(__name__)
