"""Predicted lengths of drawn groups, and where a prediction lies among the recent ones."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from storage.records import GroupKey

WINDOW = 4096


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the predictor says about one group.

    Attributes:
        rank: Fused rank: a higher value means a longer group. Only the order counts.
        p50: Median of the length of the group's longest answer, in tokens.
        p90: 90th percentile of that length, in tokens.
    """

    rank: float
    p50: float
    p90: float


class ForecastBook:
    """The forecasts of groups that are not settled, and a window of recent ones to compare with.

    A threshold taken from the groups that happen to wait would drift, because long ones gather there; the window holds
    every group that was drawn. The book is part of the run's state: :meth:`state` goes into the checkpoint.
    """

    def __init__(self, window: int = WINDOW) -> None:
        """Compare with the last ``window`` forecasts."""
        self._window = window
        self._forecasts: dict[GroupKey, Forecast] = {}
        self._recent: deque[tuple[float, float]] = deque()
        self._ranks: list[float] = []
        self._medians: list[float] = []

    def add(self, forecasts: Mapping[GroupKey, Forecast]) -> None:
        """Take in the forecasts of groups that were just drawn."""
        self._forecasts.update(forecasts)
        for forecast in forecasts.values():
            self._push(forecast.rank, forecast.p50)

    def get(self, key: GroupKey) -> Forecast | None:
        """Forecast of a group, or None if nothing was predicted for it."""
        return self._forecasts.get(key)

    def forget(self, keys: Iterable[GroupKey]) -> None:
        """Drop the forecasts of settled groups; the window keeps them."""
        for key in keys:
            self._forecasts.pop(key, None)

    def percentile(self, key: GroupKey) -> float | None:
        """Share of recent forecasts that rank below the group, in [0, 1); None without a forecast."""
        forecast = self._forecasts.get(key)
        if forecast is None or not self._ranks:
            return None
        return bisect_left(self._ranks, forecast.rank) / len(self._ranks)

    def median(self) -> float:
        """Median of the recent predicted lengths, in tokens; 0 without any."""
        return self._medians[len(self._medians) // 2] if self._medians else 0.0

    def share_above(self, tokens: float) -> float:
        """Share of the recent predicted lengths that exceed ``tokens``; 0 without any."""
        return 1.0 - bisect_right(self._medians, tokens) / len(self._medians) if self._medians else 0.0

    def remaining(self, key: GroupKey, written: int) -> float | None:
        """Tokens that the longest answer of a group still needs after ``written`` of them; None without a forecast.

        An answer that outlived its median is given the distance to its P90, and one that outlived that as much again
        as it has: lengths are log-normal in the field's measurements, where the mean residual life grows with age.
        """
        forecast = self._forecasts.get(key)
        if forecast is None:
            return None
        if written < forecast.p50:
            return forecast.p50 - written
        return forecast.p90 - written if written < forecast.p90 else float(written)

    def state(self) -> dict[str, Any]:
        """Forecasts and window as JSON values."""
        return {
            "forecasts": [[str(key), f.rank, f.p50, f.p90] for key, f in self._forecasts.items()],
            "recent": [list(pair) for pair in self._recent],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken."""
        self._forecasts = {GroupKey.parse(text): Forecast(*values) for text, *values in state["forecasts"]}
        self._recent.clear()
        self._ranks.clear()
        self._medians.clear()
        for rank, median in state["recent"]:
            self._push(rank, median)

    def _push(self, rank: float, median: float) -> None:
        self._recent.append((rank, median))
        insort(self._ranks, rank)
        insort(self._medians, median)
        if len(self._recent) > self._window:
            old_rank, old_median = self._recent.popleft()
            del self._ranks[bisect_left(self._ranks, old_rank)]
            del self._medians[bisect_left(self._medians, old_median)]
