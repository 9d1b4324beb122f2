"""The dashboard is one that Grafana can load, and draws every metric and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pipelines.dashboard_command import dashboard as command
from pipelines.dashboard_command import instructions
from pipelines.grafana import dashboard
from pipelines.metrics_table import LIVE, METRICS, exported_names
from pipelines.ray_metrics import RunMetrics
from tests.pipelines.test_ray_metrics import Fake

UNITS = {"none", "short", "percentunit", "s", "ops"}


def charts():
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions():
    return [target["expr"] for panel in charts() for target in panel["targets"]]


def drawn():
    return {name for text in expressions() for name in re.findall(r"\bray_\w+", text)}


def test_every_panel_has_an_id_of_its_own_and_a_place_of_its_own():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_asks_the_chosen_source_and_names_what_it_draws():
    model = json.loads(json.dumps(dashboard()))
    names = [variable["name"] for variable in model["templating"]["list"]]
    assert names == ["datasource", "session", "run"]
    titles = [panel["title"] for panel in charts()]
    assert len(set(titles)) == len(titles)
    for panel in charts():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        references = [target["refId"] for target in panel["targets"]]
        assert references == sorted(set(references))
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert target["legendFormat"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) == {"run", "session"}


@pytest.mark.parametrize("expression", expressions())
def test_expressions_are_balanced_and_group_by_labels_that_their_metrics_have(expression: str):
    for opening, closing in ("()", "[]", "{}"):
        assert expression.count(opening) == expression.count(closing)
    [metric] = re.findall(r"\bray_slipstream_(\w+)", expression)
    name = next(name for name in LIVE if f"ray_slipstream_{metric}" in exported_names(name))
    has = {"run", "SessionName", LIVE[name].tag} | ({"le"} if metric.endswith("_bucket") else set())
    [groups] = re.findall(r"by \(([\w, ]+)\)", expression)
    assert set(groups.split(", ")) <= has
    if LIVE[name].tag:
        assert LIVE[name].tag in groups, "else different things are mixed"


def test_every_exported_metric_is_drawn_and_nothing_else():
    exported = {full for name in LIVE for full in exported_names(name)}
    assert drawn() <= exported
    assert [name for name in LIVE if not drawn() & set(exported_names(name))] == []


def test_the_table_of_live_metrics_is_what_a_run_makes():
    fake = Fake()
    metrics = RunMetrics("run-1", fake)
    sources = {live.source for live in LIVE.values() if live.source}
    assert sources <= set(METRICS)
    metrics.step(1, dict.fromkeys(sources, 1.0) | {"time/step_s": 2.0}, generated=3, trained=2)
    made = {key[0].removeprefix("slipstream_") for key in [*fake.series, *fake.observed]}
    assert made == set(LIVE)


def run(*arguments: str):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_command_writes_the_dashboard_and_says_how_to_start_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)
    result = run(str(tmp_path / "new" / "folder"))
    assert result.exit_code == 0
    assert json.loads((tmp_path / "new" / "folder" / "slipstream.json").read_text()) == dashboard()
    assert "ray metrics launch-prometheus" in result.output
    assert f"RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR={tmp_path / 'new' / 'folder'}" in result.output
    assert "--config /tmp/ray/session_latest/metrics/grafana/grafana.ini" in result.output


def test_command_writes_into_the_session_that_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    result = run()
    assert "no Ray with a dashboard has run here" in str(result.exception)
    folder = tmp_path / "ray" / "session_latest" / "metrics" / "grafana" / "dashboards"
    folder.mkdir(parents=True)
    assert run().exit_code == 0
    assert (folder / "slipstream.json").is_file()
    assert "OUTPUT_DIR" not in run().output, "Grafana reads this folder already"


def test_prometheus_finds_sessions_that_are_not_in_the_standard_place(tmp_path: Path):
    lines = "\n".join(instructions(tmp_path / "ray", None))
    assert "launch-prometheus" not in lines, "it looks into /tmp/ray only"
    assert f"--config.file {tmp_path}/ray/session_latest/metrics/prometheus/prometheus.yml" in lines


def test_folder_that_cannot_be_written_is_a_user_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert "cannot write the dashboard there" in str(run(str(tmp_path / "file" / "x")).exception)
