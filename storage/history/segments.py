"""Sealed segments: uncompressed Arrow IPC files, sorted by prompt hash, memory-mapped, verified block by block.

A block (one record batch, about half a million tokens) is checked against the checksum of the manifest when it is
first touched, so opening a store of any size reads nothing but the manifest, and no token is used that was not
verified. Blocks are decoded from the byte ranges in the manifest: a damaged one costs its own rows only, and a damaged
footer costs none. The footer is for other Arrow readers.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from storage.files import StorageError, atomic_file, describe_failure
from storage.history.manifest import BlockEntry, SegmentEntry
from storage.history.rows import Rows


class Block:
    """A record batch in a file: decoded, and verified where it has a checksum, at first touch."""

    __slots__ = ("_digest", "_rows", "_schema", "_view", "failure", "place")

    def __init__(self, place: str, view: Callable[[], memoryview | None], digest: str, schema: Any) -> None:
        """Point to a block.

        Args:
            place: File and byte range, for messages.
            view: Returns its bytes, or ``None`` where the file does not have them.
            digest: Hexadecimal xxh3-64 of the bytes; empty if they were verified already.
            schema: ``pyarrow.Schema`` of the batch.
        """
        self.place = place
        self.failure = ""
        """Why it cannot be read; empty while nothing is known against it."""
        self._view = view
        self._digest = digest
        self._schema = schema
        self._rows: Rows | None = None

    def load(self) -> Rows | None:
        """Return the rows, zero-copy, or ``None`` for a damaged block (see ``failure``)."""
        if self._rows is not None or self.failure:
            return self._rows
        view = self._view()
        if view is None:
            self.failure = f"{self.place}: missing, the file was cut or removed"
        elif self._digest and xxhash.xxh3_64_hexdigest(view) != self._digest:
            self.failure = f"{self.place}: the checksum differs"
        else:
            self._decode(view)
        return self._rows

    def _decode(self, view: memoryview) -> None:
        """A checksum says that the bytes are those that were written, not that their offsets stay inside of them."""
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(view), self._schema)
            batch.validate(full=True)
        except (pa.ArrowException, EOFError, OSError, ValueError) as error:
            self.failure = f"{self.place}: no valid record batch ({str(error).splitlines()[0]})"
        else:
            self._rows = Rows(batch)


class Segment:
    """A sealed segment, mapped for reading; it stays readable when its file is removed."""

    def __init__(self, path: Path, entry: SegmentEntry, schema: Any) -> None:
        """Map ``path``. A file that is missing or short is no error: its blocks are damaged."""
        self.path = path
        self.entry = entry
        self._bytes = map_file(path)
        name = f"segments/{entry.name}"
        self.blocks = [
            Block(f"{name} bytes {b.offset}-{b.end} ({b.rows} answers)", _reader(self._bytes, b), b.xxh3, schema)
            for b in entry.blocks
        ]
        self._first = [block.first_hash for block in entry.blocks]
        self._last = [block.last_hash for block in entry.blocks]

    @property
    def is_missing(self) -> bool:
        """Whether there was no file to map."""
        return not self._bytes.nbytes

    def candidates(self, hash_: int) -> list[Block]:
        """Blocks that may hold a prompt with this hash, in order."""
        return self.blocks[bisect_left(self._last, hash_) : bisect_right(self._first, hash_)]

    def frame_failures(self) -> list[str]:
        """What is wrong outside the blocks; it hides no rows, but other Arrow readers may fail."""
        entry, found = self.entry, []
        first, last = entry.blocks[0].offset, entry.blocks[-1].end
        if self._bytes.nbytes != entry.nbytes:
            found.append(f"segments/{entry.name}: {self._bytes.nbytes} bytes instead of {entry.nbytes}")
        for what, part, digest in (
            ("header", self._bytes[:first], entry.head),
            ("footer", self._bytes[last : entry.nbytes], entry.tail),
        ):
            if xxhash.xxh3_64_hexdigest(part) != digest:
                found.append(f"segments/{entry.name}: the {what} is damaged; its rows are not")
        return found


def write_segment(path: Path, batches: Iterable[Any], schema: Any) -> SegmentEntry | None:
    """Write a segment, durably and atomically, one batch in memory at a time.

    Args:
        path: The file, in a folder that exists.
        batches: ``pyarrow.RecordBatch`` es, sorted by prompt hash.
        schema: Their schema.

    Returns:
        Its entry for the manifest, or ``None`` if there were no rows: then there is no file.

    Raises:
        StorageError: The disk refused it; nothing is left of it.
    """
    waiting = iter(batches)
    first = next(waiting, None)
    if first is None:
        return None
    ranges: list[tuple[int, int, Any]] = []
    steps: list[int] = []
    with atomic_file(path) as temporary:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in chain([first], waiting):
                writer.write_batch(batch)
                end = sink.tell()
                hashes = batch.column("prompt_hash")
                facts = (hashes[0].as_py(), hashes[-1].as_py(), batch.num_rows, pc.sum(batch["length"]).as_py())
                ranges.append((end - pa.ipc.get_record_batch_size(batch), end, facts))
                steps += pc.min_max(batch.column("step")).as_py().values()
        return _entry(path.name, map_file(temporary), ranges, steps)


def map_file(path: Path) -> memoryview:
    """Return the bytes of ``path``, mapped read-only; none for a missing or empty file. Raises ``StorageError``."""
    try:
        with path.open("rb") as source:
            return memoryview(mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ))
    except (FileNotFoundError, ValueError):  # an empty file cannot be mapped
        return memoryview(b"")
    except OSError as error:
        raise StorageError(describe_failure("cannot map", path, error)) from error


def _entry(name: str, content: memoryview, ranges: list[tuple[int, int, Any]], steps: list[int]) -> SegmentEntry:
    blocks = tuple(
        BlockEntry(offset, end, xxhash.xxh3_64_hexdigest(content[offset:end]), *facts) for offset, end, facts in ranges
    )
    return SegmentEntry(
        name=name,
        nbytes=content.nbytes,
        first_step=min(steps),
        last_step=max(steps),
        head=xxhash.xxh3_64_hexdigest(content[: blocks[0].offset]),
        tail=xxhash.xxh3_64_hexdigest(content[blocks[-1].end :]),
        blocks=blocks,
    )


def _reader(content: memoryview, block: BlockEntry) -> Callable[[], memoryview | None]:
    return lambda: content[block.offset : block.end] if block.end <= content.nbytes else None
