"""Checkpoints of named components, whole or absent.

Layout: ``RUN/checkpoints/step_000010/{<component>/..., CHECKPOINT.json}``. Everything is written to a temporary folder,
hashed, synced and renamed; the rename is the commit. Nothing older is touched before it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from storage.files import (
    DISK_ERRORS,
    StorageError,
    atomic_write,
    describe_failure,
    fsync_directory,
    fsync_file,
    require_free_space,
    try_lock,
)

logger = logging.getLogger(__name__)

MANIFEST = "CHECKPOINT.json"
FORMAT_VERSION = 1

_STEP = re.compile(r"step_(\d{6,})$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*$")
_WRITING, _REPLACED, _TRASH = ".writing_", ".replaced_", ".trash_"


class CheckpointError(StorageError):
    """A checkpoint could not be written or is damaged; the message names the path and what to do."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Size in bytes and xxh3-64 (hexadecimal) of one file of a checkpoint."""

    size: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint.

    Attributes:
        step: Optimiser steps done when it was taken.
        path: Its folder.
        meta: What the writer gave to :meth:`CheckpointWriter.commit`.
        components: Names of its components, sorted.
        files: Every file by its path relative to ``path``.
    """

    step: int
    path: Path
    meta: Mapping[str, Any]
    components: tuple[str, ...]
    files: Mapping[str, StoredFile] = field(repr=False)

    def component(self, name: str) -> Path:
        """Folder of one component; raises ``CheckpointError`` if the checkpoint has none of that name."""
        if name not in self.components:
            raise CheckpointError(f"{self.path} has no component {name!r}, only {', '.join(self.components) or 'none'}")
        return self.path / name

    def size(self) -> int:
        """Bytes of all files together."""
        return sum(stored.size for stored in self.files.values())

    def verify(self) -> None:
        """Read and hash every file; raises ``CheckpointError`` that names each missing, cut or changed one."""
        damage = self._missing_or_cut()
        for name, stored in self.files.items():
            if name not in damage and _hash(self.path / name) != stored.xxh3:
                damage[name] = "content differs from what was written"
        if damage:
            listed = "; ".join(f"{name}: {what}" for name, what in damage.items())
            raise CheckpointError(f"checkpoint {self.path} is damaged ({listed}): resume from an earlier one")

    def _missing_or_cut(self) -> dict[str, str]:
        damage = {}
        for name, stored in self.files.items():
            path = self.path / name
            if not path.is_file():
                damage[name] = "missing"
            elif path.stat().st_size != stored.size:
                damage[name] = f"{path.stat().st_size} bytes instead of {stored.size}"
        return damage


class CheckpointStore:
    """The checkpoints of one run. One process writes; others may read at the same time."""

    def __init__(self, directory: Path, keep_last: int = 2, in_use: int | None = None) -> None:
        """Open the store and clear away what a killed writer left; the folder need not exist yet.

        Args:
            directory: ``RUN/checkpoints``.
            keep_last: Complete checkpoints kept, at least 1.
            in_use: Step of one that is kept beside them: of the checkpoint that the run began with, from which whatever
                is replaced later loads its model.

        Raises:
            CheckpointError: The folder cannot be listed.
        """
        if keep_last < 1:
            raise ValueError("keep_last must be at least 1")
        self.directory = directory
        self.keep_last = keep_last
        self._in_use = in_use
        try:
            self._folders()
        except OSError as error:
            raise CheckpointError(describe_failure("cannot list checkpoints in", directory, error)) from error
        # Held by a living writer, not there yet, or not ours to write: then there is nothing to clear away.
        with suppress(OSError):
            lock = self._lock()
            if lock is not None:
                self._recover()
                os.close(lock)

    def begin(self, step: int) -> CheckpointWriter:
        """Start to write the checkpoint of ``step``; it replaces one of the same step when it is committed.

        Raises:
            CheckpointError: No space for another checkpoint of the present size, or no permission.
        """
        lock = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = self._lock()
            self._recover()
            newest = self.latest()
            if newest is not None:
                require_free_space(self.directory, newest.size(), f"the checkpoint of step {step}")
            return CheckpointWriter(self, step, lock)
        except BaseException as error:
            if lock is not None:
                os.close(lock)
            if isinstance(error, BlockingIOError):
                raise CheckpointError(f"{self.directory}: another checkpoint is being written there now") from None
            if isinstance(error, OSError):
                raise _write_error(self.directory, step, error) from error
            if isinstance(error, StorageError):
                raise CheckpointError(f"{error}. Earlier checkpoints are intact.") from error
            raise

    def checkpoints(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first. Incomplete ones are skipped with a warning."""
        found = []
        for path in self._folders():
            try:
                found.append(_load(path))
            except CheckpointError as error:
                logger.warning("skipping %s", error)
        return found

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose files are all there in their full size; :meth:`Checkpoint.verify` hashes them."""
        for path in reversed(self._folders()):
            try:
                return _load(path)
            except CheckpointError as error:
                logger.warning("skipping %s", error)
        return None

    def truncate_after(self, step: int) -> None:
        """Remove checkpoints later than ``step``: call it when a run goes on from ``step`` on another path."""
        for path in self._folders():
            if _step_of(path) > step:
                self._discard(path)

    def _folders(self) -> list[Path]:
        if not self.directory.exists():
            return []
        return sorted((p for p in self.directory.iterdir() if _STEP.match(p.name)), key=_step_of)

    def _lock(self) -> int | None:
        return try_lock(self.directory / ".lock")

    def _recover(self) -> None:
        """Undo a replacement that stopped half-way and remove leftovers; the caller holds the lock."""
        for old in self.directory.glob(f"{_REPLACED}*"):
            target = self.directory / old.name.removeprefix(_REPLACED)
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(target)
        for prefix in (_WRITING, _TRASH):
            for leftover in self.directory.glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def _discard(self, path: Path) -> None:
        # Renamed first: a removal that is cut short must not leave something that looks like a checkpoint.
        trash = path.with_name(f"{_TRASH}{path.name}")
        try:
            shutil.rmtree(trash, ignore_errors=True)
            path.rename(trash)
            shutil.rmtree(trash)
        except OSError as error:
            logger.warning(describe_failure("cannot remove old checkpoint", path, error))

    def _prune(self, committed: Path) -> None:
        """Keep the newest complete ones; an incomplete one goes as soon as a newer complete one exists."""
        complete = [checkpoint.path for checkpoint in self.checkpoints()]
        kept = {committed, *complete[-self.keep_last :]}
        for path in self._folders():
            if path in kept or _step_of(path) == self._in_use:
                continue
            if path in complete or _step_of(path) < _step_of(committed):
                self._discard(path)


class CheckpointWriter:
    """A checkpoint in the making. As a context manager it is abandoned unless it was committed.

    Leaving the block by an error of the disk raises ``CheckpointError`` with the path and what to do.

    Attributes:
        step: Optimiser steps done.
        path: The temporary folder; each folder in it becomes a component, whoever makes it.
    """

    def __init__(self, store: CheckpointStore, step: int, lock: int | None) -> None:
        self.step = step
        self._store = store
        self._final = store.directory / f"step_{step:06d}"
        self.path = store.directory / f"{_WRITING}{self._final.name}"
        self.path.mkdir()
        self._lock = lock
        self._open = True

    def component(self, name: str) -> Path:
        """Folder to write component ``name`` into; created on first use. Raises ``OSError``."""
        if not _NAME.match(name) or name == MANIFEST:
            raise ValueError(f"not a component name: {name!r}")
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        return folder

    def commit(self, meta: Mapping[str, Any]) -> Checkpoint:
        """Make the checkpoint durable and visible, then remove those beyond ``keep_last``.

        Args:
            meta: Small JSON values: offsets, cursors, versions.

        Raises:
            CheckpointError: The disk refused it. Earlier checkpoints are as they were.
        """
        if not self._open:
            raise ValueError(f"the checkpoint of step {self.step} was committed or abandoned before")
        try:
            self._seal(meta)
            self._publish()
        except BaseException as error:
            disk = _disk_error(error, self._store.directory)
            self.abandon()
            if disk is not None:
                raise _write_error(self._final, self.step, disk) from error
            raise
        self._release()
        checkpoint = _load(self._final)
        self._store._prune(self._final)
        return checkpoint

    def abandon(self) -> None:
        """Drop what was written; earlier checkpoints stay."""
        if self._open:
            shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        disk = None if isinstance(error, CheckpointError) else _disk_error(error, self._store.directory)
        self.abandon()
        if disk is not None:
            raise _write_error(self._final, self.step, disk) from error

    def _seal(self, meta: Mapping[str, Any]) -> None:
        files = {}
        for path in sorted(_walk(self.path)):
            fsync_file(path)
            files[path.relative_to(self.path).as_posix()] = {"size": path.stat().st_size, "xxh3": _hash(path)}
        for folder, _, _ in os.walk(self.path):
            fsync_directory(Path(folder))
        plain_meta = json.loads(json.dumps(dict(meta)))  # as a reader will see it, or the digests would differ
        content = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "components": sorted(child.name for child in self.path.iterdir() if child.is_dir()),
            "meta": plain_meta,
            "files": files,
        }
        text = json.dumps({**content, "xxh3": _digest(content)}, indent=2, sort_keys=True)
        atomic_write(self.path / MANIFEST, text.encode() + b"\n")

    def _publish(self) -> None:
        replaced = self._final.with_name(f"{_REPLACED}{self._final.name}")
        if self._final.exists():
            self._final.rename(replaced)
        try:
            self.path.rename(self._final)
        except OSError:
            if replaced.exists():
                replaced.rename(self._final)
            raise
        fsync_directory(self._store.directory)
        shutil.rmtree(replaced, ignore_errors=True)

    def _release(self) -> None:
        self._open = False
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _load(path: Path) -> Checkpoint:
    """Read the manifest at ``path`` and check that every file is there; raises ``CheckpointError``."""
    manifest = path / MANIFEST
    try:
        content = json.loads(manifest.read_bytes())
        digest = content.pop("xxh3")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: incomplete, {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest} is damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(describe_failure("cannot read", manifest, error)) from error
    if digest != _digest(content):
        raise CheckpointError(f"{manifest} is damaged: its checksum differs")
    if content["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{manifest} has format version {content['format_version']}, this program reads {FORMAT_VERSION}"
        )
    checkpoint = Checkpoint(
        step=content["step"],
        path=path,
        meta=content["meta"],
        components=tuple(content["components"]),
        files={name: StoredFile(**stored) for name, stored in content["files"].items()},
    )
    damage = checkpoint._missing_or_cut()
    if damage:
        raise CheckpointError(f"{path}: incomplete, {'; '.join(f'{name}: {what}' for name, what in damage.items())}")
    return checkpoint


def _write_error(path: Path, step: int, error: OSError) -> CheckpointError:
    described = describe_failure(f"cannot write the checkpoint of step {step} to", path, error)
    return CheckpointError(f"{described}. Earlier checkpoints are intact.")


def _disk_error(error: BaseException | None, directory: Path) -> OSError | None:
    """Return the system's error behind ``error``, if the disk caused it; call it before anything is cleared away.

    Savers of tensors wrap the system's error in types of their own: then its text, or the full disk, gives it away.
    """
    if not isinstance(error, Exception):
        return None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in DISK_ERRORS:
            return cause
        cause = cause.__cause__
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        if os.strerror(number).lower() in str(error).lower():
            return OSError(number, os.strerror(number))
    with suppress(OSError):
        usage = shutil.disk_usage(directory)
        if usage.total and usage.free < 4096:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


def _step_of(path: Path) -> int:
    match = _STEP.match(path.name)
    return int(match.group(1)) if match else -1


def _walk(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def _hash(path: Path, block: int = 1 << 20) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as source:
        while data := source.read(block):
            digest.update(data)
    return digest.hexdigest()
