"""Real training runs for benchmarks: ``slipstream train`` in a process of its own, as a newcomer starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.bench.memory import MemorySample, sample_tree
from pipelines.monitoring import read_records
from storage.errors import UserError

_SAMPLE_S = 1.0
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A run that finished.

    Attributes:
        directory: Its run directory.
        began: Wall-clock second of the command.
        seconds: From the command to the end of its process.
        records: Lines of ``metrics.jsonl``.
        peak: Memory of all its processes when it was largest; None where it was not sampled.
    """

    directory: Path
    began: float
    seconds: float
    records: Sequence[Mapping[str, Any]]
    peak: MemorySample | None

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """Records of training steps."""
        return [record for record in self.records if "time/step_s" in record]

    @property
    def startup_s(self) -> float:
        """Seconds from the command to the first work: evaluation or step, whichever came first."""
        first = self.records[0]
        worked = first.get("time/step_s") or first.get("time/evaluate_s") or 0.0
        return float(first["time"] - worked - self.began)

    def accuracies(self) -> list[float]:
        """Held-out accuracy at each evaluation, in order; the mean over sets when there are several."""
        found = []
        for record in self.records:
            values = [v for k, v in record.items() if k.startswith("eval/") and k.endswith("/accuracy")]
            if values:
                found.append(sum(values) / len(values))
        return found


@contextmanager
def workplace(keep: str) -> Iterator[Path]:
    """Yield a folder for runs: ``keep`` where it is given, else a temporary one that is removed."""
    if keep:
        path = Path(keep)
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as name:
        yield Path(name)


def run_training(
    parent: Path,
    name: str,
    overrides: Sequence[str] = (),
    *,
    preset: str | None = None,
    environment: Mapping[str, str] | None = None,
    sample_memory: bool = False,
) -> TrainingRun:
    """Train in ``parent / name`` and wait for the end; what the run prints goes to ``parent / name.log``.

    Args:
        parent: Folder of run directories.
        name: Name of the run.
        overrides: ``section.field=value`` settings on top of the preset.
        preset: What to start from; None: the default, or what ``overrides`` name.
        environment: Variables on top of this process's.
        sample_memory: Read the memory of all the run's processes once a second (Linux only).

    Raises:
        UserError: The run directory exists, or the run failed; with the last lines that it printed.
    """
    directory = parent / name
    if directory.exists():
        raise UserError(f"{directory} exists already: remove it, or choose another folder for option keep")
    place = (f"run.directory={parent}", f"run.name={name}")
    chosen = [preset] if preset else []
    command = [sys.executable, "-m", "pipelines", "train", *chosen, *place, *overrides]
    log = parent / f"{name}.log"
    began, clock = time.time(), time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
        peak = _Peak(process.pid) if sample_memory and sys.platform == "linux" else None
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            if peak is not None:
                peak.stop()
    seconds = time.perf_counter() - clock
    if status:
        raise UserError(f"the training run ended with status {status}; its last words:\n{last_words(log)}")
    return TrainingRun(
        directory=directory,
        began=began,
        seconds=seconds,
        records=read_records(directory / "metrics.jsonl"),
        peak=peak.largest if peak is not None else None,
    )


def last_words(log: Path) -> str:
    """Return the last lines of what a run has printed."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])


class _Peak:
    """Samples a process tree on a thread and remembers the largest sample."""

    def __init__(self, pid: int, sampler: Callable[[int], MemorySample] = sample_tree) -> None:
        self.largest: MemorySample | None = None
        self._pid = pid
        self._sampler = sampler
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            sample = self._sampler(self._pid)
            if self.largest is None or sample.total > self.largest.total:
                self.largest = sample
