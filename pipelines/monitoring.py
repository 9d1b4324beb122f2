"""Where metrics go.

``metrics.jsonl`` is always written: it is the record of the run that `slipstream status` and the plots read, so a
failure there ends the run. TensorBoard and Weights & Biases are conveniences: one that fails is reported once, switched
off, and the training goes on.
"""

from __future__ import annotations

import logging
import math
import numbers
import secrets
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pipelines.metrics_table import METRICS as METRICS
from pipelines.metrics_table import Metric as Metric
from pipelines.metrics_table import describe as describe
from pipelines.metrics_table import undocumented as undocumented
from storage.errors import UserError
from storage.files import StorageError, atomic_write
from storage.journal import JsonLines
from storage.options import TrackingOptions

logger = logging.getLogger(__name__)

Value = float | int | str

_TAIL_BYTES = 1 << 16


class Monitor(Protocol):
    """A place that metrics are sent to."""

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Record ``metrics`` under the number of finished optimiser steps (0: before the first)."""

    def close(self) -> None:
        """Write out what is buffered and release resources."""


class JsonlMonitor:
    """Appends one line per record to ``metrics.jsonl``: step, time (Unix seconds), wall_s (seconds run), metrics.

    ``wall_s`` goes on where an interrupted run left off. A number that is not finite becomes ``null``, since strict
    JSON has no word for it: a key that is present without a number means NaN or infinity.
    """

    def __init__(self, path: Path, *, resume_offset: int | None = None, clock: Callable[[], float] = time.time) -> None:
        """Open ``path``, dropping all behind byte ``resume_offset`` (what was logged after the resumed checkpoint)."""
        self._clock = clock
        self._lines = JsonLines(path)
        if resume_offset is not None:
            self._lines.truncate(resume_offset)
        earlier = read_records(path)
        self._started = clock() - (float(earlier[-1].get("wall_s") or 0.0) if earlier else 0.0)

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Append one record and hand it to the operating system."""
        now = self._clock()
        record: dict[str, Any] = {"step": step, "time": round(now, 3), "wall_s": round(now - self._started, 3)}
        record.update((name, _plain(value)) for name, value in metrics.items())
        self._lines.append(record)

    def offset(self) -> int:
        """Return the size of the file in bytes, for a checkpoint to come back to."""
        return self._lines.offset()

    def sync(self) -> None:
        """Return when all records are on the disk."""
        self._lines.sync()

    def close(self) -> None:
        """Make all records durable and close the file."""
        self._lines.close()


class TensorboardMonitor:
    """Writes numbers as TensorBoard scalars; text stays in ``metrics.jsonl``.

    It uses TensorBoard's own event writer: the usual ``SummaryWriter`` classes import torch, which costs the conductor
    seconds and 200 MB.
    """

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        """Open an event file in ``directory``; what an interrupted run logged after ``resume_step`` is hidden."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        # Event files are named after the second; without a suffix a quick resume would overwrite the file before it.
        self._writer = EventFileWriter(str(directory), filename_suffix=f".{time.time_ns()}")
        if resume_step is not None:
            # Readers drop everything at and behind the step of a session's start.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Write the numeric values."""
        numbers_only = {name: _plain(value) for name, value in metrics.items()}
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in numbers_only.items()
            if isinstance(value, int | float)
        ]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbMonitor:
    """Logs to one Weights & Biases run, the same one after a resume.

    The run's identity lies in ``RUN/wandb_id``. Steps are logged as a metric of their own that the charts use as their
    x axis, because the service refuses records whose built-in step goes backwards, as after a crash and resume it does.
    """

    def __init__(self, run_directory: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        """Start or continue the run.

        Raises:
            UserError: The package is not installed.
        """
        check_tracking(TrackingOptions(wandb=True))
        import wandb

        identity = run_directory / "wandb_id"
        if not identity.exists():
            atomic_write(identity, secrets.token_hex(8).encode())
        self._run = wandb.init(
            project=project,
            name=name,
            id=identity.read_text().strip(),
            dir=str(run_directory),
            config=dict(config),
            resume="allow",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Queue one record; the client sends it from a process of its own."""
        self._run.log({"step": step, **{name: _plain(value) for name, value in metrics.items()}})

    def close(self) -> None:
        """Send what is queued and end the run."""
        self._run.finish()


class MonitorGroup:
    """Sends each record to ``metrics.jsonl`` and to every tracker that still works.

    Attributes:
        failures: One message per tracker that failed and was switched off, for the run's alarms.
    """

    def __init__(self, jsonl: JsonlMonitor) -> None:
        self.failures: list[str] = []
        self._jsonl = jsonl
        self._trackers: dict[str, Monitor] = {}

    def add(self, name: str, opener: Callable[[], Monitor]) -> None:
        """Open a tracker; a failure other than a `UserError` leaves it out of the group, and so does a full disk."""
        try:
            self._trackers[name] = opener()
        except Exception as error:
            if isinstance(error, UserError) and not isinstance(error, StorageError):
                raise
            self._switch_off(name, error)

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Send one record everywhere. Only a failure to write ``metrics.jsonl`` is raised."""
        self._jsonl.log(step, metrics)
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, metrics)
            except Exception as error:  # a third-party client may raise anything; training must not depend on it
                self._switch_off(name, error)

    def offset(self) -> int:
        """Return the size of ``metrics.jsonl`` in bytes."""
        return self._jsonl.offset()

    def sync(self) -> None:
        """Return when all of ``metrics.jsonl`` is on the disk."""
        self._jsonl.sync()

    def close(self) -> None:
        """Close every tracker, then ``metrics.jsonl``."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as error:
                self._switch_off(name, error)
        self._trackers.clear()
        self._jsonl.close()

    def _switch_off(self, name: str, error: Exception) -> None:
        self._trackers.pop(name, None)
        message = f"{name} failed and is switched off for this run: {type(error).__name__}: {error}"
        self.failures.append(message)
        logger.warning("%s", message)


def check_tracking(options: TrackingOptions) -> None:
    """Raise `UserError` when a tracker is asked for whose package is missing; imports nothing."""
    if options.wandb and find_spec("wandb") is None:
        raise UserError(
            "tracking.wandb: the package wandb is not installed. "
            "Run: pip install 'slipstream[wandb]' (or set tracking.wandb=false)."
        )


def open_monitors(
    options: TrackingOptions,
    run_directory: Path,
    resume_step: int | None = None,
    *,
    resume_offset: int | None = None,
    name: str = "",
    config: Mapping[str, Any] | None = None,
) -> MonitorGroup:
    """Open ``metrics.jsonl`` and the trackers that ``options`` ask for.

    Args:
        options: The ``tracking`` section.
        run_directory: Where the run leaves its files.
        resume_step: Step of the checkpoint that the run resumes from; ``None`` for a new run.
        resume_offset: Size of ``metrics.jsonl`` at that checkpoint in bytes.
        name: Name of the run; empty takes that of the directory.
        config: Resolved configuration, shown by trackers.

    Raises:
        UserError: A tracker's package is not installed.
    """
    check_tracking(options)
    group = MonitorGroup(JsonlMonitor(run_directory / "metrics.jsonl", resume_offset=resume_offset))
    if options.tensorboard:
        group.add("tensorboard", lambda: TensorboardMonitor(run_directory / "tensorboard", resume_step=resume_step))
    if options.wandb:
        group.add(
            "wandb",
            lambda: WandbMonitor(
                run_directory, project=options.wandb_project, name=name or run_directory.name, config=config or {}
            ),
        )
    return group


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl``, in order; a missing file has no records and a torn last line is left out."""
    return JsonLines.read(path) if path.exists() else []


def newest_step(path: Path) -> tuple[int, float]:
    """Number of the newest step in ``metrics.jsonl``, and when it was finished (Unix seconds); zeros before any.

    Reads the end of the file alone, which may be written in the same moment.
    """
    try:
        records = JsonLines.tail(path, _TAIL_BYTES)
    except FileNotFoundError:
        return 0, 0.0
    steps = [record for record in records if "time/step_s" in record]
    return (int(steps[-1]["step"]), float(steps[-1]["time"])) if steps else (0, 0.0)


def _plain(value: Any) -> float | int | str | None:
    """Turn numpy scalars and the like into what JSON holds; a number that is not finite into ``None``."""
    if isinstance(value, bool | numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, str) else str(value)
