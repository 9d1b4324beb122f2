"""Live metrics of a run for Ray's metrics endpoint, and so for Prometheus, Grafana and the Ray dashboard.

Ray exports each name as ``ray_slipstream_...``; `pipelines.metrics_table.LIVE` says what each means. Tags come from
small fixed vocabularies, because each distinct value is a time series for ever: a label that is not in its vocabulary
is counted as ``other``. Gauges start at 0, so that a query for an error that has not happened yet finds a series and
not a gap. Failures are counted by a gauge that holds their total for that reason: Ray's counters refuse an increment
of 0 and so cannot exist before the first failure.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.metrics_table import LIVE, Live
from pipelines.status import STATES, Wait

PREFIX = "slipstream_"
OTHER = "other"
QUEUES = ("generating", "scoring", OTHER)
WAITS = (
    "start",
    "generate",
    "reward",
    "sleep",
    "learner queue",
    "learn",
    "publish",
    "checkpoint",
    "evaluate",
    "history queue",
    "resume",
    OTHER,
)
REASONS = ("reward", "generation", "worker_lost", "stall", OTHER)
ENDED = ("zero_variance", "unscored", "worker_crashed", OTHER)
OPERATIONS = ("generate", "reward", "learn", "publish", "checkpoint", "evaluate", "step", OTHER)
SECONDS_BUCKETS = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]

_LEDGER = "ledger/ended/"
_STEP_PARTS = ("step", "generate", "reward", "learn", "publish")


class RunMetrics:
    """The run's gauges, counters and histograms; make one inside the conductor's process."""

    def __init__(self, run: str, module: Any = None) -> None:
        """Create all series of `pipelines.metrics_table.LIVE` and seed them with 0.

        Args:
            run: Name of the run: the tag that keeps the runs of one cluster apart.
            module: Stands in for ``ray.util.metrics`` in tests.
        """
        api = module if module is not None else importlib.import_module("ray.util.metrics")
        self._series = {name: _make(api, name, live, run) for name, live in LIVE.items()}
        self._failures = dict.fromkeys(REASONS, 0)
        self._crashes = 0
        self._stalled: set[str] = set()
        for name, live in LIVE.items():
            if live.kind == "gauge" and not live.tag:
                self._series[name].set(0.0)
        self.phase("starting")
        for name, vocabulary in (
            ("queue_depth", QUEUES),
            ("errors", REASONS),
            ("ended_groups", ENDED),
            ("last_seconds", OPERATIONS),
        ):
            for value in vocabulary:
                self._series[name].set(0.0, tags={LIVE[name].tag: value})
        self.waits(())

    def phase(self, state: str) -> None:
        """Set exactly one phase to 1; ``state`` is one of `pipelines.status.STATES`."""
        for phase in STATES:
            self._series["phase"].set(1.0 if phase == state else 0.0, tags={"phase": phase})

    def step(self, step: int, metrics: Mapping[str, float], *, generated: int = 0, trained: int = 0) -> None:
        """Take in a finished step: its metrics by their names in ``metrics.jsonl`` and its token counts."""
        self._series["step"].set(float(step))
        for name, live in LIVE.items():
            value = metrics.get(live.source, math.nan)
            if math.isfinite(value):
                self._series[name].set(float(value))
        for part in _STEP_PARTS:
            if f"time/{part}_s" in metrics:
                self.seconds(part, metrics[f"time/{part}_s"])
        self.tokens(generated=generated, trained=trained)
        self._ended(metrics)
        self.error("reward", round(metrics.get("reward/error_share", 0.0) * metrics.get("rollout/samples", 0.0)))
        self.error("generation", int(metrics.get("learner/unfinished", 0)))
        crashes = int(metrics.get("faults/crashes", self._crashes))
        self.error("worker_lost", crashes - self._crashes)
        self._crashes = crashes

    def _ended(self, metrics: Mapping[str, float]) -> None:
        """Show the ledger's counts, which go on over a resume."""
        counts = dict.fromkeys(ENDED, 0.0)
        for name, value in metrics.items():
            if name.startswith(_LEDGER):
                counts[_known(name.removeprefix(_LEDGER), ENDED)] += float(value)
        for reason, count in counts.items():
            self._series["ended_groups"].set(count, tags={"reason": reason})

    def tokens(self, *, generated: int = 0, trained: int = 0) -> None:
        """Count tokens that were generated and tokens that were trained on."""
        for use, count in (("generated", generated), ("trained", trained)):
            if count > 0:
                self._series["tokens"].inc(float(count), tags={"use": use})

    def queue(self, name: str, depth: int) -> None:
        """Set the depth of a queue."""
        self._series["queue_depth"].set(float(depth), tags={"queue": _known(name, QUEUES)})

    def waits(self, waits: Sequence[Wait]) -> None:
        """Show what the run waits for now; a label that is not among ``waits`` goes back to 0.

        A wait beyond its deadline counts once as a stall.
        """
        late = {wait.label for wait in waits if wait.deadline_s and wait.seconds > wait.deadline_s}
        self.error("stall", len(late - self._stalled))
        self._stalled = late
        longest = dict.fromkeys(WAITS, 0.0)
        for wait in waits:
            label = _known(wait.label, WAITS)
            longest[label] = max(longest[label], wait.seconds)
        for label, seconds in longest.items():
            self._series["wait_seconds"].set(seconds, tags={"label": label})

    def error(self, reason: str, count: int = 1) -> None:
        """Count failures."""
        known = _known(reason, REASONS)
        self._failures[known] += count
        self._series["errors"].set(float(self._failures[known]), tags={"reason": known})

    def seconds(self, operation: str, seconds: float) -> None:
        """Record how long an operation took."""
        tags = {"operation": _known(operation, OPERATIONS)}
        self._series["seconds"].observe(float(seconds), tags=tags)
        self._series["last_seconds"].set(float(seconds), tags=tags)


def _make(api: Any, name: str, live: Live, run: str) -> Any:
    further = {"boundaries": SECONDS_BUCKETS} if live.kind == "histogram" else {}
    keys = ("run", live.tag) if live.tag else ("run",)
    cls = {"gauge": api.Gauge, "counter": api.Counter, "histogram": api.Histogram}[live.kind]
    return cls(PREFIX + name, description=live.meaning, tag_keys=keys, **further).set_default_tags({"run": run})


def _known(label: str, vocabulary: Sequence[str]) -> str:
    return label if label in vocabulary else OTHER
