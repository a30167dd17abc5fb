"""Tuners choose the next trial: in order (`GridSearchTuner`), at random, or where a model expects the most.

A tuner knows only points and scores. A point is a mapping of settings to values. A score is a number, larger is better;
None if a trial ran out of memory or time; NaN if it ended with an error. `search` is the loop; its `measure` may run a
job with many ranks, or look up recorded results.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deepspeed.errors import counted

MICRO_BATCH = "train_micro_batch_size_per_gpu"
Point = Mapping[str, Any]
Measure = Callable[[Point], float | None]

_FACTOR = 4  # maximum ratio of a micro-batch to the largest one that has run
_NOISE = 0.02  # relative noise between two measurements of a point
_LEAST_GAIN = 0.003  # minimum expected relative gain of a trial
_LEAST_TRIALS = 5  # the minimum gain applies only after this number of trials


class Tuner:
    """`Tuner` chooses among points. After a point runs out of memory or time, it drops the points with a larger
    micro-batch and otherwise equal values.

    Args:
        points: the points to choose from, in the order shown to the user.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self.left: list[Point] = list(points)
        self.scores: list[tuple[Point, float]] = []

    def next(self) -> Point | None:
        """Return the next point to measure; None if no other is worth it."""
        return self.left[0] if self.left else None

    def tell(self, point: Point, score: float | None) -> None:
        """Take the score of a measured point. None (no memory or time) also removes larger micro-batches."""
        self.left = [each for each in self.left if each != point]
        if score is not None and math.isnan(score):
            return
        if score is not None:
            self.scores.append((point, score))
            return
        micro, others = point.get(MICRO_BATCH, 0), _without_micro(point)
        self.left = [each for each in self.left if _without_micro(each) != others or each.get(MICRO_BATCH, 0) <= micro]


class GridSearchTuner(Tuner):
    """`GridSearchTuner` takes points in the given order."""


class RandomTuner(Tuner):
    """`RandomTuner` takes points in a random order, which is reproducible, so that a search can resume."""

    def __init__(self, points: Sequence[Point], seed: int = 0) -> None:
        super().__init__(points)
        random.Random(seed).shuffle(self.left)  # noqa: S311 - nothing secret


class ModelBasedTuner(Tuner):
    """`ModelBasedTuner` takes the point with the largest expected improvement under a Gaussian process.

    The process models the logarithm of the score. The kernel is a sum of one term per setting, plus a small product of
    all terms: the gain of a micro-batch at one stage is expected at other stages too (additive Gaussian processes,
    Duvenaud et al., arXiv 1112.4394, section 2). The expected improvement follows Jones et al., Efficient Global
    Optimization (1998), equation 15. Micro-batches grow by a factor of at most 4, so that the first large one runs
    after smaller ones.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        super().__init__(points)
        self._axes = _dimensions(points)

    def next(self) -> Point | None:
        candidates = self._reachable()
        if not candidates or not self.scores:
            return candidates[0] if candidates else None
        gains = self._expected_gains(candidates)
        best = int(np.argmax(gains))
        is_worth_it = gains[best] >= _LEAST_GAIN or len(self.scores) < _LEAST_TRIALS
        return candidates[best] if is_worth_it else None

    def _reachable(self) -> list[Point]:
        if not self.left:
            return []
        smallest = min(point.get(MICRO_BATCH, 0) for point in self.left)
        ran = [point.get(MICRO_BATCH, 0) for point, _ in self.scores]
        limit = max(smallest, _FACTOR * max(ran)) if ran else smallest
        return [point for point in self.left if point.get(MICRO_BATCH, 0) <= limit]

    def _expected_gains(self, candidates: Sequence[Point]) -> np.ndarray:
        measured = [point for point, _ in self.scores]
        values = np.log([score for _, score in self.scores])
        mean = values.mean()
        covariance = self._kernel(measured, measured) + _NOISE**2 * np.eye(len(measured))
        across = self._kernel(candidates, measured)
        solved = np.linalg.solve(covariance, np.column_stack([values - mean, across.T]))
        expected = mean + across @ solved[:, 0]
        prior = self._kernel(candidates[:1], candidates[:1])[0, 0]
        deviation = np.sqrt(np.maximum(prior - np.einsum("ij,ji->i", across, solved[:, 1:]), 1e-12))
        ahead = expected - values.max()
        ratio = ahead / deviation
        density = np.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([math.erfc(-each / math.sqrt(2)) / 2 for each in ratio])
        return np.asarray(ahead * below + deviation * density)

    def _kernel(self, one: Sequence[Point], other: Sequence[Point]) -> np.ndarray:
        total, product = np.zeros((len(one), len(other))), np.ones((len(one), len(other)))
        for axis in self._axes:
            alike = axis.alike(one, other)
            total += axis.deviation**2 * alike
            product *= alike
        return total + _INTERACTION**2 * product


_INTERACTION = 0.1  # standard deviation of the joint effect of settings, in the logarithm of the score


class _Dimension:
    """A setting in the model: sizes are compared by their logarithms, other values by equality."""

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        self.name = name
        self.is_size = all(isinstance(value, int | float) and value > 0 for value in values) and not all(
            isinstance(value, bool) for value in values
        )
        self.is_size = self.is_size and name != "zero_optimization.stage"
        is_micro = name == MICRO_BATCH
        #: standard deviation in the logarithm of the score, and length scale in doublings
        self.deviation, self.length = (1.0, 3.0) if is_micro else (0.2, 3.0)

    def alike(self, one: Sequence[Point], other: Sequence[Point]) -> np.ndarray:
        """Return the correlation of each pair."""
        if self.is_size:
            ours, theirs = (np.log2([float(point[self.name]) for point in points]) for points in (one, other))
            return np.asarray(np.exp(-(((ours[:, None] - theirs[None, :]) / self.length) ** 2) / 2))
        return np.array([[float(mine[self.name] == its[self.name]) for its in other] for mine in one])


def _dimensions(points: Sequence[Point]) -> list[_Dimension]:
    names = points[0].keys() if points else ()
    values = {name: [point[name] for point in points] for name in names}
    return [_Dimension(name, found) for name, found in values.items() if len({repr(each) for each in found}) > 1]


def _without_micro(point: Point) -> dict[str, Any]:
    return {name: value for name, value in point.items() if name != MICRO_BATCH}


TUNERS: Mapping[str, Callable[[Sequence[Point]], Tuner]] = {
    "gridsearch": GridSearchTuner,
    "random": RandomTuner,
    "model_based": ModelBasedTuner,
}


class Budget:
    """`Budget` says when a search is over, and why.

    Args:
        num_trials: maximum number of trials.
        early_stopping: the search ends after this number of trials in a row that bring no improvement, or end with an
            error; 0: never.
    """

    def __init__(self, num_trials: int, early_stopping: int) -> None:
        self.num_trials, self.early_stopping = num_trials, early_stopping
        self.spent = 0
        self._in_vain = self._errors = 0
        self.best: tuple[Point, float] | None = None

    def begin_space(self) -> None:
        """Reset the counts of trials in a row, because another part of the space begins."""
        self._in_vain = self._errors = 0

    def tell(self, point: Point, score: float | None) -> None:
        """Count a trial."""
        self.spent += 1
        is_error = score is not None and math.isnan(score)
        is_better = score is not None and not is_error and (self.best is None or score > self.best[1])
        if is_better:
            assert score is not None
            self.best = (point, score)
        self._in_vain = 0 if is_better else self._in_vain + 1
        self._errors = self._errors + 1 if is_error else 0

    def end(self) -> str | None:
        """Return why the search ends here; None if more trials may run."""
        if self.spent >= self.num_trials:
            return f"tuner_num_trials {self.num_trials} is reached"
        if self.early_stopping and self._errors >= self.early_stopping:
            return f"{counted(self._errors, 'trial')} in a row ended by an error (tuner_early_stopping)"
        if self.early_stopping and self._in_vain >= self.early_stopping and self.best is not None:
            return f"{counted(self._in_vain, 'trial')} in a row no better (tuner_early_stopping)"
        return None


def search(tuner: Tuner, measure: Measure, budget: Budget) -> str:
    """Measure points until the tuner or the budget ends the search; return the reason."""
    while (reason := budget.end()) is None:
        point = tuner.next()
        if point is None:
            return "every trial is measured" if not tuner.left else "no other trial promises more"
        score = measure(point)
        tuner.tell(point, score)
        budget.tell(point, score)
    return reason
