"""Whether a history is what it should be: every checksum, and the laws that rows keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from storage.history.rows import PromptHash, Rows
from storage.history.segments import Block, Segment
from storage.history.top_columns import has_top, top_laws
from storage.records import FinishReason, SegmentSource

_SOURCES = get_args(SegmentSource)
_REASONS = get_args(FinishReason)
_LARGEST_LOGPROB = 1e-3  # rounding of a probability of 1; engines compute in fp32


def verify_blocks(
    segments: Sequence[Segment], log: Sequence[Block], *, hash_prompt: PromptHash, tokenizer_fingerprint: int
) -> list[str]:
    """Return what is wrong, a sentence each; reads everything once.

    Args:
        segments: Sealed segments, oldest first.
        log: Blocks of the write-ahead log.
        hash_prompt: Hash that the prompts must have.
        tokenizer_fingerprint: Tokenizer that all rows must be of.
    """
    problems = list(chain.from_iterable(_segment_problems(segment) for segment in segments))
    identities: list[npt.NDArray[np.int64]] = []
    for block in [*chain.from_iterable(segment.blocks for segment in segments), *log]:
        rows = block.load()
        if rows is None:
            problems.append(block.failure)
            continue
        problems += [f"{block.place}: {law}" for law in _broken_laws(rows, hash_prompt, tokenizer_fingerprint)]
        sample = rows.column("sample_idx").astype(np.int64)
        identities.append(np.concatenate([rows.visit_keys(), sample[:, None]], axis=1))
    if identities:
        every = np.concatenate(identities)
        twice = len(every) - len(np.unique(every, axis=0))
        if twice:
            problems.append(f"{twice} answers are there twice (same epoch, prompt, duplicate and sample)")
    return problems


def _segment_problems(segment: Segment) -> Iterator[str]:
    if segment.is_missing:
        return  # each of its blocks says so
    yield from segment.frame_failures()
    for entry, block in zip(segment.entry.blocks, segment.blocks, strict=True):
        rows = block.load()
        if rows is None:
            continue
        hashes, steps = rows.column("prompt_hash"), rows.column("step")
        if (hashes[:-1] > hashes[1:]).any() or (hashes[0], hashes[-1]) != (entry.first_hash, entry.last_hash):
            yield f"{block.place}: not sorted by prompt hash as the manifest says"
        if len(hashes) != entry.rows or int(rows.column("length").sum(dtype=np.int64)) != entry.tokens:
            yield f"{block.place}: not as many answers and tokens as the manifest says"
        if steps.min() < segment.entry.first_step or steps.max() > segment.entry.last_step:
            yield f"{block.place}: steps outside of what the manifest says"


def _broken_laws(rows: Rows, hash_prompt: PromptHash, tokenizer_fingerprint: int) -> Iterator[str]:
    """Yield the laws that some rows break, with their number."""
    batch = rows.batch
    length = rows.column("length")
    runs = batch.column("segments")
    values, offsets = runs.values, runs.offsets.to_numpy()
    counts = values.field("count").to_numpy()
    totals = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    logprobs = batch.column("logprobs").values.to_numpy()
    hashes = np.array([hash_prompt(rows.prompt(run)) for run in range(len(rows.hashes))], np.uint64)
    laws: dict[str, Any] = {
        "as many tokens as the length says": np.diff(batch.column("tokens").offsets.to_numpy()) == length,
        "as many logprobs as the length says": np.diff(batch.column("logprobs").offsets.to_numpy()) == length,
        "runs of versions that add up to the length": totals[offsets[1:]] - totals[offsets[:-1]] == length,
        "runs of versions with tokens in them": counts >= 0,
        "sources that are known": np.isin(values.field("source").to_numpy(zero_copy_only=False), _SOURCES),
        "token ids of at least 0": batch.column("tokens").values.to_numpy() >= 0,
        "logprobs that are finite and not above 0": np.isfinite(logprobs) & (logprobs <= _LARGEST_LOGPROB),
        "prompts with the hash that they claim": hashes == rows.hashes,
        "one hash a run": np.repeat(rows.hashes, np.diff(rows.bounds)) == rows.column("prompt_hash"),
        "the store's tokenizer": rows.column("tokenizer_fp") == np.uint64(tokenizer_fingerprint),
        "no more drafted tokens accepted than verified": rows.column("n_accepted") <= rows.column("n_drafted"),
        "a known finish reason": np.isin(batch.column("finish_reason").to_numpy(zero_copy_only=False), _REASONS),
    }
    if has_top(batch.schema):
        laws |= top_laws(batch)
    for law, holds in laws.items():
        broken = int(np.count_nonzero(~np.asarray(holds, np.bool_)))
        if broken:
            yield f"{broken} values break the law: {law}"
