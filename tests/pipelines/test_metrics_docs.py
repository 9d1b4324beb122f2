"""The page of metrics shows every metric once, and README's copy of it is the present one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.metrics_docs import END, START, metrics_markdown, replace_page
from pipelines.metrics_table import LIVE, METRICS

README = Path(__file__).parents[2] / "README.md"


def rows() -> list[list[str]]:
    lines = [line for line in metrics_markdown().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines]


def test_every_metric_has_one_row_with_all_columns():
    logged = [row for row in rows() if len(row) == 4]
    live = [row for row in rows() if len(row) == 5]
    assert [row[0].strip("`") for row in logged] == list(METRICS)
    assert len(live) == len(LIVE)
    assert all(all(row) for row in rows())


def test_live_metrics_are_shown_under_their_exported_names():
    names = [row[0] for row in rows() if len(row) == 5]
    assert "`ray_slipstream_tokens_total` by `use`" in names
    assert "`ray_slipstream_seconds` by `operation`" in names
    assert "`ray_slipstream_bubble_share`" in names


def test_the_page_is_replaced_between_its_markers_only():
    document = f"# Title\n{START}\nold\n{END}\nrest\n"
    new = replace_page(document)
    assert new == f"# Title\n{START}\n{metrics_markdown()}{END}\nrest\n"
    assert replace_page(new) == new
    assert replace_page("no page") == "no page"
    with pytest.raises(ValueError, match="needs both markers"):
        replace_page(f"{START} and no end")


def test_readme_shows_the_present_page():
    text = README.read_text(encoding="utf-8")
    assert replace_page(text) == text, "run: pipelines.metrics_docs.replace_page over README.md"
