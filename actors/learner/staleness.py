"""How old the data of a batch are at the optimiser step, and what that makes them count for.

Decay is a heuristic on top of importance weights: w = 2^(-s / h) for age s and half-life h. It favours fresh data, and
with them short and easy answers. Weights have the mean 1 over the batch, else decay would lower the learning rate in
disguise; only differences of age matter, so ages in seconds may be counted from any moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from actors.learner.asynchrony_options import AsynchronyOptions
from storage.records import Float32Array, Group, Sample

Float64Array = npt.NDArray[np.float64]

# Buckets of the histograms: name -> largest age in it, in versions.
BUCKETS: Mapping[str, float] = {"0": 0, "1": 1, "2": 2, "3": 3, "4": 4, "5_to_8": 8, "9_to_16": 16, "over_16": np.inf}


def decay_weights(ages: Float64Array, half_life: float) -> Float64Array:
    """Return 2^(-age / half_life) / mean, float64[n]: positive, mean 1, unchanged when all ages shift alike."""
    if not len(ages):
        return np.ones(0)
    weights = np.exp2(-(ages - ages.min()) / half_life)
    return np.asarray(weights / weights.mean(), np.float64)


def group_ages(groups: Sequence[Group], version: int, unit: str) -> Float64Array:
    """Age of each group, that of its oldest token, float64[n].

    Args:
        groups: Complete groups. One age for all siblings: weights that differ inside a group would move its baseline.
        version: Last published version.
        unit: "versions", or "seconds" before the youngest group of the batch, from the first token of the oldest
            answer (from the end of an answer whose first token was not timed).

    Raises:
        ValueError: Seconds are asked for and a group carries no times.
    """
    if unit == "versions":
        return np.array([group.staleness(version) if group.oldest_version >= 0 else 0 for group in groups], np.float64)
    born = np.array([_born(group) for group in groups], np.float64)
    return born.max() - born if len(born) else born


def _born(group: Group) -> float:
    marks = [s.timings.first_token or s.timings.dispatched or s.timings.finished for s in group.samples]
    known = [mark for mark in marks if mark > 0]
    if not known:
        raise ValueError(f"group {group.key} carries no times, which asynchrony.half_life_unit=seconds needs")
    return min(known)


def newest_tokens(sample: Sample) -> npt.NDArray[np.bool_]:
    """True for the tokens that the newest version in this answer wrote, bool[length].

    An answer of a single version is all newest, however old that version is: the importance weight of each token
    corrects for that. What an older version wrote before newer weights took over is context.
    """
    versions, policy = sample.versions(), sample.policy_mask()
    if not policy.any():
        return policy
    newest: npt.NDArray[np.bool_] = policy & (versions == versions[policy].max())
    return newest


def batch_weights(
    groups: Sequence[Group], in_loss: Sequence[npt.NDArray[np.bool_]], version: int, options: AsynchronyOptions
) -> list[list[Float32Array]] | None:
    """What the age of each token makes it count for: per group and sample float32[length]; None when age is ignored.

    With ``grad_tokens: decay`` a token counts by its own version, with mean 1 over the policy tokens in the loss.
    Otherwise a group counts as a whole, with mean 1 over the groups that have an answer in the loss.

    Args:
        groups: All groups of the batch: the mean is taken before groups are dealt to minibatches or ranks.
        in_loss: Per group bool[group size], answers that are in the loss.
        version: Last published version.
        options: Half-life and what it applies to.
    """
    if options.half_life is None:
        return None
    result = [[np.ones(sample.length, np.float32) for sample in group.samples] for group in groups]
    if options.grad_tokens == "decay":
        places = [
            (g, i, sample.policy_mask())
            for g, group in enumerate(groups)
            for i, sample in enumerate(group.samples)
            if in_loss[g][i]
        ]
        ages = [version - groups[g].samples[i].versions()[mask].astype(np.float64) for g, i, mask in places]
        weights = decay_weights(np.concatenate(ages), options.half_life) if ages else np.ones(0)
        start = 0
        for g, i, mask in places:
            count = int(mask.sum())
            result[g][i][mask] = weights[start : start + count]
            start += count
        return result
    chosen = [g for g in range(len(groups)) if in_loss[g].any()]
    ages_of_groups = group_ages([groups[g] for g in chosen], version, options.half_life_unit)
    for g, weight in zip(chosen, decay_weights(ages_of_groups, options.half_life), strict=True):
        for array in result[g]:
            array[:] = weight
    return result


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Ages at the optimiser step by token, answer and group; names without the prefix ``learner/``.

    Histograms hold shares, empty buckets are left out. A bucket is an age, so the histogram by token is the share that
    each version has in the batch.
    """
    samples = [sample for group in groups for sample in group.samples]
    parts = [sample.versions()[sample.policy_mask()] for sample in samples]
    tokens = (version - np.concatenate(parts) if parts else np.zeros(0)).astype(np.float64)
    of_groups = np.array([g.staleness(version) for g in groups if g.oldest_version >= 0], np.float64)
    spans = np.array([part.max() - part.min() for part in parts if len(part)] or [0])
    metrics = {
        "staleness_mean": float(tokens.mean()) if len(tokens) else 0.0,
        "staleness_max": float(tokens.max()) if len(tokens) else 0.0,
        "staleness_group_mean": float(of_groups.mean()) if len(of_groups) else 0.0,
        "mixed_version_share": float((spans > 0).mean()),
        "version_span_max": float(spans.max()),
    }
    metrics |= {f"staleness_tokens/{name}": share for name, share in _histogram(tokens).items()}
    metrics |= {f"staleness_groups/{name}": share for name, share in _histogram(of_groups).items()}
    return metrics


def _histogram(ages: Float64Array) -> dict[str, float]:
    bucket = np.searchsorted(np.array(list(BUCKETS.values())), ages)
    counts = np.bincount(bucket, minlength=len(BUCKETS))
    return {name: float(n) / len(ages) for name, n in zip(BUCKETS, counts, strict=True) if n}
