"""The drift guard: how much of a stale batch still speaks about the current policy, and what to do when it is little.

Kish's effective sample size of importance weights w over n tokens is (sum w)^2 / sum w^2; its share of n is 1 on policy
and falls as few tokens come to carry most of the weight, which is what precedes a collapse. The weights are those of
single tokens, pi_proximal / pi_behaviour before any cap: products over whole answers would be near the floor 1 / n for
any long answer, however small the drift of each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.learner.algorithms import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the guard found in one batch.

    Attributes:
        ess: Effective sample size of the token weights as a share of the tokens, in (0, 1]; 1 for an empty batch.
        skip: True when the batch is not to be trained on.
        cap: Upper cap of the token weights that lifts the share to the floor; None when there is nothing to do.
    """

    ess: float
    skip: bool = False
    cap: float | None = None


def token_ess(log_weights: Tensor) -> float:
    """Effective sample size of exp(``log_weights``), float[n], as a share of n; 1 without any.

    The largest weight is scaled to 1 first, which changes nothing and cannot overflow.
    """
    if not len(log_weights):
        return 1.0
    logs = log_weights.double()
    weights = (logs - logs.max()).exp()
    return float(weights.sum() ** 2 / weights.square().sum() / len(weights))


def cap_for_floor(log_weights: Tensor, floor: float) -> float:
    """Return the largest cap c for which min(w, c) has an effective sample share of ``floor``.

    The share falls as c grows (its derivative has the sign of E[m (m - c)] with m = min(w, c) <= c), so bisection on
    log c finds it; without a cap that binds, the largest weight is returned.

    Args:
        log_weights: float[n], at least one.
        floor: In (0, 1).
    """
    logs = log_weights.double()
    low, high = float(logs.min()), float(logs.max())
    if token_ess(logs) >= floor:
        return float(torch.tensor(high, dtype=torch.float64).exp())
    for _ in range(50):
        middle = (low + high) / 2
        if token_ess(logs.clamp(max=middle)) >= floor:
            low = middle
        else:
            high = middle
    return float(torch.tensor(low, dtype=torch.float64).exp())


def judge(log_weights: Tensor, algorithm: Algorithm) -> Verdict:
    """Look at the token weights of a whole batch, before its first gradient.

    Args:
        log_weights: float[n], log(pi_proximal / pi_behaviour) of the tokens that would be trained, all finite.
        algorithm: Says what to do below which share.
    """
    ess = token_ess(log_weights)
    if algorithm.guard == "off" or ess >= algorithm.ess_floor:
        return Verdict(ess=ess)
    if algorithm.guard == "skip":
        return Verdict(ess=ess, skip=True)
    return Verdict(ess=ess, cap=cap_for_floor(log_weights, algorithm.ess_floor))


def describe(verdict: Verdict, algorithm: Algorithm, step: int) -> str:
    """Return the alarm of a batch on which the guard acted."""
    done = (
        "the batch is not trained on" if verdict.skip else f"weights are capped at {verdict.cap:.3g} to lift it to that"
    )
    return (
        f"step {step}: the effective sample size of the behaviour weights is {verdict.ess:.2f} of the tokens, below "
        f"algorithm.drift_guard.ess_floor={algorithm.ess_floor:g}: {done}; lower asynchrony.max_staleness or "
        "learner.learning_rate if this goes on"
    )
