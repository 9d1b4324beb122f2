"""Whether a preset learns as well as the synchronous baseline from the same prompts, over several seeds.

Real, unpaced runs of the default task. Every run passes over the same prompts equally often, so what differs is what
the preset does to the sampling law and to the order of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, variance

from pipelines.bench.harness import BenchResult, OptionValue
from pipelines.bench.training import TrainingRun, run_training, workplace
from pipelines.config_loader import preset_names
from storage.errors import UserError

OPTIONS: dict[str, OptionValue] = {
    "presets": "rollpacker,areal,streamrl",
    "seeds": 3,
    "epochs": 8,
    "heldout": 512,
    "keep": "",
}

BASELINE = "baseline"

# Both tails together 5 %, by degrees of freedom: Student's t, as in any table of it.
_T_975 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179, 15: 2.131}
_NORMAL_975 = 1.960


def run(options: Mapping[str, OptionValue]) -> BenchResult:
    """Train every preset and the baseline once per seed, in turns."""
    presets = [name for name in str(options["presets"]).split(",") if name]
    seeds, epochs, heldout = int(options["seeds"]), int(options["epochs"]), int(options["heldout"])
    known = preset_names()
    for name in presets:
        if name not in known or name == BASELINE:
            others = ", ".join(name for name in known if name != BASELINE)
            raise UserError(f"option presets: {name!r} is none of {others}")
    if not presets or seeds < 2 or epochs < 1 or heldout < 1:
        raise UserError("options: at least one preset, 2 seeds, 1 epoch and 1 held-out prompt are needed")
    settings = [
        "run.steps=0",
        f"run.epochs={epochs}",
        f"evaluation.prompts={heldout}",
        "evaluation.every=0",
        "checkpoint.every=0",
        "rollout.workers=2",
        "rollout.threads=1",
    ]
    runs: dict[str, list[TrainingRun]] = {name: [] for name in (BASELINE, *presets)}
    with workplace(str(options["keep"])) as parent:
        for seed in range(1, seeds + 1):
            for name, done in runs.items():
                done.append(run_training(parent, f"{name}-{seed}", [f"run.seed={seed}", *settings], preset=name))
    return report(runs, heldout)


def report(runs: Mapping[str, Sequence[TrainingRun]], heldout: int) -> BenchResult:
    """Make the table and the figures.

    Raises:
        ValueError: Two runs trained different numbers of prompts.
    """
    trained = {name: [int(run.steps[-1]["ledger/trained"]) for run in done] for name, done in runs.items()}
    if len({count for counts in trained.values() for count in counts}) != 1:
        raise ValueError(f"the runs trained different numbers of prompts: {trained}")
    after = {name: [run.accuracies()[-1] for run in done] for name, done in runs.items()}
    noise = gap_noise(list(after.values()))
    gaps = {name: mean(values) - mean(after[BASELINE]) for name, values in after.items() if name != BASELINE}
    rows = [
        (
            name,
            f"{mean(run.accuracies()[0] for run in done):.3f}",
            " ".join(f"{value:.3f}" for value in after[name]),
            f"{mean(after[name]):.3f}",
            "" if name == BASELINE else f"{gaps[name]:+.3f}",
            f"{max(record['staleness/max'] for run in done for record in run.steps):.0f}",
            f"{mean(sum(record['time/step_s'] for record in run.steps) for run in done):.0f}",
        )
        for name, done in runs.items()
    ]
    figures = {f"gap_{name}": gap for name, gap in gaps.items()}
    figures |= {
        "noise": noise,
        "worst_gap": min(gaps.values()),
        "within_noise": float(all(abs(gap) <= noise for gap in gaps.values())),
    }
    seeds = len(after[BASELINE])
    return BenchResult(
        name="accuracy",
        columns=("preset", "before", "after, by seed", "mean", "gap", "max staleness", "training s"),
        rows=tuple(rows),
        figures=figures,
        notes=(
            f"greedy accuracy on {heldout} held-out prompts; {trained[BASELINE][0]} prompts trained in every run, "
            f"{seeds} seeds",
            "noise: half the 95 % interval of a difference of two such means, from the spread over seeds of all "
            "presets together",
        ),
    )


def gap_noise(values: Sequence[Sequence[float]]) -> float:
    """Half the width of the 95 % interval of the difference of two means, spread pooled over all arms.

    Args:
        values: Results of each arm, as many in each, at least two.
    """
    count = len(values[0])
    freedom = len(values) * (count - 1)
    known = [degrees for degrees in _T_975 if degrees <= freedom]
    # The next smaller entry of the table is the wider interval, so nothing is called noise that is none by rounding.
    quantile = _T_975[max(known)] if known and freedom <= max(_T_975) else _NORMAL_975
    return float(quantile * (mean(variance(arm) for arm in values) * 2 / count) ** 0.5)
