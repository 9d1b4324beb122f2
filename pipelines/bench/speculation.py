"""Rollout time with drafts over rollout time without, in real training runs with moving weights.

Real time, one process, no Ray. From the second epoch on every prompt has been answered before; the first one shows what
drafts cost or bring while there is nothing but siblings to draft from. Packs of drafts are made between the steps, as
in a run, where an actor does it while the learner trains.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actors.drafts.options import SpeculationOptions
from actors.threads import set_torch_threads
from pipelines.bench.harness import BenchResult, BenchTable, OptionValue
from storage.errors import UserError
from storage.models import SMOLLM2, TINY

if TYPE_CHECKING:
    from pipelines.bench.rollout_loop import World
    from pipelines.bench.speculation_trials import Trial
    from storage.history.archive import RolloutArchive

OPTIONS: dict[str, OptionValue] = {
    "model": TINY,
    "rows": 0,
    "prompts": 0,
    "samples": 0,
    "epochs": 0,
    "temperature": 0.0,
    "max_tokens": 0,
    "seed": 0,
    "threads": 0,
    "repeat_share": "",
    "plot": "",
}

EXACT = ("off", "history", "previous_epoch", "hybrid")
_WAVES = 4
"""Answers of a step over rows: slots are taken over while a step runs. 4 is the built-in model's own step of 128."""
_FEWEST_PAIRS = 7
_ROUNDS = 7
"""Steps of each share of repeated prompts."""
_CHEAP = 0.01
"""Cost ratio at which drafts are as good as free: there the calibrated rule competes with the oracle on length."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, for one model.

    Attributes:
        rows: Answers decoded at once; prompts: prompts of the run; samples: answers to each.
        epochs: Passes over the prompts.
        temperature: Of sampling; max_tokens: longest answer.
        threads: Torch threads; 0 for all cores.
        modes: Values of ``speculation.source``, verified exactly.
        lenient: Whether lenient reuse is measured too.
    """

    rows: int
    prompts: int
    samples: int
    epochs: int
    temperature: float
    max_tokens: int
    threads: int
    modes: tuple[str, ...]
    lenient: bool


SIZES = {
    # A pass of the built-in model has too little work for two threads: meeting costs more than it saves.
    TINY: Sizes(8, 56, 8, 4, 1.0, 256, 1, EXACT, True),
    SMOLLM2: Sizes(8, 16, 8, 4, 0.7, 48, 0, ("off", "history", "hybrid"), False),
}


def run(options: Mapping[str, OptionValue]) -> BenchResult:
    """Train for some epochs with every way of drafting beside plain decoding."""
    name = str(options["model"])
    sizes, seed = _sizes(name, options), int(options["seed"])
    shares = parse_shares(str(options["repeat_share"]))
    plot = str(options["plot"])
    if plot and not shares:
        raise UserError(f"option plot={plot} draws speed-up against the share of repeated prompts: set repeat_share")
    if plot and not Path(plot).absolute().parent.is_dir():
        raise UserError(f"option plot={plot}: the folder does not exist")
    set_torch_threads(sizes.threads or len(os.sched_getaffinity(0)))
    from pipelines.bench import speculation_trials as trials
    from storage.history.archive import RolloutArchive

    world = _world(name, sizes, epochs=sizes.epochs, seed=seed, prompts=sizes.prompts)
    plan = trials.epochs_of(world, sizes.epochs)
    with tempfile.TemporaryDirectory(prefix="slipstream-speculation-") as folder:
        archive = RolloutArchive(Path(folder) / "rollouts", world.data.tokenizer_fingerprint)
        exact = trials.exact_trial(world, sizes.modes, plan, Path(folder) / "exact", archive)
        figures, more, notes = _forecasts(exact, archive, sizes, Path(folder) / "sources")
    lenient = None
    if sizes.lenient:
        with tempfile.TemporaryDirectory(prefix="slipstream-speculation-") as folder:
            lenient = trials.lenient_trial(world, plan, Path(folder))
    result = report(name, sizes, exact, lenient, figures, more, notes)
    if not shares:
        return result
    curve = _repeat_curve(name, sizes, shares, seed)
    if plot:
        _draw(shares, curve, Path(plot))
    return _with_curve(result, shares, curve)


def parse_shares(text: str) -> tuple[float, ...]:
    """Read shares between 0 and 1 separated by commas; raises ``UserError`` for anything else."""
    if not text:
        return ()
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = (math.nan,)
    if not all(0 <= share <= 1 for share in shares):
        raise UserError(f"option repeat_share={text}: must be shares from 0 to 1 separated by commas, as in 0,.5,1")
    return shares


def report(
    name: str,
    sizes: Sizes,
    exact: Trial,
    lenient: Trial | None,
    figures: Mapping[str, float],
    more: Sequence[BenchTable],
    notes: Sequence[str],
) -> BenchResult:
    """Make tables and figures.

    Args:
        name: The model.
        sizes: What was measured.
        exact: Trial of the exact modes.
        lenient: Trial of lenient reuse, or ``None``.
        figures: Figures of the forecasts.
        more: Tables of the forecasts.
        notes: Notes of the forecasts.
    """
    later = range(1, sizes.epochs)
    trials = [(mode, exact) for mode in sizes.modes if mode != "off"]
    if lenient is not None:
        trials.append(("lenient", lenient))
    rows = [_row(mode, trial, sizes.epochs) for mode, trial in trials]
    speedups = {mode: trial.speedup(mode, later) for mode, trial in trials}
    found: dict[str, float] = {}
    if name == TINY:
        found |= {f"speedup_{_KEYS.get(mode, mode)}": value for mode, value in speedups.items()}
    else:
        found |= {
            f"speedup_{name}" + ("" if mode == "history" else f"_{mode}"): value for mode, value in speedups.items()
        }
    cold = {mode: exact.cold_ratios(mode) for mode in sizes.modes if mode != "off"}
    pairs = len(cold["history"])
    if pairs >= _FEWEST_PAIRS:
        found |= {f"cold_ratio_{mode}": float(np.median(ratios)) for mode, ratios in cold.items()}
        found["cold_ratio"] = min(float(np.median(ratios)) for ratios in cold.values())
    found |= {f"acceptance_length_{mode}": trial.acceptance_length(mode, later) for mode, trial in trials}
    found["differing_share"] = max(exact.differing_share(mode) for mode in sizes.modes)
    found["index_mb"] = exact.index_mb["history"]
    found["model_mb"] = exact.model_mb
    said = [
        f"{name}: {sizes.prompts} prompts, {sizes.samples} answers each, T = {sizes.temperature:g}, at most "
        f"{sizes.max_tokens} tokens, {sizes.rows} rows, {_prompts_per_step(sizes)} prompts a step; real time",
        "speed-up is rollout seconds of plain decoding over those with drafts, same steps and weights, taken in turns",
        f"cold: medians of {pairs} pairs in the first epoch, the lowest of all modes"
        + ("" if pairs >= _FEWEST_PAIRS else f"; {_FEWEST_PAIRS} are needed for cold_ratio"),
        "differing answers come from floating-point near-ties; lenient reuse is biased and may differ in all",
        f"indexes of all {sizes.prompts} prompts take {found['index_mb']:.1f} MB, the model {found['model_mb']:.1f} MB",
    ]
    if lenient is not None:
        bias = lenient.bias(later)
        found |= {f"lenient_{key.removeprefix('speculation/')}": value for key, value in bias.items()}
        said.append(
            "lenient: its own training run, plain decoding beside it under its weights; bias is reused less fresh "
            "answers to the same prompt: "
            + ", ".join(f"{key.removeprefix('speculation/')} {value:+.3f}" for key, value in bias.items())
        )
    return BenchResult(
        name="speculation",
        columns=("mode", "speed-up from epoch 2", "by epoch", "acceptance", "tokens/row/pass", "differing", "index MB"),
        rows=tuple(rows),
        figures={**found, **figures},
        notes=(*said, *notes),
        more=(_epoch_table(sizes, exact, lenient), *more),
    )


_KEYS = {"previous_epoch": "previous"}


def _row(mode: str, trial: Trial, epochs: int) -> tuple[str, ...]:
    later = range(1, epochs)
    return (
        f"{mode}, biased" if mode == "lenient" else mode,
        f"{trial.speedup(mode, later):.2f}",
        "  ".join(f"{trial.speedup(mode, [epoch]):.2f}" for epoch in range(epochs)),
        f"{trial.acceptance(mode, later):.0%}",
        f"{trial.acceptance_length(mode, later):.2f}",
        "" if mode == "lenient" else f"{trial.differing_share(mode):.2%}",
        f"{trial.index_mb[mode]:.1f}",
    )


def _epoch_table(sizes: Sizes, exact: Trial, lenient: Trial | None) -> BenchTable:
    drafting = [mode for mode in sizes.modes if mode != "off"]
    rows = []
    for epoch in range(sizes.epochs):
        steps = exact.of([epoch])
        reward = float(np.mean([step.reward for step in steps]))
        length = sum(step.tokens for step in steps) / sum(step.answers for step in steps)
        accepted = [f"{exact.acceptance(mode, [epoch]):.0%}" for mode in drafting]
        row = [str(epoch + 1), f"{reward:.2f}", f"{length:.0f}", f"{exact.entropy(epoch):.3f}", *accepted]
        if lenient is not None:
            row += [f"{lenient.entropy(epoch):.3f}", f"{np.mean([s.reward for s in lenient.of([epoch])]):.2f}"]
        rows.append(tuple(row))
    columns = ["epoch", "reward", "tokens/answer", "entropy (nats)", *(f"accepted, {mode}" for mode in drafting)]
    if lenient is not None:
        columns += ["entropy, lenient", "reward, lenient"]
    return BenchTable("entropy of a token beside acceptance", tuple(columns), tuple(rows))


def _forecasts(
    exact: Trial, archive: RolloutArchive, sizes: Sizes, folder: Path
) -> tuple[dict[str, float], list[BenchTable], list[str]]:
    """Predict the measured speed-up from the recorded answers, and play all rules back over them."""
    from pipelines.bench.draft_sources import compare_sources, sources_table
    from pipelines.forecast import forecast, predicted_speedup

    cost = exact.cost(("off", "history"), range(sizes.epochs))
    if cost is None:
        return {}, [], ["too few passes to fit their cost: nothing is predicted"]
    later = [number for number, step in enumerate(exact.steps) if step.epoch]
    measured = exact.speedup("history", range(1, sizes.epochs))
    predicted = predicted_speedup(archive, SpeculationOptions(source="history"), cost, max_rows=sizes.rows, steps=later)
    plain = [step.rollouts["off"] for step in exact.steps if step.epoch]
    rows = sum(rollout.row_passes for rollout in plain) / sum(rollout.passes for rollout in plain)
    ratio = cost.token * rows / cost.plain(rows)
    found = forecast(archive, ratios=(_CHEAP,), measured_ratio=ratio, max_rows=sizes.rows)
    lines = found.rows()
    rivals = [d for d in found.drafters if d.drafter.startswith(("fixed", "aimd"))]
    calibrated = next(d for d in found.drafters if d.drafter == "calibrated" and d.ratio == ratio)
    figures = {
        "predicted_speedup": predicted,
        "prediction_error": abs(predicted - measured) / measured,
        "cost_ratio": ratio,
        "calibrated_over_best_rule": calibrated.speedups[ratio] / max(d.speedups[ratio] for d in rivals),
        "oracle_share": found.oracle_share(_CHEAP),
        "oracle_share_measured_cost": found.oracle_share(ratio),
    }
    notes = [
        f"predicted {predicted:.2f} against {measured:.2f} measured, from the recorded answers and the fitted cost of "
        f"a pass: {1e3 * cost.fixed:.2f} ms + {1e3 * cost.row:.3f} a row + {1e3 * cost.token:.4f} a token + "
        f"{1e3 * cost.ragged:.2f} with drafts",
        f"rules are played back over the run's answers; c = {ratio:.3f} was measured, {rows:.0f} rows a pass",
    ]
    table = BenchTable(
        "rules on the same traces, speed-up by cost ratio c", tuple(lines[0]), tuple(map(tuple, lines[1:]))
    )
    sources = compare_sources(archive, cost, folder, max_rows=sizes.rows, fingerprint=archive.tokenizer_fingerprint)
    return figures, [table, sources_table(sources)], notes


def _repeat_curve(name: str, sizes: Sizes, shares: Sequence[float], seed: int) -> list[float]:
    """Return the speed-up of ``history`` for each share of repeated prompts."""
    from pipelines.bench import speculation_trials as trials

    needed = trials.prompts_for_repeats(shares, _ROUNDS, _prompts_per_step(sizes))
    world = _world(name, sizes, epochs=1, seed=seed, prompts=needed)
    plan, turns = trials.repeating(world, shares, _ROUNDS)
    with tempfile.TemporaryDirectory(prefix="slipstream-speculation-") as folder:
        trial = trials.exact_trial(world, ("off", "history"), plan, Path(folder))
    steps = trial.steps[len(plan) - len(turns) :]
    curve = []
    for which in range(len(shares)):
        mine = [step.rollouts for step, turn in zip(steps, turns, strict=True) if turn == which]
        curve.append(sum(r["off"].seconds for r in mine) / sum(r["history"].seconds for r in mine))
    return curve


def _with_curve(result: BenchResult, shares: Sequence[float], curve: Sequence[float]) -> BenchResult:
    table = BenchTable(
        "history, by share of prompts that were answered before",
        ("share", "speed-up"),
        tuple((f"{share:g}", f"{value:.2f}") for share, value in zip(shares, curve, strict=True)),
    )
    figures = {f"speedup_repeat_{share:g}": value for share, value in zip(shares, curve, strict=True)}
    return replace(
        result,
        figures={**result.figures, **figures},
        notes=(*result.notes, f"share of repeated prompts: {_ROUNDS} steps each, taken in turns after one epoch"),
        more=(*result.more, table),
    )


def _draw(shares: Sequence[float], curve: Sequence[float], picture: Path) -> None:
    from matplotlib.figure import Figure  # a figure of its own draws with Agg, whatever backend pyplot would take

    from storage.files import atomic_file

    figure = Figure(figsize=(5.5, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(shares, curve, marker="o", color="#6d4aff", linewidth=2)
    axes.axhline(1.0, color="#7b8794", linewidth=1, linestyle="--")
    axes.set_xlabel("share of prompts that were answered before")
    axes.set_ylabel("speed-up of the rollout")
    axes.set_ylim(bottom=0)
    with atomic_file(picture) as temporary:
        figure.savefig(temporary, format="png")


def _sizes(name: str, options: Mapping[str, OptionValue]) -> Sizes:
    """Return the model's sizes with those options that were set; raises ``UserError`` for what cannot be measured."""
    if name not in SIZES:
        raise UserError(f"option model={name}: must be one of {', '.join(SIZES)}")
    own = SIZES[name]
    chosen = {
        key: int(options[key]) or getattr(own, key) for key in ("rows", "prompts", "samples", "epochs", "max_tokens")
    }
    for key, least in {"rows": 1, "prompts": 1, "samples": 2, "epochs": 2, "max_tokens": 1}.items():
        if chosen[key] < least:
            raise UserError(f"option {key}={chosen[key]}: must be at least {least}")
    temperature = float(options["temperature"]) or own.temperature
    if not 0 < temperature <= 10:
        raise UserError(f"option temperature={temperature:g}: must be above 0 and at most 10")
    threads = int(options["threads"])
    if threads < 0:
        raise UserError(f"option threads={threads}: must be 0 or more")
    sizes = Sizes(
        rows=chosen["rows"],
        prompts=chosen["prompts"],
        samples=chosen["samples"],
        epochs=chosen["epochs"],
        temperature=temperature,
        max_tokens=chosen["max_tokens"],
        threads=threads or own.threads,
        modes=own.modes,
        lenient=own.lenient,
    )
    size = _prompts_per_step(sizes)
    if sizes.prompts % size:
        raise UserError(f"option prompts={sizes.prompts}: must be a multiple of the {size} prompts of a step")
    return sizes


def _prompts_per_step(sizes: Sizes) -> int:
    return max(1, _WAVES * sizes.rows // sizes.samples)


def _world(name: str, sizes: Sizes, *, epochs: int, seed: int, prompts: int) -> World:
    """Load configuration, model and prompts of the run that is played."""
    from pipelines.bench.rollout_loop import World
    from pipelines.config_loader import load
    from pipelines.run_data import load_run_data
    from storage.models import resolve_model

    config = load(
        [
            f"model={name}",
            "run.steps=0",
            f"run.epochs={epochs}",
            f"run.seed={seed}",
            f"data.prompts={prompts}",
            f"rollout.prompts_per_step={_prompts_per_step(sizes)}",
            f"rollout.samples_per_prompt={sizes.samples}",
            f"rollout.max_rows={sizes.rows}",
            f"rollout.max_tokens={sizes.max_tokens}",
            f"rollout.temperature={sizes.temperature}",
        ]
    ).config
    return World(config, load_run_data(config, resolve_model(config.model)), sizes.rows)
