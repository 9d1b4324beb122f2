"""Statistics of an evaluation: what a set of scored answers says about the policy, and how surely.

Pure functions over sample headers: nothing here generates, scores or knows Ray. A sample whose scoring failed carries
no information about the policy, so it leaves every figure and is counted instead; it is never a wrong answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from storage.records import GroupKey, SampleHeader

Z_95 = 1.959963984540054

Judge = Callable[[SampleHeader], bool | None]
"""Says whether a scored sample is correct; ``None`` where the deciding reward function abstained."""


def correct_at_least(function: str, threshold: float) -> Judge:
    """Return the judge that reads the raw value of reward function ``function`` and asks for ``threshold`` or more."""

    def judge(header: SampleHeader) -> bool | None:
        value = header.reward_parts.get(function)
        return None if value is None else value >= threshold

    return judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A share in [0, 1] with its uncertainty over prompts.

    Attributes:
        value: Point estimate.
        stderr: Standard error; prompts are the sampling unit, since samples of one prompt are not independent.
        low: Lower end of the 95 % interval.
        high: Upper end of the 95 % interval.
        prompts: Prompts that entered the estimate.
    """

    value: float
    stderr: float
    low: float
    high: float
    prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """What one evaluation of one held-out set found.

    Attributes:
        prompts: Prompts that were asked.
        greedy: Accuracy of greedy answers; ``None`` without any judged greedy answer.
        k: Samples per prompt that were asked for; 0 for a greedy-only evaluation.
        mean_at_k: Expected accuracy of one sampled answer; ``None`` without sampled answers.
        pass_at: Chance that at least one of j sampled answers is correct, by j (1, 2, 4, ... and k). A prompt with
            fewer than j judged samples does not enter entry j.
        reward_mean: Mean weighted reward of the greedy answers (of the sampled ones where there are none).
        length_mean: Mean length of the same answers. Unit: tokens.
        truncated_share: Share of the same answers that ran into the token limit.
        answers: Greedy and sampled answers that came back.
        errors: Answers that could not be generated or scored, by kind: ``generation``, ``reward_error``,
            ``reward_timeout``, ``unscored``.
        abstained: Answers on which the deciding reward function abstained.
    """

    prompts: int
    greedy: Estimate | None
    k: int
    mean_at_k: Estimate | None
    pass_at: Mapping[int, Estimate]
    reward_mean: float | None
    length_mean: float | None
    truncated_share: float | None
    answers: int
    errors: Mapping[str, int] = field(default_factory=dict)
    abstained: int = 0

    @property
    def error_share(self) -> float:
        """Share of the answers that could not be judged because something failed."""
        return sum(self.errors.values()) / self.answers if self.answers else 0.0

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return the figures under metric names, for example ``eval/heldout/accuracy`` for prefix ``eval/heldout``.

        Figures that do not exist (no sampled answers, nothing judged) are absent rather than 0.
        """
        found: dict[str, float] = {
            "prompts": float(self.prompts),
            "error_share": self.error_share,
            "abstained": float(self.abstained),
        }
        if self.greedy is not None:
            found |= {
                "accuracy": self.greedy.value,
                "accuracy_stderr": self.greedy.stderr,
                "accuracy_low": self.greedy.low,
                "accuracy_high": self.greedy.high,
            }
        if self.mean_at_k is not None:
            found |= {
                "mean_at_k": self.mean_at_k.value,
                "mean_at_k_stderr": self.mean_at_k.stderr,
                "mean_at_k_low": self.mean_at_k.low,
                "mean_at_k_high": self.mean_at_k.high,
            }
        for j, estimate in self.pass_at.items():
            found[f"pass_at_{j}"] = estimate.value
        if self.k in self.pass_at:
            found |= {"pass_at_k": self.pass_at[self.k].value, "pass_at_k_stderr": self.pass_at[self.k].stderr}
        optional = {
            "reward": self.reward_mean,
            "length_mean": self.length_mean,
            "truncated_share": self.truncated_share,
        }
        found |= {name: value for name, value in optional.items() if value is not None}
        return {f"{prefix}/{name}": value for name, value in found.items()}


def evaluate(
    greedy: Mapping[GroupKey, Sequence[SampleHeader]],
    sampled: Mapping[GroupKey, Sequence[SampleHeader]],
    correct: Judge,
    *,
    k: int | None = None,
) -> EvaluationResult:
    """Summarise the answers to one held-out set.

    Args:
        greedy: The greedy answer of each prompt (a list of at most one); empty when none was asked for.
        sampled: The sampled answers of each prompt; empty for a greedy-only evaluation.
        correct: Judge of a scored sample, see `correct_at_least`.
        k: Samples that were asked for per prompt; ``None`` takes the most that any prompt has.

    Raises:
        ValueError: A prompt has two greedy answers, or more than ``k`` sampled ones.
    """
    if k is None:
        k = max((len(headers) for headers in sampled.values()), default=0)
    for key, headers in greedy.items():
        if len(headers) > 1:
            raise ValueError(f"{key}: {len(headers)} greedy answers, expected one")
    for key, headers in sampled.items():
        if len(headers) > k:
            raise ValueError(f"{key}: {len(headers)} sampled answers, expected at most k={k}")

    errors: dict[str, int] = {}
    abstained = 0
    for header in (h for side in (greedy, sampled) for headers in side.values() for h in headers):
        kind = failure(header)
        if kind is not None:
            errors[kind] = errors.get(kind, 0) + 1
        elif _verdict(header, correct) is None:
            abstained += 1

    greedy_counts = _counts(greedy, correct)
    sampled_counts = _counts(sampled, correct)
    described = [
        h for headers in (greedy or sampled).values() for h in headers if h.finish_reason in ("stop", "length")
    ]
    rewards = [h.reward for h in described if h.reward is not None]
    return EvaluationResult(
        prompts=len(set(greedy) | set(sampled)),
        greedy=_share(greedy_counts),
        k=k,
        mean_at_k=_share(sampled_counts),
        pass_at=_pass_curve(sampled_counts, k),
        reward_mean=math.fsum(rewards) / len(rewards) if rewards else None,
        length_mean=sum(h.tokens for h in described) / len(described) if described else None,
        truncated_share=sum(h.finish_reason == "length" for h in described) / len(described) if described else None,
        answers=sum(len(headers) for side in (greedy, sampled) for headers in side.values()),
        errors=errors,
        abstained=abstained,
    )


def failure(header: SampleHeader) -> str | None:
    """Say why an answer cannot be judged; ``None`` for one that was generated and scored (or abstained on)."""
    if header.finish_reason in ("abort", "error"):
        return "generation"
    if header.reward_status == "error":
        return "reward_error"
    if header.reward_status == "timeout":
        return "reward_timeout"
    return "unscored" if header.reward_status == "pending" else None


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of ``k`` draws is correct, from ``correct`` of ``samples``.

    It is 1 - C(n - c, k) / C(n, k), the share of k-subsets that hold a correct sample, as a product of n - c + 1 to n
    factors so that no binomial overflows (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Raises:
        ValueError: Not 1 <= k <= samples, or not 0 <= correct <= samples; below k samples no unbiased estimate exists.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, have {samples}")
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} correct of {samples} samples")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))


def wilson_interval(share: float, trials: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a share seen in ``trials`` trials, which may be an effective number."""
    if trials <= 0:
        return 0.0, 1.0
    z2 = Z_95 * Z_95
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 / (1 + z2 / trials) * math.sqrt(max(share * (1 - share) / trials + z2 / (4 * trials * trials), 0.0))
    return max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share))


def cluster_estimate(values: Sequence[float], samples: int) -> Estimate | None:
    """Estimate the mean of per-prompt values in [0, 1]; ``None`` without values.

    The standard error is that of a mean over prompts. The interval is Wilson's with the effective number of trials
    p (1 - p) / stderr^2 in place of the number of trials (the design-effect correction of survey sampling, Korn and
    Graubard 1998), held between the number of prompts and ``samples``. So one answer per prompt gives exactly Wilson's
    interval, every interval stays inside [0, 1], and none shrinks to a point when all prompts agree.
    """
    if not values:
        return None
    n = len(values)
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1) if n > 1 else 0.0
    stderr = math.sqrt(variance / n)
    trials = float(n)
    if stderr > 0:
        trials = min(max(mean * (1 - mean) / stderr**2, trials), float(max(samples, n)))
    low, high = wilson_interval(mean, trials)
    return Estimate(value=mean, stderr=stderr, low=low, high=high, prompts=n)


def _verdict(header: SampleHeader, correct: Judge) -> bool | None:
    """Judge a sample; ``None`` for one that failed or was abstained on."""
    if failure(header) is not None or header.reward_status == "abstained":
        return None
    return correct(header)


def _counts(answers: Mapping[GroupKey, Sequence[SampleHeader]], correct: Judge) -> list[tuple[int, int]]:
    """Return (judged samples, correct samples) of each prompt with at least one judged sample."""
    counts = []
    for headers in answers.values():
        verdicts = [v for v in (_verdict(h, correct) for h in headers) if v is not None]
        if verdicts:
            counts.append((len(verdicts), sum(verdicts)))
    return counts


def _share(counts: Sequence[tuple[int, int]]) -> Estimate | None:
    return cluster_estimate([c / n for n, c in counts], sum(n for n, _ in counts))


def _pass_curve(counts: Sequence[tuple[int, int]], k: int) -> dict[int, Estimate]:
    """Return pass@j for j = 1, 2, 4, ... below k and for k itself."""
    curve: dict[int, Estimate] = {}
    for j in sorted({2**i for i in range(k.bit_length()) if 2**i <= k} | ({k} if k else set())):
        values = [pass_at_k(n, c, j) for n, c in counts if n >= j]
        estimate = cluster_estimate(values, len(values))
        if estimate is not None:
            curve[j] = estimate
    return curve
