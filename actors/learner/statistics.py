"""What one training step says about itself.

Numbers are computed once per step from per-token arrays that the micro-batches leave behind, so they do not depend on
how the batch was divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.learner.advantages import GroupAdvantages, is_scored, reward_summary
from actors.learner.algorithms import Algorithm
from actors.learner.logprobs import Scores
from actors.learner.losses import clipping, kl_penalty, log_ratio
from actors.learner.packing import MicroBatch
from storage.records import Group

# Name -> (meaning, unit). "Trained tokens" are those in micro-batches: answers with advantage 0 have no gradient and
# are not computed at all unless a KL term needs them.
METRICS: Mapping[str, tuple[str, str]] = {
    "reward_mean": ("Mean reward of the scored answers, before the overlong penalty", ""),
    "reward_std": ("Population standard deviation of those rewards", ""),
    "reward_errors": ("Answers whose scoring failed, timed out or gave no finite number", "answers"),
    "reward_abstained": ("Answers that no reward function judged", "answers"),
    "unfinished": ("Answers that were aborted or could not be generated", "answers"),
    "zero_variance_groups": ("Groups whose scored answers all have the same reward", "groups"),
    "truncated_fraction": ("Answers that hit the token limit", "share"),
    "length_mean": ("Mean length of the answers", "tokens"),
    "length_max": ("Longest answer", "tokens"),
    "staleness_mean": ("Versions between a token and the weights that it trains, over all policy tokens", "versions"),
    "staleness_max": ("Largest of those", "versions"),
    "entropy_sampled": ("Entropy of the behaviour policy, estimated by -mean logprob of all policy tokens", "nats"),
    "rejected_nonfinite": ("Answers that left the loss for a behaviour logprob that is not finite", "answers"),
    "rejected_support": ("Trained tokens that truncated sampling could not draw under the current weights", "tokens"),
    "answers_trained": ("Answers with a gradient", "answers"),
    "tokens_trained": ("Trained tokens", "tokens"),
    "entropy": ("Exact entropy of the current policy at trained tokens", "nats"),
    "kl_behaviour": ("KL(behaviour || current), k3 estimate over trained tokens", "nats"),
    "kl_reference": ("KL to the reference by the configured estimator, with a KL term only", "nats"),
    "ratio_mean": ("Mean of pi / behaviour over trained tokens", ""),
    "ratio_p99": ("99th percentile of it", ""),
    "ratio_outside": ("Trained tokens with that ratio outside [0.9, 1.1]", "share"),
    "clip_fraction_low": ("Trained tokens whose gradient the lower clip cuts", "share"),
    "clip_fraction_high": ("Trained tokens whose gradient the upper clip cuts", "share"),
    "dual_clip_fraction": ("Trained tokens whose gradient the dual clip cuts", "share"),
    "behaviour_weight_mean": ("Mean truncated behaviour weight, with a proximal anchor only", ""),
    "behaviour_weight_capped": ("Trained tokens whose behaviour weight is capped", "share"),
    "ess": ("Effective sample size of the answers' importance weights over their number", "share"),
    "grad_norm": ("Global gradient norm before clipping, mean over updates", ""),
    "learning_rate": ("Rate of the last update", ""),
    "updates": ("Optimiser updates applied in this step", "updates"),
    "skipped_nonfinite": ("Updates left out because the gradient was not finite", "updates"),
    "microbatches": ("Forward and backward passes", "passes"),
    "padding_share": ("Share of padding among the tokens computed", "share"),
    "seconds_forward_backward": ("Time in forward and backward passes", "s"),
    "seconds_proximal": ("Time recomputing proximal logprobs", "s"),
    "seconds_optimiser": ("Time in clipping and updating", "s"),
}


def record_metrics(groups: Sequence[Group], advantages: Sequence[GroupAdvantages], version: int) -> dict[str, float]:
    """Metrics that need no model: everything that the records say about a batch trained from ``version``."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([sample.length for sample in samples] or [0])
    masks = [sample.policy_mask() for sample in samples]
    ages = version - _joined([s.versions()[m] for s, m in zip(samples, masks, strict=True)])
    behaviour = _joined([s.logprobs()[m] for s, m in zip(samples, masks, strict=True)])
    behaviour = behaviour[np.isfinite(behaviour)]
    mean, std = reward_summary(groups)
    unfinished = [s.finish_reason in ("abort", "error") for s in samples]
    abstained = [s.reward_status == "abstained" and not u for s, u in zip(samples, unfinished, strict=True)]
    unscored = sum(not is_scored(s) for s in samples)
    return {
        "reward_mean": mean,
        "reward_std": std,
        "reward_errors": float(unscored - sum(unfinished) - sum(abstained)),
        "reward_abstained": float(sum(abstained)),
        "unfinished": float(sum(unfinished)),
        "zero_variance_groups": float(sum(a.zero_variance for a in advantages)),
        "truncated_fraction": float(np.mean([s.finish_reason == "length" for s in samples] or [False])),
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness_max": float(ages.max()) if len(ages) else 0.0,
        "entropy_sampled": -float(behaviour.mean(dtype=np.float64)) if len(behaviour) else 0.0,
    }


@dataclass(slots=True)
class TokenStatistics:
    """Collects what the micro-batches of one step computed, token by token."""

    algorithm: Algorithm
    microbatches: int = 0
    computed: int = 0
    padding: int = 0
    _parts: list[tuple[Tensor, ...]] = field(default_factory=list)

    def add(self, batch: MicroBatch, scores: Scores, proximal: Tensor, reference: Tensor | None) -> None:
        """Take note of one micro-batch; ``proximal`` is what the loss used, or the current logprobs."""
        reference = scores.logprobs if reference is None else reference
        columns = (
            scores.logprobs, proximal, reference, batch.behaviour, batch.advantages, scores.entropy,
            scores.in_support, batch.answers,
        )  # fmt: skip
        self._parts.append(tuple(column.detach().cpu() for column in columns))
        self.microbatches += 1
        self.computed += batch.input_ids.numel()
        self.padding += batch.padding

    def metrics(self) -> dict[str, float]:
        """Return the token-level metrics; those over trained tokens are absent when there are none."""
        result = {
            "microbatches": float(self.microbatches),
            "padding_share": self.padding / max(1, self.computed),
            "tokens_trained": 0.0,
            "answers_trained": 0.0,
            "rejected_support": 0.0,
        }
        if not self._parts:
            return result
        current, proximal, reference, behaviour, advantages, entropy, kept, answers = (
            torch.cat(column) for column in zip(*self._parts, strict=True)
        )
        result["rejected_support"] = float((~kept).sum())
        result["answers_trained"] = float(len(torch.unique(answers)))
        result["tokens_trained"] = float(kept.sum())
        if not bool(kept.any()):
            return result
        current, proximal, reference, behaviour, advantages, entropy, answers = (
            column[kept] for column in (current, proximal, reference, behaviour, advantages, entropy, answers)
        )
        ratio = log_ratio(current, behaviour).exp().double()
        anchor = behaviour if self.algorithm.anchor == "behaviour" else proximal
        cut = clipping(log_ratio(current, anchor).exp(), advantages, self.algorithm)
        result |= {
            "entropy": float(entropy.double().mean()),
            "kl_behaviour": float(kl_penalty(behaviour, current, "k3").double().mean()),
            "ratio_mean": float(ratio.mean()),
            "ratio_p99": float(np.quantile(ratio.numpy(), 0.99)),
            "ratio_outside": float(((ratio < 0.9) | (ratio > 1.1)).double().mean()),
            "clip_fraction_low": float(cut.low.double().mean()),
            "clip_fraction_high": float(cut.high.double().mean()),
            "dual_clip_fraction": float(cut.dual.double().mean()),
            "ess": effective_sample_share(log_ratio(proximal, behaviour), answers),
        }
        if self.algorithm.kl_coefficient > 0:
            penalty = kl_penalty(current, reference, self.algorithm.kl_estimator)
            result["kl_reference"] = float(penalty.double().mean())
        cap = self.algorithm.behaviour_cap
        if cap is not None:
            weight = log_ratio(proximal, behaviour).exp().double()
            result["behaviour_weight_mean"] = float(weight.clamp(max=cap).mean())
            result["behaviour_weight_capped"] = float((weight > cap).double().mean())
        return result


def effective_sample_share(log_weights: Tensor, answers: Tensor) -> float:
    """Kish's effective sample size of the answers' weights, divided by their number; in (0, 1].

    An answer's weight is the product of its token weights pi / behaviour. The largest weight is scaled to 1 first,
    which changes nothing and cannot overflow.
    """
    owners, position = torch.unique(answers, return_inverse=True)
    totals = torch.zeros(len(owners), dtype=torch.float64).index_add_(0, position, log_weights.double())
    weights = (totals - totals.max()).exp()
    return float(weights.sum() ** 2 / weights.square().sum() / len(owners))


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    return np.concatenate(parts).astype(np.float64) if parts else np.zeros(0)
