"""Prints what a machine keeps in Slipstream's cache folder."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.progress import duration
from storage.files import try_lock
from storage.models import cache_directory
from storage.remote.kept import MAX_AGE_S, Kept, entries, folder_size, limit_bytes
from storage.remote.marker import read_marker

_MODELS, _RUNS = "models", "runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    kind: str
    what: str
    size: int
    used: float
    state: str
    path: Path


def print_cache(console: Console) -> None:
    """Print every folder with kind, content, size, age and state, and the bound of those that are fetched."""
    root = cache_directory().absolute()
    kept = entries()
    lines = [*_models(root / _MODELS), *(_copy(entry) for entry in kept), *_runs(root / _RUNS)]
    if not lines:
        console.print(Text(f"{root}: nothing is kept"), soft_wrap=True)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("kind", "what", "size", "last used", "state"):
        table.add_column(name, justify="right" if name == "size" else "left")
    for line in lines:
        age = f"{duration(max(0.0, time.time() - line.used))} ago"
        table.add_row(line.kind, Text(line.what), _size(line.size), age, line.state)
    console.print(table)
    console.print(Text(f"{root}: {_size(sum(line.size for line in lines))}"), soft_wrap=True)
    bound, days = _size(limit_bytes()), MAX_AGE_S / 86400
    console.print(
        Text(
            f"views and fetched hold {_size(sum(entry.size for entry in kept))} of at most {bound}; what was not used "
            f"for {days:.0f} days goes when the next one comes; `slipstream cache clear` removes them now",
            style="dim",
        ),
        soft_wrap=True,
    )
    for line in lines:
        if line.kind == _RUNS and line.state != "at work":
            console.print(
                Text(
                    f"{line.path} may hold what was not sent: `slipstream train --resume '{line.what}'` sends it, or "
                    "remove the folder",
                    style="yellow",
                ),
                soft_wrap=True,
            )


def print_removed(console: Console, gone: Sequence[Kept], stayed: Sequence[Kept]) -> None:
    """Print what `slipstream cache clear` has removed, and what stays because it is in use."""
    console.print(f"removed {len(gone)} copies of remote runs, {_size(sum(entry.size for entry in gone))}")
    for entry in stayed:
        console.print(Text(f"in use, and not removed: {entry.path} ({entry.uri or 'unknown run'})"), soft_wrap=True)


def _copy(entry: Kept) -> _Line:
    return _Line(
        kind=entry.kind,
        what=entry.uri or entry.path.name,
        size=entry.size,
        used=entry.used,
        state="in use" if entry.busy else "can be fetched again",
        path=entry.path,
    )


def _models(folder: Path) -> list[_Line]:
    """Models that were built or converted here."""
    return [
        _Line(
            kind=_MODELS,
            what=path.name,
            size=folder_size(path),
            used=max(path.stat().st_atime, path.stat().st_mtime),
            state="can be made again",
            path=path,
        )
        for path in sorted(folder.glob("*/"))
        if not path.name.startswith(".")
    ]


def _runs(folder: Path) -> list[_Line]:
    """Folders of runs whose directory is a URI: at work, or left by one that did not end well."""
    lines = []
    for path in sorted(folder.glob("*/*/")):
        marker = read_marker(path)
        lines.append(
            _Line(
                kind=_RUNS,
                what=str(path) if marker is None else marker.uri,
                size=folder_size(path),
                used=path.stat().st_mtime,
                state="at work" if _is_locked(path / ".lock") else "left behind",
                path=path,
            )
        )
    return lines


def _is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        descriptor = try_lock(path)
    except BlockingIOError:
        return True
    if descriptor is not None:
        os.close(descriptor)
    return False


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count} B"
