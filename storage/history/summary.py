"""What is in a history, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from storage.history.rows import Rows, prompt_digest
from storage.history.segments import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryStats:
    """A summary of the readable rows.

    Attributes:
        answers: Rows.
        tokens: Tokens of all answers.
        prompts: Different prompts.
        visits: Groups of answers.
        first_step: Smallest step; -1 for an empty store.
        last_step: Largest step; -1 for an empty store.
        oldest_version: Smallest version of weights among the tokens; -1 without any.
        newest_version: Largest version.
        length_mean: Mean length of an answer. Unit: tokens.
        length_quantiles: 10th, 50th and 90th percentile and the longest. Unit: tokens.
        truncated_share: Share of answers that ended at the length limit.
        duplicate_share: Share of answers that repeat another answer to their prompt word for word.
        entropy: Mean of -logprob over policy tokens: an unbiased estimate of the mean entropy of the distributions
            that were sampled. Unit: nats a token.
        drafted: Draft tokens that were verified for these answers.
        accepted: Draft tokens that were accepted.
    """

    answers: int
    tokens: int
    prompts: int
    visits: int
    first_step: int
    last_step: int
    oldest_version: int
    newest_version: int
    length_mean: float
    length_quantiles: tuple[int, int, int, int]
    truncated_share: float
    duplicate_share: float
    entropy: float
    drafted: int
    accepted: int


def summarise(blocks: Iterable[Block]) -> HistoryStats:
    """Read all blocks once; memory is a few dozen bytes an answer. Damaged blocks are left out."""
    lengths: list[npt.NDArray[np.int32]] = []
    answers: list[npt.NDArray[np.uint64]] = []
    prompts: set[bytes] = set()
    visits: set[tuple[int, ...]] = set()
    steps: list[int] = []
    versions: list[int] = []
    surprise, policy_tokens, truncated, drafted, accepted = 0.0, 0, 0, 0, 0
    for rows in (rows for rows in (block.load() for block in blocks) if rows is not None):
        batch = rows.batch
        digests = [prompt_digest(rows.prompt(run)) for run in range(len(rows.hashes))]
        prompts.update(digests)
        visits.update(map(tuple, np.unique(rows.visit_keys(), axis=0).tolist()))
        lengths.append(rows.column("length").copy())
        answers.append(_fingerprints(rows, digests))
        steps += [int(rows.column("step").min()), int(rows.column("step").max())]
        runs = batch.column("segments").values
        written = runs.filter(pc.equal(runs.field("source"), "policy"))
        if len(written):
            versions += pc.min_max(written.field("version")).as_py().values()
            policy_tokens += pc.sum(written.field("count")).as_py()
        surprise -= float(batch.column("logprobs").values.to_numpy().sum(dtype=np.float64))
        truncated += pc.sum(pc.equal(batch.column("finish_reason"), pa.scalar("length"))).as_py()
        drafted += int(rows.column("n_drafted").sum(dtype=np.int64))
        accepted += int(rows.column("n_accepted").sum(dtype=np.int64))
    every = np.concatenate(lengths) if lengths else np.zeros(0, np.int32)
    count = len(every)
    different = len(np.unique(np.concatenate(answers))) if answers else 0
    low, middle, high = (int(x) for x in np.quantile(every, (0.1, 0.5, 0.9), method="nearest")) if count else (0, 0, 0)
    return HistoryStats(
        answers=count,
        tokens=int(every.sum(dtype=np.int64)),
        prompts=len(prompts),
        visits=len(visits),
        first_step=min(steps, default=-1),
        last_step=max(steps, default=-1),
        oldest_version=min(versions, default=-1),
        newest_version=max(versions, default=-1),
        length_mean=float(every.mean()) if count else 0.0,
        length_quantiles=(low, middle, high, int(every.max(initial=0))),
        truncated_share=truncated / max(1, count),
        duplicate_share=(count - different) / max(1, count),
        entropy=surprise / max(1, policy_tokens),
        drafted=drafted,
        accepted=accepted,
    )


def _fingerprints(rows: Rows, digests: list[bytes]) -> npt.NDArray[np.uint64]:
    """64 bits for each (prompt, answer), uint64[rows]: equal for equal answers to equal prompts."""
    prompts = np.array([int.from_bytes(digest[:8], "little") for digest in digests], np.uint64)
    seeds = np.repeat(prompts, np.diff(rows.bounds)).tolist()
    return np.array(
        [xxhash.xxh3_64_intdigest(rows.tokens(row).tobytes(), seed) for row, seed in enumerate(seeds)], np.uint64
    )
