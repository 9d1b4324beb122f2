"""Merging of blocks into batches sorted by prompt: the one mechanism behind sealing, compaction and truncation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from storage.history.rows import Rows, VisitKey, conform, sparse_lists
from storage.history.segments import Block
from storage.records import Int32Array


class _Piece(NamedTuple):
    """Rows ``first`` to ``last`` (exclusive) of a batch, all answers to one prompt."""

    rows: Rows
    first: int
    last: int


class _Prompt(NamedTuple):
    """A prompt with its answers, oldest first."""

    token_ids: Int32Array
    pieces: list[_Piece]


def merge(
    blocks: Sequence[Block],
    *,
    block_tokens: int,
    schema: Any,
    window: int | None = None,
    last_step: int | None = None,
) -> Iterator[Any]:
    """Yield ``pyarrow.RecordBatch`` es sorted by prompt hash, the answers to a prompt in order of time.

    Memory: one batch of the output and 24 bytes a run of the input. Damaged blocks are left out.

    Args:
        blocks: Input, in order of time.
        block_tokens: Answer tokens from which on a batch is full; only a prompt is never split before that size.
        schema: ``pyarrow.Schema`` of the output; the input may be in an earlier version of it.
        window: Newest visits of each prompt to keep; all by default.
        last_step: Rows of later steps are left out; none by default.
    """
    pieces: list[tuple[Int32Array, _Piece]] = []
    tokens = 0
    for prompt in _prompts(blocks):
        kept = prompt.pieces
        if last_step is not None:
            kept = [part for piece in kept for part in _until(piece, last_step)]
        if window is not None:
            kept = _newest(kept, window)
        for piece in kept:
            size = int(piece.rows.column("length")[piece.first : piece.last].sum(dtype=np.int64))
            if pieces and tokens + size > block_tokens:
                yield conform(_join(pieces), schema)
                pieces, tokens = [], 0
            pieces.append((prompt.token_ids, piece))
            tokens += size
    if pieces:
        yield conform(_join(pieces), schema)


def _prompts(blocks: Sequence[Block]) -> Iterator[_Prompt]:
    """Yield every prompt once, sorted by hash; prompts with equal hashes one after the other."""
    loaded = [rows for rows in (block.load() for block in blocks) if rows is not None]
    if not loaded:
        return
    hashes = np.concatenate([rows.hashes for rows in loaded])
    sources = np.repeat(np.arange(len(loaded)), [len(rows.hashes) for rows in loaded])
    runs = np.concatenate([np.arange(len(rows.hashes)) for rows in loaded])
    order = np.argsort(hashes, kind="stable")
    ends = [*(np.flatnonzero(np.diff(hashes[order])) + 1).tolist(), len(order)]
    start = 0
    for end in ends:
        alike: list[_Prompt] = []
        for place in order[start:end].tolist():
            rows, run = loaded[sources[place]], int(runs[place])
            token_ids = rows.prompt(run)
            piece = _Piece(rows, int(rows.bounds[run]), int(rows.bounds[run + 1]))
            known = next((prompt for prompt in alike if np.array_equal(prompt.token_ids, token_ids)), None)
            if known is None:
                alike.append(_Prompt(token_ids, [piece]))
            else:
                known.pieces.append(piece)
        yield from alike
        start = end


def _until(piece: _Piece, last_step: int) -> list[_Piece]:
    """The parts of a piece without the rows of later steps."""
    return _where(piece, piece.rows.column("step")[piece.first : piece.last] <= last_step)


def _newest(pieces: list[_Piece], window: int) -> list[_Piece]:
    """The parts of ``pieces`` that belong to the last ``window`` visits."""
    visits: dict[VisitKey, None] = {}
    keys = [[VisitKey(*key) for key in p.rows.visit_keys()[p.first : p.last].tolist()] for p in pieces]
    for key in (key for part in reversed(keys) for key in reversed(part)):
        if key not in visits and len(visits) == window:
            break
        visits[key] = None
    return [
        part
        for piece, there in zip(pieces, keys, strict=True)
        for part in _where(piece, np.array([key in visits for key in there]))
    ]


def _where(piece: _Piece, mask: Any) -> list[_Piece]:
    """The stretches of a piece where ``mask``, bool[rows], holds."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))) + piece.first
    return [_Piece(piece.rows, int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _join(pieces: Sequence[tuple[Int32Array, _Piece]]) -> Any:
    """Copy pieces into one batch, in which each prompt has one run."""
    batch = pa.concat_batches([p.rows.batch.slice(p.first, p.last - p.first) for _, p in pieces])
    starts: list[int] = []
    prompts: list[Int32Array] = []
    row = 0
    for token_ids, piece in pieces:
        if not prompts or prompts[-1] is not token_ids:
            starts.append(row)
            prompts.append(token_ids)
        row += piece.last - piece.first
    index = batch.schema.get_field_index("prompt_tokens")
    return batch.set_column(index, batch.schema.field(index), sparse_lists(batch.num_rows, starts, prompts))
