"""Turns drawn tokens into answers: accepts drafts, finds where rows end, keeps the books."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from actors.rollout.engine import Completion
from actors.rollout.pass_planner import Pass
from actors.rollout.row_pool import RowPool
from actors.rollout.sampling import acceptance_uniforms, position_keys
from actors.rollout.verification import LenientDrafts, accepted_counts, leniently_kept_counts

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

Redraw = Callable[[Int64Array, Int64Array, Float32Array], tuple[Int64Array, Float32Array]]
"""Maps draws int64[r] of a pass, with token ids int64[r, m] and log q of them float32[r, m], to a token drawn from each
residual, int64[r], and log p of it, float32[r]."""


class Emission:
    """What one pass emits.

    Attributes:
        emitted: int64[d], tokens that each drawing row emits, up to and including the one that ends it.
        accepted: int64[d], draft tokens among them.
        stopped, failed: bool[d], rows that ended with a stop token or text; rows whose next token is not computable.
        turned: bool[d], rows that the active weights go on with; what was drawn behind the place is not emitted.
        residual_draws, residual_tail: As in :class:`actors.rollout.engine.StepStats`.
    """

    def __init__(
        self,
        pool: RowPool,
        work: Pass,
        drawn: Int64Array,
        logprobs: Float32Array,
        scored: Float32Array | None,
        version: int,
        *,
        top: tuple[Int64Array, Float32Array] | None = None,
        redraw: Redraw | None = None,
    ) -> None:
        """Append the tokens to their rows.

        Args:
            pool: The rows.
            work: The pass.
            drawn: int64[len(work.logit_index)], one token per draw.
            logprobs: float32 of the same length; not finite where the logits were not.
            scored: float32 of the same length, log-probabilities of ``work.wanted()``.
            version: Version of the weights.
            top: int64 and float32[len(work.logit_index), K], the likeliest tokens of each draw; ``None`` when they are
                not recorded.
            redraw: Draws from the residuals of rejected lenient drafts; ``None``: the plain draws stand.
        """
        table, rows = pool.table, work.drawing
        self.residual_draws, self.residual_tail = 0, 0.0
        self._top, self._redraw = top, redraw
        self._pool, self._rows, self._version = pool, rows, version
        counts = self._counts = work.draft_lengths + 1
        steps = np.arange(int(counts.max()))
        real = steps < counts[:, None]
        tokens = np.full(real.shape, -1, np.int64)
        scores = np.zeros(real.shape, np.float32)
        tokens[real], scores[real] = drawn, logprobs
        accepted = accepted_counts(tokens, work.drafts, work.draft_lengths)
        offered = accepted + 1
        if work.lenient is not None and scored is not None:
            policy = np.zeros(real.shape, np.float32)
            policy[real] = scored
            at = work.lenient.rows
            accepted[at] = self._keep_leniently(work, work.lenient, tokens, scores, policy[at, :-1])
            table.held[rows[at]] = unfinished = work.lenient.cut & (accepted[at] == work.draft_lengths[at])
            offered[at] = accepted[at] + 1 - unfinished
        self.emitted, self.stopped, self.failed = _cut(tokens, scores, table.stop_ids[rows], offered)
        self.turned = np.zeros(len(rows), np.bool_)
        if table.old[rows].any():
            self._cut_at_handovers(tokens)
        self._append(tokens, scores)
        if table.watched[rows].any():
            self._cut_at_texts()
        self.accepted = np.minimum(accepted, self.emitted)
        table.cached[rows] = table.length[rows] - 1
        some = self.emitted > 0
        now = time.time()
        for i in rows[some & (table.passes[rows] == 0)].tolist():
            table[i].first_token = now
        table.passes[rows] += some
        table.drafted[rows] += work.draft_lengths
        table.accepted[rows] += self.accepted

    def release_ended(self) -> list[Completion]:
        """Take the rows that ended out of the pool and return their completions; let others change their weights."""
        table, rows = self._pool.table, self._rows
        ended = self.stopped | self.failed | (table.length[rows] >= table.limit[rows])
        finished = []
        for j in np.flatnonzero(ended).tolist():
            index = int(rows[j])
            if self.failed[j]:
                error = f"the logits of the next token are not finite (weights version {self._version})"
                finished.append(self._pool.completion(index, "error", error=error))
                self._pool.discard_state(index)
            else:
                finished.append(self._pool.completion(index, "stop" if self.stopped[j] else "length"))
            self._pool.release(index)
        self._pool.hand_over(rows[self.turned & ~ended])
        return finished

    def _keep_leniently(
        self, work: Pass, lenient: LenientDrafts, tokens: Int64Array, scores: Float32Array, policy: Float32Array
    ) -> Int64Array:
        """Overwrite drawn tokens, and their log-probabilities, with the draft tokens that are kept; return how many."""
        table, at = self._pool.table, lenient.rows
        rows, lengths = self._rows[at], work.draft_lengths[at]
        steps = np.arange(policy.shape[1])
        positions = (table.length[rows] - table.prompt[rows])[:, None] + steps
        uniforms = acceptance_uniforms(position_keys(table.key[rows][:, None], positions))
        kept = leniently_kept_counts(policy, lenient.logprobs, lenient.lenience, uniforms, lengths)
        self._draw_residuals(work, lenient, kept, tokens, scores)
        inside = steps < kept[:, None]
        tokens[at, :-1] = np.where(inside, work.drafts[at], tokens[at, :-1])
        scores[at, :-1] = np.where(inside, policy, scores[at, :-1])
        return kept

    def _draw_residuals(
        self, work: Pass, lenient: LenientDrafts, kept: Int64Array, tokens: Int64Array, scores: Float32Array
    ) -> None:
        """Overwrite the tokens drawn at first rejected positions by draws from the residual, where q is known there."""
        at = lenient.rows
        known = lenient.residual_at(kept, work.draft_lengths[at], work.drafts[at])
        # A greedy row's law is a point mass: what it draws is all that a residual could leave.
        warm = self._pool.table.temperature[self._rows[at[known.places]]] > 0
        if self._redraw is None or not warm.any():
            return
        places = at[known.places][warm]
        steps = kept[known.places][warm]
        draws = (np.cumsum(self._counts) - self._counts)[places] + steps
        drawn, logprobs = self._redraw(draws, known.ids[warm], known.logprobs[warm])
        tokens[places, steps], scores[places, steps] = drawn, logprobs
        self.residual_draws, self.residual_tail = len(places), float(known.tail_mass[warm].sum())

    def _cut_at_handovers(self, tokens: Int64Array) -> None:
        """Cut what rows emit behind the token that hands them over to the active weights."""
        inside = np.arange(tokens.shape[1]) < self.emitted[:, None]
        turns = self._pool.table.turning(self._rows, tokens) & inside
        self.turned = np.asarray(turns.any(axis=1))
        emitted = np.where(self.turned, turns.argmax(axis=1) + 1, self.emitted)
        self.stopped &= emitted == self.emitted
        self.failed &= ~self.turned  # the token that could not be computed lies behind the place
        self.emitted = emitted

    def _append(self, tokens: Int64Array, scores: npt.NDArray[np.float32]) -> None:
        table, rows = self._pool.table, self._rows
        turned = (table.version[rows] != self._version) & (self.emitted > 0)
        if turned.any():
            table.mark(rows[turned], self._version)
        table.reserve(int((table.length[rows] + self.emitted).max()))
        steps = np.arange(tokens.shape[1])
        inside = steps < self.emitted[:, None]
        lines = np.repeat(rows, self.emitted)
        columns = (table.length[rows][:, None] + steps)[inside]
        table.tokens[lines, columns] = tokens[inside]
        table.logprobs[lines, columns] = scores[inside]
        if table.top is not None and self._top is not None:
            draws = ((np.cumsum(self._counts) - self._counts)[:, None] + steps)[inside]
            table.top.put(lines, columns - table.prompt[lines], self._top[0][draws], self._top[1][draws])
        table.length[rows] += self.emitted

    def _cut_at_texts(self) -> None:
        """End rows behind the token that completes one of their stop strings."""
        table = self._pool.table
        for j in np.flatnonzero(table.watched[self._rows] & (self.emitted > 0)).tolist():
            index = int(self._rows[j])
            row = table[index]
            answer = table.answer(index)
            fresh = len(answer) - int(self.emitted[j])
            end = row.stops.first_completion(answer, row.stops_from, fresh) if row.stops else None
            if end is not None:
                self.emitted[j] = end + 1 - fresh
                table.length[index] = table.prompt[index] + end + 1
                self.stopped[j], self.failed[j] = True, False


def _cut(
    tokens: Int64Array, scores: npt.NDArray[np.float32], stop_ids: Int64Array, emitted: Int64Array
) -> tuple[Int64Array, BoolArray, BoolArray]:
    """Cut what rows emit behind their first stop id, and before their first token that could not be computed."""
    inside = np.arange(tokens.shape[1]) < emitted[:, None]
    stopping = (tokens[:, :, None] == stop_ids[:, None, :]).any(axis=2) & inside
    stopped = np.asarray(stopping.any(axis=1))
    emitted = np.where(stopped, stopping.argmax(axis=1) + 1, emitted)
    broken = ~np.isfinite(scores) & (np.arange(tokens.shape[1]) < emitted[:, None])
    failed = np.asarray(broken.any(axis=1))
    if failed.any():
        stopped &= ~failed
        emitted = np.where(failed, broken.argmax(axis=1), emitted)
    return emitted, stopped, failed
