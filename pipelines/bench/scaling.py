"""How far rollout workers scale over nodes, and what the conductor costs for each group.

*Scaling*: a worker brings its share of prompts along (weak scaling), its forward passes are paced to the time law of a
GPU, and generation overlaps with training; so twice the workers should train twice the tokens a second, as far as
queues, transport, learner and conductor keep up. The nodes are raylets of their own on this machine: objects travel
between their stores. *Groups*: answers of one token with equal rewards leave engine, scoring and learner next to
nothing to do; what is left is the way of a group through the system.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pipelines.bench.harness import BenchResult, BenchTable, OptionValue
from pipelines.bench.paced_runs import PacedRun, paced_run, validity, write_prompts
from pipelines.bench.training import TrainingRun, run_training, workplace
from pipelines.emulated_nodes import ON_NODES, EmulatedNodes
from pipelines.progress import load_status
from storage.errors import UserError
from storage.tasks import RunningSums

OPTIONS: dict[str, OptionValue] = {
    "workers": "1,2,4,8",
    "steps": 12,
    "t0_ms": 150.0,
    "groups": 1536,
    "seed": 0,
    "keep": "",
}

COLUMNS = ("workers", "nodes", "s/step", "tokens/s", "of linear", "conductor ms/group", "learn", "overrun")

_SKIP = 4
_NODE_CPUS = 8
_PROMPTS_EACH = 4
_SAMPLES = 4
_TASK = RunningSums(max_stations=4, median_laps=3.0, sigma_laps=0.3, max_laps=6)
_PROMPTS = 256
_STREAM = (
    "rollout.samples_per_prompt=4",
    "rollout.max_rows=16",
    "rollout.max_tokens=96",
    "asynchrony.pipeline=stream",
    "asynchrony.partial=interrupt",
    "asynchrony.max_staleness=4",
    "algorithm.name=decoupled_ppo",
    "run.restarts=0",
)
_GROUPS_A_STEP = 64
_NO_WORK = (
    f"rollout.prompts_per_step={_GROUPS_A_STEP}",
    "rollout.samples_per_prompt=2",
    "rollout.max_tokens=1",
    "rollout.max_rows=128",
    "rollout.threads=1",
    "rollout.stream_interval_s=0.05",
    "learner.threads=1",
    "evaluation.before=false",
    "evaluation.after=false",
    "evaluation.every=0",
    "checkpoint.every=0",
    "tracking.tensorboard=false",
)


def run(options: Mapping[str, OptionValue]) -> BenchResult:
    """Run each number of workers once, and then the run of many small groups."""
    counts = _counts(str(options["workers"]))
    steps, groups = int(options["steps"]), int(options["groups"])
    if steps < _SKIP + 2:
        raise UserError(f"option steps={steps}: at least {_SKIP + 2} are needed, the first {_SKIP} do not count")
    if groups and groups < _GROUPS_A_STEP * (_SKIP + 2):
        raise UserError(f"option groups={groups}: 0, or at least {_GROUPS_A_STEP * (_SKIP + 2)}")
    with workplace(str(options["keep"])) as parent:
        data = write_prompts(parent, _TASK, _PROMPTS)
        scaled = [_scaled(parent, count, data, steps, options) for count in counts]
        small = _small_groups(parent, groups, int(options["seed"])) if groups else None
    return report(scaled, small)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A paced run with some workers.

    Attributes:
        workers, nodes: How many.
        paced: The run; tokens: those that its counted steps trained.
        cpu_ms_per_group: CPU time of the conductor's process over the groups that they trained.
    """

    workers: int
    nodes: int
    paced: PacedRun
    tokens: int
    cpu_ms_per_group: float

    @property
    def goodput(self) -> float:
        """Trained tokens per second of wall-clock time."""
        return self.tokens / self.paced.seconds


def report(scaled: list[Scaled], small: tuple[TrainingRun, float] | None) -> BenchResult:
    """Make table and figures; linear is the goodput of the fewest workers times their number."""
    base = scaled[0]
    rows, figures = [], {}
    for one in scaled:
        linear = base.goodput * one.workers / base.workers
        figures[f"scaling_{one.workers}"] = one.goodput / linear
        figures[f"conductor_ms_per_group_{one.workers}"] = one.cpu_ms_per_group
        rows.append(
            (
                str(one.workers),
                str(one.nodes),
                f"{one.paced.seconds / len(one.paced.steps):.2f}",
                f"{one.goodput:.0f}",
                f"{one.goodput / linear:.2f}",
                f"{one.cpu_ms_per_group:.1f}",
                f"{one.paced.share('learn'):.0%}",
                f"{one.paced.overrun_share:.1%}",
            )
        )
    figures["conductor_growth"] = scaled[-1].cpu_ms_per_group / max(1e-9, base.cpu_ms_per_group)
    overrun, note = validity([one.paced for one in scaled])
    figures["overrun"] = overrun
    more = []
    if small is not None:
        run_, cpu = small
        counted = run_.steps[_SKIP:]
        seconds = sum(float(step["time/step_s"]) for step in counted)
        trained = len(counted) * _GROUPS_A_STEP
        figures |= {"groups_per_s": trained / seconds, "conductor_ms_per_small_group": cpu}
        cells = (str(trained), f"{seconds:.1f}", f"{trained / seconds:.0f}", f"{cpu:.1f}")
        more.append(
            BenchTable("groups with nothing to do", ("groups", "s", "groups/s", "conductor ms/group"), (cells,))
        )
    return BenchResult(
        name="scaling",
        columns=COLUMNS,
        rows=tuple(rows),
        figures=figures,
        notes=(
            note,
            "staleness up to 4: with less, slots wait for the longest answer of a step, the longer the more there are",
            f"paced: {_PROMPTS_EACH} prompts of {_SAMPLES} answers a step and worker, profile latency_bound, model "
            f"tiny; one run each, the first {_SKIP} steps do not count; nodes are emulated on this machine",
            "learn: share of the step in which the learner works; it overlaps with generation",
            "groups with nothing to do: two answers of one token, equal rewards; real actors, queues, ledger, archive",
        ),
        more=tuple(more),
    )


def _counts(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise UserError(f"option workers={text!r}: write numbers of workers, as in 1,2,4,8")
    return counts


def _scaled(
    parent: Path, workers: int, data: tuple[str, ...], steps: int, options: Mapping[str, OptionValue]
) -> Scaled:
    nodes = max(1, workers // 2)
    name = f"workers-{workers}"
    settings = (*_STREAM, *ON_NODES, *data, f"run.steps={steps}", f"rollout.prompts_per_step={_PROMPTS_EACH * workers}")
    cluster = EmulatedNodes(nodes, _NODE_CPUS)
    try:
        with conductor_clock(parent / name) as clock:
            paced = paced_run(
                parent,
                name,
                t0_ms=float(options["t0_ms"]),
                workers=workers,
                seed=int(options["seed"]),
                overrides=settings,
                skip=_SKIP,
                environment={"RAY_ADDRESS": cluster.address},
            )
    finally:
        cluster.shutdown()
    return Scaled(workers, nodes, paced, int(paced.lengths().sum()), clock.per_group(paced.run, paced.trained))


def _small_groups(parent: Path, groups: int, seed: int) -> tuple[TrainingRun, float]:
    steps = groups // _GROUPS_A_STEP
    settings = [*_NO_WORK, f"run.steps={steps}", f"run.seed={seed}", f"data.prompts={_GROUPS_A_STEP * 4}"]
    with conductor_clock(parent / "groups") as clock:
        run_ = run_training(parent, "groups", settings)
    return run_, clock.per_group(run_, len(run_.steps[_SKIP:]) * _GROUPS_A_STEP)


@dataclass(slots=True)
class ConductorClock:
    """CPU time of a run's conductor as it went on: pairs of wall-clock second and CPU seconds, ascending."""

    readings: list[tuple[float, float]] = field(default_factory=list)

    def at(self, second: float) -> float:
        """CPU seconds at a wall-clock second, by the reading next before it."""
        index = bisect_left(self.readings, (second, float("inf"))) - 1
        return self.readings[max(0, index)][1]

    def per_group(self, run_: TrainingRun, groups: int) -> float:
        """CPU milliseconds for each of the groups that the steps after the skipped ones trained."""
        if not self.readings:
            raise UserError(f"{run_.directory}: the conductor's process was not seen; does it run on this machine?")
        began, ended = float(run_.steps[_SKIP - 1]["time"]), float(run_.steps[-1]["time"])
        return 1e3 * (self.at(ended) - self.at(began)) / max(1, groups)


@contextmanager
def conductor_clock(directory: Path, interval_s: float = 0.25) -> Iterator[ConductorClock]:
    """Read the CPU time of the conductor that writes ``directory/status.json``, on a thread, while the block lasts."""
    clock, over = ConductorClock(), threading.Event()

    def watch() -> None:
        while not over.wait(interval_s):
            status = load_status(directory)
            if status is None or not status.pid:
                continue
            try:
                times = psutil.Process(status.pid).cpu_times()
            except psutil.Error:
                continue
            clock.readings.append((time.time(), times.user + times.system))

    thread = threading.Thread(target=watch, name="conductor-clock", daemon=True)
    thread.start()
    try:
        yield clock
    finally:
        over.set()
        thread.join()
