"""Predicted lengths of drawn groups, and where a prediction lies among the recent ones."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from actors.length_predictor.records import Prediction
from storage.records import GroupKey

WINDOW = 4096


class ForecastBook:
    """The forecasts of groups that are not settled, and a window of recent ones to compare with.

    A threshold taken from the groups that happen to wait would drift, because long ones gather there; the window holds
    every group that was drawn. The book is part of the run's state: :meth:`state` goes into the checkpoint.
    """

    def __init__(self, window: int = WINDOW) -> None:
        """Compare with the last ``window`` forecasts."""
        self._window = window
        self._forecasts: dict[GroupKey, Prediction] = {}
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, forecasts: Mapping[GroupKey, Prediction]) -> None:
        """Take in the forecasts of groups that were just drawn."""
        self._forecasts.update(forecasts)
        for forecast in forecasts.values():
            self._push(forecast.longest)

    def get(self, key: GroupKey) -> Prediction | None:
        """Forecast of a group, or None if nothing was predicted for it."""
        return self._forecasts.get(key)

    def forget(self, keys: Iterable[GroupKey]) -> None:
        """Drop the forecasts of settled groups; the window keeps them."""
        for key in keys:
            self._forecasts.pop(key, None)

    def percentile(self, key: GroupKey) -> float | None:
        """Share of recent groups with a shorter predicted longest answer, in [0, 1); None without a forecast.

        The predictor's own rank holds within one question to it only; this one compares groups of different draws.
        """
        forecast = self._forecasts.get(key)
        if forecast is None or not self._sorted:
            return None
        return bisect_left(self._sorted, forecast.longest) / len(self._sorted)

    def median(self) -> float:
        """Median of the recent predictions of a group's longest answer, in tokens; 0 without any."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0

    def share_above(self, tokens: float) -> float:
        """Share of the recent predictions that exceed ``tokens``; 0 without any."""
        return 1.0 - bisect_right(self._sorted, tokens) / len(self._sorted) if self._sorted else 0.0

    def remaining(self, key: GroupKey, written: int) -> float | None:
        """Tokens that the longest answer of a group still needs after ``written`` of them; None without a forecast."""
        forecast = self._forecasts.get(key)
        return None if forecast is None else max(forecast.longest - written, forecast.remaining(written))

    def state(self) -> dict[str, Any]:
        """Forecasts and window as JSON values."""
        return {
            "forecasts": [
                [str(key), f.rank, f.p50, f.p90, f.longest, f.confidence] for key, f in self._forecasts.items()
            ],
            "recent": list(self._recent),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken."""
        self._forecasts = {
            GroupKey.parse(text): Prediction(rank=rank, p50=p50, p90=p90, longest=longest, confidence=confidence)
            for text, rank, p50, p90, longest, confidence in state["forecasts"]
        }
        self._recent.clear()
        self._sorted.clear()
        for longest in state["recent"]:
            self._push(longest)

    def _push(self, longest: float) -> None:
        self._recent.append(longest)
        insort(self._sorted, longest)
        if len(self._recent) > self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
