"""The benchmark of the history store measures what it says, on a store that it fills itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.bench import history
from storage.errors import UserError
from storage.history.store import HistoryStore


def test_a_small_run_fills_the_store_and_reports_every_figure(tmp_path: Path) -> None:
    small = {"answers": 130, "tokens": 6, "group": 4, "steps": 4, "lookups": 5, "keep": str(tmp_path)}
    result = history.run(small)
    assert {"store_append_mtok_s", "store_open_s", "store_lookup_us", "store_peak_growth_mb"} <= set(result.figures)
    assert all(value >= 0 for value in result.figures.values())
    assert len(result.rows) == 9
    with HistoryStore(tmp_path / "history", None) as store:
        stats = store.stats()
        assert (stats.answers, stats.tokens, stats.prompts, stats.visits) == (128, 768, 16, 32)
        assert store.verify() == ()
    with pytest.raises(UserError, match="holds a history already"):
        history.run(small)


def test_options_that_make_no_store_are_refused() -> None:
    with pytest.raises(UserError, match="at least one group a step"):
        history.run({**history.OPTIONS, "answers": 3})
