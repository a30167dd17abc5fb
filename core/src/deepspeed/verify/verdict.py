"""Judge the differences between a recorded run and a second run by bounds on the rounding errors of both.

`u` is the unit roundoff of a dtype: half the distance from 1 to the next number. The error of a sum of n numbers, in
any order, is at most (n - 1) u times the sum of their magnitudes (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., section 4.2). Here the summands are the gradients of micro-batches and ranks, and the magnitudes
are their lengths (L2 norms). Both runs compute the same operations on the same values, so that besides the sums only
roundings inside kernels differ:

    slack   2^-18 in fp32, 2^-12 in bf16, 2^-14 in fp16: one of 64 roundings to 16 bits may go the other way; 16 u if
            the recorded run uses other kernels (torch.autocast, torch.compile)

    loss        slack |loss|
    buffer      16 slack, relative to its sums
    gradient    (slack + (n + 4) u_sums) times the lengths of its summands, plus 4 slack times the average element's
                share of the whole norm: a gradient that is zero except for rounding has no digits to compare
    norm        2^-14 of the norm
    weight      2 u_masters |w| + 2^-12 times the length of its update; and for each element 4 u_masters of the element,
                2^-6 of its update and 2^-10 of the root mean square of all updates; the larger violation counts

Plain torch adds in fp64. For a second run with another configuration, the roundings of its sums are added to the above,
and u_masters is the larger one of both. If the runs differ in dtypes, or in the micro-batches of a step, they do not
compute the same operations on the same values. Then

    slack   is at least 16 u of the coarser dtype, as for other kernels
    weights in the forward, and inputs, may differ by 2 u (1 + u) of the coarser dtype, relative to their sums
    weights after the update get 8 u_sums more, times update and mean, if the second run rounds recorded gradients

A gradient that only one run has is a difference, even if it is zero: an optimizer decays a weight with a zero gradient,
but does not touch a weight without a gradient. Values that are finite in neither run are equal. If a bound itself is
not finite, only values that are finite in just one run differ.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.autotuning.trial import write_json
from deepspeed.verify.recording import Arithmetic, Record

PLAIN = "plain torch"
_OTHER = "against.json"
#: in the order in which a step computes them: the first one that differs is closest to the cause
KINDS = ("input", "forward weight", "loss", "buffer", "learning rate", "gradient", "norm", "skipped step", "weight")
_SLACK = {"float32": 2.0**-18, "bfloat16": 2.0**-12, "float16": 2.0**-14}
_OF_OTHER_KERNELS = 16
_NORM, _UPDATE = 2.0**-14, 2.0**-12
_OF_ELEMENT, _OF_MEAN = 2.0**-6, 2.0**-10
_SAME = 1e-9  # relative tolerance for fp64 sums over the same values
_SHOWN = 3  # names in a note
_ALIKE = 1e-3  # relative tolerance for inputs, which may depend on rounded values


def roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype, given by its name in torch."""
    return torch.finfo(getattr(torch, dtype)).eps / 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison. It holds if the difference is within the bound."""

    step: int  # from 1
    kind: str  # one of `KINDS`
    name: str  # name of a parameter, or of a loss or forward
    difference: float
    bound: float
    size: float  # size of the second run's value, in the unit of the difference
    rank: int
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.difference <= self.bound  # False for nan

    @property
    def share(self) -> float:
        """The difference as a multiple of its bound."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.bound if self.bound > 0 else math.inf


class Bounds:
    """`Bounds` computes the bounds in the docstring of this module.

    Args:
        arithmetic: arithmetic of the recorded run.
        num_elements: name of each trained parameter -> number of elements.
        other: arithmetic of the second run; None: plain torch.
    """

    def __init__(
        self, arithmetic: Arithmetic, num_elements: Mapping[str, int], other: Arithmetic | None = None
    ) -> None:
        both = [arithmetic] if other is None else [arithmetic, other]
        self._numel = num_elements
        self._total = max(sum(num_elements.values()), 1)
        self.slack = max(map(_slack, both))
        self.same, self.alike = _SAME, _ALIKE
        self._rounded = 0.0  # 8 u_sums of the second run, if it rounds the recorded gradients
        #: whether both runs have the same micro-batches
        self.are_paired = len({each.num_micros for each in both}) == 1
        coarser = max(roundoff(each.computes or each.model) for each in both)
        if not self.are_paired or len({each.computes or each.model for each in both}) > 1:
            self.slack = max(self.slack, _OF_OTHER_KERNELS * coarser)
        if len({each.model for each in both}) > 1:
            self.same = 2 * coarser * (1 + coarser)
            self.alike = max(_ALIKE, self.same)
        if other is not None and other.sums not in (arithmetic.sums, "float32"):
            self._rounded = 8 * roundoff(other.sums)
        self._sums = sum(roundoff(each.sums) * (each.num_ranks * each.num_micros + 4) for each in both)
        self._masters = max(roundoff(each.masters) for each in both)
        self._smallest = max(torch.finfo(getattr(torch, each.sums)).smallest_normal for each in both)

    def loss(self, wanted: float) -> float:
        return self.slack * max(abs(wanted), 2.0**-10)

    def gradient(self, name: str, *, length: float, norm: float) -> float:
        """Return the bound for the L2 norm of the difference of a gradient.

        Args:
            length: the total length of its summands, averaged like the gradient.
            norm: norm of the whole gradient.
        """
        of_average = norm * math.sqrt(self._numel[name] / self._total)
        underflow = self._smallest * math.sqrt(self._numel[name])
        return (self.slack + self._sums) * length + 4 * self.slack * of_average + underflow

    def norm(self, wanted: float) -> float:
        return (_NORM + 4 * self._sums) * wanted

    def element(self, size: Tensor, update: Tensor, mean: float) -> Tensor:
        """Return the bounds for the differences of a weight's elements, from the magnitudes of weight and update.

        Args:
            mean: the root mean square of all updates.
        """
        tiny = torch.finfo(torch.float32).tiny
        rounded = self._rounded
        return 4 * self._masters * size + (_OF_ELEMENT + rounded) * update + (_OF_MEAN + rounded) * mean + tiny

    def weight(self, *, size: float, update: float) -> float:
        return 2 * self._masters * size + (_UPDATE + self._rounded) * update


def _slack(arithmetic: Arithmetic) -> float:
    if arithmetic.other_kernels:
        return _OF_OTHER_KERNELS * roundoff(arithmetic.model)
    return _SLACK.get(arithmetic.model, _SLACK["float32"])


class Comparison:
    """Compares the steps of a second run with the record, and writes each rank's `Finding`s beside the record.

    Args:
        second: description of the second run, for messages.
    """

    def __init__(self, record: Record, bounds: Bounds, second: str = PLAIN) -> None:
        self._record, self._bounds, self._second = record, bounds, second
        self._step = 0
        self._rows: list[Finding] = []

    def begin(self, step: int) -> None:
        """Begin a step, counted from 1."""
        self._step, self._rows = step, []

    def end(self) -> None:
        """Write the findings of the step."""
        folder = self._record.folder / f"step{self._step}"
        write_json(folder / f"rows{self._record.rank}.json", [asdict(row) for row in self._rows])

    def _add(self, kind: str, name: str, difference: float, bound: float, size: float, note: str = "") -> None:
        bound = bound if math.isfinite(bound) else sys.float_info.max  # an infinite bound allows everything
        self._rows.append(Finding(self._step, kind, name, difference, bound, size, self._record.rank, note))

    def has_no_equal(self, why: str) -> None:
        """Add a finding that the two runs did not use the same data, or did not make the same calls."""
        self._add("input", why, math.inf, 0.0, 0.0)

    def compare_forwards(self, wanted: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> None:
        """Compare the inputs of each forward, and the weights that its modules used."""
        if not self._bounds.are_paired:
            self._compare_totals(wanted, found)
            wanted, found = wanted[:1], found[:1]
        elif len(wanted) != len(found):
            self.has_no_equal(f"{len(found)} forwards when it was recorded, and {len(wanted)} in {self._second}")
            return
        for number, (here, there) in enumerate(zip(wanted, found, strict=True)):
            same = not self._bounds.are_paired or (
                len(here["inputs"]) == len(there["inputs"])
                and all(
                    _is_alike(a, b, self._bounds.alike) for a, b in zip(here["inputs"], there["inputs"], strict=True)
                )
            )
            if not same:
                self.has_no_equal(f"inputs of forward {number + 1}: seed what draws the data and shuffles it")
            for name, of_weight in there["weights"].items():
                if name in here["weights"]:
                    difference = _relative(here["weights"][name], of_weight)
                    self._add("forward weight", name, difference, self._bounds.same, 1.0, f"forward {number + 1}")

    def _compare_totals(self, wanted: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> None:
        """Compare the total inputs of a step, if the runs divide it into different micro-batches."""
        if any(each.get("draws") for each in (*wanted, *found)):
            self.has_no_equal(
                "a forward draws random numbers, which are others for other micro-batches: verify without dropout, or "
                "with the same gradient_accumulation_steps"
            )
        here, there = _totals(wanted), _totals(found)
        same = len(here) == len(there) and all(
            a[0] == b[0] and abs(a[1] - b[1]) <= self._bounds.alike * abs(b[1])
            for a, b in zip(here, there, strict=True)
        )
        if not same:
            self.has_no_equal(
                "inputs of all forwards: both runs have to divide the same samples into their micro-batches"
            )

    def compare_count(self, wanted: int, found: int) -> None:
        """Compare the step's number of micro-batches with the configuration."""
        self._add("loss", "micro-batches", float(abs(wanted - found)), 0.0, float(wanted), f"{found} of {wanted}")

    def compare_losses(self, wanted: Sequence[float], found: Sequence[float]) -> None:
        """Compare the loss of each backward."""
        if len(wanted) != len(found):
            self.has_no_equal(f"{len(found)} losses when it was recorded, and {len(wanted)} in {self._second}")
            return
        for number, (here, there) in enumerate(zip(wanted, found, strict=True)):
            difference = 0.0 if here == there or (math.isnan(here) and math.isnan(there)) else abs(here - there)
            self._add("loss", f"backward {number + 1}", difference, self._bounds.loss(here), abs(here))

    def compare_buffers(self, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Compare digests of buffers after the step."""
        for name, here in wanted.items():
            there = found.get(name)
            if there is None or here[0] != there[0] or len(here) != len(there):
                self._add("buffer", name, math.inf, 0.0, 1.0, "it has another shape or type")
            elif len(here) == 3:
                self._add("buffer", name, _relative(here, there), 16 * self._bounds.slack, 1.0)
            else:
                self._add("buffer", name, float(here != there), 0.0, 1.0)

    def compare_rates(self, wanted: Sequence[float], found: Sequence[float]) -> None:
        """Compare the learning rate of each parameter group, in the step."""
        if len(wanted) != len(found):
            self._add("learning rate", "groups", math.inf, 0.0, len(wanted), f"{len(found)} of {len(wanted)} groups")
            return
        for number, (here, there) in enumerate(zip(wanted, found, strict=True)):
            self._add("learning rate", f"group {number}", abs(here - there), 1e-6 * abs(here), abs(here))

    def compare_gradient(
        self, name: str, wanted: Tensor | None, found: Tensor | None, *, length: float, norm: float
    ) -> None:
        """Compare one gradient; None: the run has none. See `Bounds.gradient`."""
        if wanted is None and found is None:
            return
        size = 0.0 if wanted is None else float(wanted.norm())
        if wanted is None or found is None:
            # even for zeros: an optimizer skips a weight without a gradient, but decays one with a zero gradient
            difference, note = math.inf, "no gradient there" if found is None else f"no gradient in {self._second}"
        else:
            difference, note = _distance(found, wanted), ""
        self._add("gradient", name, difference, self._bounds.gradient(name, length=length, norm=norm), size, note)

    def compare_norm(self, wanted: float, found: float | None) -> None:
        """Compare the reported norm with the norm of the recorded gradient."""
        if found is None:
            return
        is_lost = not (math.isfinite(wanted) or math.isfinite(found))
        difference = 0.0 if is_lost else abs(wanted - found)
        self._add("norm", "whole gradient", difference, self._bounds.norm(wanted), wanted)

    def compare_skipped(self, *, was_skipped: bool, is_finite: bool) -> None:
        """Check that the recorded step was skipped if and only if this run's gradients are not finite."""
        note = (
            "" if was_skipped != is_finite else f"gradients are {'' if is_finite else 'not '}finite in {self._second}"
        )
        self._add("skipped step", "overflow", float(was_skipped == is_finite), 0.0, 1.0, note)

    def compare_weight(self, name: str, wanted: Tensor, found: Tensor | None, *, before: Tensor) -> None:
        """Compare one weight after the update."""
        if found is None:
            self._add("weight", name, math.inf, 0.0, float(wanted.norm()), "it was not recorded")
            return
        here, there = wanted.to(torch.float64), found.to(torch.float64)
        update = here - before.to(torch.float64)
        size, length = float(here.nan_to_num(0.0).norm()), _distance(here, before.to(torch.float64))
        judged = [(_distance(there, here), self._bounds.weight(size=size, update=length))]
        if math.isfinite(length):
            mean = length / math.sqrt(max(here.numel(), 1))
            share = (there - here).abs().nan_to_num(0.0) / self._bounds.element(here.abs(), update.abs(), mean)
            worst = int(share.flatten().argmax()) if share.numel() else 0
            if share.numel():
                difference = float((there - here).flatten()[worst].abs().nan_to_num(0.0))
                judged.append((difference, difference / float(share.flatten()[worst]) if difference else 1.0))
        difference, bound = max(judged, key=lambda each: each[0] / each[1] if each[1] else each[0])
        self._add("weight", name, difference, bound, length)


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the L2 norm of the difference; elements that are finite in neither tensor are equal."""
    are_lost = ~(a.isfinite() | b.isfinite())
    return float((a - b).masked_fill(are_lost, 0.0).norm())


def _is_alike(a: Sequence[Any], b: Sequence[Any], tolerance: float) -> bool:
    if len(a) != len(b) or a[0] != b[0]:
        return False
    return _relative(a, b) <= tolerance if len(a) == 3 else list(a) == list(b)


def _totals(forwards: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return the number of elements and the sum of squares of each input, totaled over all forwards; (1, 0.0) for an
    input that is no numeric tensor."""
    totals: dict[int, tuple[int, float]] = {}
    for forward in forwards:
        for place, (shape, *facts) in enumerate(forward["inputs"]):
            numel, squares = totals.get(place, (0, 0.0))
            counts = bool(shape) and len(facts) > 1
            its = (numel + math.prod(shape), squares + facts[-1]) if counts else (1, 0.0)
            totals[place] = its
    return list(totals.values())


def _relative(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Return the relative difference of two digests of floating tensors."""
    if list(a[1:]) == list(b[1:]) or not any(map(math.isfinite, (*a[1:], *b[1:]))):
        return 0.0
    numel = math.prod(a[0])
    size = math.sqrt(max(a[2] * numel, 0.0)) or 1.0
    return max(abs(a[1] - b[1]) / size, abs(a[2] - b[2]) / (a[2] or 1.0))


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """All comparisons of one script."""

    rows: Sequence[Finding]
    losses: Mapping[int, tuple[float, float]]  # step -> recorded loss and gradient norm
    notes: Sequence[str] = ()  # remarks that are no differences
    second: str = PLAIN  # description of the second run

    @property
    def num_steps(self) -> int:
        return max((row.step for row in self.rows), default=0)

    @property
    def is_comparable(self) -> bool:
        """Whether both runs had the same data."""
        return bool(self.rows) and not any(row.kind == "input" for row in self.rows)

    @property
    def faults(self) -> list[Finding]:
        """The comparisons that do not hold, closest to the cause first.

        Within a step, gradients are in the order of a backward, last parameter first, because errors propagate in this
        order. Rows of several ranks keep each rank's order.
        """
        faults = [row for row in self.rows if not row.holds]
        place: dict[tuple[str, str, str], int] = {}
        for row in self.rows:
            place.setdefault((row.kind, row.name, row.note * (row.kind == "forward weight")), len(place))

        def order(row: Finding) -> tuple[int, int, int]:
            its = place[row.kind, row.name, row.note * (row.kind == "forward weight")]
            return row.step, KINDS.index(row.kind), -its if row.kind == "gradient" else its

        return sorted(faults, key=order)

    @property
    def first(self) -> Finding | None:
        """The fault closest to the cause; None if all comparisons hold."""
        return next(iter(self.faults), None)

    def of_kind(self, kind: str, step: int) -> list[Finding]:
        return [row for row in self.rows if row.kind == kind and row.step == step]

    def as_json(self) -> dict[str, Any]:
        """Return the record that `ds_verify --json` writes."""
        first = self.first
        verdict = "not comparable" if not self.is_comparable else "differs" if first is not None else "equal"
        return {
            "verdict": verdict,
            "against": self.second,
            "steps": self.num_steps,
            "comparisons": len(self.rows),
            "notes": list(self.notes),
            "first": None if first is None else asdict(first),
            "faults": [asdict(row) for row in self.faults],
            "worst": {kind: asdict(row) for kind in KINDS if (row := self._worst(kind)) is not None},
        }

    def _worst(self, kind: str) -> Finding | None:
        return max((row for row in self.rows if row.kind == kind), key=lambda row: row.share, default=None)


def read_verdict(folder: Path) -> RunVerdict:
    """Read the findings of all ranks and engines beside the records of a run.

    If a recorded step has no findings, the runs are not comparable: the second run ended before this step.
    """
    second = second_of(folder)
    rows: list[Finding] = []
    losses: dict[int, tuple[float, float]] = {}
    for engine in sorted(folder.glob("engine*"), key=lambda path: int(path.name.removeprefix("engine"))):
        steps = sorted(engine.glob("step*"), key=lambda path: int(path.name.removeprefix("step")))
        for step in steps[1:]:
            number, facts = int(step.name.removeprefix("step")), step / "rank0.json"
            said = json.loads(facts.read_text()) if facts.exists() else None
            its = sorted(step.glob("rows*.json"))
            for path in its:
                rows += [_of_engine(Finding(**row), engine.name) for row in json.loads(path.read_text())]
            if said is not None and not its:
                why = f"{engine.name} made no such step in {second}"
                rows.append(Finding(number, "input", why, math.inf, 0, 0, 0))
            if said is not None and number not in losses:
                mean = sum(said["losses"]) / len(said["losses"]) if said["losses"] else math.nan
                losses[number] = mean, math.nan if said["norm"] is None else said["norm"]
    if rows and not any(row.kind in ("gradient", "input") for row in rows):
        why = "every step was skipped, for gradients that are not finite, so nothing was compared; take more --steps"
        rows.append(Finding(1, "input", why, math.inf, 0.0, 0.0, 0))
    notes = [*_lost(rows, losses), *_notes(folder)]
    return RunVerdict(rows, losses, notes, second)


@dataclass(frozen=True, slots=True)
class OtherConfig:
    """`OtherConfig` is the configuration of the second run, which `ds_verify --against` names.

    For "auto" the script's values are used.
    """

    name: str  # name of the file, for messages
    config: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write the configuration for the ranks of the second run. The command calls this before it starts them."""
        write_json(folder / _OTHER, asdict(self))


def read_other(folder: Path) -> OtherConfig | None:
    """Return the configuration of the second run; None for plain torch."""
    path = folder / _OTHER
    return OtherConfig(**json.loads(path.read_text())) if path.exists() else None


def second_of(folder: Path) -> str:
    """Return the description of a folder's second run: plain torch, or the name of its configuration."""
    other = read_other(folder)
    return PLAIN if other is None else other.name


def _of_engine(row: Finding, engine: str) -> Finding:
    """Add the engine's name to the note of a finding, unless it is the first engine."""
    return row if engine == "engine0" else replace(row, note=f"{engine} {row.note}".strip())


def _lost(rows: Sequence[Finding], losses: Mapping[int, tuple[float, float]]) -> list[str]:
    """Return notes about comparisons that prove nothing."""
    notes = []
    updated = {row.step for row in rows if row.kind == "gradient"}  # excludes skipped steps
    weights = [row for row in rows if row.kind == "weight" and row.step in updated]
    hidden = [row for row in weights if row.size <= row.bound]
    if len(hidden) * 2 > len(weights):
        notes.append(
            f"{len(hidden)} of {len(weights)} updates are smaller than the rounding of their weights, and are not "
            "judged: verify with a larger learning rate, or without warm-up"
        )
    if lost := [step for step, (loss, norm) in losses.items() if not math.isfinite(norm) and math.isnan(loss)]:
        notes.append(f"loss and norm are no numbers from step {min(lost)} on, and say nothing")
    return notes


def _notes(folder: Path) -> list[str]:
    """Return notes about what a verdict does not cover: parts of the script that run in both runs, and ranks that have
    equal inputs in every step."""
    notes = []
    for engine in sorted(folder.glob("engine*")):
        setting = engine / "setting.json"
        brings = json.loads(setting.read_text()) if setting.exists() else {}
        if hooked := brings.get("hooks"):
            names = ", ".join(hooked[:_SHOWN]) + (f" and {len(hooked) - _SHOWN} more" if len(hooked) > _SHOWN else "")
            notes.append(f"hooks of the script ran in both runs, and what they do is not judged: {names}")
        if name := brings.get("optimizer"):
            notes.append(f"the script's optimizer {name} ran in both runs, and was compared with itself")
        steps = [[json.loads(path.read_text()) for path in step.glob("rank*.json")] for step in engine.glob("step*")]
        inputs = [
            [[each["inputs"] for each in rank["forwards"]] for rank in ranks] for ranks in steps if ranks and ranks[0]
        ]
        if inputs and all(len(each) > 1 and all(one == each[0] != [] for one in each) for each in inputs):
            notes.append(
                f"all ranks had the same inputs in every step ({engine.name}): is the data divided over ranks?"
            )
    return notes
