"""Seconds per decoding pass by rows in it: measured, smoothed, and the same for the dispatcher and the simulator."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping


class LatencyTable:
    """Per-token latency (PTL in StreamRL, arXiv 2504.15930): time of one pass in which every row advances one token.

    Points between measured ones are interpolated; outside of them the nearest two points give the slope, never below
    zero, and never a time below that of the smallest measured batch.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """Take measured points.

        Args:
            seconds: Seconds of a pass by rows, at least one point, all positive.

        Raises:
            ValueError: No point, or one that is not positive.
        """
        if not seconds or any(rows < 1 or value <= 0 for rows, value in seconds.items()):
            raise ValueError(f"a latency table needs positive seconds for at least one number of rows, got {seconds}")
        self._seconds = dict(sorted(seconds.items()))
        self._rows = list(self._seconds)

    @classmethod
    def affine(cls, t0: float, k_row: float, rows: int) -> LatencyTable:
        """The table of ``t0 + k_row * rows`` seconds, for batches of up to ``rows``."""
        return cls({1: t0 + k_row, max(2, rows): t0 + k_row * max(2, rows)})

    def observe(self, rows: int, seconds: float, weight: float = 0.1) -> None:
        """Blend a measured pass into the point for ``rows`` with ``weight``; a first measurement sets the point."""
        if rows < 1 or seconds <= 0:
            return
        known = self._seconds.get(rows)
        self._seconds[rows] = seconds if known is None else (1 - weight) * known + weight * seconds
        if known is None:
            self._seconds = dict(sorted(self._seconds.items()))
            self._rows = list(self._seconds)

    def __call__(self, rows: int) -> float:
        """Seconds of a pass with ``rows`` rows."""
        points = self._rows
        if len(points) == 1:
            return self._seconds[points[0]]
        place = min(max(bisect_left(points, rows), 1), len(points) - 1)
        low, high = points[place - 1], points[place]
        below, above = self._seconds[low], self._seconds[high]
        slope = (above - below) / (high - low)
        if low <= rows <= high:
            return below + slope * (rows - low)
        if rows < low:
            return below
        return above + max(0.0, slope) * (rows - high)

    def state(self) -> dict[str, float]:
        """The points as JSON values; rows are texts because they are keys."""
        return {str(rows): seconds for rows, seconds in self._seconds.items()}
