"""Durable file operations, and what to tell a person when the disk refuses one.

Everything that must survive a crash goes through here: a file is either absent, whole and old, or whole and new. A
rename is durable only after its folder was synced too, so both are always done together.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.errors import UserError

_ADVICE = {
    errno.EIO: "the disk reports an input/output error: check it and the system log",
    errno.ENOSPC: "free space on that disk, or point run.directory at a larger one",
    errno.EDQUOT: "raise the quota or free space, or point run.directory elsewhere",
    errno.EFBIG: "the limit on file size (ulimit -f, or the file system) is too small: raise it",
    errno.EACCES: "make the folder writable for this user, or point run.directory elsewhere",
    errno.EPERM: "make the folder writable for this user, or point run.directory elsewhere",
    errno.EROFS: "the file system is read-only: point run.directory at a writable one",
    errno.ENOENT: "the path has gone: was the folder removed while the run was going on?",
    errno.ENOTDIR: "a part of the path is a file, not a folder: remove it or choose another path",
}


_LOCK_POLL_S = 0.05

DISK_ERRORS = frozenset(_ADVICE)
"""Values of ``errno`` that the disk or its permissions cause."""

FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
"""Those of them that say that there is no room."""


class StorageError(UserError):
    """The disk refused or lost something; the message names the path and what to do."""


def describe_failure(action: str, path: Path, error: OSError) -> str:
    """Return one sentence for people: what failed, where, why, and what to do."""
    number = error.errno or 0
    advice = _ADVICE.get(number, "check the disk and the mount")
    return f"{action} {path}: {os.strerror(number) if number else error}; {advice}"


def try_lock(path: Path) -> int | None:
    """Lock the file at ``path`` (created if needed) until the returned descriptor is closed or the process ends.

    Returns ``None`` where the file system has no locks. Raises ``BlockingIOError`` when another process, or another
    descriptor of this one, holds the lock, and ``OSError`` when the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            return None
        raise
    return descriptor


def await_lock(path: Path, patience_s: float) -> int | None:
    """As :func:`try_lock`, but wait for up to ``patience_s`` seconds for a holder that is about to end."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return try_lock(path)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LOCK_POLL_S)


def fsync_directory(path: Path) -> None:
    """Make renames, creations and removals inside ``path`` durable. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the content of one file durable. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; what was written there replaces ``path`` when the block ends well.

    A reader sees the old file or the whole new one, also after a crash or a power cut.

    Raises:
        StorageError: The disk refused it; ``path`` is as it was before.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        fsync_file(temporary)
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except OSError as error:
        raise StorageError(describe_failure("cannot write", path, error)) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def atomic_write(path: Path, data: bytes) -> None:
    """Replace the content of ``path`` by ``data``, durably and atomically. Raises ``StorageError``."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


def remove_temporaries(folder: Path) -> None:
    """Remove what killed writers of ``atomic_file`` left in ``folder``; call it only while nobody else writes there."""
    for leftover in folder.glob(".*.tmp-*"):
        with suppress(OSError):
            leftover.unlink()


def truncate_file(path: Path, size: int) -> None:
    """Cut ``path`` to ``size`` bytes, durably.

    Raises:
        StorageError: The file is missing, is shorter than ``size``, or the disk refused it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            present = os.fstat(descriptor).st_size
            if present < size:
                raise StorageError(f"{path} has {present} bytes where {size} were saved: it was cut by something else")
            if present > size:
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(describe_failure("cannot truncate", path, error)) from error


def require_free_space(path: Path, nbytes: int, purpose: str) -> None:
    """Raise ``StorageError`` unless the disk that holds ``path`` has ``nbytes`` free.

    A file system that reports a total size of 0 (some network mounts do) is taken at its word to be unlimited.
    """
    usage = shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists()))
    if usage.total and usage.free < nbytes:
        raise StorageError(
            f"{path}: {purpose} needs {nbytes / 2**20:.1f} MiB, {usage.free / 2**20:.1f} MiB are free; "
            f"{_ADVICE[errno.ENOSPC]}"
        )


class AppendFile:
    """A file that only grows. Each write reaches the operating system at once, the disk on :meth:`sync`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            is_new = not path.exists()
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            if is_new:
                fsync_directory(path.parent)
            self.size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise StorageError(describe_failure("cannot open", path, error)) from error

    def write(self, data: bytes) -> None:
        """Append ``data`` whole, or raise ``StorageError`` and leave the file as it was."""
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            # Half a line must not stay: the next append would be glued to it.
            with suppress(OSError):
                os.ftruncate(self._descriptor, self.size)
            raise StorageError(describe_failure("cannot append to", self.path, error)) from error
        self.size += len(data)

    def sync(self) -> None:
        """Return when everything written is on the disk. Raises ``StorageError``."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise StorageError(describe_failure("cannot sync", self.path, error)) from error

    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes, durably. Raises ``StorageError``, also when it is shorter."""
        truncate_file(self.path, size)
        self.size = size

    def close(self) -> None:
        """Sync and close; closing twice is allowed."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise StorageError(describe_failure("cannot sync", self.path, error)) from error
            finally:
                os.close(descriptor)
