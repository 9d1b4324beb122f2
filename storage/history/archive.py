"""Every rollout of a run, kept as one Parquet file per split and step: ``RUN/rollouts/<split>/step_000012.parquet``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.parquet as pq

from storage.files import StorageError, atomic_file, describe_failure, fsync_directory, remove_temporaries
from storage.history.schema import SCHEMA, SCHEMA_VERSION, VERSION_KEY, to_batch
from storage.records import TRAIN_SPLIT, Float32Array, Group, GroupKey, SamplingParams

_STEP = re.compile(r"step_(\d{6,})\.parquet$")
_TOKENS_PER_ROW_GROUP = 1 << 22


class ArchiveError(StorageError):
    """A file of rollouts is missing, damaged or of another version; the message names it."""


class RolloutArchive:
    """The rollouts of one run, by split and step."""

    def __init__(self, directory: str | Path, tokenizer_fingerprint: int = 0) -> None:
        """Open the archive in ``directory``, which need not exist before the first :meth:`append`.

        Args:
            directory: ``RUN/rollouts``.
            tokenizer_fingerprint: 64-bit identity of the tokenizer, written to each row; readers need not give it.
        """
        self.directory = Path(directory)
        self.tokenizer_fingerprint = tokenizer_fingerprint

    def append(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Mapping[GroupKey, Float32Array],
        *,
        sampling: SamplingParams,
        split: str = TRAIN_SPLIT,
    ) -> Path:
        """Write the groups of one step, durably and atomically; a file of that split and step is replaced.

        Args:
            step: The step.
            groups: Its groups; all of their keys are of ``split``.
            advantages: float32[samples] by group; missing groups get null.
            sampling: How the tokens were drawn.
            split: ``train`` or the name of an evaluation set.

        Returns:
            The file.

        Raises:
            ValueError: A key of another split, or keys and lengths that contradict each other.
            StorageError: The disk refused it; an earlier file of that step is as it was.
        """
        for group in groups:
            if group.key.split != split:
                raise ValueError(f"group {group.key} does not belong to split {split!r}")
        path = self._path(step, split)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(describe_failure("cannot make", path.parent, error)) from error
        with (
            atomic_file(path) as temporary,
            pq.ParquetWriter(temporary, SCHEMA, compression="zstd", write_page_checksum=True) as writer,
        ):
            for part in _parts(groups):
                writer.write_batch(
                    to_batch(
                        part,
                        advantages,
                        step=step,
                        sampling=sampling,
                        tokenizer_fingerprint=self.tokenizer_fingerprint,
                    )
                )
        return path

    def splits(self) -> list[str]:
        """Splits that have rollouts, sorted."""
        if not self.directory.is_dir():
            return []
        return sorted(unquote(folder.name) for folder in self.directory.iterdir() if any(_steps(folder)))

    def steps(self, split: str = TRAIN_SPLIT) -> list[int]:
        """Steps of ``split`` that have rollouts, ascending."""
        return sorted(_steps(self._folder(split)))

    def read(self, step: int, split: str = TRAIN_SPLIT) -> Any:
        """Return the ``pyarrow.Table`` of one step, in the archive's schema.

        Raises:
            ArchiveError: No such step (names those there are), or the file is damaged or of another schema version.
        """
        path = self._path(step, split)
        if not path.is_file():
            raise ArchiveError(f"no rollouts of step {step} in {path.parent}: {self._what_there_is(split)}")
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as source:
                found = (source.schema_arrow.metadata or {}).get(VERSION_KEY)
                if found is None:
                    raise ArchiveError(f"{path} is not a file of rollouts: it has no schema version")
                if found != str(SCHEMA_VERSION).encode():
                    raise ArchiveError(
                        f"{path} has schema version {found.decode(errors='replace')}, this program reads "
                        f"{SCHEMA_VERSION}: read it with the version that wrote it"
                    )
                table = source.read().cast(SCHEMA)
                table.validate(full=True)
                return table
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ArchiveError(
                f"{path} is damaged and cannot be read ({error}): remove it to go on without it"
            ) from error

    def iterate(self, split: str = TRAIN_SPLIT) -> Iterator[tuple[int, Any]]:
        """Yield ``(step, table)`` of ``split``, ascending, one table in memory at a time. Raises as :meth:`read`."""
        for step in self.steps(split):
            yield step, self.read(step, split)

    def truncate_after(self, step: int) -> None:
        """Remove the rollouts of later steps in all splits, and what a killed writer left. Raises ``StorageError``."""
        for split in self.splits():
            folder = self._folder(split)
            try:
                for later in [found for found in self.steps(split) if found > step]:
                    self._path(later, split).unlink()
                remove_temporaries(folder)
                fsync_directory(folder)
            except OSError as error:
                raise StorageError(describe_failure("cannot remove rollouts in", folder, error)) from error

    def _folder(self, split: str) -> Path:
        return self.directory / quote(split, safe="").replace(".", "%2E")

    def _path(self, step: int, split: str) -> Path:
        return self._folder(split) / f"step_{step:06d}.parquet"

    def _what_there_is(self, split: str) -> str:
        steps = self.steps(split)
        if steps:
            return f"there are {len(steps)} steps from {steps[0]} to {steps[-1]}"
        return f"rollouts are kept for {', '.join(self.splits()) or 'no split'} (see tracking.rollouts)"


def _steps(folder: Path) -> Iterator[int]:
    if folder.is_dir():
        for path in folder.iterdir():
            match = _STEP.match(path.name)
            if match:
                yield int(match.group(1))


def _parts(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Split into runs of whole groups of bounded size, so that neither memory nor list offsets overflow."""
    part: list[Group] = []
    tokens = 0
    for group in groups:
        size = sum(sample.length + len(group.prompt.token_ids) for sample in group.samples)
        if part and tokens + size > _TOKENS_PER_ROW_GROUP:
            yield part
            part, tokens = [], 0
        part.append(group)
        tokens += size
    if part:
        yield part
