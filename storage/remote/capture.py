"""A consistent look at a run directory that is being written: open files and their sizes at one moment.

Files are held open, so that what is pruned, compacted or replaced meanwhile can still be sent. Three things change
together and are looked at twice, until both looks agree: the set of complete checkpoints with the ledger, which is
compacted up to the oldest of them, and the manifest of the history with its files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from storage.checkpoints import MANIFEST as CHECKPOINT_MARKER
from storage.files import StorageError, describe_failure

LIVE = ("config.yaml", "status.json", "curves.png")
"""Files that are sent as they are, beside the index: what people look at, and what makes a folder a run."""

_HISTORY_MANIFEST = "history/MANIFEST.json"
_ATTEMPTS = 20


class Stamp(NamedTuple):
    """What tells that a file is the same as before without reading it."""

    inode: int
    size: int
    changed_ns: int


@dataclass(slots=True)
class CapturedFile:
    """A file that may have changed: an open descriptor, and how many of its bytes count."""

    name: str
    descriptor: int
    stamp: Stamp


@dataclass(slots=True)
class Capture:
    """What a run directory holds. Close it, or descriptors leak.

    Attributes:
        changed: Files that are new or not as they were.
        unchanged: Names of those that are.
        live: Content of the files of :data:`LIVE` that are there.
    """

    changed: list[CapturedFile] = field(default_factory=list)
    unchanged: set[str] = field(default_factory=set)
    live: dict[str, bytes] = field(default_factory=dict)

    def close(self) -> None:
        """Let go of the files."""
        for file in self.changed:
            with suppress(OSError):
                os.close(file.descriptor)
        self.changed.clear()

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def capture(directory: Path, known: Mapping[str, Stamp]) -> Capture:
    """Look at a run directory.

    Args:
        directory: The run directory.
        known: Files that need not be opened while they are as they were.

    Raises:
        StorageError: The disk refused it, or the directory changes faster than it can be looked at.
    """
    try:
        for _ in range(_ATTEMPTS):
            before = _versions(directory)
            found = _look(directory, known, complete=before[0])
            if found is not None and _versions(directory) == before:
                return found
            if found is not None:
                found.close()
    except OSError as error:
        raise StorageError(describe_failure("cannot look at", directory, error)) from error
    raise StorageError(f"{directory} changes faster than it can be mirrored")


def _versions(directory: Path) -> tuple[frozenset[tuple[str, int]], bytes]:
    """The complete checkpoints with the inodes of their markers, and the manifest of the history."""
    markers = set()
    for marker in directory.glob(f"checkpoints/step_*/{CHECKPOINT_MARKER}"):
        with suppress(FileNotFoundError):
            markers.add((marker.parent.name, marker.stat().st_ino))
    manifest = directory / _HISTORY_MANIFEST
    with suppress(FileNotFoundError):
        return frozenset(markers), manifest.read_bytes()
    return frozenset(markers), b""


def _look(directory: Path, known: Mapping[str, Stamp], complete: frozenset[tuple[str, int]]) -> Capture | None:
    """Open what has changed; None when something vanished that may not: then the look has to be repeated."""
    found = Capture()
    steps = {name for name, _ in complete}
    try:
        for name in sorted(_names(directory, steps), key=_last_the_growing):
            if name in LIVE:
                with suppress(FileNotFoundError):
                    found.live[name] = (directory / name).read_bytes()
                continue
            try:
                status = (directory / name).stat()
                if known.get(name) == _stamp(status):
                    found.unchanged.add(name)
                    continue
                descriptor = os.open(directory / name, os.O_RDONLY)
            except FileNotFoundError:
                if name.startswith(("checkpoints/", "history/")):
                    found.close()
                    return None
                continue
            found.changed.append(CapturedFile(name, descriptor, _stamp(os.fstat(descriptor))))
    except BaseException:
        found.close()
        raise
    return found


def _names(directory: Path, complete: set[str]) -> Iterator[str]:
    """Paths of all files that count: nothing hidden, no checkpoint in the making."""
    for folder, folders, files in os.walk(directory):
        relative = Path(folder).relative_to(directory).as_posix()
        folders[:] = [name for name in folders if not name.startswith(".")]
        if relative == "checkpoints":
            folders[:] = [name for name in folders if name in complete]
        for name in files:
            if not name.startswith("."):
                yield name if relative == "." else f"{relative}/{name}"


def _last_the_growing(name: str) -> tuple[int, str]:
    """Checkpoints before the ledger that must reach as far as they do; then by name."""
    return (0 if name.startswith("checkpoints/") else 1, name)


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


def stamp_of(path: Path) -> Stamp:
    """Return the stamp of a file. Raises ``OSError``."""
    return _stamp(path.stat())
