"""The history of a run that drafts are taken from: ``RUN/history``, one process writes, any number read.

A step is appended to a write-ahead log (``wal.py``); from time to time the log is sealed into a sorted, memory-mapped
segment (``segments.py``), and segments are merged (``merging.py``). What counts is said by the manifest
(``manifest.py``), which is replaced atomically: a crash between any two operations leaves the state before or after.

Nothing is written before the first call that writes; that call takes the lock. Files that a new generation does not
need are unlinked at once: a reader of the old one has them mapped and is not disturbed, and the disk has the space
back when it lets go. Not safe for use by several threads at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from storage.files import StorageError, await_lock, describe_failure, fsync_directory, remove_temporaries
from storage.history.manifest import HistoryError, Manifest, SegmentEntry, write_manifest
from storage.history.merging import merge
from storage.history.reader import HistoryReader, as_history_error
from storage.history.rows import PLAIN_VERSION, TOP_VERSION, PromptHash, history_schema, in_parts, to_rows
from storage.history.schema import prompt_hash
from storage.history.segments import Block, write_segment
from storage.records import Group, SamplingParams

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 1 << 19
_TOP_BLOCK_TOKENS = 1 << 15
"""The same with top tokens beside the answers: blocks of like size on the disk, as each is verified as a whole."""
_BATCH_TOKENS = 1 << 22
_MOST_BATCHES = 4096


class HistoryStore(HistoryReader):
    """The hot store of answers by prompt: reads like :class:`HistoryReader`, and writes."""

    def __init__(
        self,
        directory: str | Path,
        tokenizer_fingerprint: int | None,
        *,
        seal_bytes: int = 256 << 20,
        hash_prompt: PromptHash = prompt_hash,
        keep_top: bool = False,
        patience_s: float = 0.0,
    ) -> None:
        """Open the store in ``directory`` for reading; nothing has to be there yet.

        Args:
            directory: ``RUN/history``.
            tokenizer_fingerprint: 64-bit identity of the tokenizer; ``None`` reads whatever is there.
            seal_bytes: Size of the write-ahead log from which on an append seals it first.
            hash_prompt: Hash of prompts; the same for all users of the store.
            keep_top: Keep the likeliest tokens at each place of an answer that comes with them. A store that cannot
                hold them is rewritten with the first call that writes; its older answers have none.
            patience_s: How long the first call that writes waits for another writer to end. A killed process lives on
                for a moment after its death was reported. Unit: seconds.

        Raises:
            HistoryError: It belongs to another tokenizer or schema version, or its manifest is damaged. Damage to data
                is no error: see :attr:`damage`.
        """
        self._seal_bytes = seal_bytes
        self._keep_top = keep_top
        self._patience_s = patience_s
        self._lock: int | None = None
        self._is_writer = False
        self._step: int | None = None
        super().__init__(directory, tokenizer_fingerprint, hash_prompt=hash_prompt)

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, step: int, groups: Sequence[Group], sampling: SamplingParams) -> None:
        """Add finished groups of the training split, whole or not at all.

        They are visible and survive the death of this process at once; they survive a power cut after :meth:`sync`,
        which the first append of another step does by itself.

        Args:
            step: Step that they belong to; never below an earlier one.
            groups: The groups, in any number; none is no error.
            sampling: How their tokens were drawn.

        Raises:
            ValueError: A group of another split, or keys that contradict each other.
            HistoryError: The disk refused it, or another process writes here.
        """
        with self._writing():
            if self._wal.nbytes >= self._seal_bytes or len(self._wal.blocks) >= _MOST_BATCHES:
                self._commit(self._manifest.segments, self._wal.blocks)
            if step != self._step:
                self._wal.sync()
            before = self._wal.nbytes
            try:
                for part in in_parts(groups, _BATCH_TOKENS):
                    if any(group.samples for group in part):
                        self._wal.append(
                            to_rows(step, part, sampling, schema=self._schema, hash_prompt=self.hash_prompt)
                        )
            except BaseException:
                self._wal.roll_back(before)
                raise
            self._step = step

    def sync(self) -> None:
        """Return when everything appended is on the disk. Raises ``HistoryError``."""
        if self._is_writer:
            with self._writing():
                self._wal.sync()

    def seal(self) -> None:
        """Put the write-ahead log into a segment; for the end of an epoch. Raises ``HistoryError``."""
        with self._writing():
            if self._wal.blocks:
                self._commit(self._manifest.segments, self._wal.blocks)

    def compact(self, window: int) -> None:
        """Merge everything into one segment and drop answers older than the last ``window`` visits of their prompt.

        Needs as much free space as the result takes. Raises ``HistoryError``; the store is then as it was.
        """
        if window < 1:
            raise ValueError(f"window {window}: at least one visit has to be kept")
        with self._writing():
            blocks = self.blocks()
            if blocks:
                self._commit((), blocks, window=window)

    def truncate_to(self, step: int) -> None:
        """Remove the rows of steps after ``step``, durably; doing it twice changes nothing. Raises ``HistoryError``."""
        with self._writing():
            self._step = None
            entries = self._manifest.segments
            untouched = next((i for i, entry in enumerate(entries) if entry.last_step > step), len(entries))
            late = (block.load() for block in self._wal.blocks)
            if untouched == len(entries) and not any(
                rows is not None and rows.column("step").max() > step for rows in late
            ):
                return
            blocks = [block for segment in self._segments[untouched:] for block in segment.blocks]
            self._commit(entries[:untouched], [*blocks, *self._wal.blocks], last_step=step)

    def refresh(self) -> None:
        """See what the writer did since, unless that is this store itself. Raises ``HistoryError``."""
        if not self._is_writer:
            super().refresh()

    def close(self) -> None:
        """Sync and give the lock up. Arrays handed out stay valid. Raises ``HistoryError``."""
        try:
            with as_history_error():
                self._wal.close()
        finally:
            self._is_writer = False
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lock and have recovered from a crash while the block lasts."""
        with as_history_error():
            if not self._is_writer:
                self._become_writer()
            yield

    def _become_writer(self) -> None:
        if self._wanted is None:
            raise HistoryError(f"{self.directory}: give the tokenizer's fingerprint to write to it")
        try:
            for folder in ("segments", "wal"):
                (self.directory / folder).mkdir(parents=True, exist_ok=True)
            fsync_directory(self.directory)
            fsync_directory(self.directory.parent)
            if self._lock is None:  # after a failed commit we hold it already
                self._lock = await_lock(self.directory / ".lock", self._patience_s)
        except BlockingIOError:
            raise HistoryError(
                f"{self.directory} is being written by another process: wait for it, or stop that run first"
            ) from None
        except OSError as error:
            raise StorageError(describe_failure("cannot lock", self.directory, error)) from error
        try:
            self._load()
            version = TOP_VERSION if self._keep_top else PLAIN_VERSION
            if not self._manifest.generation:
                write_manifest(self.directory, Manifest(1, self._wanted, schema_version=version))
                self._load()
            elif version > self._manifest.schema_version:
                self._commit((), self.blocks(), version=version)
            self._tidy()
            if not self._wal.is_writable:
                self._wal.open_for_append()
        except BaseException:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
            raise
        self._is_writer = True

    def _commit(
        self,
        kept: Sequence[SegmentEntry],
        blocks: Sequence[Block],
        *,
        window: int | None = None,
        last_step: int | None = None,
        version: int | None = None,
    ) -> None:
        """Make a generation of the segments ``kept`` and a new one with the rows of ``blocks``.

        With a schema ``version`` other than the store's, no segment may be kept.
        """
        generation, fingerprint = self.generation + 1, self._manifest.tokenizer_fingerprint
        version = version or self._manifest.schema_version
        schema = history_schema(fingerprint, version)
        path = self.directory / "segments" / f"{generation:06d}.arrow"
        size = _TOP_BLOCK_TOKENS if version == TOP_VERSION else BLOCK_TOKENS
        batches = merge(blocks, block_tokens=size, schema=schema, window=window, last_step=last_step)
        entry = write_segment(path, batches, schema)
        entries = (*kept, *(() if entry is None else (entry,)))
        failures = list(self.damage)
        old_wal, old_segments = self._wal, self._segments
        # If the disk fails from here on, nobody knows which of the two manifests is there: the next write looks.
        self._is_writer = False
        try:
            write_manifest(self.directory, Manifest(generation, fingerprint, entries, version))
        finally:
            with suppress(StorageError):  # a failed sync: its rows are in the segment, or were never promised
                old_wal.close()
        names = {kept_entry.name for kept_entry in entries}
        damaged = [s.path for s in old_segments if s.entry.name not in names and any(b.failure for b in s.blocks)]
        if old_wal.notes:
            damaged.append(old_wal.path)
        self._load()
        self._notes = failures
        self._set_aside(damaged)
        self._tidy()
        self._wal.open_for_append()
        self._is_writer = True

    def _set_aside(self, paths: Sequence[Path]) -> None:
        """Keep damaged files out of the way, for whoever wants to save more of them than we can."""
        for path in paths:
            with suppress(OSError):
                (self.directory / "damaged").mkdir(exist_ok=True)
                os.replace(path, self.directory / "damaged" / path.name)
                logger.warning("%s is damaged and was set aside in %s", path.name, self.directory / "damaged")

    def _tidy(self) -> None:
        """Remove what no generation needs any more; a failure costs disk space only."""
        needed = {entry.name for entry in self._manifest.segments} | {self._wal.path.name}
        for folder in (self.directory / "segments", self.directory / "wal"):
            for path in folder.glob("*.arrow*"):
                if path.name not in needed:
                    with suppress(OSError):
                        path.unlink()
            if folder.is_dir():
                remove_temporaries(folder)
                with suppress(OSError):
                    fsync_directory(folder)
        remove_temporaries(self.directory)
