"""What a person sees while a run is going on, and what is left on the screen when it has ended.

On a terminal: one panel that is redrawn in place. Elsewhere, or with ``--plain``: a line per finished step and per
evaluation, and one whenever something is awaited for long. Both are drawn from `RunStatus` alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelines.plots import CURVES_FILE
from pipelines.status import Curve, RunStatus, Wait, accuracy_metric
from storage.files import FULL
from storage.run_directory import RunDirectory

LONG_WAIT_S = 10.0
_REPEAT_WAIT_S = 60.0
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-~=+*#"
_CURVE_WIDTH = 36
_DOING = {
    "starting": "starting Ray and the actors",
    "warming_up": "building the model",
    "evaluating": "evaluating held-out prompts",
    "generating": "generating answers",
    "rewarding": "scoring answers",
    "training": "training",
    "publishing": "publishing weights",
    "checkpointing": "writing a checkpoint",
    "paused": "paused",
    "finished": "finished",
    "failed": "failed",
    "stopped": "stopped",
}
_ZERO_IS_NORMAL = frozenset(("rollout/truncated_share", "reward/error_share", "staleness/mean", "waste/share"))
_STYLES = {"finished": "bold green", "failed": "bold red", "stopped": "bold yellow", "paused": "bold yellow"}


class LiveView:
    """Shows a run while it goes on; use it as a context manager and call `update` now and then."""

    def __init__(self, fetch: Callable[[], RunStatus | None], console: Console, *, plain: bool = False) -> None:
        """Choose the panel or plain lines.

        Args:
            fetch: Returns the current status, or ``None`` while there is none yet.
            console: Where to draw; one that is not a terminal gets plain lines.
            plain: Plain lines even on a terminal.
        """
        self._fetch = fetch
        self._view: PanelView | PlainView = (
            PanelView(console) if console.is_terminal and not plain else PlainView(console)
        )

    def update(self) -> RunStatus | None:
        """Fetch the status, show it and return it. Output that goes to a full disk is left out: the run needs none."""
        status = self._fetch()
        if status is not None:
            try:
                self._view.show(status)
            except OSError as error:
                if error.errno not in FULL:
                    raise
        return status

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.close()


class PanelView:
    """Redraws one panel in place; what others print appears above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, status: RunStatus) -> None:
        """Draw the panel anew."""
        self._live.update(panel(status, unicode=_unicode(self._console)), refresh=True)

    def close(self) -> None:
        """Leave the last panel where it is."""
        self._live.stop()


class PlainView:
    """Prints a line for each finished step, each evaluation, each new alarm and each long wait; never redraws."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._step = -1
        self._evaluated: dict[str, int] = {}
        self._alarms: set[str] = set()
        self._waits: dict[str, float] = {}
        self._state = ""

    def show(self, status: RunStatus) -> None:
        """Print what is new since the last snapshot."""
        if status.state != self._state and (status.state in ("starting", "warming_up") or status.terminal):
            self._print(f"{_DOING[status.state]}{': ' + status.message if status.message else ''}")
        self._state = status.state
        lines: list[tuple[int, int, str]] = []
        for row in status.recent:
            if row["step"] > self._step:
                self._step = int(row["step"])
                lines.append((self._step, 0, step_line(row, status)))
        for name in status.evaluation_sets():
            curve = status.curves[accuracy_metric(name)]
            for step, value in zip(curve.steps, curve.values, strict=True):
                if step > self._evaluated.get(name, -1):
                    self._evaluated[name] = step
                    lines.append((step, 1, f"evaluation at step {step}: {name} accuracy {value:.3f}"))
        for _, _, line in sorted(lines):
            self._print(line)
        for message in status.alarms:
            if message not in self._alarms:
                self._alarms.add(message)
                self._print(f"ALARM {message}")
        self._show_waits(status.waits)

    def close(self) -> None:
        """Nothing is left to do."""

    def _show_waits(self, waits: Sequence[Wait]) -> None:
        for gone in set(self._waits) - {w.label for w in waits}:
            del self._waits[gone]
        for wait in waits:
            due = self._waits.get(wait.label, LONG_WAIT_S)
            if wait.seconds >= due:
                self._waits[wait.label] = wait.seconds + _REPEAT_WAIT_S
                self._print(f"waiting for {wait_text(wait)}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def panel(status: RunStatus, *, unicode: bool = True) -> RenderableType:
    """Draw the live panel; it fits 80 columns."""
    rows: list[RenderableType] = [_bar(status, unicode), _figures(status), _curves(status, unicode), _now(status)]
    rows += [
        Text(f"! {message}", style="bold yellow", overflow="ellipsis", no_wrap=True) for message in status.alarms[-3:]
    ]
    if status.restarts:
        rows.append(Text(_setbacks(status), style="yellow"))
    if status.message:
        rows.append(Text(status.message, style=_STYLES.get(status.state, "")))
    title = f"[bold]{escape(status.name)}[/bold]"
    return Panel(
        Group(*rows),
        title=title,
        title_align="left",
        subtitle=escape(status.dashboard_url) or None,
        subtitle_align="right",
        border_style=_STYLES.get(status.state, "cyan"),
        padding=(0, 1),
    )


def step_line(row: Mapping[str, float], status: RunStatus) -> str:
    """Return the plain line of one finished step."""
    parts = [f"step {int(row['step'])}/{status.steps}"]
    for name, template in (
        ("reward/mean", "reward {:.3f}"),
        ("accuracy/train", "accuracy {:.3f}"),
        ("rollout/length_mean", "length {:.0f}"),
        ("rollout/truncated_share", "truncated {:.0%}"),
        ("reward/error_share", "reward errors {:.0%}"),
        ("staleness/mean", "staleness {:.1f}"),
        ("waste/share", "waste {:.0%}"),
        ("rollout/tokens_per_s", "{:,.0f} tok/s"),
        ("time/step_s", "{:.1f} s"),
    ):
        if _tells(name, row):
            parts.append(template.format(row[name]))
    if status.eta_seconds is not None and row is status.recent[-1]:
        parts.append(f"ETA {duration(status.eta_seconds)}")
    return " | ".join(parts)


def wait_text(wait: Wait) -> str:
    """Say what is awaited, from whom, for how long and when it is overdue."""
    text = f"{wait.label} ({wait.who}) for {duration(wait.seconds)}"
    return f"{text}, deadline {duration(wait.deadline_s)}" if wait.deadline_s > 0 else text


def _setbacks(status: RunStatus) -> str:
    return f"deaths sent the run back to a checkpoint {status.restarts} times and cost {status.steps_lost} steps"


def duration(seconds: float) -> str:
    """Write a duration in two units at most: ``8 s``, ``5 m``, ``2 m 05 s``, ``3 h 12 m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    large, small, names = (whole // 60, whole % 60, "ms") if whole < 3600 else (whole // 3600, whole % 3600 // 60, "hm")
    return f"{large} {names[0]} {small:02d} {names[1]}" if small else f"{large} {names[0]}"


def timeline(curve: Curve, width: int, *, steps: int, low: float, high: float, unicode: bool = True) -> str:
    """Draw a curve as a row of ``width`` blocks that stands for steps 0 to ``steps``, so that rows line up by step.

    A column shows the mean of its points; one without points repeats the column before it, up to the newest point.
    """
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    top = len(blocks) - 1
    columns: list[list[float]] = [[] for _ in range(width)]
    for step, value in zip(curve.steps, curve.values, strict=True):
        columns[min(width - 1, step * width // max(steps + 1, 1))].append(value)
    drawn, symbol = [], " "
    for column in columns[: max((i + 1 for i, column in enumerate(columns) if column), default=0)]:
        if column:
            height = (sum(column) / len(column) - low) / (high - low) if high > low else 0.0
            symbol = blocks[min(top, max(0, round(height * top)))]
        drawn.append(symbol)
    return "".join(drawn)


class Ending(Protocol):
    """What the summary needs to know of how a run ended; the conductor's outcome has it."""

    @property
    def state(self) -> str:
        """``finished``, ``stopped`` or ``failed``."""

    @property
    def message(self) -> str:
        """Why it failed or stopped; may be empty."""

    @property
    def evaluations(self) -> Mapping[str, Mapping[str, float]]:
        """Metrics of the evaluations ``before`` and ``after`` training; a run that only evaluates has the latter."""

    @property
    def checkpoint(self) -> str:
        """Newest complete checkpoint; empty without one."""

    @property
    def seconds(self) -> float:
        """Wall-clock time."""


def print_summary(ending: Ending, directory: Path, console: Console) -> None:
    """Print the last lines of a run: how it ended, accuracy per held-out set, time, directory and what to do next."""
    status = load_status(directory)
    before, after = ending.evaluations.get("before", {}), ending.evaluations.get("after", {})
    reason = f": {ending.message}" if ending.message else ""
    steps = f" after {status.step} of {status.steps} steps" if status is not None and status.steps else ""
    say = _printer(console)
    say(Text.assemble((ending.state, _STYLES.get(ending.state, "bold")), f"{steps}{reason}"))
    for name in dict.fromkeys(_sets(before) + _sets(after)):
        say(_accuracy_line(name, before, after))
    reward = status.curves.get("reward/mean") if status is not None else None
    if reward is not None and len(reward.values) > 1:
        say(Text(f"reward in training: {reward.values[0]:.3f} -> {reward.values[-1]:.3f}"))
    if status is not None and status.restarts:
        say(Text(_setbacks(status)))
    say(Text(f"time: {duration(ending.seconds)}"))
    run = RunDirectory(directory)
    say(Text.assemble("run directory: ", (run.address, "bold")))
    if ending.state != "finished" and ending.checkpoint:
        say(_next_step("go on", f"slipstream train --resume {shlex.quote(run.address)}"))
    if status is not None and status.step:
        say(_next_step("read answers", f"slipstream show {shlex.quote(run.address)}"))
        if (directory / CURVES_FILE).exists():
            say(_next_step("see curves", run.where(directory / CURVES_FILE)))
        is_here = run.address == str(directory)
        say(_next_step("all metrics", f"tensorboard --logdir {directory}" if is_here else run.where(run.metrics)))


def load_status(directory: Path) -> RunStatus | None:
    """Read a run's ``status.json``; ``None`` while there is none that can be read."""
    try:
        return RunStatus.load(directory / "status.json")
    except (OSError, ValueError):
        return None


def _sets(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return the names of the evaluated sets, in order."""
    return tuple(n.split("/")[1] for n in metrics if n.startswith("eval/") and n.endswith("/accuracy"))


def _accuracy_line(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> Text:
    """Write one held-out set's accuracy before and after, with the newest interval and the sampled figures."""
    metric = accuracy_metric(name)
    first, last = before.get(metric), after.get(metric)
    newest = after if last is not None else before
    line = Text(f"held-out accuracy ({name}): ")
    if first is not None and last is not None:
        line.append(f"{first:.3f} -> {last:.3f}", "bold")
        line.append(f" ({last - first:+.3f})", "green" if last >= first else "red")
    else:
        line.append(f"{newest[metric]:.3f}", "bold")
    if f"{metric}_low" in newest and f"{metric}_high" in newest:
        line.append(f", 95 % interval {newest[f'{metric}_low']:.3f} to {newest[f'{metric}_high']:.3f}")
    for figure, label in (("mean_at_k", "mean@k"), ("pass_at_k", "pass@k")):
        if f"eval/{name}/{figure}" in newest:
            line.append(f", {label} {newest[f'eval/{name}/{figure}']:.3f}")
    return line


def _next_step(what: str, command: str) -> Text:
    return Text.assemble(f"{what + ':':<15}", (command, "cyan"))


def _printer(console: Console) -> Callable[[Text], None]:
    return lambda text: console.print(text, soft_wrap=True, highlight=False)


def _bar(status: RunStatus, unicode: bool) -> RenderableType:
    """Steps done, and the time so far and to come."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    bar: RenderableType = ProgressBar(total=max(status.steps, 1), completed=status.step)
    if not unicode:
        bar = Text("#" * round(20 * status.step / max(status.steps, 1)))
    eta = "--" if status.eta_seconds is None else duration(status.eta_seconds)
    clock = duration(status.elapsed_s) if status.terminal else f"{duration(status.elapsed_s)}, ETA {eta}"
    grid.add_row(Text(f"step {status.step}/{status.steps}", style="bold"), bar, Text(clock))
    return grid


def _figures(status: RunStatus) -> RenderableType:
    """The newest headline figures: what is learned in the first row, what it costs in the second."""
    rows = (
        (("reward/mean", "reward", "{:.3f}"), ("accuracy/train", "accuracy", "{:.3f}")),
        (
            ("rollout/tokens_per_s", "tokens/s", "{:,.0f}"),
            ("rollout/length_mean", "length", "{:.0f}"),
            ("rollout/truncated_share", "truncated", "{:.0%}"),
            ("staleness/mean", "staleness", "{:.1f}"),
            ("waste/share", "waste", "{:.0%}"),
        ),
    )
    lines = []
    for row in rows:
        shown = [
            (label, template.format(status.latest[name]))
            for name, label, template in row
            if _tells(name, status.latest)
        ]
        if row is rows[0]:
            shown.insert(0, ("epoch", f"{status.epoch:.2f}"))
        if shown:
            line = Text(overflow="ellipsis", no_wrap=True)
            for label, value in shown:
                line.append(f"{label} ", "dim").append(value, "bold").append("   ")
            lines.append(line)
    return Group(*lines)


def _tells(name: str, figures: Mapping[str, float]) -> bool:
    """Return True for a figure that is there and, where 0 is what one expects, is not 0."""
    value = figures.get(name)
    return value is not None and (value >= 0.005 or name not in _ZERO_IS_NORMAL)


def _curves(status: RunStatus, unicode: bool) -> RenderableType:
    """Reward in training and accuracy on each held-out set, as rows of blocks with first and newest value."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, style="dim", max_width=24, overflow="ellipsis")
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, style="bold")
    names = [("reward", "reward/mean", "magenta")]
    names += [(f"{name} accuracy", accuracy_metric(name), "green") for name in status.evaluation_sets()]
    for label, metric, colour in names:
        curve = status.curves.get(metric)
        if curve is None or not curve.values:
            continue
        low, high = min(0.0, *curve.values), max(1.0, *curve.values)
        drawn = timeline(curve, _CURVE_WIDTH, steps=status.steps, low=low, high=high, unicode=unicode)
        grid.add_row(
            label, f"{curve.values[0]:.3f}", Text(drawn.ljust(_CURVE_WIDTH), colour), f"{curve.values[-1]:.3f}"
        )
    return grid


def _now(status: RunStatus) -> RenderableType:
    """What is being done, how far it is, and what it waits for."""
    text = Text(_DOING[status.state], style=_STYLES.get(status.state, "bold cyan"))
    if not status.terminal and status.samples_launched:
        text.append(f"  {status.samples_done}/{status.samples_launched} answers", "default")
    for wait in status.waits[:3]:
        style = "yellow" if wait.seconds >= LONG_WAIT_S else "dim"
        text.append(f"\nwaiting for: {wait_text(wait)}", style)
    return text


def _unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf") and not console.legacy_windows
