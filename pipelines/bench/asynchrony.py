"""What overlapping generation and training brings, in real training runs with paced generation and a real learner.

A short run of the synchronous pipeline measures how long the learner takes for a batch; the pace is then set so that
writing a batch takes three times as long, as long, or a third of that. *Ratios*: short answers, where a synchronous
step is generation plus training. *Long tail*: long-tailed answers at 3:1, where it also waits for the longest answer;
a stream that hands new weights over in mid-answer does not. All pipelines have the same workers, slots and learner.

The learner does real work only: four updates a batch with the proximal and the reference policy computed beforehand
and activations recomputed, one answer a micro-batch. A batch of the tiny model then lasts some seconds: long against
the pass of an engine, as the training step of a large model is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from pipelines.bench.harness import BenchResult, OptionValue
from pipelines.bench.paced_runs import COLUMNS, LONG_TAILED, PacedRun, paced_run, row, speedup, validity, write_prompts
from pipelines.bench.training import workplace
from storage.errors import UserError
from storage.tasks import RunningSums

OPTIONS: dict[str, OptionValue] = {"part": "both", "steps": 10, "t0_ms": 0.0, "seed": 0, "keep": ""}

_TAIL_WORKERS = 4
_RATIO_WORKERS = 2  # fewer passes for the same rows: two cores are to be the learner's, not the pace's
_RATIOS = {"3to1": 3.0, "1to1": 1.0, "1to3": 1 / 3}
_PARTS = ("both", "ratios", *_RATIOS, "tail")
_SKIP = 2
_CALIBRATION_STEPS = 6
_CALIBRATION_T0_MS = 60.0
_SHORTEST_T0_MS = 8.0
_SHORT_TASK = RunningSums(max_stations=4, median_laps=1.0, sigma_laps=0.3, max_laps=2)
_SHORT_PROMPTS = 128
_LONG_PROMPTS = 240
_PROMPTS_PER_STEP = 16
_SAMPLES = 16
_SETTINGS = (
    f"rollout.prompts_per_step={_PROMPTS_PER_STEP}",
    f"rollout.samples_per_prompt={_SAMPLES}",
    "learner.tokens_per_microbatch=16",
    "learner.minibatches=4",
    "learner.gradient_checkpointing=true",
    "algorithm.name=decoupled_ppo",
    "algorithm.kl.coefficient=0.001",
)
_STREAM = ("asynchrony.pipeline=stream", "asynchrony.partial=interrupt")


@dataclass(frozen=True, slots=True)
class _Bench:
    """Where runs go, how long they are, and what they answer."""

    parent: Path
    steps: int
    seed: int
    task: str
    workers: int
    data: tuple[str, ...]

    def run(self, name: str, t0_ms: float, settings: Sequence[str], steps: int = 0) -> PacedRun:
        """Train for ``steps`` steps (0: as many as asked for); the first two, which fill a stream, do not count."""
        length = [f"run.steps={steps or self.steps}"]
        slots = f"rollout.max_rows={_PROMPTS_PER_STEP * _SAMPLES // self.workers}"  # one for every answer of a step
        overrides = [*_SETTINGS, slots, *self.data, *length, *settings]
        name = f"{self.task}-{name}"
        return paced_run(
            self.parent, name, t0_ms=t0_ms, workers=self.workers, seed=self.seed, overrides=overrides, skip=_SKIP
        )


def run(options: Mapping[str, OptionValue]) -> BenchResult:
    """Run the asked-for parts."""
    part, steps = str(options["part"]), int(options["steps"])
    if part not in _PARTS:
        raise UserError(f"option part={part!r}: there are {', '.join(_PARTS)}")
    if steps < _SKIP + 2:
        raise UserError(f"option steps={steps}: at least {_SKIP + 2} are needed, the first {_SKIP} do not count")
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    notes: list[str] = []
    every: list[PacedRun] = []
    with workplace(str(options["keep"])) as parent:
        data = (*write_prompts(parent, _SHORT_TASK, _SHORT_PROMPTS), "rollout.max_tokens=64")
        short = _Bench(parent, steps, int(options["seed"]), "short", _RATIO_WORKERS, data)
        comparisons: list[Comparison] = []
        if part != "tail":
            comparisons += _ratios(short, [part] if part in _RATIOS else list(_RATIOS), float(options["t0_ms"]))
        if part in ("both", "tail"):
            tailed = write_prompts(parent, LONG_TAILED, _LONG_PROMPTS)
            long = replace(short, task="tail", workers=_TAIL_WORKERS, data=tailed)
            comparisons += _tail(long, float(options["t0_ms"]))
        for comparison in comparisons:
            rows += [row(run, comparison.baseline) for run in comparison.runs]
            figures |= comparison.figures()
            every += comparison.runs
            notes.append(comparison.note())
        figures |= shared_figures(every, figures)
        figures["length_ratio"] = min(comparison.length_ratio() for comparison in comparisons)
    overrun, note = validity(every)
    figures["overrun"] = overrun
    notes += [
        note,
        f"{_RATIO_WORKERS} rollout workers ({_TAIL_WORKERS} on the long tail), profile latency_bound, model tiny, "
        f"{_PROMPTS_PER_STEP} prompts of {_SAMPLES} answers, {steps} steps of which the first {_SKIP} do not count on "
        "either side; generate: engine time of the busiest worker",
        "pause_share: pause of a worker for new weights over a step, mean of a run, worst run",
    ]
    return BenchResult(name="asynchrony", columns=COLUMNS, rows=tuple(rows), figures=figures, notes=tuple(notes))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Streams against the synchronous pipeline at one pace.

    Attributes:
        t0_ms: The pace.
        baseline: The synchronous run.
        streams: The others, by the name of their figure.
    """

    t0_ms: float
    baseline: PacedRun
    streams: Mapping[str, PacedRun]

    @property
    def runs(self) -> list[PacedRun]:
        """All of them, the baseline first."""
        return [self.baseline, *self.streams.values()]

    def figures(self) -> dict[str, float]:
        """Speed-up of each stream, by trained prompts."""
        return {f"speedup_{name}": speedup([self.baseline], [run]) for name, run in self.streams.items()}

    def length_ratio(self) -> float:
        """Mean length of the answers that a stream trained over that of the baseline, the smallest of all streams.

        Below 1 a stream had longer answers under way when it ended, and its speed-up by prompts flatters it by as much.
        """
        return min(run.mean_length for run in self.streams.values()) / self.baseline.mean_length

    def note(self) -> str:
        """The pace, and the ratio that it gave."""
        ratio = self.baseline.share("generate") / self.baseline.share("learn")
        return f"{self.baseline.name}: t0 {self.t0_ms:.0f} ms, generation to training {ratio:.2f} to 1"


def shared_figures(runs: Sequence[PacedRun], speedups: Mapping[str, float]) -> dict[str, float]:
    """Worst speed-up, the smaller of two at 1:1, staleness beyond its bound, and pauses for new weights."""
    found = {"worst": min(speedups.values())}
    even = [value for name, value in speedups.items() if name.startswith("speedup_1to1")]
    if even:
        found["speedup_1to1"] = min(even)
    found["staleness_violations"] = sum(run.violations for run in runs)
    found["pause_share"] = max(fmean(step["time/pause_s"] / step["time/step_s"] for step in run.steps) for run in runs)
    return found


def pace(calibration: PacedRun, t0_ms: float, ratio: float) -> float:
    """Return the t0 in milliseconds at which writing a batch takes ``ratio`` times as long as training on it.

    Engine time is proportional to t0, which was ``t0_ms`` in the calibration. Below 8 ms no CPU keeps the pace.
    """
    generate = median(float(step["time/generate_s"]) for step in calibration.steps)
    learn = median(float(step["time/learn_s"]) for step in calibration.steps)
    return max(_SHORTEST_T0_MS, t0_ms * ratio * learn / generate)


def _ratios(bench: _Bench, names: Sequence[str], t0_ms: float) -> list[Comparison]:
    calibration = None if t0_ms else bench.run("calibration", _CALIBRATION_T0_MS, (), _CALIBRATION_STEPS)
    found = []
    for name in names:
        ratio = _RATIOS[name]
        chosen = t0_ms * ratio if calibration is None else pace(calibration, _CALIBRATION_T0_MS, ratio)
        streams = {
            f"{name}_stale{bound}": bench.run(
                f"{name}-stale{bound}", chosen, [*_STREAM, f"asynchrony.max_staleness={bound}"]
            )
            for bound in (1, 2)
        }
        found.append(Comparison(chosen, bench.run(f"{name}-step", chosen, ()), streams))
    return found


def _tail(bench: _Bench, t0_ms: float) -> list[Comparison]:
    if not t0_ms:
        calibration = bench.run("calibration", _CALIBRATION_T0_MS / 2, (), _CALIBRATION_STEPS)
        t0_ms = pace(calibration, _CALIBRATION_T0_MS / 2, _RATIOS["3to1"])
    baseline = bench.run("step", t0_ms, ())
    streams = {
        "partial": bench.run("partial", t0_ms, ["areal"]),
        "streamrl": bench.run("streamrl", t0_ms, ["streamrl"]),
    }
    return [Comparison(t0_ms, baseline, streams)]
