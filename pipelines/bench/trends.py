"""Straight lines through noisy readings: how fast something grows, and whether that can be told from standing still."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCKS = 12
"""Neighbouring readings move together; means of blocks hardly do, so that their scatter tells the error of a slope."""

_FEWEST = 3
_NOTICEABLE = 0.01
"""Growth by this share of its size in an hour goes unnoticed in a day."""
_ERRORS = 2.0

Readings = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trend:
    """A least-squares line.

    Attributes:
        slope: Growth of the value in an hour.
        error: Standard error of the slope; infinite with fewer than three blocks.
        mean: Mean of the value.
        last: Value of the line at the last reading.
    """

    slope: float
    error: float
    mean: float
    last: float

    @property
    def flat(self) -> bool:
        """Whether the value stands still, shrinks, or grows by less than anybody would notice in a day."""
        return self.slope <= max(_ERRORS * self.error, _NOTICEABLE * abs(self.mean))

    def after(self, hours: float) -> float:
        """Value to expect after further hours; one that is flat stays where it is."""
        return self.mean if self.flat else self.last + self.slope * hours


def trend(seconds: Readings, values: Readings) -> Trend:
    """Fit a line through readings.

    Args:
        seconds: When each was taken, ascending.
        values: What was read; as long as ``seconds``, and at least one.
    """
    blocks = min(BLOCKS, len(values))
    hours = np.array([part.mean() for part in np.array_split(seconds, blocks)]) / 3600.0
    means = np.array([part.mean() for part in np.array_split(values, blocks)])
    mean = float(values.mean())
    spread = float(((hours - hours.mean()) ** 2).sum())
    if blocks < _FEWEST or spread == 0.0:
        return Trend(0.0, math.inf, mean, float(values[-1]))
    slope = float(((hours - hours.mean()) * (means - means.mean())).sum() / spread)
    line = means.mean() + slope * (hours - hours.mean())
    error = math.sqrt(float(((means - line) ** 2).sum()) / (blocks - 2) / spread)
    last = float(means.mean() + slope * (seconds[-1] / 3600.0 - hours.mean()))
    return Trend(slope, error, mean, last)
