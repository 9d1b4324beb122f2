"""Decides what each row feeds into the next forward pass, and which tokens are to be drawn from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actors.rollout.engine import DraftSource, RowView
from actors.rollout.row_pool import RowPool
from actors.rollout.step_layout import Feed

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class Pass:
    """One forward pass.

    Attributes:
        feed: Its tokens.
        rows: int64[fed], row of each entry of ``feed``.
        drawing: int64[d], rows that draw tokens: decoding rows, rows whose prefill completes, and followers.
        logit_index: int64[sum of (draft_lengths + 1)], fed token that each draw stands behind, row by row.
        drafts: int64[d, longest], draft tokens, padded with -1.
        draft_lengths: int64[d].
        followers: Rows that take over the prompt that a sibling (the key) computes in this pass.
        prefill: Prompt and prefix tokens in the pass.
    """

    feed: Feed
    rows: Int64Array
    drawing: Int64Array
    logit_index: Int64Array
    drafts: Int64Array
    draft_lengths: Int64Array
    followers: dict[int, list[int]] = field(default_factory=dict)
    prefill: int = 0


class PassPlanner:
    """Plans passes over the rows of a pool.

    ``prefill_tokens`` bounds prompt and prefix tokens per pass; ``vocabulary`` is the number of token ids that the
    model can read.
    """

    def __init__(self, pool: RowPool, drafts: DraftSource | None, prefill_tokens: int, vocabulary: int) -> None:
        self._pool = pool
        self._drafts = drafts
        self._prefill_tokens = prefill_tokens
        self._vocabulary = vocabulary

    def plan(self, rows: Int64Array, version: int) -> Pass:
        """Plan one pass over ``rows`` (in order of slot, at least one) under the weights ``version``."""
        table = self._pool.table
        behind = table.length[rows] - table.cached[rows]
        prefill: list[tuple[int, int]] = []
        followers: dict[int, list[int]] = {}
        if (behind > 1).any():
            prefill, followers = self._plan_prefill(rows[behind > 1], version)
            behind = table.length[rows] - table.cached[rows]
        decoding = rows[behind == 1]
        last = table.tokens[decoding, table.length[decoding] - 1].astype(np.int64)
        drafts, lengths = self._propose(decoding)
        counts = lengths + 1
        if drafts.shape[1]:
            wide = np.concatenate([last[:, None], drafts], axis=1)
            last = wide[np.arange(wide.shape[1]) < counts[:, None]]
        index = np.arange(len(last))
        if not prefill:
            feed = Feed(table.slot[decoding], table.cached[decoding], counts, last, len(decoding))
            return Pass(feed, decoding, decoding, index, drafts, lengths)
        tokens, drawing, places = [last], [], []
        at = len(last)
        for row, amount in prefill:
            start, prompt = int(table.cached[row]), int(table.prompt[row])
            tokens.append(table.tokens[row, start : start + amount].astype(np.int64))
            if start + amount == table.length[row]:
                drawing.append(row)
                places.append(at + amount - 1)
            for follower in followers.get(row, ()):
                drawing.append(follower)
                places.append(at + prompt - 1 - start)
            at += amount
        fed = np.concatenate([decoding, np.array([row for row, _ in prefill], np.int64)])
        amounts = np.array([amount for _, amount in prefill], np.int64)
        return Pass(
            feed=Feed(
                slots=table.slot[fed],
                starts=table.cached[fed],
                counts=np.concatenate([counts, amounts]),
                tokens=np.concatenate(tokens),
                decoding=len(decoding),
            ),
            rows=fed,
            drawing=np.concatenate([decoding, np.array(drawing, np.int64)]),
            logit_index=np.concatenate([index, np.array(places, np.int64)]),
            drafts=np.pad(drafts, ((0, len(drawing)), (0, 0)), constant_values=-1),
            draft_lengths=np.pad(lengths, (0, len(drawing))),
            followers=followers,
            prefill=int(amounts.sum()),
        )

    def _plan_prefill(self, rows: Int64Array, version: int) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
        """Share prompts and split work: (row, tokens to feed) pairs, and the rows that follow a leader's prompt.

        A row whose prompt is computed elsewhere copies it. Of siblings that all lack it, one computes it; those with
        nothing behind the prompt draw from the leader's own logits, those with a prefix wait for the next pass.
        """
        table = self._pool.table
        budget = self._prefill_tokens
        prefill: list[tuple[int, int]] = []
        followers: dict[int, list[int]] = {}
        leaders: dict[int, tuple[int, int]] = {}
        # Rows in the middle of their prompt come first: they lead the siblings that have not begun.
        for row in sorted(rows.tolist(), key=lambda i: int(table.cached[i] == 0)):
            prompt, group = int(table.prompt[row]), table[row].request.group
            if group is not None and table.cached[row] == 0 and prompt > 1:
                if group in leaders:
                    leader, amount = leaders[group]
                    start = int(table.cached[leader])
                    if table.length[row] == prompt and start < prompt <= start + amount:
                        followers.setdefault(leader, []).append(row)
                    continue
                self._pool.copy_prompt(row, version)
            behind = int(table.length[row] - table.cached[row])
            if behind == 1:
                continue
            amount = min(behind, budget)
            if group is not None and table.cached[row] < prompt:
                leaders[group] = (row, amount)
            if amount:
                prefill.append((row, amount))
                budget -= amount
        return prefill, followers

    def _propose(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Ask for drafts; int64[rows, longest], padded with -1, and their lengths int64[rows]."""
        if self._drafts is None or not len(rows):
            return np.zeros((len(rows), 0), np.int64), np.zeros(len(rows), np.int64)
        table = self._pool.table
        room = table.limit[rows] - table.length[rows] - 1
        views = []
        for row, space in zip(rows.tolist(), room.tolist(), strict=True):
            request = table[row].request
            views.append(RowView(request.request_id, request.group, request.prompt_ids, table.answer(row), space))
        proposed = [np.asarray(p[:space]) for p, space in zip(self._drafts.propose(views), room.tolist(), strict=True)]
        drafts = np.full((len(rows), max(len(p) for p in proposed)), -1, np.int64)
        for line, draft in zip(drafts, proposed, strict=True):
            line[: len(draft)] = draft
        # The model cannot read an id that it has no embedding for, so a draft ends before one.
        readable = np.logical_and.accumulate((drafts >= 0) & (drafts < self._vocabulary), axis=1)
        lengths = readable.sum(axis=1, dtype=np.int64)
        width = int(lengths.max()) if drafts.size else 0
        return np.where(readable, drafts, -1)[:, :width], lengths
