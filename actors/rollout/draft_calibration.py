"""How likely a draft token is accepted, learned from the draft tokens that were verified.

Four facts are known of a draft token before it is verified: where it comes from, how long the match in front of it is,
how often that context was seen, and which share of those times the token followed. They index a table of
(accepted + 1/2) / (tried + 1). Only positions that verification reached count, those up to the first rejection: a table
over all positions of a text would be too optimistic, because drafts begin again just where texts diverge.

A thin cell leans on coarser ones: source, match and share; then source and match; then match alone; then a prior.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from storage.history.index.compiled import compiled

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

SOURCES = ("previous", "prompt", "live", "shared")
"""Where drafts come from: the previous answer of the sample slot; earlier answers to the prompt; siblings that are
being written and the row's own text; answers to other prompts."""

MATCH_LIMITS = np.array([1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64], np.int64)
COUNT_LIMITS = np.array([1.5, 2.5, 4.5, 8.5, 16.5], np.float64)
RATIO_LIMITS = np.array([0.25, 0.5, 0.7, 0.85, 0.95], np.float64)
"""Smallest values of the buckets behind the first: 14 of match length in tokens, 6 of counts, 6 of shares."""

SHAPE = (len(SOURCES), len(MATCH_LIMITS) + 1, len(COUNT_LIMITS) + 1, len(RATIO_LIMITS) + 1)

_PRIOR = np.array([0.3, 0.35, 0.55, 0.6, 0.7, 0.75, 0.8, 0.88, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98])
"""Acceptance by match length before anything was verified, rounded from replayed answers to mathematics prompts."""
_PRIOR_TRIALS = 2.0
_LEAN = 4.0
"""Trials at which a cell weighs as much as the coarser one that it leans on."""
_REFRESH = 256
"""Verified tokens after which the probabilities are computed anew."""


class Calibration:
    """The table. Not thread-safe; it belongs to the thread that decodes."""

    def __init__(self, horizon: float = 20_000.0) -> None:
        """Start from the prior; ``horizon`` is the number of verified tokens after which a trial counts 1/e."""
        self._horizon = horizon
        self._tried = np.zeros(SHAPE)
        self._accepted = np.zeros(SHAPE)
        self._fresh = 0
        self._probability = np.zeros(int(np.prod(SHAPE)), np.float32)
        self._refresh()

    @property
    def probability(self) -> Float32Array:
        """float32[cells], acceptance of one token by flat cell; read-only use."""
        return self._probability

    def score(
        self,
        matched: Int32Array,
        counts: Float32Array,
        ratios: Float32Array,
        lengths: Int64Array,
        cumulative: Float32Array,
        cells: Int32Array,
    ) -> None:
        """Score the candidates of a step.

        Args:
            matched: int32[sources, rows, width], length of the matched context in front of each token.
            counts: float32[sources, rows, width], weighted occurrences of that context.
            ratios: float32[sources, rows, width], share of them that went on with the token.
            lengths: int64[sources, rows], tokens of each candidate.
            cumulative: float32[sources, rows, width], filled with the probability that the token and all before it are
                accepted; 0 beyond the length.
            cells: int32[sources, rows, width], filled with the flat cell of each token.
        """
        _score(
            matched,
            counts,
            ratios,
            lengths,
            self._probability,
            MATCH_LIMITS,
            COUNT_LIMITS,
            RATIO_LIMITS,
            cumulative,
            cells,
        )

    def learn(self, cells: Int32Array, handles: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Count what verification found.

        Args:
            cells: int32[handles, width], cell of each draft token.
            handles: int64[rows], which line of ``cells`` a row lies in.
            drafted: int64[rows], tokens verified; accepted: int64[rows], tokens accepted, of those.
        """
        self._fresh += int(_learn(self._tried.ravel(), self._accepted.ravel(), cells, handles, drafted, accepted))
        if self._fresh >= _REFRESH:
            self._refresh()

    def export(self) -> dict[str, Float64Array]:
        """Return the table as arrays for a checkpoint."""
        return {"tried": self._tried.copy(), "accepted": self._accepted.copy()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`export` returned; raises ``ValueError`` when it is another shape of table."""
        arrays = {name: np.asarray(state[name], np.float64) for name in ("tried", "accepted")}
        for name, array in arrays.items():
            if array.shape != SHAPE:
                raise ValueError(f"calibration table {name!r} has shape {array.shape}, expected {SHAPE}")
        self._tried, self._accepted = arrays["tried"].copy(), arrays["accepted"].copy()
        self._fresh = 0
        self._refresh()

    def _refresh(self) -> None:
        keep = np.exp(-self._fresh / self._horizon)
        self._tried *= keep
        self._accepted *= keep
        self._fresh = 0
        by_match = self._lean((0, 2, 3), _PRIOR[None, :, None, None], _PRIOR_TRIALS)
        by_source = self._lean((2, 3), by_match, _LEAN)
        by_ratio = self._lean((2,), by_source, _LEAN)
        fine = (self._accepted + _LEAN * by_ratio + 0.5) / (self._tried + _LEAN + 1)
        self._probability[:] = fine.ravel()

    def _lean(self, axes: tuple[int, ...], coarse: Float64Array, trials: float) -> Float64Array:
        tried = self._tried.sum(axis=axes, keepdims=True)
        accepted = self._accepted.sum(axis=axes, keepdims=True)
        pooled: Float64Array = (accepted + trials * coarse) / (tried + trials)
        return pooled


@compiled
def _score(
    matched: Int32Array,
    counts: Float32Array,
    ratios: Float32Array,
    lengths: Int64Array,
    table: Float32Array,
    match_limits: Int64Array,
    count_limits: Float64Array,
    ratio_limits: Float64Array,
    cumulative: Float32Array,
    cells: Int32Array,
) -> None:
    sources, rows, width = counts.shape
    count_buckets, ratio_buckets = len(count_limits) + 1, len(ratio_limits) + 1
    match_buckets = len(match_limits) + 1
    for source in range(sources):
        for row in range(rows):
            length = lengths[source, row]
            product = np.float32(1.0)
            for j in range(width):
                if j >= length:
                    cumulative[source, row, j] = 0.0
                    continue
                match = 0
                while match < match_buckets - 1 and matched[source, row, j] >= match_limits[match]:
                    match += 1
                count = 0
                while count < count_buckets - 1 and counts[source, row, j] >= count_limits[count]:
                    count += 1
                ratio = 0
                while ratio < ratio_buckets - 1 and ratios[source, row, j] >= ratio_limits[ratio]:
                    ratio += 1
                cell = ((source * match_buckets + match) * count_buckets + count) * ratio_buckets + ratio
                product *= table[cell]
                cells[source, row, j] = cell
                cumulative[source, row, j] = product


@compiled
def _learn(
    tried: Float64Array,
    accepted_sum: Float64Array,
    cells: Int32Array,
    handles: Int64Array,
    drafted: Int64Array,
    accepted: Int64Array,
) -> int:
    reached = 0
    for row in range(len(drafted)):
        for j in range(min(accepted[row] + 1, drafted[row])):
            cell = cells[handles[row], j]
            tried[cell] += 1.0
            accepted_sum[cell] += 1.0 if j < accepted[row] else 0.0
            reached += 1
    return reached
