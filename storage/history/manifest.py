"""Which files make up the history store: ``MANIFEST.json``, replaced as a whole, and its generation number.

The generation counts replacements. It also names the only live write-ahead log, ``wal/<generation>.arrows``: whoever
commits a new manifest has put the rows of the old log into a segment, so the old log is void from that moment on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from storage.files import StorageError, atomic_write
from storage.history.rows import PLAIN_VERSION, TOP_VERSION
from storage.journal import decode_line, encode_line

_FILE = "MANIFEST.json"
_SEGMENT_NAME = re.compile(r"\d{6,}\.arrow")


class HistoryError(StorageError):
    """The history store cannot be used as asked; the message names the file and says what to do."""


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A record batch of a segment.

    Attributes:
        offset: Place of its message in the file, bytes.
        end: Place behind it, bytes.
        xxh3: Hexadecimal xxh3-64 of those bytes.
        first_hash: Smallest prompt hash in it.
        last_hash: Largest prompt hash in it.
        rows: Answers.
        tokens: Tokens of the answers.
    """

    offset: int
    end: int
    xxh3: str
    first_hash: int
    last_hash: int
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A sealed segment.

    Attributes:
        name: File in ``segments/``.
        nbytes: Size of the file.
        first_step: Smallest step of its rows.
        last_step: Largest step of its rows.
        head: Hexadecimal xxh3-64 of the bytes before the first block.
        tail: Hexadecimal xxh3-64 of the bytes behind the last block.
        blocks: Its record batches, by prompt hash.
    """

    name: str
    nbytes: int
    first_step: int
    last_step: int
    head: str
    tail: str
    blocks: tuple[BlockEntry, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """State of a store. Segments are in order of time: every row of one is older than those of the next.

    ``schema_version`` is that of all segments and of the log.
    """

    generation: int
    tokenizer_fingerprint: int
    segments: tuple[SegmentEntry, ...] = ()
    schema_version: int = PLAIN_VERSION


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest of ``directory``, durably and atomically. Raises ``StorageError``."""
    record = {
        "schema_version": manifest.schema_version,
        "tokenizer_fp": f"{manifest.tokenizer_fingerprint:016x}",
        "generation": manifest.generation,
        "segments": [
            {**asdict(segment), "blocks": [list(asdict(block).values()) for block in segment.blocks]}
            for segment in manifest.segments
        ],
    }
    atomic_write(directory / _FILE, encode_line(record))


def read_manifest(directory: Path, tokenizer_fingerprint: int | None) -> Manifest | None:
    """Return the manifest of ``directory``, or ``None`` where no store was written yet.

    Args:
        directory: ``RUN/history``.
        tokenizer_fingerprint: Tokenizer that the caller has; ``None`` takes any.

    Raises:
        HistoryError: It is damaged, missing beside data, or of another schema version or tokenizer.
    """
    path = directory / _FILE
    advice = f"move {directory} away to begin a new history (rollouts/ keeps every answer), or restore the file"
    try:
        line = path.read_bytes()
    except FileNotFoundError:
        left = [*directory.glob("wal/*.arrows"), *directory.glob("segments/*.arrow")]
        if any(file.stat().st_size for file in left):
            raise HistoryError(f"{path} is missing beside {len(left)} files of a history: {advice}") from None
        return None
    except OSError as error:
        raise HistoryError(f"{path} cannot be read ({error}): {advice}") from error
    try:
        record = decode_line(line)
    except ValueError as error:
        raise HistoryError(f"{path} is damaged ({error}): {advice}") from error
    version = record.get("schema_version")
    if version not in (PLAIN_VERSION, TOP_VERSION):
        raise HistoryError(
            f"{path} has schema version {version}, this program reads {PLAIN_VERSION} and {TOP_VERSION}: use the "
            f"version that wrote it, or move {directory} away to begin a new history"
        )
    try:
        manifest = _manifest(record)
    except (KeyError, TypeError, ValueError) as error:
        raise HistoryError(f"{path} is no manifest of a history ({type(error).__name__}: {error}): {advice}") from error
    found = manifest.tokenizer_fingerprint
    if tokenizer_fingerprint is not None and found != tokenizer_fingerprint:
        raise HistoryError(
            f"{directory} was written with tokenizer {found:016x}, this model has {tokenizer_fingerprint:016x}: its "
            f"tokens mean something else; move it away to begin a new history, or go back to that model"
        )
    return manifest


def manifest_size(directory: Path) -> int:
    """Bytes of the manifest; 0 before the first write."""
    path = directory / _FILE
    return path.stat().st_size if path.exists() else 0


def _manifest(record: Mapping[str, Any]) -> Manifest:
    """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for what no writer of ours has written."""
    manifest = Manifest(
        generation=record["generation"],
        tokenizer_fingerprint=int(record["tokenizer_fp"], 16),
        segments=tuple(_segment(part) for part in record["segments"]),
        schema_version=record["schema_version"],
    )
    if type(manifest.generation) is not int or manifest.generation < 1:
        raise ValueError(f"generation {manifest.generation!r}")
    return manifest


def _segment(record: Mapping[str, Any]) -> SegmentEntry:
    segment = SegmentEntry(**{**record, "blocks": tuple(BlockEntry(*block) for block in record["blocks"])})
    if not _SEGMENT_NAME.fullmatch(segment.name):
        raise ValueError(f"segment name {segment.name!r}")
    numbers = [segment.nbytes, segment.first_step, segment.last_step]
    place = 0
    for block in segment.blocks:
        numbers += [block.offset, block.end, block.first_hash, block.last_hash, block.rows, block.tokens]
        if any(type(number) is not int for number in numbers) or not place <= block.offset < block.end:
            raise ValueError(f"blocks of segment {segment.name}")
        place = block.end
    if not segment.blocks:
        raise ValueError(f"no blocks in segment {segment.name}")
    return segment
