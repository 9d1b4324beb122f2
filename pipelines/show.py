"""Looking at a run from outside: what it is doing (`status`) and what the policy wrote (`show`).

Both read the run directory alone, so they work while the run goes on, after it ended, and after it was killed.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pipelines.liveness import SILENT_S, is_alive
from pipelines.monitoring import read_records
from pipelines.plots import CURVES_FILE, draw_curves
from pipelines.progress import duration, load_status, panel
from pipelines.remote_views import saved_steps
from pipelines.status import RunStatus
from pipelines.terminal import report_console
from storage.errors import UserError
from storage.records import TRAIN_SPLIT, GroupKey
from storage.remote.view import archive_of
from storage.run_directory import RunDirectory

Order = Literal["data", "best", "worst"]

_RECENT = 8
_ANSWERS = 4
_LINES = 12

_RECENT_COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("accuracy/train", "accuracy", "{:.3f}"),
    ("rollout/length_mean", "length", "{:.0f}"),
    ("rollout/truncated_share", "truncated", "{:.0%}"),
    ("rollout/tokens_per_s", "tokens/s", "{:,.0f}"),
    ("learner/entropy", "entropy", "{:.3f}"),
    ("time/step_s", "seconds", "{:.1f}"),
)


def show(
    run: Path,
    step: int | None = None,
    prompt: int | None = None,
    limit: int = 3,
    console: Console | None = None,
    *,
    split: str = TRAIN_SPLIT,
    order: Order = "data",
) -> None:
    """Print prompts, answers, rewards and advantages of one step.

    Args:
        run: Run directory.
        step: Step to print; the last one that was kept by default.
        prompt: Only the groups of this prompt (its row number in the data), with every answer whole.
        limit: Most groups to print.
        console: Where to print.
        split: ``train``, or the name of an evaluation set.
        order: Groups as they were trained, or by mean reward, best or worst first.

    Raises:
        UserError: No such run, step, split or prompt; the message says what there is.
    """
    console = console or report_console()
    directory = RunDirectory.open(run)
    archive = archive_of(directory)
    kept = archive.steps(split)
    if step is None:
        if not kept:
            others = ", ".join(archive.splits()) or "none at all"
            raise UserError(
                f"{directory.where(directory.rollouts)}: no rollouts of {split!r} are kept (there are: {others}): "
                "the run has finished no step yet, or tracking.rollouts is off"
            )
        step = kept[-1]
    groups = _groups(archive.read(step, split))
    if prompt is not None:
        there = sorted({key.prompt for key in groups})
        groups = {key: rows for key, rows in groups.items() if key.prompt == prompt}
        if not groups:
            raise UserError(
                f"prompt {prompt} was not part of step {step} of {split!r}; its prompts are {_ranges(there)}"
            )
    if order != "data":
        groups = dict(sorted(groups.items(), key=lambda item: _mean_reward(item[1]), reverse=order == "best"))
    console.print(Text(f"{directory.path.name}: {split} step {step}, {_overview(groups)}", style="bold"))
    for key, rows in list(groups.items())[:limit]:
        _print_group(console, key, rows, whole=prompt is not None)
    if len(groups) > limit:
        hint = f"{len(groups) - limit} more prompts (--limit); steps {_ranges(kept)} are kept (--step)"
        console.print(Text(hint, style="dim"))


def status(run: Path, console: Console | None = None) -> None:
    """Print what a run is doing, how it has gone so far, what it saved, and what to do next.

    Raises:
        UserError: No such run.
    """
    console = console or report_console()
    directory = RunDirectory.open(run)
    current = load_status(directory.path)
    records = read_records(directory.metrics)
    checkpoints = saved_steps(directory)
    if current is None:
        console.print(Text(f"{directory.address}: the run has not reported anything yet"), soft_wrap=True)
    else:
        if is_alive(current) is False:
            current = replace(current, eta_seconds=None, waits=())
        console.print(panel(current, unicode=console.encoding.lower().startswith("utf")))
        console.print(Text(_liveness(current), style=_liveness_style(current)), soft_wrap=True)
    _print_evaluations(console, records)
    _print_recent(console, records)
    saved = ", ".join(f"step {step}" for step in checkpoints) or "none yet"
    console.print(Text(f"checkpoints: {saved}"))
    for what, command in _next_commands(directory, current, bool(checkpoints)):
        console.print(Text.assemble(f"{what}: ", (command, "cyan")), soft_wrap=True)


def plot(run: Path, console: Console | None = None) -> Path:
    """Draw the learning curve of a run into ``RUN/curves.png``, say where it is, and return the path.

    Raises:
        UserError: No such run, or it has finished nothing yet.
    """
    directory = RunDirectory.open(run)
    picture = draw_curves(directory.metrics, directory.path / CURVES_FILE)
    (console or report_console()).print(Text(f"curves: {picture}"), soft_wrap=True)
    return picture


def _liveness(current: RunStatus) -> str:
    """Say whether a run goes on, and what became of it otherwise."""
    if current.terminal:
        reason = f": {current.message}" if current.message else ""
        return f"{current.state} {_ago(current)}{reason}"
    alive = is_alive(current)
    if alive is False:
        return f"dead: process {current.pid} is gone, it was killed or crashed while {current.state} ({_ago(current)})"
    where = f"process {current.pid} on {current.host}"
    if time.time() - current.updated > SILENT_S:
        return f"no news: {where} last reported {_ago(current)}; RUN/events.log may say why"
    return f"running: {where}, reported {_ago(current)}"


def _liveness_style(current: RunStatus) -> str:
    if current.terminal:
        return "green" if current.state == "finished" else "yellow"
    return "bold red" if is_alive(current) is False else "green"


def _next_commands(directory: RunDirectory, current: RunStatus | None, saved: bool) -> list[tuple[str, str]]:
    """Return what one can do with a run in this state, as (what for, command)."""
    commands = []
    place = shlex.quote(directory.address)
    over = current is not None and (current.terminal or is_alive(current) is False)
    if over and current is not None and current.state != "finished":
        if saved:
            commands.append(("go on", f"slipstream train --resume {place}"))
        else:
            commands.append(("start again", f"slipstream train {directory.config} run.name=NEW_NAME"))
    if current is not None and current.state == "finished" and saved:
        commands.append(("train longer", f"slipstream train --resume {place} run.steps={2 * current.steps}"))
    if archive_of(directory).splits():
        commands.append(("read answers", f"slipstream show {place}"))
    if directory.tensorboard.is_dir():
        commands.append(("all metrics", f"tensorboard --logdir {directory.path}"))
    return commands


def _print_evaluations(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """Print the accuracies of every held-out set by step, with their 95 % intervals."""
    found = [r for r in records if any(n.startswith("eval/") and n.endswith("/accuracy") for n in r)]
    if not found:
        return
    names = dict.fromkeys(n.split("/")[1] for r in found for n in r if n.startswith("eval/"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("step", justify="right")
    for name in names:
        table.add_column(Text(f"{name} accuracy"))
    for record in found[-_RECENT:]:
        table.add_row(str(record["step"]), *(_interval(record, f"eval/{name}/accuracy") for name in names))
    console.print(table)


def _print_recent(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """Print the headline metrics of the last steps, a row each."""
    found = [record for record in records if "reward/mean" in record][-_RECENT:]
    columns = [c for c in _RECENT_COLUMNS if any(record.get(c[0]) is not None for record in found)]
    if not found:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for _, label, _ in columns:
        table.add_column(label, justify="right")
    for record in found:
        table.add_row(*("-" if record.get(n) is None else template.format(record[n]) for n, _, template in columns))
    console.print(table)


def _interval(record: Mapping[str, Any], name: str) -> str:
    value, low, high = (record.get(f"{name}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return "-"
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _groups(table: Any) -> dict[GroupKey, list[dict[str, Any]]]:
    """Return the rows of a rollout table by group, in file order, siblings by index."""
    columns = [name for name in table.column_names if name not in ("tokens", "logprobs", "prompt_tokens")]
    groups: dict[GroupKey, list[dict[str, Any]]] = {}
    for row in table.select(columns).to_pylist():
        key = GroupKey(row["split"], row["epoch"], row["prompt"], row["duplicate"])
        groups.setdefault(key, []).append(row)
    return {key: sorted(rows, key=lambda row: row["sample_idx"]) for key, rows in groups.items()}


def _print_group(console: Console, key: GroupKey, rows: Sequence[dict[str, Any]], *, whole: bool) -> None:
    """Print one prompt and its answers, best first; unless ``whole``, long texts and the middle answers are cut."""
    console.print(Rule(Text(f"prompt {key.prompt} (epoch {key.epoch}), {_overview({key: rows})}"), align="left"))
    console.print(Padding(_clip(rows[0]["prompt_text"], console.width - 4, whole), (0, 0, 1, 2)))
    ranked = sorted(rows, key=_rank)
    left_out = 0 if whole else max(0, len(ranked) - _ANSWERS)
    shown = ranked if not left_out else [*ranked[: _ANSWERS // 2], *ranked[-(_ANSWERS - _ANSWERS // 2) :]]
    for position, row in enumerate(shown):
        if left_out and position == _ANSWERS // 2:
            console.print(Text(f"  ... {left_out} answers in between (--prompt {key.prompt} shows all)", style="dim"))
        console.print(_facts(row))
        console.print(Padding(_clip(row["text"], console.width - 6, whole), (0, 0, 0, 4)))
    console.print()


def _facts(row: Mapping[str, Any]) -> Text:
    """Write the line above an answer: reward, advantage, how it ended, length, versions, reward of each function."""
    text = Text(f"  #{row['sample_idx']}  ")
    if row["reward"] is None:
        text.append(f"no reward ({row['reward_status']})", "bold red")
    else:
        text.append(f"reward {row['reward']:.3g}", "bold green" if row["reward"] > 0 else "bold")
    if row["advantage"] is not None:
        text.append(f"  advantage {row['advantage']:+.2f}", "green" if row["advantage"] > 0 else "red")
    text.append(f"  {row['finish_reason']}", "" if row["finish_reason"] == "stop" else "yellow")
    text.append(f"  {row['length']} tokens  {_versions(row['segments'])}", "dim")
    parts = dict(row["reward_parts"])
    if len(parts) > 1:
        told = ("-" if value is None else f"{value:.3g}" for value in parts.values())
        text.append("  " + " ".join(f"{name}={value}" for name, value in zip(parts, told, strict=True)), "cyan")
    if row["error"]:
        text.append(f"  {' '.join(row['error'].split())[:200]}", "red")
    return text


def _versions(segments: Sequence[Mapping[str, Any]]) -> str:
    """Write the versions that wrote an answer: ``v3``, or ``v3-5`` for one that outlived an update."""
    versions = [s["version"] for s in segments if s["source"] == "policy"]
    if not versions:
        return "no version"
    low, high = min(versions), max(versions)
    return f"v{low}" if low == high else f"v{low}-{high}"


def _clip(text: str, width: int, whole: bool) -> Text:
    """Make control characters harmless, and keep the first and last lines of a text that fills many."""
    harmless = "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if not harmless.strip():
        return Text("(empty)", style="dim")
    width = max(width, 20)
    lines = [line[i : i + width] for line in harmless.split("\n") for i in range(0, max(len(line), 1), width)]
    if whole or len(lines) <= _LINES:
        return Text(harmless)
    head, tail = lines[: _LINES * 2 // 3], lines[-(_LINES - _LINES * 2 // 3) :]
    cut = Text(f"\n... {len(lines) - _LINES} lines ...\n", style="dim")
    return Text.assemble("\n".join(head), cut, "\n".join(tail))


def _overview(groups: Mapping[GroupKey, Sequence[Mapping[str, Any]]]) -> str:
    rows = [row for rows in groups.values() for row in rows]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no rewards"
    prompts = "" if len(groups) == 1 else f"{len(groups)} prompts, "
    return f"{prompts}{len(rows)} answer{'s' * (len(rows) != 1)}, {mean}"


def _mean_reward(rows: Sequence[Mapping[str, Any]]) -> float:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return sum(rewards) / len(rewards) if rewards else float("-inf")


def _rank(row: Mapping[str, Any]) -> tuple[float, int]:
    """Order answers by reward, best first and those without one last."""
    return (float("inf") if row["reward"] is None else -row["reward"], row["sample_idx"])


def _ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers briefly: ``1-4, 7, 9-12``; only both ends of a long list."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    told = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(told if len(told) <= 12 else [*told[:6], "...", *told[-5:]])


def _ago(current: RunStatus) -> str:
    return f"{duration(max(0.0, time.time() - current.updated))} ago"
