"""Plays recorded answers back through a draft source, without a model.

A draft is a function of what was written before it, so which draft tokens are accepted can be read off the recorded
answer: those that equal it, up to the first that does not. Rows run side by side in slots like in the engine, so the
source also sees siblings grow, and steps are told the time that a given cost says they take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.rollout.draft_budget import Budget
from actors.rollout.draft_cost import PassCost
from actors.rollout.engine import Request, RunningRows, StepStats
from actors.rollout.history_drafts import HistoryDrafts
from actors.rollout.row_sources import Candidates
from storage.records import Int32Array

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recorded:
    """An answer to play back: its request, and int32[n] tokens, n >= 1."""

    request: Request
    token_ids: Int32Array


@dataclass(slots=True)
class Totals:
    """What a replay came to; adds up.

    Attributes:
        passes: Forward passes; row_passes: rows in them, added up.
        emitted: Tokens written; drafted: draft tokens verified; accepted: draft tokens accepted.
        seconds: Time of the passes by the given cost.
    """

    passes: int = 0
    row_passes: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def add(self, other: Totals) -> None:
        """Add the figures of another replay."""
        self.passes += other.passes
        self.row_passes += other.row_passes
        self.emitted += other.emitted
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.seconds += other.seconds

    @property
    def acceptance_length(self) -> float:
        """Tokens that a row writes in a pass on average."""
        return self.emitted / self.row_passes if self.row_passes else math.nan

    @property
    def acceptance(self) -> float:
        """Share of draft tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else math.nan

    def speedup(self, ratio: float) -> float:
        """Return tokens over cost where a row costs 1 a pass and each draft token ``ratio`` of that."""
        spent = self.row_passes + ratio * self.drafted
        return self.emitted / spent if spent else math.nan


def replay(answers: Sequence[Recorded], source: HistoryDrafts | None, cost: PassCost, max_rows: int) -> Totals:
    """Play ``answers`` back in order, ``max_rows`` side by side; without a source they are decoded plainly."""
    totals = Totals()
    if not answers:
        return totals
    prompts = np.array([len(a.request.prompt_ids) for a in answers], np.int64)
    sizes = np.array([len(a.token_ids) for a in answers], np.int64)
    slots = min(max_rows, len(answers))
    # A token that nothing equals stands behind each answer, so no draft goes on beyond the end.
    tokens = np.full((slots, int((prompts + sizes).max()) + 1), -1, np.int32)
    length, prompt, end, limit = (np.zeros(slots, np.int64) for _ in range(4))
    active = np.zeros(slots, np.bool_)
    waiting = 0
    while active.any() or waiting < len(answers):
        begun: list[int] = []
        prefill = 0
        for handle in np.flatnonzero(~active)[: len(answers) - waiting].tolist():
            answer = answers[waiting]
            tokens[handle] = -1
            tokens[handle, : prompts[waiting]] = answer.request.prompt_ids
            tokens[handle, prompts[waiting] : prompts[waiting] + sizes[waiting]] = answer.token_ids
            length[handle] = prompt[handle] = prompts[waiting]
            end[handle] = prompts[waiting] + sizes[waiting]
            limit[handle] = prompts[waiting] + max(answer.request.sampling.max_tokens, int(sizes[waiting]))
            first = waiting == 0 or answers[waiting - 1].request.group != answer.request.group
            prefill += int(prompts[waiting]) if first or answer.request.group is None else 0
            if source is not None:
                source.open(handle, answer.request)
            begun.append(handle)
            waiting += 1
        decoding = np.flatnonzero(active)
        active[begun] = True
        lengths, accepted = np.zeros(len(decoding), np.int64), np.zeros(len(decoding), np.int64)
        if source is not None and len(decoding):
            room = limit[decoding] - length[decoding] - 1
            rows = RunningRows(decoding, tokens, prompt[decoding], length[decoding], room)
            drafts = source.propose(rows)
            if drafts is not None:
                lengths = np.minimum(drafts.lengths, room)
                accepted = _agreeing(drafts.tokens, lengths, tokens, decoding, length[decoding])
                some = lengths > 0
                if some.any():
                    source.observe(decoding[some], lengths[some], accepted[some])
        before = length.copy()
        length[decoding] = np.minimum(length[decoding] + accepted + 1, end[decoding])
        length[begun] += 1
        stats = _stats(
            len(decoding) + len(begun), prefill, int((length - before)[active].sum()), lengths, accepted, cost
        )
        totals.add(
            Totals(1, stats.rows, stats.emitted, stats.drafted, stats.accepted, stats.paced_seconds),
        )
        for handle in np.flatnonzero(active & (length >= end)).tolist():
            active[handle] = False
            if source is not None:
                source.close(handle)
        if source is not None:
            source.on_step(stats)
    return totals


class OracleLengths:
    """Knows the recorded answers: each row takes the candidate that is right for longest, cut where it goes wrong."""

    def __init__(self, max_draft: int) -> None:
        self._max_draft = max_draft

    def open(self, handle: int) -> None:
        """Nothing is kept by row."""

    def limits(self, rows: RunningRows) -> Int64Array:
        """int64[rows], most tokens that sources need to offer."""
        return np.minimum(rows.room, self._max_draft)

    def choose(self, candidates: Candidates, rows: RunningRows, weights: Float64Array, cost: PassCost) -> Budget:
        """Return the longest right draft of each row; the rows' array holds what they will write."""
        right = np.stack(
            [
                _agreeing(offered, lengths, rows.tokens, rows.handles, rows.length)
                for offered, lengths in zip(candidates.tokens, candidates.lengths, strict=True)
            ]
        )
        source = right.argmax(axis=0)
        lengths = right[source, np.arange(len(source))]
        return Budget(np.where(lengths > 0, source, -1), lengths, math.nan)

    def observe(self, handles: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Nothing is learned."""


def _agreeing(
    drafts: Int32Array, lengths: Int64Array, tokens: Int32Array, handles: Int64Array, at: Int64Array
) -> Int64Array:
    """int64[rows], leading draft tokens that equal what the row goes on with."""
    width = int(lengths.max(initial=0))
    columns = np.arange(width)
    actual = tokens[handles[:, None], np.minimum(at[:, None] + columns, tokens.shape[1] - 1)]
    equal = (drafts[:, :width] == actual) & (columns < lengths[:, None])
    counts: Int64Array = np.logical_and.accumulate(equal, axis=1).sum(axis=1, dtype=np.int64)
    return counts


def _stats(
    rows: int, prefill: int, emitted: int, lengths: Int64Array, accepted: Int64Array, cost: PassCost
) -> StepStats:
    drafted = int(lengths.sum())
    # Rows that begin draw behind the last token of their prompt, which is among the prefilled ones.
    tokens = len(lengths) + drafted + prefill
    seconds = cost.seconds(rows, tokens, ragged=drafted + prefill > 0)
    return StepStats(
        rows=rows,
        tokens=tokens,
        prefill_tokens=prefill,
        emitted=emitted,
        drafted=drafted,
        accepted=int(accepted.sum()),
        waiting=0,
        seconds=seconds,
        paced_seconds=seconds,
    )
