"""One row per answer, as drafting needs it: the compact Arrow schema of the history store, and the way in and out.

It holds what the archive's schema holds about tokens and leaves out texts, rewards by function and timings. Choices
that the schema does not show:

* ``prompt_tokens`` is filled in the first row of each *run*, the consecutive rows of one prompt in a batch, and null in
  the others. So a prompt is written once a batch, every batch is complete on its own (losing one loses nothing of the
  others), and prompts with equal hashes are told apart by their tokens.
* The tokenizer is part of each row and of the metadata: tokens mean nothing without it.
* Schema version 2 has two columns more, ``top_ids`` and ``top_logprobs``: K values a token, flattened, null where none
  were recorded. A store has one version for all of its files; it stays at 1 until somebody wants to keep top tokens,
  since these take many times the space of all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from storage.history.schema import SCHEMA as ARCHIVE_SCHEMA
from storage.history.schema import VERSION_KEY
from storage.history.top_columns import TOP_FIELDS, TOP_NAMES, has_top, top_columns
from storage.records import (
    TRAIN_SPLIT,
    FinishReason,
    Float32Array,
    Group,
    Int32Array,
    Sample,
    SamplingParams,
    SegmentSource,
    TopTokens,
)

PLAIN_VERSION, TOP_VERSION = 1, 2
"""Schema versions: without and with the likeliest tokens at each place."""
TOKENIZER_KEY = b"tokenizer_fp"

PromptHash = Callable[[Int32Array], int]
"""Maps int32[n] to 64 bits; :func:`storage.history.schema.prompt_hash` unless a test forces collisions."""

_COLUMNS = (
    *("prompt_hash", "prompt_tokens", "epoch", "prompt", "duplicate", "sample_idx", "step", "segments", "tokens"),
    *("logprobs", "length", "reward", "finish_reason", "temperature", "top_p", "top_k", "tokenizer_fp"),
    *("n_drafted", "n_accepted"),
)
_SCALARS = (
    *("epoch", "prompt", "duplicate", "sample_idx", "step", "segments", "reward", "finish_reason", "temperature"),
    *("top_p", "top_k", "n_drafted", "n_accepted"),
)
_KEY_COLUMNS = ("epoch", "prompt", "duplicate")


def history_schema(tokenizer_fingerprint: int, version: int = PLAIN_VERSION) -> Any:
    """Return the ``pyarrow.Schema`` of a store whose tokens are those of one tokenizer."""
    columns = [ARCHIVE_SCHEMA.field(name).with_nullable(name in ("prompt_tokens", "reward")) for name in _COLUMNS]
    return pa.schema(
        [*columns, *(TOP_FIELDS if version == TOP_VERSION else ())],
        metadata={VERSION_KEY: str(version).encode(), TOKENIZER_KEY: f"{tokenizer_fingerprint:016x}".encode()},
    )


def conform(batch: Any, schema: Any) -> Any:
    """Return ``batch`` in another version of the schema; columns that it lacks are null."""
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    have = set(batch.schema.names)
    columns = [batch.column(f.name) if f.name in have else pa.nulls(batch.num_rows, f.type) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class VisitKey(NamedTuple):
    """Names one visit of a prompt: the group of answers that one assignment asked for."""

    epoch: int
    prompt: int
    duplicate: int


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """``count`` tokens of an answer that share a source and a version (-1 for environment tokens)."""

    source: SegmentSource
    version: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer out of the store.

    ``tokens``, ``logprobs`` and ``top`` are read-only views of the store's files: they stay valid after compaction and
    keep the file mapped as long as they live. Whoever keeps or sends an answer takes :meth:`copy`.

    Attributes:
        tokens: int32[n].
        logprobs: float32[n] under the distribution that was sampled; 0 on environment tokens.
        segments: Runs of tokens by source and version; their counts add up to n.
        reward: Reward, ``None`` where there was none.
        sample_idx: Position among its siblings.
        epoch: Pass over the data.
        prompt: Row number of the prompt in the data.
        duplicate: Which occurrence inside the epoch.
        step: Step that the answer was trained in.
        finish_reason: How it ended.
        temperature: How its tokens were drawn.
        top_p: Nucleus mass.
        top_k: Number of highest logits kept; 0 for all.
        n_drafted: Draft tokens that were verified for it.
        n_accepted: Draft tokens that were accepted.
        top: The likeliest tokens at each place, of n rows; ``None`` where none were recorded.
    """

    tokens: Int32Array
    logprobs: Float32Array
    segments: tuple[SegmentRun, ...]
    reward: float | None
    sample_idx: int
    epoch: int
    prompt: int
    duplicate: int
    step: int
    finish_reason: FinishReason
    temperature: float
    top_p: float
    top_k: int
    n_drafted: int
    n_accepted: int
    top: TopTokens | None = None

    @property
    def visit(self) -> VisitKey:
        """The visit that it belongs to."""
        return VisitKey(self.epoch, self.prompt, self.duplicate)

    @property
    def oldest_version(self) -> int:
        """Smallest version among the policy's tokens; -1 without any."""
        return min((run.version for run in self.segments if run.source == "policy"), default=-1)

    def versions(self) -> Int32Array:
        """Version of each token, int32[n]; -1 on environment tokens."""
        counts = [run.count for run in self.segments]
        return np.repeat(np.array([run.version for run in self.segments], np.int32), counts)

    def policy_mask(self) -> npt.NDArray[np.bool_]:
        """True where the policy wrote the token, bool[n]."""
        counts = [run.count for run in self.segments]
        return np.repeat(np.array([run.source == "policy" for run in self.segments], np.bool_), counts)

    def copy(self) -> Answer:
        """Return the answer with arrays of its own, which keep no file mapped."""
        top = None if self.top is None else self.top.copy()
        return replace(self, tokens=self.tokens.copy(), logprobs=self.logprobs.copy(), top=top)


class Rows:
    """A record batch of the store with its runs; everything that it hands out is a view."""

    def __init__(self, batch: Any) -> None:
        """Wrap ``batch``, a ``pyarrow.RecordBatch`` in :func:`history_schema` that starts with a run."""
        self.batch = batch
        first = np.flatnonzero(batch.column("prompt_tokens").is_valid().to_numpy(zero_copy_only=False))
        self.bounds: npt.NDArray[np.int64] = np.append(first, batch.num_rows).astype(np.int64)
        """int64[runs + 1]: run r is rows ``bounds[r]`` to ``bounds[r + 1]``."""
        self.hashes: npt.NDArray[np.uint64] = self.column("prompt_hash")[first]
        """uint64[runs]."""
        self._prompts = _Ragged(batch.column("prompt_tokens"))
        self._tokens = _Ragged(batch.column("tokens"))
        self._logprobs = _Ragged(batch.column("logprobs"))
        self._top = None
        if has_top(batch.schema):
            ids, logprobs = (_Ragged(batch.column(name)) for name in TOP_NAMES)
            self._top = ids, logprobs

    def column(self, name: str) -> npt.NDArray[Any]:
        """One column of numbers without nulls, one value a row."""
        values: npt.NDArray[Any] = self.batch.column(name).to_numpy()
        return values

    def prompt(self, run: int) -> Int32Array:
        """Tokens of the prompt of a run, int32[n]."""
        return self._prompts[int(self.bounds[run])]

    def runs_of(self, hash_: int, token_ids: Int32Array) -> list[int]:
        """Runs of the prompt with this hash and these tokens, in order."""
        found = np.flatnonzero(self.hashes == np.uint64(hash_))
        return [int(run) for run in found if np.array_equal(self.prompt(int(run)), token_ids)]

    def tokens(self, row: int) -> Int32Array:
        """Tokens of an answer, int32[n]."""
        return self._tokens[row]

    def logprobs(self, row: int) -> Float32Array:
        """Logprobs of an answer, float32[n]."""
        return self._logprobs[row]

    def top(self, row: int) -> TopTokens | None:
        """Likeliest tokens at each place of an answer; ``None`` where none were recorded."""
        ids = None if self._top is None else self._top[0][row]
        if self._top is None or ids is None or not len(ids):
            return None
        shape = len(self.tokens(row)), -1
        return TopTokens(ids=ids.reshape(shape), logprobs=self._top[1][row].reshape(shape))

    def visit_keys(self) -> npt.NDArray[np.int64]:
        """int64[rows, 3]: epoch, prompt and duplicate, as in :class:`VisitKey`."""
        return np.stack([self.column(name).astype(np.int64) for name in _KEY_COLUMNS], axis=1)

    def answers(self, first: int, last: int) -> list[Answer]:
        """Answers of rows ``first`` to ``last`` (exclusive)."""
        part = self.batch.slice(first, last - first)
        columns = [part.column(name).to_pylist() for name in _SCALARS]
        answers = []
        for row, values in enumerate(zip(*columns, strict=True), start=first):
            cell: dict[str, Any] = dict(zip(_SCALARS, values, strict=True))
            runs = tuple(SegmentRun(run["source"], run["version"], run["count"]) for run in cell.pop("segments"))
            answers.append(
                Answer(tokens=self.tokens(row), logprobs=self.logprobs(row), segments=runs, top=self.top(row), **cell)
            )
        return answers


class _Ragged:
    """Rows of a list column as views of its values; offsets already count from the start of ``values``."""

    def __init__(self, column: Any) -> None:
        self._values = column.values.to_numpy()
        self._offsets = column.offsets.to_numpy()

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        view: npt.NDArray[Any] = self._values[self._offsets[row] : self._offsets[row + 1]]
        return view


def to_rows(
    step: int,
    groups: Sequence[Group],
    sampling: SamplingParams,
    *,
    schema: Any,
    hash_prompt: PromptHash,
) -> Any:
    """Return the ``pyarrow.RecordBatch`` of ``groups``: one row per sample, one run per group that has samples.

    Raises:
        ValueError: A group that is not of the training split, or keys or lengths that contradict each other; names it.
    """
    for group in groups:
        if group.key.split != TRAIN_SPLIT:
            raise ValueError(f"group {group.key}: only groups of {TRAIN_SPLIT!r} belong to the history")
        if group.prompt.index != group.key.prompt or any(sample.key != group.key for sample in group.samples):
            raise ValueError(f"group {group.key}: its prompt or a sample carries another key")
    groups = [group for group in groups if group.samples]
    samples = [sample for group in groups for sample in group.samples]
    sizes = [len(group.samples) for group in groups]
    segments = [segment for sample in samples for segment in sample.segments]
    counts = np.array([len(segment.token_ids) for segment in segments], np.int64)
    if not np.array_equal(counts, [len(segment.logprobs) for segment in segments]):
        wrong = next(s for s in samples if any(len(part.token_ids) != len(part.logprobs) for part in s.segments))
        raise ValueError(f"group {wrong.key}: sample {wrong.index} does not have one logprob a token")
    totals = np.concatenate([[0], np.cumsum(counts)])
    lengths = np.diff(totals[np.concatenate([[0], np.cumsum([len(sample.segments) for sample in samples])])])
    count = len(samples)
    fingerprint = int(schema.metadata[TOKENIZER_KEY], 16)
    starts = np.cumsum([0, *sizes])[:-1]
    hashes = np.array([hash_prompt(group.prompt.token_ids) for group in groups], np.uint64)
    values: Mapping[str, Any] = {
        "prompt_hash": np.repeat(hashes, sizes),
        "prompt_tokens": sparse_lists(count, starts, [group.prompt.token_ids for group in groups]),
        "epoch": np.repeat(np.array([group.key.epoch for group in groups], np.int32), sizes),
        "prompt": np.repeat(np.array([group.key.prompt for group in groups], np.int64), sizes),
        "duplicate": np.repeat(np.array([group.key.duplicate for group in groups], np.int32), sizes),
        "sample_idx": [sample.index for sample in samples],
        "step": np.full(count, step, np.int32),
        "segments": pa.ListArray.from_arrays(
            _offsets([len(sample.segments) for sample in samples]),
            pa.StructArray.from_arrays(
                [
                    pa.array([segment.source for segment in segments], pa.string()),
                    pa.array([segment.version for segment in segments], pa.int32()),
                    pa.array(counts, pa.int32()),
                ],
                fields=list(schema.field("segments").type.value_type),
            ),
        ),
        "tokens": _lists(lengths, [segment.token_ids for segment in segments], np.dtype(np.int32)),
        "logprobs": _lists(lengths, [segment.logprobs for segment in segments], np.dtype(np.float32)),
        "length": lengths,
        "reward": [sample.reward for sample in samples],
        "finish_reason": [sample.finish_reason for sample in samples],
        "temperature": np.full(count, sampling.temperature, np.float32),
        "top_p": np.full(count, sampling.top_p, np.float32),
        "top_k": np.full(count, sampling.top_k, np.int32),
        "tokenizer_fp": np.full(count, fingerprint, np.uint64),
        "n_drafted": [sample.drafted for sample in samples],
        "n_accepted": [sample.accepted for sample in samples],
    }
    if has_top(schema):
        values = {**values, **top_columns(samples)}
    arrays = [
        values[column.name] if isinstance(values[column.name], pa.Array) else pa.array(values[column.name], column.type)
        for column in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def in_parts(groups: Sequence[Group], most_tokens: int) -> Iterator[list[Group]]:
    """Split into stretches of whole groups of at most ``most_tokens`` tokens, or of one larger group.

    A likely token that was recorded beside the one drawn counts as a token too: it takes as much space.
    """
    part: list[Group] = []
    tokens = 0
    for group in groups:
        size = len(group.prompt.token_ids) + sum(_size(sample) for sample in group.samples)
        if part and tokens + size > most_tokens:
            yield part
            part, tokens = [], 0
        part.append(group)
        tokens += size
    if part:
        yield part


def _size(sample: Sample) -> int:
    return sample.length + sum(segment.top.ids.size for segment in sample.segments if segment.top is not None)


def prompt_digest(token_ids: Int32Array) -> bytes:
    """Return 128 bits that tell prompts apart where a table of their tokens would be too large."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(token_ids, "<i4").tobytes())


def sparse_lists(rows: int, places: Sequence[int] | npt.NDArray[Any], lists: Sequence[Int32Array]) -> Any:
    """Return a ``list<int32>`` array of ``rows`` entries with ``lists`` at ``places`` (ascending), null elsewhere."""
    lengths = np.zeros(rows, np.int64)
    lengths[places] = [len(part) for part in lists]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    absent = np.ones(rows, np.bool_)
    absent[places] = False
    flat = np.concatenate(lists).astype(np.int32, copy=False) if lists else np.zeros(0, np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), mask=pa.array(absent))


def copy_out(batch: Any) -> Any:
    """Return a ``pyarrow.RecordBatch`` that holds nothing but the rows of ``batch``.

    A slice keeps, pickles and sends the whole buffers of its parent; take this before one leaves the process.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def expand_prompts(batch: Any) -> Any:
    """Return ``batch`` with the prompt's tokens in every row, for readers that know nothing of runs."""
    rows = Rows(batch)
    repeated = [
        rows.prompt(run) for run, (first, last) in enumerate(pairwise(rows.bounds)) for _ in range(last - first)
    ]
    index = batch.schema.get_field_index("prompt_tokens")
    return batch.set_column(
        index, batch.schema.field(index), sparse_lists(len(repeated), range(len(repeated)), repeated)
    )


def _lists(lengths: Sequence[int] | npt.NDArray[Any], parts: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any]) -> Any:
    """Return a list array with rows of ``lengths`` out of ``parts``, which need not be cut where rows are."""
    values = np.concatenate(parts) if parts else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(_offsets(lengths), pa.array(values.astype(dtype, copy=False)))


def _offsets(lengths: Sequence[int] | npt.NDArray[Any]) -> Any:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
