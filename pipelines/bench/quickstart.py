"""What a newcomer gets: the default ``slipstream train``, from an empty cache and then again with the model in place.

Times run from the command to its prompt, with everything in between: imports, Ray, the model's warm-up, training,
evaluations, checkpoints, shutdown. Memory is the sum of proportional set sizes of all processes, read once a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from pipelines.bench.harness import BenchResult, OptionValue
from pipelines.bench.training import TrainingRun, run_training, workplace
from storage.errors import UserError

OPTIONS: dict[str, OptionValue] = {"seeds": 1, "keep": ""}

_GIGA = 1e9
_HOLDERS = 6


def run(options: Mapping[str, OptionValue]) -> BenchResult:
    """Run the default configuration once with an empty cache, then with ``seeds`` seeds."""
    seeds = int(options["seeds"])
    if seeds < 1:
        raise UserError(f"option seeds={seeds}: at least one later run is needed")
    with workplace(str(options["keep"])) as parent:
        cache = parent / "cache"
        if cache.exists() and any(cache.iterdir()):
            raise UserError(f"{cache} holds models already: the first run needs an empty cache, choose another folder")
        environment = {"SLIPSTREAM_CACHE": str(cache)}
        first = run_training(parent, "first", environment=environment, sample_memory=True)
        later = [
            run_training(parent, f"seed{seed}", [f"run.seed={seed}"], environment=environment, sample_memory=True)
            for seed in range(1, seeds + 1)
        ]
    return report(first, later)


def report(first: TrainingRun, later: Sequence[TrainingRun]) -> BenchResult:
    """Make the table and the figures: medians of times, the worst of accuracies and memory."""
    runs = [first, *later]
    before = [run.accuracies()[0] for run in runs]
    after = [run.accuracies()[-1] for run in runs]
    peaks = [run.peak for run in runs if run.peak is not None]
    rows = [
        (
            run.directory.name,
            f"{run.seconds:.0f}",
            f"{run.startup_s:.0f}",
            f"{run.accuracies()[0]:.3f}",
            f"{run.accuracies()[-1]:.3f}",
            f"{rollout_share(run):.0%}",
            f"{length_tail(run):.1f}",
            "" if run.peak is None else f"{run.peak.total / _GIGA:.2f}",
        )
        for run in runs
    ]
    figures = {
        "first_s": first.seconds,
        "later_s": median(run.seconds for run in later),
        "startup_s": median(run.startup_s for run in later),
        "accuracy_before": min(before),
        "accuracy_after": min(after),
        "accuracy_gain": min(b - a for a, b in zip(before, after, strict=True)),
        "rollout_share": median(rollout_share(run) for run in runs),
        "length_p90_over_p50": median(length_tail(run) for run in runs),
    }
    notes = ["first: empty model cache, the built-in model is warmed up; start-up: command to the first evaluation"]
    if peaks:
        largest = max(peaks, key=lambda peak: peak.total)
        figures["peak_pss_gb"] = largest.total / _GIGA
        held = sorted(largest.by_role.items(), key=lambda item: -item[1])[:_HOLDERS]
        notes.append("largest memory: " + ", ".join(f"{role} {size / _GIGA:.2f} GB" for role, size in held))
    else:
        notes.append("memory was not measured: proportional set sizes are known on Linux only")
    return BenchResult(
        name="quickstart",
        columns=("run", "s", "start-up s", "before", "after", "rollout share", "length P90/P50", "peak PSS GB"),
        rows=tuple(rows),
        figures=figures,
        notes=tuple(notes),
    )


def rollout_share(run: TrainingRun) -> float:
    """Share of the time of all training steps that the busiest engine was at work."""
    return float(sum(r["time/generate_s"] for r in run.steps) / sum(r["time/step_s"] for r in run.steps))


def length_tail(run: TrainingRun) -> float:
    """Median over steps of the 90th percentile of answer lengths over their median."""
    return float(median(r["rollout/length_p90"] / max(1.0, r["rollout/length_p50"]) for r in run.steps))
