"""Lists the runs in a folder or below a URI, a line each."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.liveness import condition
from pipelines.progress import duration, load_status
from pipelines.remote_views import at_work_here
from pipelines.status import RunStatus, accuracy_metric
from storage.errors import UserError
from storage.remote.address import Address, is_address
from storage.remote.capture import LIVE
from storage.remote.objects import Objects
from storage.remote.staging import run_names
from storage.run_directory import RunDirectory, run_names_in

_READERS = 16
_STYLES = {"finished": "green", "failed": "red", "dead": "red", "no news": "yellow", "stopped": "yellow"}


@dataclass(frozen=True, slots=True)
class _Run:
    place: str
    status: RunStatus | None

    @property
    def updated(self) -> float:
        return 0.0 if self.status is None else self.status.updated


def list_runs(place: str | None, parent: Path, console: Console, *, limit: int) -> None:
    """Print the runs at a place, the one that changed last first: state, step, reward, accuracy.

    Args:
        place: A folder of runs or a URI below which there are some; None: ``parent``, and the runs that are at work on
            this machine with their directory at a URI.
        parent: Folder of runs.
        console: Where to print.
        limit: Most runs to print.

    Raises:
        UserError: There are no runs there; or it is a run itself.
        StorageError: The store failed.
    """
    if place is not None and is_address(place):
        runs = _below(Address.parse(place, "place"))
    else:
        folder = parent if place is None else Path(place)
        if RunDirectory(folder).config.is_file():
            raise UserError(
                f"{folder} is a run: look at it with `slipstream status {folder}`, or name the folder above"
            )
        runs = [_Run(name, load_status(folder / name)) for name in run_names_in(folder)]
        if place is None:
            runs += [_Run(RunDirectory(path).address, load_status(path)) for path in at_work_here()]
    if not runs:
        raise UserError(
            f"{place or parent} holds no runs: start one with `slipstream train`, or name a folder or a URI that does"
        )
    runs.sort(key=lambda run: run.updated, reverse=True)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("run", "state", "step", "reward", "accuracy", "changed"):
        table.add_column(name, justify="right" if name in ("step", "reward", "accuracy") else "left")
    for run in runs[:limit]:
        table.add_row(*_cells(run))
    console.print(table)
    if len(runs) > limit:
        console.print(Text(f"{len(runs) - limit} older runs (--limit)", style="dim"))


def _below(address: Address) -> list[_Run]:
    objects = Objects(address)
    if objects.info(LIVE[0]) is not None:
        raise UserError(
            f"{address} is a run: look at it with `slipstream status '{address}'`, or name what is above it"
        )

    def one(name: str) -> _Run:
        data = objects.read(f"{name}/{LIVE[1]}")
        status = None
        if data is not None:
            # written by another version, or by somebody else
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                status = RunStatus.from_json(data.decode("utf-8", "replace"))
        return _Run(name, status)

    with ThreadPoolExecutor(_READERS) as readers:  # a store answers in tens of milliseconds, and many at once
        return list(readers.map(one, run_names(address)))


def _cells(run: _Run) -> tuple[Text | str, ...]:
    state = condition(run.status)
    told = Text(state, style=_STYLES.get(state, ""))
    if run.status is None:
        return Text(run.place), told, "-", "-", "-", "-"
    status = run.status
    step = f"{status.step}/{status.steps}" if status.steps else "evaluation"
    sets = status.evaluation_sets()
    accuracy = status.latest.get(accuracy_metric(sets[0])) if sets else None
    changed = f"{duration(max(0.0, time.time() - status.updated))} ago"
    return Text(run.place), told, step, _number(status.latest.get("reward/mean")), _number(accuracy), changed


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
