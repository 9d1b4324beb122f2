"""The write-ahead log of the history: an Arrow IPC stream that grows by a batch an append.

An IPC stream has no checksums, so each batch carries one in its message's custom metadata: the length of the message
and the xxh3-64 of its bytes with the digest itself taken as zeros. That keeps the file a plain IPC stream for other
tools, finds what a crash cut and what a disk changed, and lets reading go on behind a damaged batch: nothing is handed
to Arrow that was not verified.
"""

from __future__ import annotations

import logging
import os
import struct
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import xxhash

from storage.files import AppendFile, StorageError, describe_failure
from storage.history.rows import Rows
from storage.history.segments import Block, map_file

logger = logging.getLogger(__name__)

_FRAME_KEY = b"frame"
_MARK = b"slipstream-frame:"
_HEX = 16
_VALUE = len(_MARK) + 2 * _HEX + 1
_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = 8
_LARGEST_HEADER = 1 << 20
_SCAN_BYTES = 1 << 20


class _Frame(NamedTuple):
    """Bytes of one message, and whether they are whole, cut off by the end of the file, or something else."""

    end: int
    state: str


class WriteAheadLog:
    """One log, read by any process and written by one.

    The writer maps its batches, so that its memory does not grow with the log. A reader copies them: the writer may
    take back what it has just written, and a map of bytes that are gone ends a process without a word.
    """

    def __init__(self, path: Path, schema: Any) -> None:
        """Read the log at ``path`` as far as it goes; a missing one is empty. Raises ``StorageError``."""
        self.path = path
        self.blocks: list[Block] = []
        self.notes: list[str] = []
        """What is damaged in the middle; a torn end is what a crash leaves and is not listed."""
        self._schema = schema
        self._header: bytes = schema.serialize().to_pybytes()
        self._runs: defaultdict[int, list[Block]] = defaultdict(list)
        self._mapped = memoryview(b"")
        self._file: AppendFile | None = None
        self._owned = False
        self._end = 0
        self.refresh()

    @property
    def nbytes(self) -> int:
        """Bytes up to the end of the last whole batch."""
        return self._end

    @property
    def is_writable(self) -> bool:
        """Whether :meth:`open_for_append` was called."""
        return self._file is not None

    def candidates(self, hash_: int) -> list[Block]:
        """Batches that hold a prompt with this hash, in order."""
        return self._runs.get(hash_, [])

    def refresh(self) -> None:
        """Read what was appended since the last look. Raises ``StorageError``."""
        if self._file is not None:
            return
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(describe_failure("cannot open", self.path, error)) from error
        try:
            self._scan(descriptor, os.fstat(descriptor).st_size)
        except OSError as error:
            raise StorageError(describe_failure("cannot read", self.path, error)) from error
        finally:
            os.close(descriptor)

    def open_for_append(self) -> None:
        """Become the writer; the folder must be there. What a crash left behind the last whole batch is cut off.

        Raises ``StorageError``.
        """
        self._owned = True
        self._read_anew()
        file = AppendFile(self.path)
        if file.size > self._end:
            logger.warning("%s: %d bytes behind the last whole batch are dropped", self.path, file.size - self._end)
            file.truncate(self._end)
        if not self._end:
            file.write(self._header)
            self._end = file.size
        self._file = file

    def append(self, batch: Any) -> None:
        """Write a batch whole or not at all. Durable after :meth:`sync`. Raises ``StorageError``."""
        assert self._file is not None
        frame = _encode(batch, len(self._header))
        self._file.write(frame)
        start, self._end = self._end, self._file.size
        self._add(start, self._end, Rows(batch))

    def roll_back(self, nbytes: int) -> None:
        """Take back the batches behind offset ``nbytes``, as far as the disk lets us."""
        assert self._file is not None
        if nbytes < self._end:
            with suppress(StorageError):
                self._file.truncate(nbytes)
        file, self._file = self._file, None
        self._read_anew()
        self._file = file

    def sync(self) -> None:
        """Return when everything appended is on the disk. Raises ``StorageError``."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Sync and close. Blocks stay readable."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read_anew(self) -> None:
        self._end = 0
        self.blocks, self.notes, self._runs = [], [], defaultdict(list)
        self._mapped = memoryview(b"")
        self.refresh()

    def _scan(self, descriptor: int, size: int) -> None:
        start = 0
        if not self._end:
            start = _schema_end(descriptor, self._schema)
            self._end = start if _read(descriptor, 0, start) == self._header else 0
        position = self._end
        while position < size:
            frame = _inspect(descriptor, position, size)
            if frame.state == "whole":
                if position != (self._end or start):  # the header may be that of another version of Arrow
                    self.notes.append(f"{self._name(self._end, position)}: damaged, the batches behind are not")
                self._add(position, frame.end, None)
                self._end = frame.end
                position = frame.end
            else:
                position = _next_mark(descriptor, position + 8, size)
        if size > self._end and _inspect(descriptor, self._end, size).state == "damaged":
            note = f"wal/{self.path.name} from byte {self._end}: the checksum differs"
            if note not in self.notes:
                self.notes.append(note)

    def _add(self, start: int, end: int, rows: Rows | None) -> None:
        block = Block(self._name(start, end), lambda: self._view(start, end), "", self._schema)
        self.blocks.append(block)
        rows = rows or block.load()  # a reader has its copy now, right behind the check
        for hash_ in dict.fromkeys(rows.hashes.tolist()) if rows is not None else ():
            self._runs[hash_].append(block)

    def _view(self, start: int, end: int) -> memoryview | None:
        if not self._owned:
            with self.path.open("rb") as source:
                copy = _read(source.fileno(), start, end - start)
            return memoryview(copy) if len(copy) == end - start else None
        if self._mapped.nbytes < end:
            self._mapped = map_file(self.path)
        return self._mapped[start:end] if end <= self._mapped.nbytes else None

    def _name(self, start: int, end: int) -> str:
        return f"wal/{self.path.name} bytes {start}-{end}"


def _encode(batch: Any, header: int) -> bytes:
    """Return the IPC message of ``batch`` with its length and digest in the custom metadata."""
    blank = _MARK + b"0" * _HEX + b":" + b"0" * _HEX
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata={_FRAME_KEY: blank})
    message = bytearray(memoryview(sink.getvalue())[header:-_END_OF_STREAM])
    place = message.index(_MARK)
    message[place + len(_MARK) : place + _VALUE] = f"{len(message):016x}:".encode() + b"0" * _HEX
    message[place + _VALUE - _HEX : place + _VALUE] = xxhash.xxh3_64_hexdigest(message).encode()
    return bytes(message)


def _inspect(descriptor: int, position: int, size: int) -> _Frame:
    """Look at the message at ``position`` of a file of ``size`` bytes without trusting any of it."""
    prefix = _read(descriptor, position, 8)
    if len(prefix) < 8:
        return _Frame(size, "torn")
    (length,) = struct.unpack("<i", prefix[4:])
    if prefix[:4] != _CONTINUATION or not 0 < length <= _LARGEST_HEADER:
        return _Frame(size, "damaged")
    metadata = _read(descriptor, position + 8, length)
    if len(metadata) < length:
        return _Frame(size, "torn")
    place = metadata.find(_MARK)
    value = metadata[place + len(_MARK) : place + _VALUE]
    try:
        end = position + int(value[:_HEX], 16)
    except ValueError:
        return _Frame(size, "damaged")
    if place < 0 or end <= position + 8 + length:
        return _Frame(size, "damaged")
    if end > size:
        return _Frame(size, "torn")
    message = bytearray(_read(descriptor, position, end - position))
    digest = slice(8 + place + _VALUE - _HEX, 8 + place + _VALUE)
    found, message[digest] = bytes(message[digest]), b"0" * _HEX
    whole = found == xxhash.xxh3_64_hexdigest(message).encode()
    return _Frame(end, "whole" if whole else "damaged")


def _next_mark(descriptor: int, position: int, size: int) -> int:
    """Place of the next thing that could be a message: the continuation mark at a multiple of 8; ``size`` if none."""
    while position < size:
        window = _read(descriptor, position, _SCAN_BYTES)
        if not window:
            break
        found = window.find(_CONTINUATION)
        while found >= 0 and (position + found) % 8:
            found = window.find(_CONTINUATION, found + 1)
        if found >= 0:
            return position + found
        position += max(8, len(window) // 8 * 8)
    return size


def _read(descriptor: int, position: int, count: int) -> bytes:
    """Read up to ``count`` bytes; fewer only at the end of the file."""
    parts = []
    while count > 0:
        part = os.pread(descriptor, count, position)
        if not part:
            break
        parts.append(part)
        position += len(part)
        count -= len(part)
    return b"".join(parts)


def _schema_end(descriptor: int, schema: Any) -> int:
    """Place behind the stream's schema message, however this version of Arrow writes it; 0 if there is none."""
    prefix = _read(descriptor, 0, 8)
    length = int.from_bytes(prefix[4:], "little")
    if len(prefix) < 8 or length > _LARGEST_HEADER:
        return 0
    header = _read(descriptor, 0, 8 + length)
    try:
        found = pa.ipc.read_schema(pa.py_buffer(header))
    except (pa.ArrowException, OSError, ValueError):
        return 0
    return len(header) if len(header) == 8 + length and found.equals(schema, check_metadata=True) else 0
