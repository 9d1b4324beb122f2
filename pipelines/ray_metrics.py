"""Live metrics of a run for Ray's metrics endpoint, and so for Prometheus, Grafana and the Ray dashboard.

Ray exports each name as ``ray_slipstream_...``. Tags come from small fixed vocabularies, because each distinct value is
a time series for ever: a label that is not in its vocabulary is counted as ``other``. Gauges start at 0, so that a
query for an error that has not happened yet finds a series and not a gap. Failures are counted by a gauge that holds
their total for that reason: Ray's counters refuse an increment of 0 and so cannot exist before the first failure.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.status import STATES, Wait

PREFIX = "slipstream_"
OTHER = "other"
QUEUES = ("generating", "scoring", OTHER)
WAITS = (
    "start",
    "generate",
    "reward",
    "learner queue",
    "learn",
    "publish",
    "checkpoint",
    "evaluate",
    "history queue",
    "resume",
    OTHER,
)
REASONS = ("reward_error", "reward_timeout", "generation", "worker_lost", "payload_lost", "stall", OTHER)
OPERATIONS = ("generate", "reward", "learn", "publish", "checkpoint", "evaluate", "step", OTHER)
SECONDS_BUCKETS = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]

_GAUGES = {
    "step": "Optimiser steps finished",
    "reward": "Mean reward of the last step",
    "accuracy": "Training accuracy of the last step, share",
    "tokens_per_second": "Tokens generated per second of generation in the last step",
    "goodput_tokens_per_second": "Trained tokens per second of the last step",
    "staleness_mean": "Mean staleness of the answers trained on in the last step, versions",
    "staleness_max": "Largest staleness in the last step, versions",
    "waste_share": "Share of the last step's generated tokens that were not trained on",
    "truncated_share": "Share of the last step's answers that hit the token limit",
    "reward_error_share": "Share of the last step's answers whose scoring failed",
    "zero_variance_share": "Share of the last step's groups whose rewards are all equal",
}
_FROM_METRIC = {
    "reward": "reward/mean",
    "accuracy": "accuracy/train",
    "tokens_per_second": "rollout/tokens_per_s",
    "goodput_tokens_per_second": "goodput/tokens_per_s",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "waste_share": "waste/share",
    "truncated_share": "rollout/truncated_share",
    "reward_error_share": "reward/error_share",
    "zero_variance_share": "reward/zero_variance_share",
}
_STEP_PARTS = ("step", "generate", "reward", "learn", "publish")


class RunMetrics:
    """The run's gauges, counters and histograms; make one inside the conductor's process."""

    def __init__(self, module: Any = None) -> None:
        """Create all series and seed them with 0; ``module`` stands in for ``ray.util.metrics`` in tests."""
        api = module if module is not None else importlib.import_module("ray.util.metrics")
        self._gauges = {name: api.Gauge(PREFIX + name, description=text) for name, text in _GAUGES.items()}
        self._phase = api.Gauge(PREFIX + "phase", description="1 for what the run is doing now", tag_keys=("phase",))
        self._queue = api.Gauge(PREFIX + "queue_depth", description="Items in a queue", tag_keys=("queue",))
        self._wait = api.Gauge(
            PREFIX + "wait_seconds", description="How long the run has waited for this, now", tag_keys=("label",)
        )
        self._tokens = api.Counter(
            PREFIX + "tokens", description="Tokens since the start of this process", tag_keys=("use",)
        )
        self._errors = api.Gauge(
            PREFIX + "errors", description="Failures since the start of this process, by reason", tag_keys=("reason",)
        )
        self._failures = dict.fromkeys(REASONS, 0)
        self._seconds = api.Histogram(
            PREFIX + "seconds",
            description="Durations of operations",
            boundaries=SECONDS_BUCKETS,
            tag_keys=("operation",),
        )
        self._last = api.Gauge(
            PREFIX + "last_seconds", description="Last duration of an operation", tag_keys=("operation",)
        )
        for gauge in self._gauges.values():
            gauge.set(0.0)
        self.phase("starting")
        for queue in QUEUES:
            self._queue.set(0.0, tags={"queue": queue})
        for reason in REASONS:
            self._errors.set(0.0, tags={"reason": reason})
        for operation in OPERATIONS:
            self._last.set(0.0, tags={"operation": operation})
        self.waits(())

    def phase(self, state: str) -> None:
        """Set exactly one phase to 1; ``state`` is one of `pipelines.status.STATES`."""
        for phase in STATES:
            self._phase.set(1.0 if phase == state else 0.0, tags={"phase": phase})

    def step(self, step: int, metrics: Mapping[str, float], *, generated: int = 0, trained: int = 0) -> None:
        """Take in a finished step: its metrics by their names in ``metrics.jsonl`` and its token counts."""
        self._gauges["step"].set(float(step))
        for name, metric in _FROM_METRIC.items():
            value = metrics.get(metric, math.nan)
            if math.isfinite(value):
                self._gauges[name].set(float(value))
        for part in _STEP_PARTS:
            if f"time/{part}_s" in metrics:
                self.seconds(part, metrics[f"time/{part}_s"])
        self.tokens(generated=generated, trained=trained)

    def tokens(self, *, generated: int = 0, trained: int = 0) -> None:
        """Count tokens that were generated and tokens that were trained on."""
        for use, count in (("generated", generated), ("trained", trained)):
            if count > 0:
                self._tokens.inc(float(count), tags={"use": use})

    def queue(self, name: str, depth: int) -> None:
        """Set the depth of a queue."""
        self._queue.set(float(depth), tags={"queue": _known(name, QUEUES)})

    def waits(self, waits: Sequence[Wait]) -> None:
        """Show what the run waits for now; a label that is not among ``waits`` goes back to 0."""
        longest = dict.fromkeys(WAITS, 0.0)
        for wait in waits:
            label = _known(wait.label, WAITS)
            longest[label] = max(longest[label], wait.seconds)
        for label, seconds in longest.items():
            self._wait.set(seconds, tags={"label": label})

    def error(self, reason: str, count: int = 1) -> None:
        """Count failures."""
        known = _known(reason, REASONS)
        self._failures[known] += count
        self._errors.set(float(self._failures[known]), tags={"reason": known})

    def seconds(self, operation: str, seconds: float) -> None:
        """Record how long an operation took."""
        tags = {"operation": _known(operation, OPERATIONS)}
        self._seconds.observe(float(seconds), tags=tags)
        self._last.set(float(seconds), tags=tags)


def _known(label: str, vocabulary: Sequence[str]) -> str:
    return label if label in vocabulary else OTHER
