"""Fuses several rankings of the same prompts into one: weighted mean of percentile ranks (a weighted Borda count).

Only the order counts: a ranker may use any scale, and a rescaled one gives the same result. A ranker's influence is the
signal-to-noise ratio of a noisy copy of the truth that correlates with it by ``w``, which is ``w^2 / (1 - w^2)``: the
weight of inverse variances when errors are independent. So a ranker at 0.95 is not dragged down by one at 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.length_predictor.quality import average_ranks
from storage.errors import UserError

Float64Array = npt.NDArray[np.float64]

_MOST_TRUSTED = 0.99  # a correlation of 1, measured on few groups, must not silence the others


@dataclass(frozen=True, slots=True)
class Ranking:
    """One ranker's view of n prompts.

    Attributes:
        scores: float64[n], larger is longer, on any scale; nan: no place in the order. Percentiles are then among the
            prompts that have one: fill the gaps if those are not like the others.
        quantiles: float64[n, q] in tokens; nan: no opinion on this prompt.
    """

    scores: Float64Array
    quantiles: Float64Array


@dataclass(frozen=True, slots=True)
class Fusion:
    """The fused view.

    Attributes:
        rank: float64[n], 0 (shortest) to 1 (longest); all 0.5 when nobody knows anything.
        quantiles: float64[n, q] in tokens; nan where no ranker had an opinion.
        confidence: float64[n], 0 to 1.
    """

    rank: Float64Array
    quantiles: Float64Array
    confidence: Float64Array


def combine_rankings(rankings: Sequence[Ranking], weights: Sequence[float]) -> Fusion:
    """Fuse rankings of the same prompts.

    Ranks are percentiles of the weighted mean percentile. Quantiles are averaged in log space with the same weights,
    which keeps them in order. Confidence is the largest weight among the rankers that had an opinion on the prompt,
    times one minus twice the weighted standard deviation of their percentiles.

    Args:
        rankings: One per ranker, all of the same prompts and quantiles.
        weights: Each ranker's recent Spearman; 0 (and below, and nan) leaves it out.

    Raises:
        UserError: No ranking, a weight missing, or rankings of different sizes.
    """
    if not rankings or len(rankings) != len(weights):
        raise UserError(f"combine_rankings: {len(rankings)} rankings and {len(weights)} weights; one weight each")
    shape = rankings[0].quantiles.shape
    if any(r.quantiles.shape != shape or r.scores.shape != shape[:1] for r in rankings):
        raise UserError("combine_rankings: the rankings are not of the same prompts and quantiles")
    trust = _trust(weights)
    pull = influence(weights)[:, None]
    percentiles = np.stack([_percentiles(ranking.scores) for ranking in rankings])
    placed = np.where(np.isfinite(percentiles), pull, 0.0)
    mean = weighted_mean(percentiles, placed, empty=0.5)
    quantiles = np.stack([ranking.quantiles for ranking in rankings])
    opinion = np.where(np.isfinite(quantiles).all(axis=2), pull, 0.0)
    logs = np.log(np.where(np.isfinite(quantiles), np.maximum(quantiles, 1e-9), 1.0))
    fused = np.exp(weighted_mean(logs, np.repeat(opinion[:, :, None], shape[1], axis=2), empty=np.nan))
    strength = np.where(opinion > 0, trust[:, None], 0.0).max(axis=0)
    judged = np.where(np.isfinite(percentiles), opinion, 0.0)
    centre = weighted_mean(percentiles, judged, empty=0.5)
    spread = np.sqrt(weighted_mean((percentiles - centre) ** 2, judged, empty=0.0))
    return Fusion(
        rank=_percentiles(np.round(mean, 12)),  # equal sums of different order differ in the last bits
        quantiles=fused,
        confidence=np.clip(strength * (1.0 - 2.0 * spread), 0.0, 1.0),
    )


def influence(weights: Sequence[float]) -> Float64Array:
    """Return float64[k], each ranker's share in a mean before normalisation: ``w^2 / (1 - w^2)`` of its weight."""
    trust = _trust(weights)
    return np.asarray(trust**2 / (1.0 - trust**2), np.float64)


def _trust(weights: Sequence[float]) -> Float64Array:
    return np.nan_to_num(np.clip(np.asarray(weights, np.float64), 0.0, _MOST_TRUSTED), nan=0.0)


def _percentiles(scores: Float64Array) -> Float64Array:
    """Map scores to (0, 1) by rank; equal scores are equal, nan stays nan."""
    result = np.full(len(scores), np.nan)
    known = np.isfinite(scores)
    if known.any():
        result[known] = (average_ranks(scores[known]) - 0.5) / known.sum()
    return result


def weighted_mean(values: Float64Array, weights: Float64Array, empty: float) -> Float64Array:
    """Return the mean over the first axis; ``empty`` where all weights are 0. Values without weight may be nan."""
    total = weights.sum(axis=0)
    summed = (np.where(weights > 0, values, 0.0) * weights).sum(axis=0)
    return np.asarray(np.where(total > 0, summed / np.where(total > 0, total, 1.0), empty), np.float64)
