"""Reading the history of a run: any number of processes, while another one writes it.

A reader serves the generation that it found until it looks again. The files of that generation are mapped, so it does
not matter that the writer unlinks them meanwhile. Not safe for use by several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from storage.files import StorageError
from storage.history.manifest import HistoryError, Manifest, SegmentEntry, manifest_size, read_manifest
from storage.history.rows import Answer, PromptHash, Rows, VisitKey, history_schema, prompt_digest
from storage.history.schema import prompt_hash
from storage.history.segments import Block, Segment
from storage.history.summary import HistoryStats, summarise
from storage.history.verify import verify_blocks
from storage.history.wal import WriteAheadLog
from storage.records import Int32Array

_ATTEMPTS = 20


class _Place(NamedTuple):
    """A run of answers to one prompt."""

    rows: Rows
    run: int


class HistoryReader:
    """The answers in a store, by prompt."""

    def __init__(
        self, directory: str | Path, tokenizer_fingerprint: int | None, *, hash_prompt: PromptHash = prompt_hash
    ) -> None:
        """Open the store in ``directory``; nothing has to be there yet.

        Args:
            directory: ``RUN/history``.
            tokenizer_fingerprint: 64-bit identity of the tokenizer; ``None`` reads whatever is there.
            hash_prompt: Hash of prompts; the same for all users of the store.

        Raises:
            HistoryError: It belongs to another tokenizer or schema version, or its manifest is damaged. Damage to data
                is no error: see :attr:`damage`.
        """
        self.directory = Path(directory)
        self.hash_prompt = hash_prompt
        self._wanted = tokenizer_fingerprint
        self._notes: list[str] = []
        self._segments: list[Segment] = []
        self._load()

    @property
    def generation(self) -> int:
        """Counts changes of the set of files; rows appended since show only in :meth:`visits`."""
        return self._manifest.generation

    @property
    def schema(self) -> Any:
        """``pyarrow.Schema`` of all rows."""
        return self._schema

    @property
    def tokenizer_fingerprint(self) -> int:
        """Identity of the tokenizer whose tokens these are; 0 for an empty store that was opened without one."""
        return self._manifest.tokenizer_fingerprint

    @property
    def damage(self) -> tuple[str, ...]:
        """What was found damaged so far, a sentence each; the rest is served. :meth:`verify` looks at everything."""
        failures = [block.failure for block in self.blocks() if block.failure]
        return tuple(dict.fromkeys([*self._notes, *self._wal.notes, *failures]))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The sealed segments, in order of time."""
        return tuple(self._segments)

    @property
    def wal_bytes(self) -> int:
        """Bytes in the write-ahead log."""
        return self._wal.nbytes

    @property
    def manifest_bytes(self) -> int:
        """Bytes of the manifest; 0 before the first write."""
        return manifest_size(self.directory)

    def refresh(self) -> None:
        """See what the writer did since. Arrays handed out before stay valid. Raises ``HistoryError``."""
        manifest = read_manifest(self.directory, self._wanted)
        if (manifest.generation if manifest is not None else 0) == self.generation:
            self._wal.refresh()
        else:
            self._load()

    def visits(self, prompt_token_ids: Int32Array, limit: int) -> list[list[Answer]]:
        """Return the answers to a prompt, by visit.

        Args:
            prompt_token_ids: int32[n].
            limit: Most visits.

        Returns:
            Visits, the newest first; in each its answers by sample index.
        """
        token_ids = np.ascontiguousarray(prompt_token_ids, np.int32)
        found: dict[VisitKey, list[Answer]] = {}
        for place in self._places(token_ids):
            first, last = int(place.rows.bounds[place.run]), int(place.rows.bounds[place.run + 1])
            for answer in reversed(place.rows.answers(first, last)):
                if answer.visit not in found and len(found) >= limit:
                    return _by_sample(found)
                found.setdefault(answer.visit, []).append(answer)
        return _by_sample(found)

    def prompts(self) -> Iterator[tuple[int, Int32Array]]:
        """Yield ``(hash, int32[n])`` of every prompt, each once, in no order; reads and verifies every block."""
        seen: set[bytes] = set()
        for block in self.blocks():
            rows = block.load()
            for run in range(0 if rows is None else len(rows.hashes)):
                assert rows is not None
                token_ids = rows.prompt(run)
                digest = prompt_digest(token_ids)
                if digest not in seen:
                    seen.add(digest)
                    yield int(rows.hashes[run]), token_ids

    def recent_answers(self, limit_tokens: int) -> list[Answer]:
        """Return the newest answers to whatever prompts, newest first, of at most ``limit_tokens`` tokens together."""
        answers: list[Answer] = []
        left = limit_tokens
        for rows, row in self._newest_rows():
            left -= len(rows.tokens(row))
            if left < 0:
                break
            answers += rows.answers(row, row + 1)
        return answers

    def stats(self) -> HistoryStats:
        """Summarise the readable rows; reads everything once."""
        return summarise(self.blocks())

    def verify(self) -> tuple[str, ...]:
        """Check every checksum and the laws of the rows; returns what is wrong, a sentence each. Reads everything."""
        problems = verify_blocks(
            self._segments,
            self._wal.blocks,
            hash_prompt=self.hash_prompt,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
        )
        kept = [
            f"damaged/{path.name}: set aside earlier; remove it once nothing in it is wanted"
            for path in self.set_aside()
        ]
        return tuple(dict.fromkeys([*self.damage, *problems, *kept]))

    def blocks(self) -> list[Block]:
        """All blocks, oldest first; each gives its rows, or ``None`` and a ``failure``."""
        return [*chain.from_iterable(segment.blocks for segment in self._segments), *self._wal.blocks]

    def set_aside(self) -> list[Path]:
        """Files with damage that were taken out of the store and kept in ``damaged/``."""
        return sorted((self.directory / "damaged").glob("*"))

    def _places(self, token_ids: Int32Array) -> Iterator[_Place]:
        """Runs of one prompt, the newest first."""
        hash_ = self.hash_prompt(token_ids)
        sources: list[WriteAheadLog | Segment] = [self._wal, *reversed(self._segments)]
        for source in sources:
            for block in reversed(source.candidates(hash_)):
                rows = block.load()
                if rows is not None:
                    for run in reversed(rows.runs_of(hash_, token_ids)):
                        yield _Place(rows, run)

    def _newest_rows(self) -> Iterator[tuple[Rows, int]]:
        """Rows, the newest first; a segment is sorted by prompt and has to be looked through as a whole."""
        for blocks in (self._wal.blocks, *(segment.blocks for segment in reversed(self._segments))):
            loaded = [rows for rows in (block.load() for block in blocks) if rows is not None]
            if not loaded:
                continue
            steps = np.concatenate([rows.column("step") for rows in loaded])
            sources = np.repeat(np.arange(len(loaded)), [rows.batch.num_rows for rows in loaded])
            places = np.concatenate([np.arange(rows.batch.num_rows) for rows in loaded])
            for place in np.argsort(steps, kind="stable")[::-1].tolist():
                yield loaded[sources[place]], int(places[place])

    def _load(self) -> None:
        """Read the manifest and map what it names; starts again when the writer replaces it meanwhile."""
        with as_history_error():
            for _ in range(_ATTEMPTS):
                manifest = read_manifest(self.directory, self._wanted) or Manifest(0, self._wanted or 0)
                schema = history_schema(manifest.tokenizer_fingerprint, manifest.schema_version)
                known = {segment.entry: segment for segment in self._segments if not segment.is_missing}
                segments = [known.get(e) or Segment(self._segment_path(e), e, schema) for e in manifest.segments]
                wal = WriteAheadLog(self._wal_path(manifest.generation), schema)
                after = read_manifest(self.directory, self._wanted)
                if after is None or after.generation == manifest.generation:
                    break
            else:
                raise HistoryError(f"{self.directory} changes faster than it can be read: try again")
        self._manifest, self._schema, self._segments, self._wal = manifest, schema, segments, wal

    def _segment_path(self, entry: SegmentEntry) -> Path:
        return self.directory / "segments" / entry.name

    def _wal_path(self, generation: int) -> Path:
        return self.directory / "wal" / f"{generation:06d}.arrows"


def _by_sample(found: dict[VisitKey, list[Answer]]) -> list[list[Answer]]:
    return [sorted(answers, key=lambda answer: answer.sample_idx) for answers in found.values()]


@contextmanager
def as_history_error() -> Iterator[None]:
    """Turn every refusal of the disk into a ``HistoryError`` with the same message."""
    try:
        yield
    except HistoryError:
        raise
    except StorageError as error:
        raise HistoryError(str(error)) from error
