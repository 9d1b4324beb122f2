"""The Grafana dashboard of a run, made from the table of live metrics.

Grafana that Ray configures reads every JSON file in ``<session>/metrics/grafana/dashboards``. Each panel says which
metrics it draws; a test holds the expressions against what a run really exports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

UID = "slipstream"
_RUN = 'run=~"$run",SessionName=~"$session"'
_WIDTH, _HEIGHT = 8, 8
_COLUMNS = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WINDOW = "10m"
"""Steps last seconds to minutes: a rate over less would fall to nothing between two of them."""

Mode = Literal["lines", "stack", "stat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart.

    Attributes:
        title: What it shows.
        targets: Legends and PromQL expressions.
        unit: Grafana's name of the unit: ``none``, ``percentunit``, ``s``, ``short``, ``ops``.
        mode: Lines, stacked areas, or the last value in large type.
        note: How to read it.
    """

    title: str
    targets: Mapping[str, str]
    unit: str = "short"
    mode: Mode = "lines"
    note: str = ""


def _of(name: str, tag: str = "", *, by: str = "max") -> str:
    """One line per run (and tag value): a resumed run has another process, whose series takes over from the old one."""
    keys = f"run, {tag}" if tag else "run"
    return f"{by} by ({keys}) (ray_slipstream_{name}{{{_RUN}}})"


def _rate(name: str, tag: str) -> str:
    return f"sum by (run, {tag}) (rate(ray_slipstream_{name}_total{{{_RUN}}}[{_WINDOW}]))"


def _quantile(share: float) -> str:
    inner = f"rate(ray_slipstream_seconds_bucket{{{_RUN}}}[{_WINDOW}])"
    return f"histogram_quantile({share:g}, sum by (le, run, operation) ({inner}))"


ROWS: Mapping[str, Sequence[Panel]] = {
    "Run": (
        Panel(title="Steps", targets={"{{run}}": _of("step")}, mode="stat", unit="none"),
        Panel(title="Weights", targets={"{{run}}": _of("version")}, mode="stat", unit="none", note="Version published"),
        Panel(
            title="Phase",
            targets={"{{run}} {{phase}}": _of("phase", "phase")},
            mode="stack",
            unit="none",
            note="What the run is doing: 1 for one phase at a time",
        ),
        Panel(title="Reward", targets={"{{run}}": _of("reward")}, note="Mean of the step; should rise"),
        Panel(title="Training accuracy", targets={"{{run}}": _of("accuracy")}, unit="percentunit"),
        Panel(
            title="Groups that teach nothing",
            targets={"{{run}} all rewards equal": _of("zero_variance_share")},
            unit="percentunit",
            note="Below 0.8, or most of the rollout is for nothing",
        ),
    ),
    "Speed": (
        Panel(
            title="Tokens per second",
            targets={
                "{{run}} while generating": _of("tokens_per_second"),
                "{{run}} goodput": _of("goodput_tokens_per_second"),
            },
            note="Goodput: generated tokens that were trained on, over the whole step",
        ),
        Panel(title="Tokens by use", targets={"{{run}} {{use}}": _rate("tokens", "use")}, note="Per second"),
        Panel(
            title="Draft tokens accepted",
            targets={"{{run}}": _of("acceptance")},
            unit="percentunit",
            note="With speculation only; above 0.5 from the second epoch on",
        ),
        Panel(
            title="Where the rollout is idle",
            targets={
                "{{run}} slot bubble": _of("bubble_share"),
                "{{run}} replicas": _of("replica_idle_share"),
                "{{run}} in use": _of("utilisation"),
            },
            unit="percentunit",
        ),
        Panel(
            title="Waste and overhead",
            targets={"{{run}} waste": _of("waste_share"), "{{run}} overhead": _of("overhead_share")},
            unit="percentunit",
            note="Both at most 0.1",
        ),
        Panel(title="Answer length", targets={"{{run}} mean": _of("length_mean")}, note="Tokens"),
    ),
    "Time": (
        Panel(
            title="Last duration of each operation",
            targets={"{{run}} {{operation}}": _of("last_seconds", "operation")},
            unit="s",
        ),
        Panel(
            title="Duration, median and 90 %",
            targets={
                "{{run}} {{operation}} p50": _quantile(0.5),
                "{{run}} {{operation}} p90": _quantile(0.9),
            },
            unit="s",
            note=f"Over {_WINDOW}, as far as the buckets resolve it",
        ),
        Panel(
            title="Operations",
            targets={
                "{{run}} {{operation}}": (
                    f"sum by (run, operation) (rate(ray_slipstream_seconds_count{{{_RUN}}}[{_WINDOW}]))"
                )
            },
            unit="ops",
        ),
    ),
    "Law of the samples": (
        Panel(
            title="Staleness",
            targets={"{{run}} mean": _of("staleness_mean"), "{{run}} max": _of("staleness_max")},
            unit="none",
            note="Versions; never above asynchrony.max_staleness",
        ),
        Panel(title="Answers at the token limit", targets={"{{run}}": _of("truncated_share")}, unit="percentunit"),
        Panel(title="Groups ended untrained", targets={"{{run}} {{reason}}": _of("ended_groups", "reason")}),
    ),
    "Health": (
        Panel(
            title="What the run waits for",
            targets={"{{run}} {{label}}": f"{_of('wait_seconds', 'label')} > 0"},
            unit="s",
            note="A wait that keeps growing is a stall: the alarms of `slipstream status` say who",
        ),
        Panel(title="Queues", targets={"{{run}} {{queue}}": _of("queue_depth", "queue")}, mode="stack"),
        Panel(
            title="Failures by reason",
            targets={"{{run}} {{reason}}": _of("errors", "reason")},
            note="Since the start of the conductor's process; 0",
        ),
        Panel(
            title="Back to a checkpoint",
            targets={"{{run}} times": _of("restarts"), "{{run}} steps lost": _of("steps_lost")},
            unit="none",
            note="After the death of the learner, of a queue or of the conductor, since the run began",
        ),
        Panel(
            title="Answers whose scoring failed",
            targets={"{{run}}": _of("reward_error_share")},
            unit="percentunit",
            note="Below reward.error_alarm",
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON model; for Grafana 10 or newer."""
    return {
        "uid": UID,
        "title": "Slipstream",
        "tags": ["ray", "slipstream"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [_datasource(), _variable("session", "SessionName"), _variable("run", "run")]},
        "panels": list(_panels()),
    }


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "current": {},
        "options": [],
        "regex": "",
    }


def _variable(name: str, label: str) -> dict[str, Any]:
    """Make a menu of the values that a label has; all of them are chosen at first."""
    query = f"label_values(ray_slipstream_step, {label})"
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"{name}-values"},
        "refresh": 2,
        "hide": 0,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "sort": 2,
        "regex": "",
        "options": [],
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Iterator[dict[str, Any]]:
    """Lay the panels out from left to right, a header above each row."""
    ids = count(1)
    y = 0
    for title, panels in ROWS.items():
        header = {"h": 1, "w": _COLUMNS, "x": 0, "y": y}
        yield {"id": next(ids), "type": "row", "title": title, "collapsed": False, "gridPos": header, "panels": []}
        y += 1
        each_line = _COLUMNS // _WIDTH
        for place, panel in enumerate(panels):
            x, line = place % each_line, place // each_line
            yield _panel(panel, next(ids), {"h": _HEIGHT, "w": _WIDTH, "x": x * _WIDTH, "y": y + line * _HEIGHT})
        y += _HEIGHT * -(-len(panels) // each_line)


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"drawStyle": "line", "lineWidth": 1, "spanNulls": True}
    if panel.mode == "stack":
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": {} if panel.mode == "stat" else custom}
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    if panel.mode == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "textMode": "auto"}
    return {
        "id": number,
        "type": "stat" if panel.mode == "stat" else "timeseries",
        "title": panel.title,
        "description": panel.note,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(panel.targets.items())
        ],
    }
