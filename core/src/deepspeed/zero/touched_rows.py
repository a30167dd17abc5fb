"""Which rows of a parameter got a gradient: for an optimizer that takes sparse gradients only (SparseAdam).

Buckets are dense. Such an optimizer updates the rows that a gradient names, even where their gradient is zero, and no
others. So each rank notes the rows of its sparse gradients, the ranks that hold the parameter add these marks up once
per step, and the update picks the marked rows out of the dense sum. Made by `Sharding`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.comm.backend import GroupBackend
from deepspeed.errors import StateError, counted


class TouchedRows:
    """Marks for the rows of `params`.

    Args:
        params: the attached parameters.
        ranks: by parameter, those that hold it.
    """

    def __init__(self, params: Sequence[Tensor], ranks: Sequence[GroupBackend]) -> None:
        numels = [len(param) if param.dim() > 0 else 1 for param in params]
        self._by_param: dict[int, Tensor] = {}
        #: one element per row, 0 or not, of the parameters of each group of ranks
        self._marks: dict[GroupBackend, Tensor] = {}
        for group in dict.fromkeys(ranks):
            places = [place for place, each in enumerate(ranks) if each is group]
            counts = [numels[place] for place in places]
            self._marks[group] = group.allocate(sum(counts), torch.float32, params[places[0]].device).zero_()
            self._by_param.update(zip(places, self._marks[group].split(counts), strict=True))

    def add_up(self) -> None:
        """A row is marked that any rank has marked. A collective of each group."""
        for group, marks in self._marks.items():
            group.all_reduce(marks).wait()

    def note(self, index: int, grad: Tensor, name: str) -> None:
        """A gradient of the parameter `index`, called `name`, arrived.

        Raises:
            StateError: for a gradient that is dense, or sparse in more than its rows.
        """
        if not grad.is_sparse or grad.sparse_dim() != 1:
            kind = (
                "a dense one"
                if not grad.is_sparse
                else f"one that is sparse in {counted(grad.sparse_dim(), 'dimension')}"
            )
            raise StateError(
                f"backward: SparseAdam takes sparse gradients only, and {name} got {kind}; use "
                "torch.nn.Embedding(sparse=True), or an optimizer for dense gradients such as AdamW"
            )
        self._by_param[index][grad._indices()[0]] = 1.0

    def note_all(self, index: int) -> None:
        """The whole gradient of the parameter `index` was replaced."""
        self._by_param[index].fill_(1.0)

    def pick(self, index: int, grad: Tensor) -> Tensor:
        """The marked rows of `grad`, the whole reduced gradient of the parameter `index`, as a sparse tensor."""
        rows = self._by_param[index].nonzero().flatten().to(grad.device)
        return torch.sparse_coo_tensor(rows[None], grad[rows], grad.shape, is_coalesced=True, check_invariants=False)

    def clear(self) -> None:
        for marks in self._marks.values():
            marks.zero_()
