"""What a run is doing right now: a small record that the conductor keeps and everybody else may read.

`StatusBoard` collects facts as they happen; `RunStatus` is the frozen snapshot that the live view draws, that
``RUN/status.json`` holds and that `slipstream status` prints.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

State = Literal[
    "starting",
    "warming_up",
    "evaluating",
    "generating",
    "rewarding",
    "training",
    "publishing",
    "checkpointing",
    "paused",
    "finished",
    "failed",
    "stopped",
]
STATES: tuple[State, ...] = get_args(State)
TERMINAL: frozenset[State] = frozenset(("finished", "failed", "stopped"))

HEADLINES = (
    "reward/mean",
    "accuracy/train",
    "rollout/tokens_per_s",
    "rollout/length_mean",
    "rollout/truncated_share",
    "reward/error_share",
    "staleness/mean",
    "waste/share",
    "time/step_s",
)
"""Metrics that the status carries, beside the accuracy of each held-out set."""

CURVES = ("reward/mean", "accuracy/train")
CURVE_POINTS = 256
RECENT_STEPS = 20
ETA_STEPS = 16
MAX_ALARMS = 20


def accuracy_metric(evaluation_set: str) -> str:
    """Return the name of the headline figure of one held-out set."""
    return f"eval/{evaluation_set}/accuracy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Something that the run is waiting for.

    Attributes:
        label: What is awaited, from a small fixed vocabulary (``generate``, ``reward``, ``learn``, ...).
        who: Who is to deliver it, for people: ``rollout-1: 3 of 16 groups``.
        seconds: How long it has been awaited.
        deadline_s: When a stall report is due, in seconds from the start of the wait; 0 for never.
    """

    label: str
    who: str
    seconds: float
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric by step, thinned so that it never grows beyond a bound."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def add(self, step: int, value: float, limit: int = CURVE_POINTS) -> Curve:
        """Return the curve with one more point; a full curve first drops every second of its inner points."""
        points = [(s, v) for s, v in zip(self.steps, self.values, strict=True) if s < step]
        if len(points) >= limit:
            points = [point for i, point in enumerate(points) if i % 2 == 0 or i == len(points) - 1]
        points.append((step, value))
        return Curve(tuple(s for s, _ in points), tuple(v for _, v in points))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A snapshot of a run.

    Attributes:
        name: Name of the run.
        directory: Its run directory.
        state: What it is doing.
        step: Optimiser steps finished.
        steps: Optimiser steps planned.
        epoch: Passes over the training prompts so far.
        latest: Newest value of the headline metrics, by the names used in ``metrics.jsonl``.
        curves: Reward, training accuracy and held-out accuracies by step.
        recent: Headline metrics of the last steps, oldest first, each with its ``step``.
        samples_done: Answers finished and scored in the step or evaluation in progress.
        samples_launched: Answers launched in it.
        waits: What it is waiting for, longest first.
        queues: Depth of each queue, in envelopes.
        versions: Version of the weights of each holder (``learner``, ``rollout-0``, ...).
        eta_seconds: Estimated seconds to the end; ``None`` before the first step.
        started: Start of this process, in seconds since the epoch.
        updated: Time of this snapshot, in seconds since the epoch.
        alarms: Messages that a person should read, oldest first.
        restarts: Times that the run went back to a checkpoint by itself.
        steps_lost: Finished steps that it had to train once more because of that.
        dashboard_url: Ray dashboard; empty without one.
        host: Host name of the conductor.
        pid: Process id of the conductor on that host.
        message: Why it failed or stopped; empty otherwise.
    """

    name: str
    directory: str
    state: State = "starting"
    step: int = 0
    steps: int = 0
    epoch: float = 0.0
    latest: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    recent: tuple[Mapping[str, float], ...] = ()
    samples_done: int = 0
    samples_launched: int = 0
    waits: tuple[Wait, ...] = ()
    queues: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    eta_seconds: float | None = None
    started: float = 0.0
    updated: float = 0.0
    alarms: tuple[str, ...] = ()
    restarts: int = 0
    steps_lost: int = 0
    dashboard_url: str = ""
    host: str = ""
    pid: int = 0
    message: str = ""

    @property
    def terminal(self) -> bool:
        """True when the run will not go on by itself."""
        return self.state in TERMINAL

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start of this process to the snapshot."""
        return max(0.0, self.updated - self.started)

    def evaluation_sets(self) -> tuple[str, ...]:
        """Names of the held-out sets with at least one result."""
        return tuple(name.split("/")[1] for name in self.curves if name.startswith("eval/"))

    def to_json(self) -> str:
        """Return the snapshot as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunStatus:
        """Read back what `to_json` wrote; fields that a later version added are ignored.

        Raises:
            ValueError: ``text`` is not such an object, or its state is unknown.
        """
        raw = json.loads(text)
        if not isinstance(raw, dict) or raw.get("state") not in STATES:
            raise ValueError("not a run status")
        known = {f.name for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {name: value for name, value in raw.items() if name in known}
        values["curves"] = {
            name: Curve(tuple(curve["steps"]), tuple(curve["values"])) for name, curve in raw.get("curves", {}).items()
        }
        values["waits"] = tuple(Wait(**wait) for wait in raw.get("waits", ()))
        values["recent"] = tuple(raw.get("recent", ()))
        values["alarms"] = tuple(raw.get("alarms", ()))
        return cls(**values)

    def save(self, path: Path) -> None:
        """Replace ``path`` in one go, so that a reader never sees half a snapshot. Raises ``OSError``."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(self.to_json(), encoding="utf-8")
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path) -> RunStatus:
        """Read a snapshot; raises ``OSError`` without a file and ``ValueError`` for a damaged one."""
        return cls.from_json(path.read_text(encoding="utf-8"))


class StatusBoard:
    """Collects what happens and hands out snapshots; lives in the conductor.

    It keeps the durations that the estimate of the remaining time rests on, the curves, and a bounded list of alarms.
    """

    def __init__(
        self,
        name: str,
        directory: str,
        *,
        steps: int,
        step: int = 0,
        evaluate_every: int = 0,
        evaluate_after: bool = True,
        dashboard_url: str = "",
        restarts: tuple[int, int] = (0, 0),
        previous: RunStatus | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Start at ``step`` of ``steps``; a resumed run takes over the curves of its ``previous`` status up to it.

        ``restarts`` are the times that the run went back to a checkpoint, and the steps that it lost by that.
        """
        self._clock = clock
        self._every = evaluate_every
        self._after = evaluate_after
        self._last_evaluation = -1
        self._step_started = clock()
        self._step_seconds: deque[float] = deque(maxlen=ETA_STEPS)
        self._evaluation_seconds: deque[float] = deque(maxlen=ETA_STEPS)
        self._waits: dict[str, tuple[str, float, float]] = {}
        curves, recent = _until(previous, step) if previous is not None else ({}, ())
        self._step_seconds.extend(row["time/step_s"] for row in recent if "time/step_s" in row)
        self._status = RunStatus(
            name=name,
            directory=directory,
            step=step,
            steps=steps,
            curves=curves,
            recent=recent,
            latest={key: curve.values[-1] for key, curve in curves.items()},
            restarts=restarts[0],
            steps_lost=restarts[1],
            dashboard_url=dashboard_url,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=clock(),
        )

    def enter(self, state: State, *, samples: int = 0, message: str = "") -> None:
        """Change the state; ``samples`` are the answers launched in a new generation or evaluation phase."""
        changes: dict[str, Any] = {"state": state, "message": message}
        if samples:
            changes |= {"samples_done": 0, "samples_launched": samples}
        if state in TERMINAL:
            self._waits.clear()
        self._change(**changes)

    def start_step(self) -> None:
        """Mark the start of a step."""
        self._step_started = self._clock()
        self._change(samples_done=0, samples_launched=0)

    def plan_evaluations(self, every: int) -> None:
        """Take note that evaluations now come every so many steps."""
        self._every = every

    def progress(self, done: int, launched: int) -> None:
        """Say how many of the answers in progress are finished."""
        self._change(samples_done=done, samples_launched=launched)

    def finish_step(self, step: int, metrics: Mapping[str, Any], *, epoch: float = 0.0) -> None:
        """Take in the metrics of a finished step. Its duration is ``time/step_s``, else the time since `start_step`."""
        seconds = float(metrics.get("time/step_s", self._clock() - self._step_started))
        self._step_seconds.append(seconds)
        headline = {n: float(metrics[n]) for n in HEADLINES if n in metrics and math.isfinite(float(metrics[n]))}
        curves = dict(self._status.curves)
        for name in CURVES:
            if name in headline:
                curves[name] = curves.get(name, Curve()).add(step, headline[name])
        recent = (*self._status.recent, {"step": float(step), "time/step_s": seconds, **headline})[-RECENT_STEPS:]
        latest = {**self._status.latest, **headline}
        self._step_started = self._clock()
        self._change(step=step, epoch=epoch, latest=latest, curves=curves, recent=recent)

    def finish_evaluation(self, step: int, metrics: Mapping[str, Any], seconds: float) -> None:
        """Take in the metrics of an evaluation of all sets after ``step`` steps, which took ``seconds``."""
        self._evaluation_seconds.append(seconds)
        self._last_evaluation = step
        self._step_started = self._clock()
        curves, latest = dict(self._status.curves), dict(self._status.latest)
        for name, value in metrics.items():
            if name.startswith("eval/") and name.endswith("/accuracy"):
                curves[name] = curves.get(name, Curve()).add(step, float(value))
                latest[name] = float(value)
        self._change(curves=curves, latest=latest)

    def wait(self, label: str, who: str, deadline_s: float = 0.0) -> None:
        """Say that something is being waited for; the same label again only changes ``who``."""
        since = self._waits[label][1] if label in self._waits else self._clock()
        self._waits[label] = (who, since, deadline_s)

    def arrived(self, label: str) -> None:
        """Say that it came."""
        self._waits.pop(label, None)

    def observe(self, *, queues: Mapping[str, int] | None = None, versions: Mapping[str, int] | None = None) -> None:
        """Take in queue depths and weight versions."""
        if queues is not None:
            self._change(queues=dict(queues))
        if versions is not None:
            self._change(versions=dict(versions))

    def alarm(self, message: str) -> None:
        """Add a message for people; a repeated one is kept once, and only the newest are kept."""
        others = tuple(a for a in self._status.alarms if a != message)
        self._change(alarms=(*others, message)[-MAX_ALARMS:])

    def snapshot(self) -> RunStatus:
        """Return the status as of now, with waits timed and the end estimated."""
        now = self._clock()
        status = self._status
        waits = [
            Wait(label=label, who=who, seconds=max(0.0, now - since), deadline_s=deadline)
            for label, (who, since, deadline) in list(self._waits.items())  # asked for from another thread
        ]
        eta = None
        if not status.terminal:
            eta = estimate_eta(
                steps_left=status.steps - status.step,
                step_seconds=self._step_seconds,
                elapsed_s=0.0 if status.state == "evaluating" else now - self._step_started,
                evaluations_left=evaluations_left(
                    status.step, status.steps, self._every, self._after, self._last_evaluation
                ),
                evaluation_seconds=self._evaluation_seconds,
            )
        return dataclasses.replace(
            status, waits=tuple(sorted(waits, key=lambda w: -w.seconds)), eta_seconds=eta, updated=now
        )

    def _change(self, **changes: Any) -> None:
        self._status = dataclasses.replace(self._status, **changes)


def robust_mean(values: Sequence[float]) -> float:
    """Return the mean after pulling outliers in to 3 scaled median absolute deviations from the median.

    A stall or a first step that compiles cannot dominate it, while the ordinary long tail still counts, which a median
    would leave out.
    """
    centre = statistics.median(values)
    reach = 3 * 1.4826 * statistics.median(abs(v - centre) for v in values)
    return statistics.fmean(min(max(v, centre - reach), centre + reach) for v in values)


def estimate_eta(
    *,
    steps_left: int,
    step_seconds: Sequence[float],
    elapsed_s: float,
    evaluations_left: int,
    evaluation_seconds: Sequence[float],
) -> float | None:
    """Estimate the seconds that a run still takes; ``None`` before the first step is known.

    Args:
        steps_left: Steps not yet finished, the one in progress included.
        step_seconds: Durations of recent steps.
        elapsed_s: Age of the step in progress; it counts for at most one step.
        evaluations_left: Evaluations still to come.
        evaluation_seconds: Durations of recent evaluations; without any they count as free.
    """
    if not step_seconds:
        return None
    each = robust_mean(step_seconds)
    remaining = max(0.0, steps_left * each - min(elapsed_s, each)) if steps_left > 0 else 0.0
    if evaluation_seconds:
        remaining += evaluations_left * robust_mean(evaluation_seconds)
    return remaining


def evaluations_left(step: int, steps: int, every: int, after: bool, last: int = -1) -> int:
    """Count the evaluations to come once ``step`` steps are done and the one at step ``last`` was the newest.

    They fall on each multiple of ``every`` (0: none) and, with ``after``, on the end.
    """
    due = set(range(every, steps + 1, every)) if every else set()
    if after:
        due.add(steps)
    return sum(step <= s and last < s for s in due)


def _until(previous: RunStatus, step: int) -> tuple[dict[str, Curve], tuple[Mapping[str, float], ...]]:
    """Return the curves and recent rows of an interrupted run up to the step that it resumes from."""
    curves = {}
    for name, curve in previous.curves.items():
        points = [(s, v) for s, v in zip(curve.steps, curve.values, strict=True) if s <= step]
        if points:
            curves[name] = Curve(tuple(s for s, _ in points), tuple(v for _, v in points))
    return curves, tuple(row for row in previous.recent if row["step"] <= step)
