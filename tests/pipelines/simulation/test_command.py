"""`slipstream simulate` and `slipstream bench simulator` at a small size: tables, charts, bad input."""

from __future__ import annotations

import re

import pytest
import typer
from typer.testing import CliRunner

from pipelines.bench import simulator as bench
from pipelines.simulate_command import simulate
from storage.errors import UserError

SMALL = ["--gpus", "4", "--steps", "5"]


@pytest.fixture
def invoke(monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")
    app = typer.Typer()
    app.command()(simulate)

    def call(*arguments):
        result = CliRunner().invoke(app, [*arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


def test_it_prints_every_schedule_with_its_denominators_and_draws_charts(invoke, tmp_path):
    result = invoke(*SMALL, "--output", str(tmp_path / "out"))
    assert result.exit_code == 0
    for text in ("all at once", "tail batching, resume", "length split", "skew-aware", "Waste: dropped over generated"):
        assert text in result.output
    assert "answers above four medians" in result.output
    for name in ("out.png", "out-sweep.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    page = (tmp_path / "out.html").read_text()
    assert page.count("<svg") >= 10
    assert "<title>prompt " in page
    assert not re.search(r"(src|href)=", page), "the page needs nothing else"


def test_without_a_predictor_the_schedules_that_need_one_are_left_out(invoke):
    result = invoke(*SMALL, "--predictor", "0", "--no-sweep")
    assert "length split" not in result.output
    assert "tail batching, restart" in result.output
    assert "four medians" not in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "2000"], "change --gpus"),
        (["--overlaunch", "0.9"], "change --overlaunch"),
        (["--p50", "9000"], "P50 <= P90"),
        (["--predictor", "2"], "correlation"),
        (["--gpus", "4", "--output", "/nowhere/at/all"], "does not exist"),
        (["--recorded", "no-such-run"], "no-such-run"),
    ],
)
def test_bad_input_names_the_option(invoke, arguments, words):
    with pytest.raises(UserError, match=words):
        invoke(*arguments)


def test_the_benchmark_gives_its_figures():
    result = bench.run({"gpus": 8, "steps": 5, "seed": 0, "published": 0})
    assert result.figures["sim_speedup_tail"] > 1.3
    assert result.figures["sim_waste_tail"] == 0
    assert result.figures["sim_ks_tail"] == 0
    assert result.figures["sim_closed_form_error"] < 0.005
    assert all(len(row) == len(result.columns) for row in result.rows)
