"""The page of metrics as Markdown: what the README shows between its markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipelines.metrics_table import LIVE, METRICS, exported_names

START = "<!-- metrics: made by pipelines.metrics_docs -->"
END = "<!-- end of metrics -->"


def metrics_markdown() -> str:
    """Return both tables, live metrics first, without the markers; ends with a newline."""
    logged = [
        (f"`{name}`", _cell(metric.meaning), metric.unit or "-", _cell(metric.healthy) or "-")
        for name, metric in METRICS.items()
    ]
    live = []
    for name, series in LIVE.items():
        exported = exported_names(name)
        full = exported[0].removesuffix("_bucket")
        tag = f" by `{series.tag}`" if series.tag else ""
        kind = series.kind + (", of the last step" if series.source else "")
        live.append((f"`{full}`{tag}", kind, _cell(series.meaning), series.unit or "-", _cell(series.healthy) or "-"))
    return "\n".join(
        [
            "Live, on Ray's metrics endpoint (each series also carries the label `run`):",
            "",
            *_table(("name", "kind", "meaning", "unit", "healthy"), live),
            "",
            "Each step, in `metrics.jsonl`, TensorBoard and Weights & Biases:",
            "",
            *_table(("name", "meaning", "unit", "healthy"), logged),
            "",
        ]
    )


def replace_page(text: str) -> str:
    """Return a document with what lies between its markers brought up to date; one without markers is returned as is.

    Raises:
        ValueError: Only one of the markers is there.
    """
    if START not in text and END not in text:
        return text
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page of metrics needs both markers, {START} and {END}")
    return f"{before}{START}\n{metrics_markdown()}{END}{after}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
