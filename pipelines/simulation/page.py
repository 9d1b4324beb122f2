"""The simulation as one HTML file that needs nothing else: figures, charts with a note on every bar, the sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from pipelines.simulation.gantt import COLOURS, MEANINGS, REPLICAS_SHOWN, SERIES, panels
from pipelines.simulation.scenarios import CaseResult
from storage.files import atomic_file

_WIDTH = 960.0
_LANE = 2.0

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Slipstream: simulated schedules</title>
<style>
body { font: 14px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 1040px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .5rem; border-bottom: 1px solid #e4e7eb; }
th:first-child, td:first-child { text-align: left; }
.note { color: #52606d; }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; vertical-align: -1px; }
h3 { margin: 1.2rem 0 .2rem; font-size: 1rem; }
svg { display: block; max-width: 100%; background: #f7f8fa; }
</style>
</head>
<body>
<h1>Simulated schedules</h1>
{% for line in notes %}<p class="note">{{ line }}</p>
{% endfor %}
<table>
<tr>{% for head in columns %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
<h2>One step of each</h2>
<p class="note">A line is a slot; the first {{ replicas }} replicas are shown. Point at a bar to see whose it is.
{% for outcome, colour in colours.items() %}<span class="key" style="background: {{ colour }}"></span>{{
meanings[outcome] }}{% endfor %}</p>
{% for panel in panels %}<h3>{{ panel.title }}: {{ "%.0f" | format(panel.seconds) }} s</h3>
<svg viewBox="0 0 {{ width }} {{ panel.lanes * lane }}" role="img" aria-label="{{ panel.title }}">
{% for bar in panel.bars %}<rect x="{{ "%.2f" | format(bar.begin * scale) }}" y="{{ bar.lane * lane }}" width="{{
"%.2f" | format((bar.end - bar.begin) * scale) }}" height="{{ lane * 0.9 }}" fill="{{ colours[bar.outcome] }}"><title>{{
bar.label }}</title></rect>
{% endfor %}<line x1="{{ "%.2f" | format(panel.seconds * scale) }}" x2="{{ "%.2f" | format(panel.seconds * scale)
}}" y1="0" y2="{{ panel.lanes * lane }}" stroke="#1f2933"/>
</svg>
{% endfor %}
{% if curves %}<h2>Utilisation against the share of long answers</h2>
<p class="note">Long: above four medians. The median stays, the spread grows.{% for curve in curves %}
<span class="key" style="background: {{ curve.colour }}"></span>{{ curve.name }}{% endfor %}</p>
<svg viewBox="0 0 {{ width }} 300" role="img" aria-label="utilisation against the share of long answers">
{% for tick in ticks %}<line x1="40" x2="{{ width }}" y1="{{ tick.y }}" y2="{{ tick.y }}" stroke="#e4e7eb"/>
<text x="0" y="{{ tick.y + 4 }}" font-size="11" fill="#7b8794">{{ tick.text }}</text>
{% endfor %}{% for curve in curves %}<polyline fill="none" stroke-width="2" stroke="{{ curve.colour }}" points="{{
curve.points }}"/>
{% endfor %}{% for mark in marks %}<text x="{{ mark.x }}" y="296" font-size="11" fill="#7b8794">{{ mark.text }}</text>
{% endfor %}</svg>
{% endif %}
</body>
</html>
"""


def write_page(
    path: Path,
    results: Sequence[CaseResult],
    *,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    curves: Mapping[str, Sequence[float]],
    shares: Sequence[float],
) -> Path:
    """Write the page; replaced in one go.

    Args:
        path: Where it goes.
        results: Recorded simulations, for the charts.
        columns: Heads of the table.
        rows: Its cells.
        notes: What a reader must know.
        curves: Utilisation by name, one value per share; may be empty.
        shares: Shares of long answers.
    """
    shown = panels(results)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text = environment.from_string(_TEMPLATE).render(
        columns=columns,
        rows=rows,
        notes=notes,
        panels=shown,
        colours=COLOURS,
        meanings=MEANINGS,
        replicas=REPLICAS_SHOWN,
        width=_WIDTH,
        lane=_LANE,
        scale=_WIDTH / (1.01 * max(panel.seconds for panel in shown)),
        **_sweep(curves, shares),
    )
    with atomic_file(path) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")
    return path


def _sweep(curves: Mapping[str, Sequence[float]], shares: Sequence[float]) -> dict[str, object]:
    """Points, ticks and marks of the sweep in the coordinates of its picture, 960 by 300."""
    if not curves:
        return {"curves": [], "ticks": [], "marks": []}
    top = max(max(values) for values in curves.values()) * 1.05
    places = [45 + (_WIDTH - 90) * (share - shares[0]) / max(1e-9, shares[-1] - shares[0]) for share in shares]
    drawn = [
        {
            "name": name,
            "colour": colour,
            "points": " ".join(
                f"{x:.1f},{270 - 260 * value / top:.1f}" for x, value in zip(places, values, strict=True)
            ),
        }
        for colour, (name, values) in zip(SERIES, curves.items(), strict=False)
    ]
    ticks = [{"y": 270 - 260 * part / 4, "text": f"{100 * top * part / 4:.0f} %"} for part in range(5)]
    marks = [{"x": x - 10, "text": f"{100 * share:g} %"} for x, share in zip(places, shares, strict=True)]
    return {"curves": drawn, "ticks": ticks, "marks": marks}
