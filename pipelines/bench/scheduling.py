"""What tail batching and skew-aware dispatch bring in real training runs with paced generation.

Two regimes, because no schedule wins in both. *Tail*: there is a slot for every row, a pass costs about the same
whatever its rows, so a step lasts as long as its longest answer; tail batching races. *Dispatch*: a worker has slots
for a quarter of its rows, so a step lasts as long as its fullest worker; dispatch decides. Both sides of a comparison
train the same prompts once an epoch with the same sampling noise, on the same workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipelines.bench.harness import BenchResult, OptionValue
from pipelines.bench.paced_runs import (
    COLUMNS,
    LONG_TAILED,
    PacedRun,
    paced_run,
    row,
    speedup,
    validity,
    write_prompts,
)
from pipelines.bench.training import workplace
from pipelines.simulation.measures import ks_distance
from storage.errors import UserError

OPTIONS: dict[str, OptionValue] = {
    "regime": "both",
    "t0_ms": 40.0,
    "periods": 3,
    "epochs": 3,
    "pairs": 1,
    "seed": 0,
    "keep": "",
}

_WORKERS = 4
_PROMPTS_PER_STEP = 16
_SAMPLES = 8
_OVERLAUNCH = 1.25
_PERIOD = 5
_CAP = 256
_EPOCH_STEPS = 3
_REGIMES = ("both", "tail", "dispatch")
_GROUPS = (f"rollout.prompts_per_step={_PROMPTS_PER_STEP}", f"rollout.samples_per_prompt={_SAMPLES}")


def run(options: Mapping[str, OptionValue]) -> BenchResult:
    """Run the asked-for regimes, baseline and technique in turns."""
    regime, pairs = str(options["regime"]), int(options["pairs"])
    if regime not in _REGIMES:
        raise UserError(f"option regime={regime!r}: there are {', '.join(_REGIMES)}")
    if int(options["periods"]) < 1 or int(options["epochs"]) < 2 or pairs < 1:
        raise UserError("options periods and pairs must be at least 1, and epochs 2: the first teaches the predictor")
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    notes: list[str] = []
    every: list[PacedRun] = []
    with workplace(str(options["keep"])) as parent:
        for name, measure in (("tail", _tail), ("dispatch", _dispatch)):
            if regime in ("both", name):
                baselines, others = [], []
                for pair in range(pairs):
                    baseline, other = measure(parent, options, pair)
                    baselines.append(baseline)
                    others.append(other)
                    rows += [row(baseline, baseline), row(other, baseline)]
                figures[f"speedup_{name}"] = speedup(baselines, others)
                if name == "tail":
                    figures |= tail_figures(baselines, others)
                every += baselines + others
    overrun, note = validity(every)
    figures |= {"overrun": overrun, "generate_share": min(run.share("generate") for run in every)}
    notes.append(note)
    notes += [
        f"{_WORKERS} rollout workers, t0 {float(options['t0_ms']):g} ms, profile latency_bound (k_row = 0.5 % of t0); "
        f"{_PROMPTS_PER_STEP} prompts a step, {_SAMPLES} answers each, model tiny, cap {_CAP} tokens",
        "s/prompt: wall-clock time of all steps over the prompts that they trained, learning and Ray included; "
        "generate: engine time of the busiest worker, rest: what is neither that nor learning",
        f"tail: {int(options['periods'])} periods of {_PERIOD} steps, an epoch in all; waste: tokens given up over "
        "generated ones; ks: lengths that tail batching trained against those of the baseline, which trains all it "
        "launches: the same prompts and sampling noise",
        f"dispatch: 8 slots a worker for 32 rows; the first of {int(options['epochs'])} epochs does not count, "
        "it teaches the length predictor",
    ]
    return BenchResult(name="scheduling", columns=COLUMNS, rows=tuple(rows), figures=figures, notes=tuple(notes))


def tail_figures(baselines: list[PacedRun], others: list[PacedRun]) -> dict[str, float]:
    """Waste, distance of lengths and staleness of tail batching: the worst of all pairs."""
    return {
        "waste": max(other.waste for other in others),
        "ks": max(
            ks_distance(baseline.lengths(), other.lengths()) for baseline, other in zip(baselines, others, strict=True)
        ),
        "length_p90_over_p50": min(baseline.length_tail for baseline in baselines),
        "cap_over_p50": min(_CAP / float(np.median(baseline.lengths())) for baseline in baselines),
        "staleness_violations": sum(other.violations for other in others),
    }


def _tail(parent: Path, options: Mapping[str, OptionValue], pair: int) -> tuple[PacedRun, PacedRun]:
    """One epoch of so many prompts that it is made of whole periods."""
    settings = [
        *_GROUPS,
        *write_prompts(parent, LONG_TAILED, int(options["periods"]) * _PERIOD * _PROMPTS_PER_STEP),
        "run.steps=0",
        "run.epochs=1",
        "rollout.max_rows=64",
        f"rollout.max_tokens={_CAP}",
        "algorithm.name=decoupled_ppo",
    ]
    tail = [
        "schedule.batching=tail",
        f"schedule.overlaunch_prompts={_OVERLAUNCH}",
        f"asynchrony.max_staleness={_PERIOD}",
    ]
    return (
        _run(parent, f"all-{pair}", options, pair, settings),
        _run(parent, f"tail-{pair}", options, pair, [*settings, *tail]),
    )


def _dispatch(parent: Path, options: Mapping[str, OptionValue], pair: int) -> tuple[PacedRun, PacedRun]:
    """Some epochs over few prompts: the first teaches the predictor their lengths."""
    settings = [
        *_GROUPS,
        *write_prompts(parent, LONG_TAILED, _EPOCH_STEPS * _PROMPTS_PER_STEP),
        "run.steps=0",
        f"run.epochs={int(options['epochs'])}",
        f"rollout.max_rows={_PROMPTS_PER_STEP * _SAMPLES // _WORKERS // 4}",
    ]
    return (
        _run(parent, f"least_loaded-{pair}", options, pair, settings, _EPOCH_STEPS),
        _run(parent, f"skew_aware-{pair}", options, pair, [*settings, "schedule.dispatch=skew_aware"], _EPOCH_STEPS),
    )


def _run(
    parent: Path, name: str, options: Mapping[str, OptionValue], pair: int, settings: list[str], skip: int = 0
) -> PacedRun:
    seed = int(options["seed"]) + pair
    return paced_run(
        parent, name, t0_ms=float(options["t0_ms"]), workers=_WORKERS, seed=seed, overrides=settings, skip=skip
    )
