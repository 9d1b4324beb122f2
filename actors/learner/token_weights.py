"""What each token of a micro-batch counts for, apart from its objective: weights, and which tokens stay in the loss.

All of it is detached, taken from logprobs under the proximal policy (the weights just before the batch) and belongs to
whole answers or single tokens, so it does not depend on how a batch is divided.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.learner.algorithms import Algorithm
from actors.learner.losses import LOG_RATIO_BOUND, answer_means, behaviour_weight, log_ratio
from actors.learner.packing import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """Per policy token of a micro-batch.

    Attributes:
        scored: bool[n], tokens with a finite logprob inside the support, those without a gradient included.
        counted: bool[n], scored tokens that have a gradient by ``grad_tokens``; sequence masks not yet applied.
        kept: bool[n], counted tokens of answers that no mask dropped: those in the loss.
        prefix: float32[n], truncated importance weight of the answer's tokens without gradient; None: there are none.
        values: float32[n], what the token's loss is multiplied by; None: 1 everywhere.
    """

    scored: Tensor
    counted: Tensor
    kept: Tensor
    prefix: Tensor | None
    values: Tensor | None


def token_weights(
    batch: MicroBatch, in_support: Tensor, before: Tensor, algorithm: Algorithm, cap: float | None = None
) -> TokenWeights:
    """Weigh the tokens of one micro-batch.

    Args:
        batch: Holds whole answers.
        in_support: bool[n], True where the sampled token could be drawn, before the batch and now.
        before: float32[n], logprobs under the proximal policy, detached; not finite is treated as outside the support.
        algorithm: Caps and masks.
        cap: Cap of the token weights by the drift guard; None: it does not act.
    """
    finite = torch.isfinite(before)
    scored = in_support & finite
    before = torch.where(finite, before, torch.zeros_like(before))
    counted = scored & batch.trained
    kept = counted
    if algorithm.mask != "off":
        kept = counted & _within_bounds(log_ratio(before, batch.behaviour), batch.answers, scored, algorithm)
    factors = []
    if batch.weighted:
        factors.append(batch.weights)
    prefix = None
    if batch.has_prefix:
        prefix = _prefix_weight(batch, scored, before, algorithm.prefix_cap)
        factors.append(prefix)
    if cap is not None:
        if algorithm.anchor == "behaviour":
            used = log_ratio(before, batch.behaviour).exp()
        else:
            used = behaviour_weight(before, batch.behaviour, batch.advantages, algorithm, batch.answers, counted)
        factors.append((cap / used).clamp(max=1))
    values = None
    for factor in factors:
        values = factor if values is None else values * factor
    return TokenWeights(scored=scored, counted=counted, kept=kept, prefix=prefix, values=values)


def _within_bounds(log_ratios: Tensor, answers: Tensor, scored: Tensor, algorithm: Algorithm) -> Tensor:
    """True for the tokens of answers whose ratios pi_proximal / pi_behaviour are within the mask's bounds, bool[n].

    "geometric" bounds exp(mean log ratio), which does not grow with length as the product of ratios would; "max" bounds
    every single ratio.
    """
    if algorithm.mask == "geometric":
        mean = answer_means(log_ratios, answers, scored).exp()
        return (mean >= algorithm.mask_low) & (mean <= algorithm.mask_high)
    ratios = log_ratios.exp()
    outside = scored & ((ratios < algorithm.mask_low) | (ratios > algorithm.mask_high))
    return answer_means(outside.float(), answers, scored) == 0


def _prefix_weight(batch: MicroBatch, scored: Tensor, before: Tensor, cap: float) -> Tensor:
    """Importance weight min(product of pi_proximal / pi_behaviour over the tokens without gradient, cap), float32[n].

    Uncapped, and with a suffix written by the current policy, it makes the suffix's part of the policy gradient exact.
    A prefix that the policy cannot write any more has the weight 0.
    """
    outside = ~batch.trained & ~scored
    logs = torch.where(batch.trained, torch.zeros_like(before), log_ratio(before, batch.behaviour))
    owners, place = torch.unique(batch.answers, return_inverse=True)
    zeros = torch.zeros(len(owners), dtype=torch.float64, device=logs.device)
    total = zeros.index_add(0, place, logs.double()).clamp(max=LOG_RATIO_BOUND).exp().clamp(max=cap)
    lost = zeros.index_add(0, place, outside.double()) > 0
    return torch.where(lost, torch.zeros_like(total), total)[place].float()
