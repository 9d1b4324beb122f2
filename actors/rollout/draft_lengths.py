"""How long the drafts of a pass are: the calibrated rule, and the two fixed rules that it is compared with."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

from actors.rollout.draft_budget import Budget, allocate
from actors.rollout.draft_calibration import Calibration
from actors.rollout.draft_cost import PassCost
from actors.rollout.engine import RunningRows
from actors.rollout.row_sources import Candidates, grown

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

AIMD_START = 2
AIMD_STEP = 2


class LengthRule(Protocol):
    """Chooses a candidate and a length for each row; keeps what it needs by handle."""

    def open(self, handle: int) -> None:
        """Hear of a new row."""

    def limits(self, rows: RunningRows) -> Int64Array:
        """int64[rows], most tokens that sources need to offer."""

    def choose(self, candidates: Candidates, rows: RunningRows, weights: Float64Array, cost: PassCost) -> Budget:
        """Return what each row drafts; ``weights`` is float64[rows], at least 1; gain is NaN if it is not predicted."""

    def observe(self, handles: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Hear how drafts fared, int64[m] each."""


class CalibratedLengths:
    """Goes on with a draft while its chance of being accepted up to there pays for the token."""

    def __init__(self, calibration: Calibration, max_draft: int) -> None:
        self._calibration = calibration
        self._max_draft = max_draft

    def open(self, handle: int) -> None:
        """Nothing is kept by row."""

    def limits(self, rows: RunningRows) -> Int64Array:
        """As in the protocol."""
        return np.minimum(rows.room, self._max_draft)

    def choose(self, candidates: Candidates, rows: RunningRows, weights: Float64Array, cost: PassCost) -> Budget:
        """As in the protocol."""
        self._calibration.score(
            candidates.matched,
            candidates.counts,
            candidates.ratios,
            candidates.lengths,
            candidates.cumulative,
            candidates.cells,
        )
        return allocate(candidates.cumulative, candidates.lengths, weights, cost)

    def observe(self, handles: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """The calibration learns by itself."""


class FixedLengths:
    """Drafts ``draft_tokens`` tokens behind a match of ``match_length`` or more, from the source that matches most."""

    def __init__(self, match_length: int, draft_tokens: int) -> None:
        self._match_length = match_length
        self._draft_tokens = draft_tokens

    def open(self, handle: int) -> None:
        """Nothing is kept by row."""

    def limits(self, rows: RunningRows) -> Int64Array:
        """As in the protocol."""
        return np.minimum(rows.room, self._draft_tokens)

    def choose(self, candidates: Candidates, rows: RunningRows, weights: Float64Array, cost: PassCost) -> Budget:
        """As in the protocol."""
        return longest_match(candidates, self._match_length)

    def observe(self, handles: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Nothing is learned."""


class AimdLengths:
    """HistoSpec's rule (RhymeRL, arXiv 2508.18588): 2 tokens, 2 more after a full acceptance, 2 again after a miss.

    A draft that is shorter than the row's budget and wholly accepted counts as a full acceptance.
    """

    def __init__(self, match_length: int, max_draft: int) -> None:
        self._match_length = match_length
        self._max_draft = max_draft
        self._budget = np.full(8, AIMD_START, np.int64)

    def open(self, handle: int) -> None:
        """Start a row at 2 tokens."""
        self._budget = grown(self._budget, handle + 1, AIMD_START)
        self._budget[handle] = AIMD_START

    def limits(self, rows: RunningRows) -> Int64Array:
        """As in the protocol."""
        return np.minimum(rows.room, np.minimum(self._budget[rows.handles], self._max_draft))

    def choose(self, candidates: Candidates, rows: RunningRows, weights: Float64Array, cost: PassCost) -> Budget:
        """As in the protocol."""
        return longest_match(candidates, self._match_length)

    def observe(self, handles: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Widen or reset."""
        wider = np.minimum(self._budget[handles] + AIMD_STEP, self._max_draft)
        self._budget[handles] = np.where(accepted == drafted, wider, AIMD_START)


def longest_match(candidates: Candidates, least: int) -> Budget:
    """Take, for each row, the whole candidate behind the longest match of ``least`` tokens or more."""
    matched = np.where(candidates.lengths > 0, candidates.matched[:, :, 0], -1)
    source = matched.argmax(axis=0)
    rows = np.arange(matched.shape[1])
    usable = matched[source, rows] >= least
    lengths = np.where(usable, candidates.lengths[source, rows], 0)
    return Budget(np.where(usable, source, -1), lengths, math.nan)
