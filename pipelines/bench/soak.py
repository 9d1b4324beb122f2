"""What a run of days would need: memory, object store, logs and files of a real run, read every few seconds.

A small training run goes on for some minutes with everything on that keeps something: history for drafts, archive,
ledger, metrics, TensorBoard, checkpoints, metrics of Ray. After a warm-up a line is fitted through the readings of each
thing. Memory, object store, threads and open files have to stand still; what is kept of the data has to grow with the
tokens that were trained, and logs by next to nothing. The last column is what a day of this speed would bring.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipelines.bench.census import Census, take_census
from pipelines.bench.harness import BenchResult, BenchTable, OptionValue
from pipelines.bench.training import last_words, workplace
from pipelines.bench.trends import Trend, trend
from pipelines.monitoring import newest_step, read_records
from storage.errors import UserError

OPTIONS: dict[str, OptionValue] = {"minutes": 30.0, "every_s": 5.0, "seed": 0, "keep": ""}

Verdict = Literal["flat", "with the data", "LEAKS", "GROWS"]

WARM_UP = 0.5
"""Share of the readings that are left out at the beginning: what is bounded fills up (a thousand steps for drivers,
3,000 calls for the dashboard, answers of five minutes, indexes of the first epochs)."""

DATA = ("history", "archive", "ledger", "metrics", "TensorBoard")
"""What is kept of the data, and has to grow with it."""
LOGS = ("events log", "Ray logs")
LOG_MB_H = 10.0
"""Logs that grow by less fill no disk within a run of a month."""

_DAY_H = 24.0
_MEGA = 1e6
_STOP_S = 120.0
_START_S = 300.0
_FEWEST = 4
_SETTINGS = (
    "run.steps=1000000",
    "data.prompts=64",
    "data.shuffle=true",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=64",
    "rollout.threads=1",
    "learner.threads=1",
    "learner.schedule=constant",
    "speculation.source=history",
    "checkpoint.every=20",
    "evaluation.before=false",
    "evaluation.after=false",
    "evaluation.every=0",
)


@dataclass(frozen=True, slots=True)
class Reading:
    """A census, when it was taken (seconds since the first step), and the steps and tokens trained by then."""

    seconds: float
    steps: float
    tokens: float
    census: Census


def run(options: Mapping[str, OptionValue]) -> BenchResult:
    """Train for ``minutes``, take a census every ``every_s`` seconds, and judge what grows."""
    if sys.platform != "linux":
        raise UserError("bench soak reads /proc, which Linux alone has")
    minutes, every = float(options["minutes"]), float(options["every_s"])
    if every <= 0 or 60 * minutes < (_FEWEST + 1) * every / (1 - WARM_UP):
        raise UserError(f"minutes={minutes:g}, every_s={every:g}: too few readings to fit lines through")
    with workplace(str(options["keep"])) as parent:
        return report(observe(parent, 60 * minutes, every, int(options["seed"])))


def observe(parent: Path, seconds: float, every_s: float, seed: int) -> list[Reading]:
    """Run ``slipstream train`` for some seconds from its first step on, and return the readings.

    Raises:
        UserError: The run ended by itself; with the last lines that it printed.
    """
    name = "soak"
    directory, log = parent / name, parent / f"{name}.log"
    if directory.exists():
        raise UserError(f"{directory} exists already: remove it, or choose another folder for option keep")
    settings = (*_SETTINGS, f"run.seed={seed}", f"run.directory={parent}", f"run.name={name}")
    command = [sys.executable, "-m", "pipelines", "train", *settings]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}  # its own Ray is watched
    taken: list[tuple[float, Census]] = []
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _await_first_step(process, directory, log)
            began, clock = time.time(), time.monotonic()
            while (passed := time.monotonic() - clock) < seconds:
                taken.append((passed, take_census(process.pid, directory)))
                _require_running(process, log)
                time.sleep(max(0.0, clock + len(taken) * every_s - time.monotonic()))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    times, tokens = trained_tokens(directory)
    at = [began + passed for passed, _ in taken]
    known = zip(taken, np.interp(at, times, np.arange(len(times)) + 1.0), np.interp(at, times, tokens), strict=True)
    return [Reading(passed, float(steps), float(count), census) for (passed, census), steps, count in known]


def trained_tokens(directory: Path) -> tuple[list[float], list[float]]:
    """Return when each step of a run ended (Unix seconds), and the tokens trained by then."""
    steps = [record for record in read_records(directory / "metrics.jsonl") if "learner/tokens_trained" in record]
    return [step["time"] for step in steps], list(accumulate(float(step["learner/tokens_trained"]) for step in steps))


def report(readings: Sequence[Reading]) -> BenchResult:
    """Fit lines through the readings after the warm-up, and make tables and figures."""
    counted = list(readings[int(WARM_UP * len(readings)) :])
    if len(counted) < _FEWEST:
        raise UserError(f"{len(counted)} readings after the warm-up are too few: let it run for longer")
    seconds = np.array([reading.seconds for reading in counted])
    memory = _series(seconds, {role: [_usage(r, role)[0] for r in counted] for role in _roles(counted)})
    objects = trend(seconds, np.array([float(reading.census.store or 0) for reading in counted]))
    disk = _series(seconds, {what: [float(r.census.files.get(what, 0)) for r in counted] for what in _files(counted)})
    hours = (counted[-1].seconds - counted[0].seconds) / 3600.0
    tokens_h = (counted[-1].tokens - counted[0].tokens) / hours if hours else 0.0
    steps_h = (counted[-1].steps - counted[0].steps) / hours if hours else 0.0
    total = trend(seconds, np.array([sum(_usage(r, role)[0] for role in memory) for r in counted]))
    held = {**memory, "object store": objects, "all together": total}
    rows = [
        _row(what, line, "flat" if line.flat else "LEAKS", line.slope / steps_h if steps_h else None)
        for what, line in held.items()
    ]
    disk_rows = []
    for what, line in disk.items():
        per_token = line.slope / tokens_h if what in DATA and tokens_h else None
        disk_rows.append(_row(what, line, judge(what, line), per_token))
    leaking = [role for role, line in memory.items() if not line.flat]
    figures = {f"rss_slope_mb_h_{_key(role)}": line.slope / _MEGA for role, line in memory.items()}
    figures |= {
        "rss_flat": float(not leaking),
        "rss_slope_mb_h": total.slope / _MEGA,
        "object_store_slope_mb_h": objects.slope / _MEGA,
        "log_growth_mb_h": sum(disk[what].slope for what in LOGS if what in disk) / _MEGA,
        "history_bytes_per_token": disk["history"].slope / tokens_h if tokens_h and "history" in disk else 0.0,
        "steps_per_h": steps_h,
        "tokens_per_h": tokens_h,
        "projected_24h_gb": sum(line.after(_DAY_H) for line in disk.values()) / 1e9,
        "projected_24h_memory_gb": sum(line.after(_DAY_H) for line in memory.values()) / 1e9,
    }
    warnings = [f"WARNING: memory of {role} grows: {_growth(memory[role])}" for role in leaking]
    warnings += [f"WARNING: {what} grows: {_growth(disk[what])}" for what in disk if judge(what, disk[what]) == "GROWS"]
    return BenchResult(
        name="soak",
        columns=("memory of", "MB", "MB/h", "+-", "verdict", "MB after 24 h", "bytes/step"),
        rows=tuple(rows),
        figures=figures,
        notes=(
            *warnings,
            f"{len(readings)} readings over {readings[-1].seconds / 60:.1f} minutes, the first {WARM_UP:.0%} do not "
            f"count; {steps_h:,.0f} steps and {tokens_h:,.0f} trained tokens an hour; model tiny, one worker of each "
            "role, all stores on",
            "flat: growth within two standard errors, or below 1 % of the size an hour; memory is what a process holds "
            "for itself, without files and the object store",
            f"logs may grow by {LOG_MB_H:g} MB/h; checkpoints and status have to stay as they are",
        ),
        more=(
            BenchTable(
                "on disk", ("what", "MB", "MB/h", "+-", "verdict", "MB after 24 h", "bytes/token"), tuple(disk_rows)
            ),
            _counts(seconds, counted),
        ),
    )


def judge(what: str, line: Trend) -> Verdict:
    """Say whether files grow as they may."""
    if line.flat:
        return "flat"
    if what in DATA:
        return "with the data"
    return "flat" if what in LOGS and line.slope <= LOG_MB_H * _MEGA else "GROWS"


def _counts(seconds: npt.NDArray[np.float64], counted: Sequence[Reading]) -> BenchTable:
    """Threads and open files of each role at the beginning and at the end, and their trend."""
    rows = []
    for role in _roles(counted):
        cells = [role]
        for position in (1, 2):
            values = np.array([_usage(reading, role)[position] for reading in counted])
            line = trend(seconds, values)
            cells += [f"{values[0]:.0f} to {values[-1]:.0f}", "flat" if line.flat else f"LEAKS {line.slope:+.1f}/h"]
        rows.append(tuple(cells))
    return BenchTable("threads and open files", ("of", "threads", "verdict", "open files", "verdict"), tuple(rows))


def _series(seconds: npt.NDArray[np.float64], values: Mapping[str, Sequence[float]]) -> dict[str, Trend]:
    return {name: trend(seconds, np.array(readings)) for name, readings in values.items()}


def _row(what: str, line: Trend, verdict: Verdict, each: float | None = None) -> tuple[str, ...]:
    return (
        what,
        f"{line.mean / _MEGA:.2f}",
        f"{line.slope / _MEGA:+.2f}",
        f"{line.error / _MEGA:.2f}",
        verdict,
        f"{line.after(_DAY_H) / _MEGA:,.0f}",
        "" if each is None else f"{each:.1f}",
    )


def _growth(line: Trend) -> str:
    return f"{line.slope / _MEGA:+.1f} +- {line.error / _MEGA:.1f} MB an hour on {line.mean / _MEGA:.0f} MB"


def _roles(readings: Sequence[Reading]) -> list[str]:
    """Roles that were there all the time; what comes and goes has no trend."""
    return sorted(set.intersection(*(set(reading.census.roles) for reading in readings)))


def _files(readings: Sequence[Reading]) -> list[str]:
    return list(dict.fromkeys(name for reading in readings for name in reading.census.files))


def _usage(reading: Reading, role: str) -> tuple[float, float, float]:
    usage = reading.census.roles[role]
    return float(usage.memory), float(usage.threads), float(usage.descriptors)


def _key(role: str) -> str:
    return re.sub(r"\W+", "_", role).lower()


def _await_first_step(process: subprocess.Popen[bytes], directory: Path, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not newest_step(directory / "metrics.jsonl")[0]:
        _require_running(process, log)
        if time.monotonic() > deadline:
            raise UserError(f"the training run has not finished a step within {_START_S:g} s:\n{last_words(log)}")
        time.sleep(0.5)


def _require_running(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        raise UserError(f"the training run ended with status {process.returncode}:\n{last_words(log)}")
