"""The history store and the indexes over it, one after the other, in one result."""

from __future__ import annotations

from collections.abc import Mapping

from pipelines.bench import history, index
from pipelines.bench.harness import BenchResult, BenchTable, OptionValue

OPTIONS: dict[str, OptionValue] = {**history.OPTIONS, **index.OPTIONS}


def run(options: Mapping[str, OptionValue]) -> BenchResult:
    """Measure the indexes, which is quick and finds bad options early, then the store."""
    indexes = index.run({name: options[name] for name in index.OPTIONS})
    store = history.run({name: options[name] for name in history.OPTIONS})
    return BenchResult(
        name="history",
        columns=store.columns,
        rows=store.rows,
        figures={**store.figures, **indexes.figures},
        notes=(*store.notes, *indexes.notes),
        more=(BenchTable("indexes", indexes.columns, indexes.rows),),
    )
