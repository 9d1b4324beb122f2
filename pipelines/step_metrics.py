"""Numbers of one training step, from headers and clocks alone. Pure, so that a test can check each formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.round_books import RoundResult
from pipelines.scheduling.policy import zero_variance
from storage.ledger import LedgerCounts
from storage.records import SampleHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClock:
    """Durations of the parts of a step, in seconds.

    Attributes:
        step: From the end of the step before to the acknowledged weights and a durable ledger: with everything between
            two steps, without checkpoints and evaluations.
        generate: Engine-busy time of the busiest rollout worker.
        learn: Time that the learner spent in the step.
        publish: From the learner's answer to the last acknowledgement.
        pause: Longest pause of a rollout worker for the change of weights.
    """

    step: float
    generate: float
    learn: float
    publish: float
    pause: float


def step_metrics(
    result: RoundResult,
    clock: StepClock,
    learner: Mapping[str, float],
    counts: LedgerCounts,
    *,
    version: int,
    learner_version: int,
    correct_at: float,
) -> dict[str, float]:
    """Return the metrics of a step by the names that ``pipelines.monitoring.METRICS`` documents.

    Args:
        result: The training round.
        clock: Durations.
        learner: What the learner reported.
        counts: Ledger after the step.
        version: Version that the optimiser step started from.
        learner_version: Version after it.
        correct_at: A sample is correct when its first reward function returns at least this.
    """
    trained = [header for headers in result.headers.values() for header in headers]
    rewards = np.array([h.reward for h in trained if h.reward is not None], np.float64)
    lengths = np.array([h.tokens for h in trained] or [0], np.float64)
    tokens = int(sum(h.tokens for h in trained))
    staleness = np.array([version - h.oldest_version for h in trained] or [0], np.float64)
    reward_s = _reward_seconds(trained)
    other = max(0.0, clock.step - clock.generate - reward_s - clock.learn)
    zero_variance = sum(zero_variance_headers(group) for group in result.headers.values())
    metrics: dict[str, float] = {
        "reward/mean": float(rewards.mean()) if len(rewards) else float("nan"),
        "reward/std": float(rewards.std()) if len(rewards) else float("nan"),
        "reward/error_share": result.errors / max(1, result.scored),
        "reward/timeout_share": sum(h.reward_status == "timeout" for h in trained) / max(1, len(trained)),
        "reward/score_mean_s": sum(h.score_s for h in trained) / max(1, len(trained)),
        "reward/score_max_s": max((h.score_s for h in trained), default=0.0),
        "reward/zero_variance_share": zero_variance / max(1, len(result.headers)),
        "accuracy/train": accuracy(trained, correct_at),
        "rollout/samples": result.scored,
        "rollout/tokens": result.generated_tokens,
        "rollout/tokens_per_s": result.generated_tokens / max(1e-9, clock.generate or clock.step),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_p50": float(np.quantile(lengths, 0.5)),
        "rollout/length_p90": float(np.quantile(lengths, 0.9)),
        "rollout/length_max": float(lengths.max()),
        "rollout/truncated_share": _share(trained, "length"),
        "rollout/error_share": _share(trained, "error"),
        "rollout/busy_share": clock.generate / max(1e-9, clock.step),
        "goodput/tokens_per_s": tokens / max(1e-9, clock.step),
        "goodput/samples_per_s": len(trained) / max(1e-9, clock.step),
        "waste/tokens": result.dropped_tokens,
        "waste/share": result.dropped_tokens / max(1, result.generated_tokens),
        "schedule/long_round": float(result.round_class == "long"),
        "schedule/waiting": result.waiting,
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
        "time/step_s": clock.step,
        "time/generate_s": clock.generate,
        "time/reward_s": reward_s,
        "time/learn_s": clock.learn,
        "time/publish_s": clock.publish,
        "time/pause_s": clock.pause,
        "time/other_s": other,
        "time/overhead_share": other / max(1e-9, clock.step),
        "ledger/launched": counts.launched,
        "ledger/queued": counts.queued,
        "ledger/leased": counts.leased,
        "ledger/ready": counts.ready,
        "ledger/trained": counts.trained,
        "progress/version": learner_version,
    }
    metrics |= {f"ledger/ended/{reason}": float(count) for reason, count in counts.ended.items()}
    for name, values in _parts(trained).items():
        metrics[f"reward/part/{name}"] = float(np.mean(values))
    passes = sum(h.forward_passes for h in trained)
    if passes:
        metrics["rollout/tokens_per_pass"] = tokens / passes
    drafted = sum(h.drafted for h in trained)
    if drafted:
        metrics["rollout/acceptance"] = sum(h.accepted for h in trained) / drafted
    metrics |= {f"learner/{name}": float(value) for name, value in learner.items()}
    return metrics


def accuracy(headers: Sequence[SampleHeader], correct_at: float) -> float:
    """Share of correct samples among those that the first reward function judged."""
    verdicts = [v for v in (is_correct(h, correct_at) for h in headers) if v is not None]
    return sum(verdicts) / max(1, len(verdicts))


def is_correct(header: SampleHeader, correct_at: float) -> bool | None:
    """Return whether the first reward function gave at least ``correct_at``; None when it did not judge."""
    first = next(iter(header.reward_parts.values()), None)
    return None if first is None else first >= correct_at - 1e-9


def zero_variance_headers(headers: Sequence[SampleHeader]) -> bool:
    """Return True when a group teaches nothing."""
    return zero_variance([header.reward for header in headers])


def _share(headers: Sequence[SampleHeader], reason: str) -> float:
    return sum(h.finish_reason == reason for h in headers) / max(1, len(headers))


def _parts(headers: Sequence[SampleHeader]) -> dict[str, list[float]]:
    """Values of each reward function, abstentions and failures left out."""
    parts: dict[str, list[float]] = {}
    for header in headers:
        for name, value in header.reward_parts.items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    return parts


def _reward_seconds(headers: Sequence[SampleHeader]) -> float:
    """Seconds between the end of generation and the last score; scoring before that overlaps and costs nothing."""
    written = max((h.timings.finished for h in headers), default=0.0)
    scored = max((h.timings.rewarded for h in headers), default=0.0)
    return max(0.0, scored - written)
