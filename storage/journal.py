"""Append-only files of JSON lines: a checksummed journal for facts, a plain one for metrics.

A crash can cut such a file at any byte. A last line without its end is what a crash leaves and is dropped; damage
anywhere else means that something other than a crash touched the file, and is an error that names the line.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from storage.files import AppendFile, StorageError, atomic_write

logger = logging.getLogger(__name__)

_OPEN, _MIDDLE, _CLOSE = b'{"xxh3":"', b'","record":', b"}\n"
_DIGITS = 16
_BODY = len(_OPEN) + _DIGITS + len(_MIDDLE)


class JournalError(StorageError):
    """A journal is damaged, missing or not what it should be; the message names file and line."""


class JournalLine(NamedTuple):
    """One intact line: its number from 1, the offset behind it and its record."""

    number: int
    end: int
    record: dict[str, Any]


def encode_line(record: Mapping[str, Any]) -> bytes:
    """Return ``{"xxh3":"<16 hex digits>","record":{...}}`` and a newline; the digest covers the record's bytes."""
    body = json.dumps(record, separators=(",", ":")).encode()
    return _OPEN + xxhash.xxh3_64_hexdigest(body).encode() + _MIDDLE + body + _CLOSE


def decode_line(line: bytes) -> dict[str, Any]:
    """Read back a line of :func:`encode_line`; raises ``ValueError`` when it is torn or any bit of it differs."""
    body = line[_BODY : -len(_CLOSE)]
    digest = line[len(_OPEN) : len(_OPEN) + _DIGITS]
    if line != _OPEN + digest + _MIDDLE + body + _CLOSE:
        raise ValueError("the line is torn or not a journal line")
    if digest != xxhash.xxh3_64_hexdigest(body).encode():
        raise ValueError("the checksum differs")
    record: dict[str, Any] = json.loads(body)
    return record


class Journal:
    """Checksummed records, one a line. Offsets stay valid across :meth:`compact`.

    A compacted file starts with a snapshot line whose record holds ``base``: the offset up to which it stands in for
    the lines that it replaced. Offsets count as if those were still there.
    """

    def __init__(self, path: Path) -> None:
        """Start a new journal at ``path``; raises ``JournalError`` if there is one already."""
        self.path = path
        if path.exists() and path.stat().st_size:
            raise JournalError(f"{path} exists already: replay it, or choose another run directory")
        self._file = AppendFile(path)
        self._shift = 0

    @classmethod
    def reopen(cls, path: Path, end: int) -> Journal:
        """Go on with the journal at ``path`` behind offset ``end``; whatever follows is cut off, durably."""
        journal = cls.__new__(cls)
        journal.path = path
        journal._shift = _base(path)[1]
        journal._file = AppendFile(path)
        journal._file.truncate(end - journal._shift)
        return journal

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. Durable after the next :meth:`sync`. Raises ``StorageError``."""
        self._file.write(encode_line(record))

    def offset(self) -> int:
        """Offset behind the last record, in bytes."""
        return self._file.size + self._shift

    def sync(self) -> None:
        """Return when everything appended is on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Sync and close."""
        self._file.close()

    def compact(self, before: int, snapshot: Mapping[str, Any]) -> None:
        """Replace all lines before offset ``before`` by one that holds ``snapshot``, atomically.

        Offsets of ``before`` and later stay valid, earlier ones do not.
        """
        with self.path.open("rb") as source:
            source.seek(before - self._shift)
            tail = source.read()
        head = encode_line({"base": before, **snapshot})
        atomic_write(self.path, head + tail)
        self._file.close()
        self._file = AppendFile(self.path)
        self._shift = before - len(head)


def read_journal(path: Path, upto: int | None = None) -> Iterator[JournalLine]:
    """Yield the intact lines of the journal at ``path``, in order.

    Args:
        path: The file.
        upto: Offset to stop at, as :meth:`Journal.offset` gave it after a sync; everything before it must be intact.
            ``None`` reads to the end and drops a torn last line.

    Raises:
        JournalError: The file is missing or shorter than ``upto``, a line is damaged, or ``upto`` is inside a line.
    """
    if not path.exists():
        raise JournalError(f"{path} is missing: the run cannot be resumed without it")
    base, shift = _base(path)
    if upto is not None and upto < base:
        raise JournalError(f"{path} was compacted up to offset {base}, behind {upto}: resume from a later checkpoint")
    position, number = 0, 0
    with path.open("rb") as source:
        while upto is None or position + shift < upto:
            line = source.readline()
            if not line:
                break
            number += 1
            position += len(line)
            try:
                record = decode_line(line)
            except ValueError as error:
                if upto is None and not line.endswith(b"\n"):
                    logger.warning("%s line %d was torn by a crash and is dropped", path, number)
                    return
                raise JournalError(
                    f"{path} line {number} is damaged: {error}; resume from a checkpoint before it, or restore the file"
                ) from error
            yield JournalLine(number, position + shift, record)
    if upto is not None and position + shift != upto:
        raise JournalError(
            f"{path} ends at offset {position + shift} where the checkpoint says {upto}: it belongs to another run or "
            "was cut; resume from an earlier checkpoint"
        )


def _base(path: Path) -> tuple[int, int]:
    """Offset up to which the file was compacted, and what to add to a position in it to get an offset."""
    with path.open("rb") as source:
        first = source.readline()
    try:
        base = decode_line(first).get("base")
    except ValueError:
        return 0, 0
    return (0, 0) if base is None else (int(base), int(base) - len(first))


class JsonLines:
    """Plain JSON lines for metrics: readable by anything, cut back to an offset on resume.

    Numbers that JSON cannot say (NaN, infinities) are written as null.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending, creating it if needed; a torn last line is cut off."""
        self.path = path
        self._file = AppendFile(path)
        whole = _end_of_last_line(path)
        if whole < self._file.size:
            logger.warning("%s: the last line was torn by a crash and is dropped", path)
            self._file.truncate(whole)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; other processes see it at once. Raises ``StorageError``."""
        self._file.write(json.dumps(_finite(record), default=_plain).encode() + b"\n")

    def sync(self) -> None:
        """Return when everything appended is on the disk."""
        self._file.sync()

    def offset(self) -> int:
        """Size of the file in bytes."""
        return self._file.size

    def truncate(self, offset: int) -> None:
        """Drop the records behind ``offset`` (from :meth:`offset`), durably; a shorter file is left as it is."""
        if offset > self._file.size:
            logger.warning("%s is shorter than when the checkpoint was written; going on with what is there", self.path)
        else:
            self._file.truncate(offset)

    def close(self) -> None:
        """Sync and close."""
        self._file.close()

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """Return all records of ``path``; a torn last line is left out.

        Raises:
            JournalError: A line before the last is not JSON; the message names it.
        """
        records: list[dict[str, Any]] = []
        with path.open("rb") as source:
            for number, line in enumerate(source, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    records.append(json.loads(line))
                except ValueError as error:
                    raise JournalError(f"{path} line {number} is not JSON: {error}") from error
        return records

    @staticmethod
    def tail(path: Path, nbytes: int) -> list[dict[str, Any]]:
        """Return the records of the last ``nbytes`` of ``path`` that are whole and can be read.

        For watchers: the file may be written, or cut back, in the same moment.
        """
        with path.open("rb") as source:
            start = max(0, source.seek(0, 2) - nbytes)
            source.seek(start)
            lines = source.read(nbytes).split(b"\n")
        records = []
        for line in lines[1 if start else 0 : -1]:
            with suppress(ValueError):
                records.append(json.loads(line))
        return records


def _end_of_last_line(path: Path, block: int = 65536) -> int:
    """Position behind the last newline of ``path``; 0 without one."""
    with path.open("rb") as source:
        end = source.seek(0, 2)
        while end:
            start = max(0, end - block)
            source.seek(start)
            found = source.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _plain(value: Any) -> Any:
    """Turn numpy scalars and arrays into Python values; paths and the like into text."""
    return _finite(value.tolist()) if hasattr(value, "tolist") else str(value)
