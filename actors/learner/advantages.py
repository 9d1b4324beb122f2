"""Rewards become advantages, one group at a time.

A group is what its record says it is: siblings are never found by position or stride. An answer without a trustworthy
reward (failed, timed out, abstained, unfinished) is not an answer with reward 0: it is left out of its group's baseline
and of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.learner.algorithms import AdvantageKind
from actors.learner.options import OverlongOptions
from storage.records import Float32Array, Group, Sample

STD_EPSILON = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """Advantages of one group, all arrays in the order of ``group.samples``.

    Attributes:
        values: float32[n]; 0 wherever ``in_loss`` is False.
        in_loss: bool[n], answers that may contribute to the loss and count in its denominator.
        scored: bool[n], answers whose reward entered the baseline.
        rewards: float64[n], rewards after the overlong penalty; 0 where not scored.
        zero_variance: True when at least two answers are scored and all their rewards are equal.
    """

    values: Float32Array
    in_loss: npt.NDArray[np.bool_]
    scored: npt.NDArray[np.bool_]
    rewards: npt.NDArray[np.float64]
    zero_variance: bool


def is_scored(sample: Sample) -> bool:
    """True for an answer that ended by itself or at its limit and has a finite reward.

    An aborted answer is not judged even when a reward function was asked about its beginning.
    """
    return (
        sample.reward_status == "ok"
        and sample.reward is not None
        and math.isfinite(sample.reward)
        and sample.finish_reason in ("stop", "length")
    )


def soft_overlong_penalty(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """Penalty of DAPO (arXiv 2503.14476, equation 13) for an answer of ``length`` tokens.

    0 up to ``max_tokens - buffer_tokens``, falling linearly to -1 at ``max_tokens``, -1 beyond.
    """
    over = length - (max_tokens - buffer_tokens)
    return -min(1.0, max(0.0, over / buffer_tokens))


def group_advantages(
    group: Group, kind: AdvantageKind, *, overlong: OverlongOptions, max_tokens: int
) -> GroupAdvantages:
    """Return the advantages of ``group``.

    ``group_mean`` is r - mean, ``group_std`` is (r - mean) / (std + 1e-4), with the mean and the *population* standard
    deviation (divisor n, not n - 1) over the scored answers. Equal rewards, or fewer than two scored answers, give
    exactly 0. With ``overlong.mode`` "soft" the penalty is added to rewards first. With "mask", truncated answers
    (``finish_reason`` "length") leave the loss and keep their place in the baseline: their reward is a fact about the
    policy, and dropping it would raise the bar for the answers that remain.
    """
    n = len(group.samples)
    scored = np.array([is_scored(sample) for sample in group.samples], np.bool_)
    rewards = np.zeros(n, np.float64)
    for i, sample in enumerate(group.samples):
        if scored[i]:
            assert sample.reward is not None
            rewards[i] = sample.reward
            if overlong.mode == "soft":
                rewards[i] += soft_overlong_penalty(sample.length, max_tokens, overlong.buffer_tokens)
    in_loss = scored.copy()
    if overlong.mode == "mask":
        in_loss &= np.array([sample.finish_reason != "length" for sample in group.samples], np.bool_)

    values = np.zeros(n, np.float64)
    known = rewards[scored]
    equal = len(known) > 0 and bool(np.all(known == known[0]))
    if len(known) >= 2 and not equal:
        values[scored] = known - known.mean()
        if kind == "group_std":
            values /= known.std() + STD_EPSILON
    values[~in_loss] = 0.0
    return GroupAdvantages(
        values=values.astype(np.float32),
        in_loss=in_loss,
        scored=scored,
        rewards=rewards,
        zero_variance=equal and len(known) >= 2,
    )


def reward_summary(groups: Sequence[Group]) -> tuple[float, float]:
    """Mean and population standard deviation of the raw rewards of all scored answers; (0, 0) without any."""
    rewards = [s.reward for group in groups for s in group.samples if is_scored(s) and s.reward is not None]
    return (float(np.mean(rewards)), float(np.std(rewards))) if rewards else (0.0, 0.0)
