"""The learning curve of a run as one picture, readable at a glance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.monitoring import read_records
from storage.errors import UserError
from storage.files import atomic_file

CURVES_FILE = "curves.png"

_INK, _FAINT, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_REWARD, _LENGTH, _SPEED = "#6d4aff", "#0b7285", "#b45309"
_SETS = ("#15803d", "#c2255c", "#1864ab", "#5c940d", "#862e9c", "#a61e4d")

_PLACES = {"left": 0.05, "right": 0.985, "top": 0.89, "bottom": 0.075, "hspace": 0.2, "wspace": 0.13}
"""Fixed, because finding margins that fit takes as long as drawing."""

Points = tuple[list[float], list[float]]


def draw_curves(metrics_file: Path, picture: Path, *, title: str = "") -> Path:
    """Draw reward, held-out accuracy, answer length and speed by step from ``metrics.jsonl`` into a PNG.

    Args:
        metrics_file: The run's ``metrics.jsonl``.
        picture: Where the PNG goes; replaced in one go.
        title: Heading; empty takes the name of the run directory.

    Raises:
        UserError: The file is missing or holds no step and no evaluation yet.
    """
    records = read_records(metrics_file)
    if not any("reward/mean" in record or _sets([record]) for record in records):
        raise UserError(f"{metrics_file}: nothing to draw yet: the run has finished no step and no evaluation")
    from matplotlib.figure import Figure  # a figure of its own draws with Agg, whatever backend pyplot would take

    figure = Figure(figsize=(10, 6.4), dpi=110, facecolor="white")
    (reward, accuracy), (length, speed) = figure.subplots(2, 2, sharex=True, gridspec_kw=_PLACES)
    figure.suptitle(title or metrics_file.absolute().parent.name, x=0.01, ha="left", color=_INK, weight="bold")
    _draw_reward(reward, records)
    _draw_accuracy(accuracy, records)
    _draw_length(length, records)
    _draw_speed(speed, records)
    last = max((record["step"] for record in records), default=1)
    for axes in (reward, accuracy, length, speed):
        axes.set_xlim(-0.015 * max(last, 1), 1.015 * max(last, 1))
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.tick_params(colors=_FAINT, labelsize=8, length=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_GRID)
    for axes in (length, speed):
        axes.set_xlabel("optimiser step", color=_FAINT, fontsize=9)
    with atomic_file(picture) as temporary:
        figure.savefig(temporary, format="png")
    return picture


def smooth(values: Sequence[float], share: float = 0.15) -> list[float]:
    """Return the centred moving average over ``share`` of the points, with a smaller window at the ends."""
    reach = int(len(values) * share / 2)
    averages = []
    for i in range(len(values)):
        side = min(reach, i, len(values) - 1 - i)
        window = values[i - side : i + side + 1]
        averages.append(math.fsum(window) / len(window))
    return averages


def _draw_reward(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    steps, values = _points(records, "reward/mean")
    _heading(axes, "Reward in training", f"{values[-1]:.2f}" if values else "")
    axes.plot(steps, values, color=_REWARD, alpha=0.3, linewidth=1.2, marker=".", markersize=3)
    axes.plot(steps, smooth(values), color=_REWARD, linewidth=2.2)
    if values and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(0, 1.02)


def _draw_accuracy(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    names = _sets(records)
    first_to_last = []
    steps, values = _points(records, "accuracy/train")
    if values:
        axes.plot(steps, values, color=_FAINT, linewidth=1, linestyle=":", label="training answers")
    for name, colour in zip(names, _SETS * (len(names) // len(_SETS) + 1), strict=False):
        steps, values = _points(records, f"eval/{name}/accuracy")
        axes.plot(steps, values, color=colour, linewidth=2.2, marker="o", markersize=5, label=f"{name}, greedy")
        low, high = _points(records, f"eval/{name}/accuracy_low"), _points(records, f"eval/{name}/accuracy_high")
        if low[0] == high[0] == steps:
            axes.vlines(steps, low[1], high[1], color=colour, alpha=0.35, linewidth=3)
        first_to_last.append(f"{values[0]:.2f} → {values[-1]:.2f}" if len(values) > 1 else f"{values[0]:.2f}")
    _heading(axes, "Held-out accuracy", first_to_last[0] if len(names) == 1 else "")
    axes.set_ylim(0, 1.02)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="lower right", labelcolor=_INK)


def _draw_length(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    steps, values = _points(records, "rollout/length_mean")
    _heading(axes, "Answer length, tokens", f"mean {values[-1]:.0f}" if values else "")
    axes.plot(steps, values, color=_LENGTH, linewidth=2.2, label="mean")
    steps, values = _points(records, "rollout/length_p90")
    if values:
        axes.plot(steps, values, color=_LENGTH, linewidth=1.2, linestyle="--", label="90 % are shorter")
        axes.legend(frameon=False, fontsize=8, loc="best", labelcolor=_INK)
    axes.set_ylim(bottom=0)


def _draw_speed(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    steps, values = _points(records, "rollout/tokens_per_s")
    _heading(axes, "Speed, tokens/s", f"{values[-1]:,.0f}" if values else "")
    axes.plot(steps, values, color=_SPEED, linewidth=2.2, label="generation alone")
    steps, values = _points(records, "goodput/tokens_per_s")
    if values:
        axes.plot(steps, values, color=_SPEED, linewidth=1.2, linestyle="--", label="trained tokens, whole step")
        axes.legend(frameon=False, fontsize=8, loc="best", labelcolor=_INK)
    axes.set_ylim(bottom=0)


def _heading(axes: Any, text: str, figure: str) -> None:
    """Name the panel on the left and print its newest figure on the right."""
    axes.set_title(text, loc="left", fontsize=10, color=_INK)
    axes.set_title(figure, loc="right", fontsize=10, color=_INK, weight="bold")


def _points(records: Sequence[dict[str, Any]], name: str) -> Points:
    """Return steps and values of a metric, leaving out records where it is absent or not a number."""
    found = [(float(record["step"]), float(record[name])) for record in records if record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _sets(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the evaluated sets, in order of appearance."""
    names = (name for record in records for name in record if name.startswith("eval/") and name.endswith("/accuracy"))
    return list(dict.fromkeys(name.split("/")[1] for name in names))
