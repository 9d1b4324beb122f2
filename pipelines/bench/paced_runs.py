"""Whole training runs with paced generation: a schedule or a pipeline against its baseline on the same hardware.

Every run is ``slipstream train`` in a process of its own: real model, real Ray, real learner, real clocks. Only the
forward passes of the rollout workers are stretched to the time law of a GPU, one torch thread each, so that several
workers fit on two cores. Times count from the first dispatch to the last acknowledged weights; start-up is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.rollout.paced import INVALID_SHARE, OVERRUN
from pipelines.bench.training import TrainingRun, run_training
from pipelines.config_loader import load_config_file
from storage.errors import UserError
from storage.history.archive import RolloutArchive
from storage.run_directory import RunDirectory
from storage.tasks import RunningSums

PROFILE = "latency_bound"
"""A pass costs about the same whatever its rows: k_row is 0.5 % of t0."""

_COMMON = (
    "rollout.threads=1",
    "rollout.stream_interval_s=0.05",  # against steps of seconds; real ones take minutes
    "learner.threads=1",
    f"rollout.pacing.profile={PROFILE}",
    "evaluation.before=false",
    "evaluation.after=false",
    "evaluation.every=0",
    "checkpoint.every=0",
    "tracking.tensorboard=false",
)

LONG_TAILED = RunningSums(median_laps=1.0, sigma_laps=1.5)
"""Prompts of the kind that model tiny knows, with a longer tail: P90 is about 4.3 medians, the cap about 17."""

COLUMNS = (
    "run",
    "steps",
    "prompts",
    "s/prompt",
    "speed-up",
    "generate",
    "learn",
    "rest",
    "length",
    "P90/P50",
    "overrun",
)
"""Heads of the table that :func:`row` fills.

Unit of generate, learn and rest: share of the time of all steps; of length: tokens of a trained answer.
"""


@dataclass(frozen=True, slots=True)
class PacedRun:
    """A run that finished, seen as a measurement.

    Attributes:
        name: Short name for tables.
        run: What it left.
        skip: Steps at the beginning that do not count.
    """

    name: str
    run: TrainingRun
    skip: int = 0

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """Records of the steps that count."""
        return self.run.steps[self.skip :]

    @property
    def trained(self) -> int:
        """Groups (one a prompt) that those steps trained."""
        before = self.run.steps[self.skip - 1]["ledger/trained"] if self.skip else 0
        return int(self.run.steps[-1]["ledger/trained"] - before)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of those steps."""
        return float(sum(step["time/step_s"] for step in self.steps))

    @property
    def seconds_per_prompt(self) -> float:
        """Seconds for each group trained."""
        return self.seconds / self.trained

    def share(self, part: str) -> float:
        """Share of the time of all steps that ``time/<part>_s`` is; parts of a stream overlap."""
        return float(sum(step[f"time/{part}_s"] for step in self.steps)) / self.seconds

    @property
    def length_tail(self) -> float:
        """90th percentile of the lengths of all trained answers over their median."""
        p50, p90 = np.quantile(self.lengths(), (0.5, 0.9))
        return float(p90 / max(1.0, p50))

    @property
    def mean_length(self) -> float:
        """Tokens of a trained answer on average: a schedule that leaves long ones for later trains shorter ones."""
        return float(self.lengths().mean())

    @property
    def overrun_share(self) -> float:
        """Share of engine steps whose real time was above 0.7 of the paced one, worst worker."""
        return float(self.run.steps[-1]["rollout/pacing_overrun_share"])

    @property
    def waste(self) -> float:
        """Tokens given up over tokens generated, in the whole run."""
        steps = self.run.steps
        return float(sum(s["waste/tokens"] for s in steps) / max(1, sum(s["rollout/tokens"] for s in steps)))

    @property
    def violations(self) -> int:
        """Steps that trained on a token of more than ``asynchrony.max_staleness`` versions ago."""
        bound = load_config_file(RunDirectory.open(self.run.directory).config).asynchrony.max_staleness
        return sum(step["staleness/max"] > bound for step in self.run.steps)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of every answer that the steps that count trained on."""
        archive = RolloutArchive(self.run.directory / "rollouts")
        counted = [int(step["step"]) for step in self.steps]
        return np.concatenate([archive.read(step)["length"].to_numpy() for step in counted]).astype(np.int64)


def paced_run(
    parent: Path,
    name: str,
    *,
    t0_ms: float,
    workers: int,
    seed: int,
    overrides: Sequence[str],
    skip: int = 0,
    environment: Mapping[str, str] | None = None,
) -> PacedRun:
    """Train with paced generation in ``parent / name``.

    Args:
        parent: Folder of run directories.
        name: Name of the run and of its row in tables.
        t0_ms: Paced time of an empty forward pass. Unit: milliseconds.
        workers: Rollout workers.
        seed: ``run.seed``.
        overrides: Further ``section.field=value`` settings.
        skip: Steps at the beginning that do not count.
        environment: Variables of the run's process, on top of this one's.

    Raises:
        UserError: The run failed, or is not longer than ``skip`` steps.
    """
    settings = [*_COMMON, f"run.seed={seed}", f"rollout.workers={workers}", f"rollout.pacing.t0_ms={t0_ms:g}"]
    run = run_training(parent, name, [*settings, *overrides], environment=environment)
    if len(run.steps) <= skip:
        raise UserError(f"{run.directory} has {len(run.steps)} steps, {skip + 1} are needed: give it more prompts")
    return PacedRun(name, run, skip)


def write_prompts(parent: Path, task: RunningSums, count: int) -> tuple[str, ...]:
    """Write ``count`` prompts of a task in ``parent``, once; returns the settings that train on them.

    Raises:
        UserError: The task has fewer different prompts.
    """
    path = parent / f"prompts-{count}.jsonl"
    rows = task.generate(count=count, seed=1)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return (f"data.train={path}", f"data.prompts={count}")


def speedup(baselines: Sequence[PacedRun], others: Sequence[PacedRun]) -> float:
    """Median over pairs of runs of the ratio of seconds per trained prompt.

    Raises:
        ValueError: A pair trained different numbers of prompts.
    """
    for baseline, other in zip(baselines, others, strict=True):
        if baseline.trained != other.trained:
            raise ValueError(f"{other.name} trained {other.trained} prompts, {baseline.name} {baseline.trained}")
    return median(b.seconds_per_prompt / o.seconds_per_prompt for b, o in zip(baselines, others, strict=True))


def row(run: PacedRun, baseline: PacedRun) -> tuple[str, ...]:
    """Cells of :data:`COLUMNS`."""
    rest = max(0.0, 1.0 - run.share("generate") - run.share("learn"))
    return (
        run.name,
        str(len(run.steps)),
        str(run.trained),
        f"{run.seconds_per_prompt:.3f}",
        f"{baseline.seconds_per_prompt / run.seconds_per_prompt:.2f}x",
        f"{run.share('generate'):.0%}",
        f"{run.share('learn'):.0%}",
        f"{rest:.0%}",
        f"{run.mean_length:.0f}",
        f"{run.length_tail:.1f}",
        f"{run.overrun_share:.1%}",
    )


def validity(runs: Iterable[PacedRun]) -> tuple[float, str]:
    """Return the largest overrun share of some runs, and a sentence that says whether the pace was kept."""
    runs = list(runs)
    worst = max(runs, key=lambda run: run.overrun_share)
    void = [run.name for run in runs if run.overrun_share > INVALID_SHARE]
    text = f"paced: real engine steps above {OVERRUN:g} of the paced time: {worst.overrun_share:.1%} at most"
    if void:
        text += f"; INVALID, above {INVALID_SHARE:.0%}: {', '.join(void)} (raise t0_ms, or free the machine)"
    return worst.overrun_share, text
