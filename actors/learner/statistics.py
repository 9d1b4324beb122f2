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
from actors.learner.drift_guard import token_ess
from actors.learner.logprobs import Scores
from actors.learner.losses import behaviour_weight, clipping, kl_penalty, log_ratio, policy_ratio
from actors.learner.packing import MicroBatch
from actors.learner.ranks import Ranks
from actors.learner.staleness import staleness_metrics
from actors.learner.token_weights import TokenWeights
from storage.records import Group

# Name -> (meaning, unit). "Trained tokens" are those in micro-batches: answers with advantage 0 have no gradient and
# are not computed at all unless a KL term needs them, and with ``grad_tokens: current_only`` a prefix has none either.
# Tokens that a sequence mask drops are counted like the others, so that what was dropped can be seen.
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
    "staleness_group_mean": ("Mean over groups of the staleness of their oldest token", "versions"),
    "staleness_tokens/<versions>": ("Policy tokens of that staleness", "share"),
    "staleness_groups/<versions>": ("Groups whose oldest token has that staleness", "share"),
    "mixed_version_share": ("Answers that more than one version wrote", "share"),
    "version_span_max": ("Most versions between two tokens of one answer", "versions"),
    "decay_weight_min": ("Smallest weight that staleness decay gives to a token in the loss", ""),
    "decay_weight_max": ("Largest of those", ""),
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
    "prefix_share": ("Scored tokens without a gradient, because an older version wrote them", "share"),
    "prefix_weight_mean": ("Mean truncated importance weight of the prefixes, with grad_tokens=current_only only", ""),
    "prefix_weight_capped": ("Prefixes whose weight is capped", "share"),
    "sequence_masked": ("Answers that the sequence mask left out of the loss", "share"),
    "ess": ("Effective sample size of the answers' importance weights over their number", "share"),
    "ess_tokens": ("Effective sample size of the tokens' weights pi_proximal / behaviour over their number", "share"),
    "guard_skipped": ("1 when the drift guard left the batch out", ""),
    "guard_clipped": ("1 when the drift guard capped weights lower", ""),
    "guard_cap": ("The cap that it set, when it did", ""),
    "published": ("1 when the step ended with a new version", ""),
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
    behaviour = _joined([sample.logprobs()[sample.policy_mask()] for sample in samples])
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
        "entropy_sampled": -float(behaviour.mean(dtype=np.float64)) if len(behaviour) else 0.0,
        **staleness_metrics(groups, version),
    }


@dataclass(slots=True)
class TokenStatistics:
    """Collects what the micro-batches of one step computed, token by token."""

    algorithm: Algorithm
    microbatches: int = 0
    computed: int = 0
    padding: int = 0
    _minibatch: int = 0
    _parts: list[tuple[Tensor, ...]] = field(default_factory=list)

    def begin_minibatch(self) -> None:
        """The micro-batches that follow name their answers from 0 again."""
        self._minibatch += 1

    def add(
        self, batch: MicroBatch, scores: Scores, proximal: Tensor, reference: Tensor | None, weights: TokenWeights
    ) -> None:
        """Take note of one micro-batch; ``proximal`` is what the loss used, or the current logprobs."""
        reference = scores.logprobs if reference is None else reference
        prefix = torch.ones_like(scores.logprobs) if weights.prefix is None else weights.prefix
        columns = (
            scores.logprobs, proximal, reference, batch.behaviour, batch.advantages, scores.entropy,
            scores.in_support, weights.scored, weights.counted, weights.kept, prefix,
            batch.answers + (self._minibatch << 32),
        )  # fmt: skip
        self._parts.append(tuple(column.detach().cpu() for column in columns))
        self.microbatches += 1
        self.computed += batch.input_ids.numel()
        self.padding += batch.padding

    def gather(self, ranks: Ranks) -> None:
        """Take in what the other ranks collected: the leading rank has all of it then, the others what they had."""
        if ranks.count == 1:
            return
        own = [tuple(torch.cat(column) for column in zip(*self._parts, strict=True))] if self._parts else []
        collected = ranks.gather_to_leader((own, self.microbatches, self.computed, self.padding))
        if collected is not None:
            self._parts = [part for parts, *_ in collected for part in parts]
            self.microbatches, self.computed, self.padding = (
                sum(counts) for counts in zip(*((c[1], c[2], c[3]) for c in collected), strict=True)
            )

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
        columns = [torch.cat(column) for column in zip(*self._parts, strict=True)]
        in_support, scored, counted = columns[6:9]
        result["rejected_support"] = float((~in_support).sum())
        result["answers_trained"] = float(len(torch.unique(columns[-1])))
        result["tokens_trained"] = float(counted.sum())
        if not bool(counted.any()):
            return result
        current, proximal, reference, behaviour, advantages, entropy, _, _, _, kept, _, answers = (
            column[counted] for column in columns
        )
        ratio = log_ratio(current, behaviour).exp().double()
        anchor = behaviour if self.algorithm.anchor == "behaviour" else proximal
        cut = clipping(policy_ratio(current, anchor, self.algorithm, answers, None), advantages, self.algorithm)
        result |= {
            "entropy": float(entropy.double().mean()),
            "kl_behaviour": float(kl_penalty(behaviour, current, "k3").double().mean()),
            "ratio_mean": float(ratio.mean()),
            "ratio_p99": float(np.quantile(ratio.numpy(), 0.99)),
            "ratio_outside": float(((ratio < 0.9) | (ratio > 1.1)).double().mean()),
            "clip_fraction_low": float(cut.low.double().mean()),
            "clip_fraction_high": float(cut.high.double().mean()),
            "dual_clip_fraction": float(cut.dual.double().mean()),
            "prefix_share": 1 - float(counted.sum()) / float(scored.sum()),
            "sequence_masked": 1 - len(torch.unique(answers[kept])) / len(torch.unique(answers)),
            "ess": effective_sample_share(log_ratio(proximal, behaviour), answers),
            "ess_tokens": token_ess(log_ratio(proximal, behaviour)),
        }
        if self.algorithm.kl_coefficient > 0:
            penalty = kl_penalty(current, reference, self.algorithm.kl_estimator)
            result["kl_reference"] = float(penalty.double().mean())
        if self.algorithm.anchor == "proximal":
            weight = behaviour_weight(proximal, behaviour, advantages, self.algorithm, answers).double()
            uncapped = policy_ratio(proximal, behaviour, self.algorithm, answers, None).double()
            result["behaviour_weight_mean"] = float(weight.mean())
            result["behaviour_weight_capped"] = float((uncapped > weight).double().mean())
        if result["prefix_share"] > 0:
            result |= _prefix_metrics(columns, self.algorithm.prefix_cap)
        return result


def _prefix_metrics(columns: Sequence[Tensor], cap: float) -> dict[str, float]:
    """Weights of the prefixes, one per answer that has one."""
    scored, counted, prefix, answers = columns[7], columns[8], columns[10], columns[11]
    with_prefix = counted & torch.isin(answers, torch.unique(answers[scored & ~counted]))
    owners, place = torch.unique(answers[with_prefix], return_inverse=True)
    weights = torch.zeros(len(owners)).index_copy_(0, place, prefix[with_prefix]).double()
    return {
        "prefix_weight_mean": float(weights.mean()),
        "prefix_weight_capped": float((weights >= cap).double().mean()),
    }


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
