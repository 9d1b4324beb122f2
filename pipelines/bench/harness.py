"""Runs benchmarks: registry, options, table, JSON.

A benchmark is a module with ``OPTIONS`` (name to default value) and ``run(options) -> BenchResult``, imported only
when it is run.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipelines.terminal import report_console
from storage.errors import UserError

OptionValue = int | float | str


@dataclass(frozen=True, slots=True)
class BenchTable:
    """A further table of a result: its title, heads of columns, and cells as text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """What a benchmark found.

    Attributes:
        name: Its name in the registry.
        columns: Heads of the table.
        rows: Cells of the table, as text.
        figures: The numbers that others quote, by the names that they use.
        notes: What a reader must know to judge the figures.
        more: Further tables, shown below the first.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: Mapping[str, float]
    notes: tuple[str, ...] = ()
    more: tuple[BenchTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Bench:
    """An entry of the registry: where the benchmark lives, and a line that says what it measures."""

    module: str
    summary: str
    options: Mapping[str, str] = field(default_factory=dict)


BENCHES: dict[str, Bench] = {
    "accuracy": Bench(
        "pipelines.bench.accuracy",
        "Held-out accuracy of presets against the synchronous baseline at equal prompts, over seeds.",
        {
            "presets": "presets to compare, separated by commas",
            "seeds": "runs of each, with seeds 1, 2, ...",
            "epochs": "passes over the training prompts",
            "heldout": "held-out prompts",
            "keep": "folder to keep the runs in; empty: they are removed",
        },
    ),
    "engine": Bench(
        "pipelines.bench.engine",
        "Tokens per second of the rollout engine over transformers.generate.",
        {
            "models": "models to measure, separated by commas",
            "prompts": "different prompts",
            "samples": "answers written in each round, all at once; a multiple of prompts",
            "rounds": "rounds of each side, taken in turns; tiny gets three times as many",
            "max_tokens": "longest answer",
            "threads": "torch threads of both sides; 0 for all cores",
        },
    ),
    "history": Bench(
        "pipelines.bench.history_and_index",
        "Speed and memory of the history store and of the indexes over it.",
        {
            "answers": "store: answers appended",
            "tokens": "store: tokens of each",
            "group": "store: answers of a group",
            "steps": "store: steps that they come in",
            "lookups": "store: prompts looked up",
            "keep": "store: folder to keep it in; empty: it is removed",
            "prompts": "index: prompts",
            "samples": "index: answers to each, one of them held out",
            "length": "index: tokens of an answer",
            "rounds": "index: rounds, the median counts",
            "seed": "index: seed of the answers",
        },
    ),
    "losslessness": Bench(
        "pipelines.bench.losslessness",
        "Whether the tokens that drafting engines write follow the policy's law, with controls that must fail.",
        {"samples": "answers of each setting", "seed": "seed of models, drafts and noise"},
    ),
    "overhead": Bench(
        "pipelines.bench.overhead",
        "Share of a synchronous step that is neither generation, reward nor learning.",
        {
            "steps": "steps of the run; the first is left out",
            "seed": "run.seed",
            "keep": "folder to keep the run in; empty: it is removed",
        },
    ),
    "predictor": Bench(
        "pipelines.bench.predictor",
        "Recall of the longest prompts by the length predictor against an oracle, and its latency.",
        {
            "prompts": "different prompts",
            "batch": "prompts asked for at once",
            "samples": "answers to each prompt",
            "seeds": "runs that the recall is the mean of",
            "http_seconds": "seconds of requests over HTTP; 0: none",
            "rate": "requests a second",
        },
    ),
    "quickstart": Bench(
        "pipelines.bench.quickstart",
        "Time, accuracy and memory of the default run, first with an empty cache and then without.",
        {
            "seeds": "later runs, each with a run.seed of its own",
            "keep": "folder to keep cache and runs in; empty: they are removed",
        },
    ),
    "scaling": Bench(
        "pipelines.bench.scaling",
        "Goodput of 1 to 8 paced rollout workers over emulated nodes against linear, and groups a second.",
        {
            "workers": "numbers of rollout workers, separated by commas; two of them share a node",
            "steps": "steps of each run; the first two do not count",
            "t0_ms": "paced time of an empty pass, in milliseconds",
            "groups": "groups of the run that does next to nothing with each; 0: none",
            "seed": "run.seed",
            "keep": "folder to keep the runs in; empty: they are removed",
        },
    ),
    "scheduling": Bench(
        "pipelines.bench.scheduling",
        "Tail batching and skew-aware dispatch against plain batches, in paced training runs.",
        {
            "regime": "both, tail or dispatch",
            "t0_ms": "paced time of an empty pass, in milliseconds",
            "periods": "tail: periods of 5 steps",
            "epochs": "dispatch: passes over the prompts; the first does not count",
            "pairs": "runs of each side, each pair with a seed of its own",
            "seed": "run.seed of the first pair",
            "keep": "folder to keep the runs in; empty: they are removed",
        },
    ),
    "asynchrony": Bench(
        "pipelines.bench.asynchrony",
        "Streams and partial rollouts against the synchronous pipeline, in paced training runs.",
        {
            "part": "both, ratios, 3to1, 1to1, 1to3 or tail",
            "steps": "steps of a run; the first two do not count",
            "t0_ms": "pace at 1:1, and for part tail the pace itself; 0: measured from the learner",
            "seed": "run.seed",
            "keep": "folder to keep the runs in; empty: they are removed",
        },
    ),
    "simulator": Bench(
        "pipelines.bench.simulator",
        "What the schedules bring on a simulated cluster, and agreement with published ratios.",
        {
            "gpus": "GPUs of the cluster",
            "steps": "training steps",
            "seed": "seed of the lengths",
            "published": "1 also simulates the published settings",
        },
    ),
    "soak": Bench(
        "pipelines.bench.soak",
        "What grows in a run of days: memory of each role, object store, logs and stores, projected to 24 hours.",
        {
            "minutes": "length of the run, from its first step on",
            "every_s": "seconds between readings",
            "seed": "run.seed",
            "keep": "folder to keep the run in; empty: it is removed",
        },
    ),
    "speculation": Bench(
        "pipelines.bench.speculation",
        "Rollout time with drafts from history over that without, in a training run with moving weights.",
        {
            "model": "tiny or smollm2",
            "rows": "answers decoded at once; 0: 8",
            "prompts": "different prompts, a multiple of those of a step (4 * rows / samples); 0: 56 or 8",
            "samples": "answers to each prompt; 0: 8 or 4",
            "epochs": "passes over the prompts, 2 or more; 0: 4 or 3",
            "temperature": "of sampling; 0: 1 for tiny, 0.7 for smollm2",
            "max_tokens": "longest answer; 0: 256 or 48",
            "seed": "run.seed",
            "threads": "torch threads; 0: 1 for tiny, all cores for smollm2",
            "repeat_share": "shares of repeated prompts to plot speed-up against, as in 0,.25,.5,.75,1; empty: none",
            "plot": "PNG file for that curve; empty: none",
        },
    ),
}


def run_bench(name: str | None, json_path: Path | None, options: Sequence[str]) -> None:
    """Run a benchmark and print its table, or list all benchmarks when ``name`` is ``None``.

    Args:
        name: Name in the registry.
        json_path: Where to write the figures as one flat JSON object.
        options: ``NAME=VALUE`` texts.

    Raises:
        UserError: Unknown benchmark or option, a value of the wrong kind, or a JSON path without a folder.
    """
    console = report_console()
    if name is None:
        listing = Table("benchmark", "measures", "options", box=None, pad_edge=False)
        for key, entry in BENCHES.items():
            listing.add_row(key, entry.summary, ", ".join(entry.options))
        console.print(listing)
        return
    bench = BENCHES.get(name)
    if bench is None:
        raise UserError(f"there is no benchmark {name!r}; there are: {', '.join(BENCHES)}")
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise UserError(f"--json {json_path}: the folder does not exist")
    module = importlib.import_module(bench.module)
    result: BenchResult = module.run(parse_options(name, options, module.OPTIONS))
    show(result, console)
    if json_path is not None:
        json_path.write_text(json.dumps(dict(result.figures), indent=2) + "\n", encoding="utf-8")


def parse_options(name: str, texts: Sequence[str], defaults: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Read ``NAME=VALUE`` texts into the types that ``defaults`` have; raises ``UserError`` for what does not fit."""
    values = dict(defaults)
    help_texts = BENCHES[name].options
    known = "; ".join(f"{key} ({help_texts[key]}; default {default})" for key, default in defaults.items())
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key not in defaults:
            raise UserError(f"benchmark {name} has no option {text!r}; it has: {known}")
        try:
            values[key] = type(defaults[key])(value)
        except ValueError:
            kind = {int: "a whole number", float: "a number"}[type(defaults[key])]
            raise UserError(f"benchmark {name}: option {key} must be {kind}, not {value!r}") from None
    return values


def show(result: BenchResult, console: Console) -> None:
    """Print a result: tables, figures, notes and the environment it was measured in."""
    for part in (BenchTable(f"bench {result.name}", result.columns, result.rows), *result.more):
        table = Table(*part.columns, title=part.title, title_justify="left")
        for row in part.rows:
            table.add_row(*row)
        console.print(table)
    for key, value in result.figures.items():
        console.print(f"{key} = {value:.4g}", highlight=False)
    for line in (*result.notes, *environment()):
        console.print(line, style="dim", highlight=False)


def environment() -> tuple[str, ...]:
    """Lines that say on what machine and with which versions something was measured."""
    versions = []
    for package in ("torch", "transformers", "ray", "numpy"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} missing")
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cores} cores ({platform.machine()}, {platform.system()}), load {load}",
        f"python {platform.python_version()}, {', '.join(versions)}",
    )
