"""How good an ordering is: Spearman, Kendall tau, recall of the longest 20 %, and their running measurement.

Pairs in which either value is missing (nan) are left out; where too little is left to say anything, the figure is nan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

LONGEST_SHARE = 0.2
_FEWEST = 3


def average_ranks(values: Float64Array) -> Float64Array:
    """Return ranks 1 to n, float64[n]; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[inverse], np.float64)


def spearman(predicted: Float64Array, actual: Float64Array, weights: Float64Array | None = None) -> float:
    """Return Spearman's rank correlation in [-1, 1], ties averaged; nan when a side is constant.

    Args:
        predicted: float64[n], nan where there is no prediction.
        actual: float64[n].
        weights: float64[n], how much each pair counts; None counts all alike.
    """
    known = np.isfinite(predicted) & np.isfinite(actual)
    if known.sum() < _FEWEST:
        return math.nan
    x, y = average_ranks(predicted[known]), average_ranks(actual[known])
    w = np.ones(len(x)) if weights is None else weights[known]
    w = w / w.sum()
    x, y = x - w @ x, y - w @ y
    scale = math.sqrt((w @ x**2) * (w @ y**2))
    return float(np.clip((w @ (x * y)) / scale, -1.0, 1.0)) if scale > 1e-12 else math.nan


def kendall_tau(predicted: Float64Array, actual: Float64Array) -> float:
    """Return Kendall's tau-b in [-1, 1] (Kendall 1945, corrected for ties); nan when a side is constant. O(n^2)."""
    known = np.isfinite(predicted) & np.isfinite(actual)
    if known.sum() < _FEWEST:
        return math.nan
    x, y = predicted[known], actual[known]
    signs_x = np.sign(x[:, None] - x[None, :])
    signs_y = np.sign(y[:, None] - y[None, :])
    scale = math.sqrt(float((signs_x**2).sum()) * float((signs_y**2).sum()))
    return float((signs_x * signs_y).sum() / scale) if scale else math.nan


def recall_of_longest(predicted: Float64Array, actual: Float64Array, share: float = LONGEST_SHARE) -> float:
    """Return the part of the ``share`` longest that is among the ``share`` predicted to be longest, in [0, 1].

    Prompts that tie on the border of the actual longest are equally right. Ties on the border of the prediction count
    by the expectation of a random choice. nan when all lengths are equal.
    """
    known = np.isfinite(predicted) & np.isfinite(actual)
    x, y = predicted[known], actual[known]
    if len(x) < _FEWEST or y.min() == y.max():
        return math.nan
    size = max(1, round(share * len(x)))
    chosen = _membership(x, size)
    border = np.sort(y)[-size]
    surely = float(chosen[y > border].sum())
    on_border = float(chosen[y == border].sum())
    return (surely + min(on_border, size - int((y > border).sum()))) / size


def _membership(values: Float64Array, size: int) -> Float64Array:
    """Chance of each value to be among the ``size`` largest when ties are broken at random, float64[n]."""
    border = np.sort(values)[-size]
    above = values > border
    ties = values == border
    return np.where(above, 1.0, np.where(ties, (size - above.sum()) / ties.sum(), 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityFigures:
    """Quality of one ranker over the recent groups, against the group's longest answer; nan where nothing is known.

    Attributes:
        spearman: Rank correlation.
        kendall: Kendall's tau-b.
        recall20: Recall of the longest 20 %.
        groups: Groups that it was measured on.
    """

    spearman: float
    kendall: float
    recall20: float
    groups: int


class PrequentialQuality:
    """The last ``window`` predictions of some rankers beside what came true; each was made before the observation."""

    def __init__(self, names: Sequence[str], window: int, half_life: float) -> None:
        """Start empty.

        Args:
            names: Rankers, in the order of the columns.
            window: Groups that are kept.
            half_life: Groups after which a pair counts half in :meth:`correlation`.
        """
        self.names = tuple(names)
        self._window = window
        self._half_life = half_life
        self._predicted = np.zeros((0, len(names)))
        self._actual = np.zeros(0)

    def __len__(self) -> int:
        return len(self._actual)

    def add(self, predicted: Float64Array, actual: Float64Array) -> None:
        """Take in groups: float64[n, rankers] predictions (nan: no opinion), float64[n] what came true."""
        self._predicted = np.concatenate([self._predicted, predicted])[-self._window :]
        self._actual = np.concatenate([self._actual, actual])[-self._window :]

    def correlation(self, name: str) -> tuple[float, float]:
        """Return a ranker's Spearman with forgetting, and the number of groups that this is worth; (nan, 0) if none."""
        column = self._predicted[:, self.names.index(name)]
        ages = np.arange(len(self._actual))[::-1]
        weights = 0.5 ** (ages / self._half_life)
        known = weights[np.isfinite(column)]
        if not len(known):
            return math.nan, 0.0
        return spearman(column, self._actual, weights), float(known.sum() ** 2 / (known**2).sum())

    def figures(self) -> dict[str, QualityFigures]:
        """Return the figures of each ranker over the window."""
        return {name: self._figures(self._predicted[:, i]) for i, name in enumerate(self.names)}

    def _figures(self, column: Float64Array) -> QualityFigures:
        return QualityFigures(
            spearman=spearman(column, self._actual),
            kendall=kendall_tau(column, self._actual),
            recall20=recall_of_longest(column, self._actual),
            groups=int(np.isfinite(column).sum()),
        )

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Return arrays from which :meth:`load_state` restores this."""
        return {"predicted": self._predicted, "actual": self._actual}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over what :meth:`state` returned."""
        self._predicted = np.asarray(state["predicted"], np.float64).reshape(-1, len(self.names))[-self._window :]
        self._actual = np.asarray(state["actual"], np.float64)[-self._window :]
