"""The objectives, as pure functions on packed one-dimensional tokens.

Every array has one entry per answer token of a micro-batch (float32[n] unless said otherwise), whatever answer it
belongs to; prompts, padding and environment tokens never get here. Notation: pi is the policy that is trained, beta the
behaviour policy that sampled, pi_prox the proximal policy (weights before the batch), A the advantage.

Losses are minimised. A loss is summed locally and divided once by a denominator that the caller computes over the whole
(mini)batch, so it does not depend on micro-batches, padding or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.learner.algorithms import Aggregation, Algorithm, KlEstimator

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """Where the objective's bounds are active, bool[n] each; for metrics."""

    low: Tensor
    high: Tensor
    dual: Tensor


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Difference of two logprobs in fp32, clamped to +-20 so that its exponential stays finite."""
    return (numerator.float() - denominator.float()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def answer_means(values: Tensor, answers: Tensor, counted: Tensor) -> Tensor:
    """Mean of ``values`` over the counted tokens of each answer, given back to all tokens of it; float32[n], detached.

    Args:
        values: float[n].
        answers: int64[n], which answer each token belongs to.
        counted: bool[n]; an answer without any counted token has the mean 0.
    """
    owners, place = torch.unique(answers, return_inverse=True)
    zeros = torch.zeros(len(owners), dtype=torch.float64, device=values.device)
    kept = torch.where(counted, values.detach(), torch.zeros_like(values)).double()
    sums = zeros.index_add(0, place, kept)
    counts = zeros.index_add(0, place, counted.double()).clamp(min=1)
    return (sums / counts)[place].float()


def policy_ratio(
    logprobs: Tensor, anchor: Tensor, algorithm: Algorithm, answers: Tensor | None, counted: Tensor | None
) -> Tensor:
    """Ratio of the trained policy to the anchor that the objective clips; float32[n].

    At the level of tokens pi / anchor. At the level of sequences the geometric mean s of an answer's ratios, in the
    form of GSPO-token (arXiv 2507.18071, equation 14): every token has the value of s and the gradient s grad log pi of
    its own token. With one advantage for the whole answer, the mean over its tokens is GSPO in value and gradient; a
    token left out takes its own gradient along and nothing else.
    """
    differences = log_ratio(logprobs, anchor)
    if algorithm.level == "token":
        return differences.exp()
    assert answers is not None
    inside = torch.ones_like(answers, dtype=torch.bool) if counted is None else counted
    return answer_means(differences, answers, inside).exp() * (logprobs - logprobs.detach()).exp()


def clipped_objective(ratio: Tensor, advantages: Tensor, algorithm: Algorithm) -> Tensor:
    """PPO's min(ratio A, clip(ratio, 1 - low, 1 + high) A), to be maximised.

    With ``dual_clip`` c the value is at least c A where A < 0 (arXiv 1912.09729): without it the negative branch grows
    without bound in the ratio, which is how stale failures break training.
    """
    clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if algorithm.dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, algorithm.dual_clip * advantages), objective)
    return objective


def clipping(ratio: Tensor, advantages: Tensor, algorithm: Algorithm) -> Clipping:
    """Return the tokens whose gradient the clip cuts: low (A < 0), high (A > 0), and the dual clip (A < 0).

    With the surrogate "weight" nothing is cut: low and high are then the tokens whose weight is bounded.
    """
    if algorithm.surrogate == "weight":
        return Clipping(
            low=ratio < 1 - algorithm.clip_low,
            high=ratio > 1 + algorithm.clip_high,
            dual=torch.zeros_like(ratio, dtype=torch.bool),
        )
    dual = torch.zeros_like(ratio, dtype=torch.bool)
    if algorithm.dual_clip is not None:
        dual = (advantages < 0) & (ratio > algorithm.dual_clip)
    return Clipping(
        low=(advantages < 0) & (ratio < 1 - algorithm.clip_low),
        high=(advantages > 0) & (ratio > 1 + algorithm.clip_high),
        dual=dual,
    )


def behaviour_weight(
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    algorithm: Algorithm,
    answers: Tensor | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Truncated importance weight min(pi_prox / beta, cap) of each token, float32[n], detached.

    The cap may be tighter where A < 0. At the level of sequences it is the geometric mean over the answer that is
    truncated, for all of its tokens.
    """
    assert algorithm.behaviour_cap is not None
    weight = policy_ratio(proximal.detach(), behaviour, algorithm, answers, counted)
    truncated = weight.clamp(max=algorithm.behaviour_cap)
    if algorithm.behaviour_cap_negative is not None:
        truncated = torch.where(advantages < 0, weight.clamp(max=algorithm.behaviour_cap_negative), truncated)
    return truncated


def kl_penalty(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(pi || reference) per token; d = log pi_ref - log pi, clamped to +-20.

    k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1 (Schulman, "Approximating KL divergence"). As a loss, k2 has the gradient of
    the KL divergence on on-policy tokens, k3 that of the reverse divergence KL(reference || pi), and k1 a gradient of
    expectation zero: it is offered for comparison.
    """
    d = log_ratio(reference, logprobs)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return d.exp() - d - 1


def token_losses(
    logprobs: Tensor,
    *,
    behaviour: Tensor,
    advantages: Tensor,
    algorithm: Algorithm,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
    answers: Tensor | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Return the loss of each token, float32[n].

    * ``grpo``, ``dr_grpo``, ``dapo``: -min(r A, clip(r) A) with r = pi / beta, beta as recorded by the engine. The
      names differ in clip, aggregation and advantage.
    * ``decoupled_ppo``, ``tis``: -min(pi_prox / beta, cap) min(u A, clip(u) A) with u = pi / pi_prox. With one update
      per batch u is 1 and the gradient is the truncated-importance-sampling gradient weight x A x grad log pi. The two
      names differ in the cap that their papers use.
    * ``gspo``: -min(s A, clip(s) A), s the geometric mean of the answer's r (see :func:`policy_ratio`).
    * ``cispo``: -sg[clip(r)] A log pi, sg stopping the gradient: every token keeps one, of bounded weight.

    With a proximal anchor r becomes u and the truncated behaviour weight stands in front, whatever the name.

    Args:
        logprobs: log pi of the sampled tokens, with gradient.
        behaviour: log beta of the sampled tokens.
        advantages: A, constant over the tokens of an answer.
        algorithm: Constants and anchor.
        proximal: log pi_prox; None stands for ``logprobs.detach()``, exact when the batch gets a single update.
        reference: log pi_ref; needed when ``algorithm.kl_coefficient`` is positive.
        answers: int64[n], which answer each token belongs to; needed at the level of sequences.
        counted: bool[n], tokens that enter the mean over an answer at the level of sequences; None: all.
    """
    before = logprobs.detach() if proximal is None else proximal
    anchor = behaviour if algorithm.anchor == "behaviour" else before
    ratio = policy_ratio(logprobs, anchor, algorithm, answers, counted)
    if algorithm.surrogate == "clip":
        objective = clipped_objective(ratio, advantages, algorithm)
    else:
        weight = ratio.detach().clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        objective = weight * advantages * logprobs
    if algorithm.anchor == "proximal":
        objective = behaviour_weight(before, behaviour, advantages, algorithm, answers, counted) * objective
    loss = -objective
    if algorithm.kl_coefficient > 0:
        assert reference is not None
        loss = loss + algorithm.kl_coefficient * kl_penalty(logprobs, reference, algorithm.kl_estimator)
    return loss


def denominator(aggregation: Aggregation, *, tokens: int, answers: int, max_tokens: int) -> float:
    """What the summed loss is divided by, from counts over the whole (mini)batch.

    Counts are taken *before* any token is rejected for its numbers: otherwise the surviving tokens would weigh more the
    more of their neighbours were thrown out.

    Args:
        aggregation: token: number of tokens; sequence: number of answers; constant: answers x max_tokens, the
            length-unbiased form of Dr.GRPO.
        tokens: Policy tokens of the answers in the loss.
        answers: Answers in the loss that have at least one policy token.
        max_tokens: Longest answer allowed.
    """
    count = {"token": tokens, "sequence": answers, "constant": answers * max_tokens}[aggregation]
    return float(max(1, count))


def aggregate(
    losses: Tensor, *, answer_tokens: Tensor, kept: Tensor, aggregation: Aggregation, denominator: float
) -> Tensor:
    """Sum token losses locally and divide by the global denominator; a scalar.

    Args:
        losses: From :func:`token_losses`.
        answer_tokens: float32[n], policy tokens of the answer that each token belongs to, before rejection; "sequence"
            takes the mean over them.
        kept: bool[n]; other tokens contribute exactly 0, and a micro-batch without any still has a gradient (of 0).
        aggregation: As in :func:`denominator`.
        denominator: From :func:`denominator`.
    """
    if aggregation == "sequence":
        losses = losses / answer_tokens
    return torch.where(kept, losses, torch.zeros_like(losses)).sum() / denominator
