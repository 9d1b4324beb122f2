"""Objects below an address: read, written whole, listed and removed, with errors that say what to do.

A thin layer over pyarrow's file systems. An object is either absent or whole: object stores do so themselves, on file
systems with renames a temporary name is used.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import xxhash

from storage.files import StorageError, describe_failure
from storage.remote.address import Address, credentials_of, shown

BLOCK_BYTES = 8 << 20
_RENAMING = ("local", "hdfs")
_GIVE_UP_S = 60
"""How long Google's client may retry a single call; its default of 15 minutes would look like a hang."""

_REASONS = (
    ("bucket", r"NO_SUCH_BUCKET|NoSuchBucket|Bucket '.*' not found|bucket does not exist|ContainerNotFound"),
    (
        "permission",
        r"ACCESS_DENIED|AccessDenied|HTTP status 40[13]|INVALID_ACCESS_KEY|InvalidAccessKey|SIGNATURE_DOES_NOT_MATCH|"
        r"EXPIRED_TOKEN|ExpiredToken|PERMISSION_DENIED|UNAUTHENTICATED|[Cc]redential|Permission denied|not authorized",
    ),
    ("space", r"No space left|[Qq]uota exceeded|StorageFull|InsufficientStorage|HTTP status 507|free drive threshold"),
    (
        "network",
        r"NETWORK_CONNECTION|curlCode|[Cc]ould ?n.t (?:connect|resolve)|[Tt]imed? ?out|UNAVAILABLE|SLOW_DOWN|"
        r"HTTP status 5\d\d|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|[Cc]onnection (?:refused|reset)",
    ),
)


class RemoteError(StorageError):
    """The remote side failed or refused; the message names the address and what to do."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Size in bytes, and when the object was written by the clock of the store; None where it does not say."""

    size: int
    written: datetime | None


class Objects:
    """Everything below one address, by names with slashes. Safe for use by several threads."""

    def __init__(self, address: Address) -> None:
        """Find the file system; most of them are not contacted yet.

        Raises:
            RemoteError: There is no such bucket or host, or an option of the URI is wrong.
        """
        import pyarrow as pa
        from pyarrow import fs

        self.address = address
        uri = str(address)
        if address.scheme in ("gs", "gcs") and "retry_limit_seconds" not in address.query:
            uri += f"{'&' if address.query else '?'}retry_limit_seconds={_GIVE_UP_S}"
        try:
            self._files, base = fs.FileSystem.from_uri(uri)
        except (OSError, pa.ArrowException, ValueError) as error:
            raise RemoteError(explain("cannot use", address, "", error)) from None
        self._base = base.rstrip("/")
        self._renames = self._files.type_name in _RENAMING

    def read(self, name: str) -> bytes | None:
        """Return the content of an object, None when there is none. Raises ``RemoteError``."""
        with self._operation("read", name):
            try:
                with self._files.open_input_stream(self._path(name), compression=None) as source:
                    return bytes(source.read())
            except FileNotFoundError:
                self._require_bucket(name)
                return None

    def write(self, name: str, data: bytes) -> None:
        """Replace an object. Raises ``RemoteError``."""
        with self._operation("write", name), self._sink(name) as sink:
            sink.write(data)

    def upload(self, name: str, descriptor: int, start: int, size: int) -> None:
        """Replace an object by ``size`` bytes of an open file, from position ``start`` on.

        Raises:
            RemoteError: The remote side failed; an earlier object of the name is as it was.
            StorageError: The file is shorter, or cannot be read.
        """
        first = read_block(descriptor, min(size, BLOCK_BYTES), start)
        with self._operation("write", name), self._sink(name) as sink:
            sink.write(first)
            sent = len(first)
            while sent < size:
                block = read_block(descriptor, min(size - sent, BLOCK_BYTES), start + sent)
                sink.write(block)
                sent += len(block)

    def download(self, name: str, sink: Any, size: int) -> None:
        """Write the first ``size`` bytes of an object into an open file. Raises ``RemoteError``, or if it is short."""
        left = size
        with self._operation("read", name), self._files.open_input_stream(self._path(name), compression=None) as source:
            while left:
                block = source.read(min(left, BLOCK_BYTES))
                if not block:
                    raise RemoteError(f"{self.address.child(name)}: {size - left} bytes where {size} were written")
                sink.write(block)
                left -= len(block)

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object, None when there is none. Raises ``RemoteError``."""
        from pyarrow import fs

        with self._operation("look at", name):
            found = self._files.get_file_info(self._path(name))
        return None if found.type != fs.FileType.File else ObjectInfo(found.size, found.mtime)

    def names(self, folder: str = "") -> dict[str, ObjectInfo]:
        """Return all objects below a folder, by name; none for a folder that is not there. Raises ``RemoteError``."""
        from pyarrow import fs

        with self._operation("list", folder):
            found = self._files.get_file_info(fs.FileSelector(self._path(folder), allow_not_found=True, recursive=True))
        prefix = len(self._base) + 1
        return {
            entry.path[prefix:]: ObjectInfo(entry.size, entry.mtime)
            for entry in found
            if entry.type == fs.FileType.File and not entry.path.endswith("/")
        }

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the address. Raises ``RemoteError``."""
        from pyarrow import fs

        with self._operation("list", ""):
            found = self._files.get_file_info(fs.FileSelector(self._base, allow_not_found=True))
        return sorted(entry.base_name for entry in found if entry.type == fs.FileType.Directory)

    def remove(self, name: str) -> None:
        """Remove an object; one that is not there is no error. Raises ``RemoteError``."""
        with self._operation("remove", name), suppress(FileNotFoundError):
            self._files.delete_file(self._path(name))

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with everything below it, if there is one. Raises ``RemoteError``."""
        with self._operation("remove", folder), suppress(FileNotFoundError):
            self._files.delete_dir(self._path(folder))

    def check(self) -> None:
        """Write, look at and remove a small object, as a run will have to.

        Raises:
            RemoteError: With what is in the way.
        """
        probe = f".probe-{secrets.token_hex(8)}"
        self.write(probe, b"may be removed\n")
        if self.info(probe) is None:
            raise RemoteError(f"{self.address}: an object that was just written cannot be found")
        self.remove(probe)

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _require_bucket(self, name: str) -> None:
        """Tell a missing object from a missing bucket, which some file systems report alike."""
        from pyarrow import fs

        bucket = self._base.partition("/")[0]
        if bucket and not self._renames and self._files.get_file_info(bucket).type == fs.FileType.NotFound:
            raise RemoteError(explain("cannot read", self.address, name, OSError("NoSuchBucket")))

    @contextmanager
    def _sink(self, name: str) -> Iterator[Any]:
        path = self._path(name)
        if not self._renames:
            with self._files.open_output_stream(path, compression=None) as sink:
                yield sink
            return
        folder, _, last = path.rpartition("/")
        self._files.create_dir(folder, recursive=True)
        temporary = f"{folder}/.{last}.tmp-{secrets.token_hex(4)}"
        try:
            with self._files.open_output_stream(temporary, compression=None) as sink:
                yield sink
            self._files.move(temporary, path)
        except BaseException:
            with suppress(OSError):
                self._files.delete_file(temporary)
            raise

    @contextmanager
    def _operation(self, action: str, name: str) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (OSError, pa.ArrowException, ValueError) as error:
            raise RemoteError(explain(f"cannot {action}", self.address, name, error)) from error


def explain(action: str, address: Address, name: str, error: BaseException) -> str:
    """Return one sentence for people: what failed, where, why, and what to do."""
    text = shown(" ".join(str(error).split()))
    place = str(address.child(name)) if name else str(address)
    kind = next((kind for kind, pattern in _REASONS if re.search(pattern, text)), "")
    bucket = address.body.partition("/")[0]
    if isinstance(error, PermissionError):
        kind = "permission"
    if kind == "bucket":
        return f"{action} {place}: there is no bucket {bucket}; make it first, or mend run.directory"
    if kind == "permission":
        return (
            f"{action} {place}: access denied, there are no credentials or they do not allow it; they come from "
            f"{credentials_of(address.scheme)} ({text[:160]})"
        )
    if kind == "space":
        return f"{action} {place}: no space left there; free some, or point run.directory elsewhere ({text[:160]})"
    if kind == "network":
        return (
            f"{action} {place}: the store does not answer; check the network, the region and endpoint_override "
            f"({text[:160]})"
        )
    return f"{action} {place}: {text[:300]}"


def fetch_file(objects: Objects, parts: Sequence[tuple[str, int]], path: Path) -> str:
    """Write the first bytes of some objects one behind the other into a file; returns its hexadecimal xxh3-64.

    Raises:
        RemoteError: An object is missing, short, or cannot be read.
        StorageError: The disk refused it.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _HashedFile(temporary) as sink:
            for name, size in parts:
                objects.download(name, sink, size)
        os.replace(temporary, path)
        return sink.digest.hexdigest()
    except OSError as error:
        raise StorageError(describe_failure("cannot write", path, error)) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def free_space(path: Path) -> int:
    """Bytes free on the disk that a path, which need not exist, would lie on."""
    return _disk(path)[1]


def require_room(path: Path, nbytes: int, what: str) -> None:
    """Raise ``StorageError`` unless there is room for a copy of ``what`` at ``path``, which need not exist.

    A file system that reports a total size of 0 is taken to be unlimited.
    """
    total, free = _disk(path)
    if total and free < nbytes:
        raise StorageError(
            f"{path}: {what} takes {nbytes / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free; free space there, "
            "or point SLIPSTREAM_CACHE at a larger disk"
        )


def _disk(path: Path) -> tuple[int, int]:
    """Size and free bytes of the disk that ``path`` would lie on."""
    usage = shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists()))
    return usage.total, usage.free


class _HashedFile:
    """A file that is written once, and the digest of what went into it."""

    def __init__(self, path: Path) -> None:
        self.digest = xxhash.xxh3_64()
        self._path = path
        self._file = path.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        """Append ``data``. Raises ``StorageError``: what this disk refuses is no failure of the store."""
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise StorageError(describe_failure("cannot write", self._path, error)) from error
        self.digest.update(data)

    def __enter__(self) -> _HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_block(descriptor: int, size: int, position: int) -> bytes:
    """Read bytes of an open file, all of them; raises ``StorageError`` when there are fewer."""
    try:
        block = os.pread(descriptor, size, position) if size else b""
    except OSError as error:
        raise StorageError(f"cannot read a file of the run: {error}") from error
    if len(block) < size:
        while block and len(block) < size and (more := os.pread(descriptor, size - len(block), position + len(block))):
            block += more
        if len(block) < size:
            raise StorageError("a file of the run is shorter than it was when its upload began")
    return block
