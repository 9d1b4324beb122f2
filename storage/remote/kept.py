"""What a machine keeps of remote runs for its readers and roles: bounded, and never taken from whoever uses it.

A folder each below ``<cache>/views`` (files that commands have read) and ``<cache>/fetched`` (models that roles have
loaded). Everything there can be fetched again, so the least recently used goes first. A process that uses a folder
holds a shared lock on its note until it ends; only who gets that lock for itself may remove the folder.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, get_args

import xxhash

from storage.files import StorageError, describe_failure, try_lock
from storage.models import cache_directory
from storage.remote.marker import read_marker

log = logging.getLogger(__name__)

Kind = Literal["views", "fetched"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_AGE_S = 30 * 86400.0
"""A folder that nobody has used for so long goes."""
MAX_BYTES = 20 * 10**9
"""Most that all folders may hold, where that is less than the next number."""
DISK_SHARE = 0.1
"""Share of the disk that they may hold together."""

_NOTE = ".used"
_GOING = ".going-"
_UNLOCKABLE_S = 86400.0
"""Where the file system has no locks, a folder counts as in use for so long after somebody began to use it."""

_held: dict[Path, IO[str]] = {}
"""Notes of the folders that this process uses, open and locked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One folder.

    Attributes:
        kind: ``views`` or ``fetched``.
        path: Where it is.
        uri: The run that it is of; empty where that is not known.
        size: Bytes of its files.
        used: When somebody began to use it last, in seconds since the epoch.
        busy: A process uses it.
    """

    kind: Kind
    path: Path
    uri: str
    size: int
    used: float
    busy: bool


def keep(kind: Kind, uri: str) -> Path:
    """Return the folder for what is fetched of the run at ``uri``; it stays at least until this process ends.

    A new folder makes room for itself: see :func:`trim`.

    Raises:
        StorageError: The disk refused it.
    """
    folder = cache_directory().absolute() / kind / xxhash.xxh3_64_hexdigest(uri.encode())
    try:
        is_new = not folder.is_dir()
        if folder not in _held or not _is_open_at(_held[folder], folder):
            _held[folder] = _hold(folder, uri)
        os.utime(folder / _NOTE)
    except OSError as error:
        raise StorageError(
            f"{describe_failure('cannot write', folder, error)}, or set SLIPSTREAM_CACHE to another folder"
        ) from error
    if is_new:
        trim()
    return folder


def entries() -> list[Kept]:
    """Return all folders, the least recently used first."""
    found = []
    for kind in KINDS:
        place = cache_directory().absolute() / kind
        for folder in sorted(place.iterdir()) if place.is_dir() else ():
            if folder.is_dir() and not folder.name.startswith("."):
                with suppress(FileNotFoundError):  # somebody has just removed it
                    found.append(_look(kind, folder))
    return sorted(found, key=lambda entry: entry.used)


def limit_bytes() -> int:
    """Return how much all folders may hold together, on this disk."""
    place = cache_directory().absolute()
    disk = shutil.disk_usage(next(folder for folder in (place, *place.parents) if folder.exists())).total
    return min(MAX_BYTES, int(DISK_SHARE * disk)) if disk else MAX_BYTES


def trim(*, max_bytes: int | None = None, max_age_s: float = MAX_AGE_S) -> list[Kept]:
    """Remove what was not used for long, then the least recently used until the rest fits; returns what has gone.

    What is in use stays, whatever the limits say. A disk that refuses to give something up is no reason to fail.

    Args:
        max_bytes: Most that may be left; None: :func:`limit_bytes`.
        max_age_s: Longest time without use, in seconds.
    """
    gone: list[Kept] = []
    try:
        _finish_removals()
        limit, now, there = limit_bytes() if max_bytes is None else max_bytes, time.time(), entries()
        left = sum(entry.size for entry in there)
        for entry in there:
            if (now - entry.used > max_age_s or left > limit) and remove(entry):
                left -= entry.size
                gone.append(entry)
    except OSError as error:
        log.warning("the cache was not trimmed: %s", error)
    return gone


def _hold(folder: Path, uri: str) -> IO[str]:
    """Open and lock the note of a folder, which is made where it is missing. Waits for a removal that has begun."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            note = (folder / _NOTE).open("a+", encoding="utf-8")
        except FileNotFoundError:  # removed since
            continue
        with suppress(OSError):  # a file system without locks: the time of use has to do
            fcntl.flock(note, fcntl.LOCK_SH)
        if not _is_open_at(note, folder):
            note.close()
            continue
        if not os.fstat(note.fileno()).st_size:
            note.write(json.dumps({"uri": uri}))
            note.flush()
        return note


def _is_open_at(note: IO[str], folder: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(note.fileno()), os.stat(folder / _NOTE))
    return False


def _look(kind: Kind, folder: Path) -> Kept:
    note = folder / _NOTE
    uri, used, busy = "", folder.stat().st_mtime, False
    with suppress(FileNotFoundError):
        used = note.stat().st_mtime
        busy = _is_busy(note, used)
    with suppress(OSError, ValueError, KeyError, TypeError):
        uri = str(json.loads(note.read_text(encoding="utf-8"))["uri"])
    if not uri:  # made before there were notes
        marker = next((found for child in folder.iterdir() if (found := read_marker(child)) is not None), None)
        uri = "" if marker is None else marker.uri
    return Kept(kind=kind, path=folder, uri=uri, size=folder_size(folder), used=used, busy=busy)


def _is_busy(note: Path, used: float) -> bool:
    try:
        descriptor = try_lock(note)
    except BlockingIOError:
        return True
    if descriptor is None:
        return time.time() - used < _UNLOCKABLE_S
    os.close(descriptor)
    return False


def remove(entry: Kept) -> bool:
    """Remove a folder unless somebody uses it; returns whether it has gone."""
    going = entry.path.with_name(f"{_GOING}{entry.path.name}-{os.getpid()}")
    try:
        descriptor = try_lock(entry.path / _NOTE)
        try:
            if descriptor is None and time.time() - entry.used < _UNLOCKABLE_S:
                return False
            entry.path.rename(going)  # with the lock: whoever waits for it finds that the note has moved
        finally:
            if descriptor is not None:
                os.close(descriptor)
    except OSError:  # in use, or somebody else was quicker
        return False
    shutil.rmtree(going, ignore_errors=True)
    return True


def _finish_removals() -> None:
    """Remove what a process that died had begun to remove."""
    for kind in KINDS:
        for going in (cache_directory().absolute() / kind).glob(f"{_GOING}*"):
            shutil.rmtree(going, ignore_errors=True)


def folder_size(folder: Path) -> int:
    """Return the bytes of all files below a folder; what disappears meanwhile counts nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
