"""`UseSlots`: which parameters got a gradient on some rank, as numbers that ranks add up. Called by `strategy.py`.

A parameter that all ranks hold has one slot. An expert's has one for each set of experts, since the ranks that hold
another set have another parameter in its place.
"""

from collections.abc import Iterable, Sequence

from deepspeed.zero.unit_ranks import UnitRanks


class UseSlots:
    """Args:
    ranks: of each attached parameter.
    """

    def __init__(self, ranks: Iterable[UnitRanks]) -> None:
        self._own: list[int] = []  # by parameter
        self.count = 0
        for each in ranks:
            self._own.append(self.count + each.part)
            self.count += each.num_parts
        self._is_plain = self.count == len(self._own)  # no experts: slots are parameters

    def spread(self, used: Sequence[bool]) -> list[float]:
        """This rank's contribution to the sum: one number per slot."""
        if self._is_plain:
            return list(map(float, used))
        slots = [0.0] * self.count
        for slot, is_used in zip(self._own, used, strict=True):
            slots[slot] = float(is_used)
        return slots

    def own(self, sums: Sequence[float]) -> list[bool]:
        """By parameter whether a rank that holds it used it, from the sums over all ranks."""
        slots = sums[: self.count] if self._is_plain else map(sums.__getitem__, self._own)
        return [each > 0 for each in slots]
