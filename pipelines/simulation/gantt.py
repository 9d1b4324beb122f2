"""Gantt charts of single steps: when which row sat in which slot, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.simulation.measures import RoundRecord
from pipelines.simulation.replica import Span
from pipelines.simulation.scenarios import CaseResult
from storage.files import atomic_file

REPLICAS_SHOWN = 6
INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = {"trained": "#6d4aff", "deferred": "#d97706", "dropped": "#c2255c"}
MEANINGS = {
    "trained": "trained in this step",
    "deferred": "kept for a later step",
    "dropped": "dropped",
}
SERIES = ("#6d4aff", "#0b7285", "#d97706", "#c2255c", "#15803d")


@dataclass(frozen=True, slots=True)
class Bar:
    """A stay of a row in a slot; ``lane`` counts slots over the replicas that are shown, from 0."""

    lane: int
    begin: float
    end: float
    outcome: str
    label: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One step of one schedule: title, bars, number of lanes, first lane of each replica, and seconds of rollout."""

    title: str
    bars: tuple[Bar, ...]
    lanes: int
    replicas: tuple[int, ...]
    seconds: float


def panels(results: Sequence[CaseResult]) -> list[Panel]:
    """A short step of each schedule and, where it has one, a long step; the rounds must have been recorded.

    The first step is left out where there is another: nothing waits yet when it begins.
    """
    found = []
    for result in results:
        kinds = ("short", "long") if result.case.options.batching != "all" else ("short",)
        for kind in kinds:
            rounds = [record for record in result.rounds if record.round_class == kind]
            if rounds:
                record = rounds[min(1, len(rounds) - 1)]
                suffix = f", {kind} round" if len(kinds) > 1 else ""
                found.append(_panel(f"{result.case.name}{suffix}", record))
    return found


def draw_gantt(results: Sequence[CaseResult], picture: Path) -> Path:
    """Draw the panels into a PNG, one below the other on a common axis of time; replaced in one go."""
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = panels(results)
    figure = Figure(figsize=(11, 0.8 + 1.25 * len(shown)), dpi=110, facecolor="white", layout="constrained")
    axes_list: Any = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(panel.seconds for panel in shown)
    for axes, panel in zip(axes_list, shown, strict=True):
        corners = [
            [(bar.begin, bar.lane), (bar.end, bar.lane), (bar.end, bar.lane + 0.9), (bar.begin, bar.lane + 0.9)]
            for bar in panel.bars
        ]
        axes.add_collection(
            PolyCollection(corners, facecolors=[COLOURS[bar.outcome] for bar in panel.bars], linewidth=0)
        )
        axes.axvline(panel.seconds, color=INK, linewidth=1)
        for lane in panel.replicas[1:]:
            axes.axhline(lane, color=GRID, linewidth=0.6)
        axes.set_ylim(panel.lanes, 0)
        axes.set_xlim(0, 1.02 * longest)
        axes.set_yticks([])
        axes.set_title(f"{panel.title}: {panel.seconds:.0f} s", loc="left", fontsize=9, color=INK)
        axes.tick_params(colors=FAINT, labelsize=8, length=0)
        for spine in axes.spines.values():
            spine.set_color(GRID)
    axes_list[-1].set_xlabel(
        f"virtual seconds of rollout; a line is a slot, the first {REPLICAS_SHOWN} replicas are shown",
        color=FAINT,
        fontsize=9,
    )
    handles = [Patch(color=COLOURS[outcome], label=MEANINGS[outcome]) for outcome in COLOURS]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    with atomic_file(picture) as temporary:
        figure.savefig(temporary, format="png")
    return picture


def draw_sweep(curves: dict[str, list[float]], shares: Sequence[float], picture: Path) -> Path:
    """Draw utilisation against the share of long answers into a PNG; replaced in one go."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=110, facecolor="white", layout="constrained")
    axes = figure.subplots()
    for colour, (name, values) in zip(SERIES, curves.items(), strict=False):
        axes.plot([100 * share for share in shares], [100 * value for value in values], "o-", color=colour, label=name)
    axes.set_xlabel("answers longer than four medians, %", color=FAINT, fontsize=9)
    axes.set_ylabel("utilisation of the rollout, %", color=FAINT, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(colors=FAINT, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
    axes.legend(fontsize=8, frameon=False)
    with atomic_file(picture) as temporary:
        figure.savefig(temporary, format="png")
    return picture


def _panel(title: str, record: RoundRecord) -> Panel:
    by_replica: dict[int, list[Span]] = {}
    for span in record.spans:
        if span.replica < REPLICAS_SHOWN:
            by_replica.setdefault(span.replica, []).append(span)
    complete = {(span.key, span.index) for span in record.spans if span.done}
    bars, first_lanes, lane = [], [], 0
    for _, spans in sorted(by_replica.items()):
        first_lanes.append(lane)
        for span in spans:
            outcome = record.outcomes.get(span.key, "dropped")
            if outcome == "trained" and (span.key, span.index) not in complete:
                outcome = "dropped"  # a sibling that its over-launched group did not need
            label = f"prompt {span.key.prompt}, answer {span.index}: {span.begin:.1f} to {span.end:.1f} s, {outcome}"
            bars.append(Bar(lane + span.slot, span.begin, span.end, outcome, label))
        lane += 1 + max(span.slot for span in spans)
    return Panel(title, tuple(bars), max(1, lane), tuple(first_lanes), record.rollout_s)
