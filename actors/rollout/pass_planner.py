"""Decides what each row feeds into the next forward pass, and which tokens are to be drawn from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actors.rollout.drafting import Drafting
from actors.rollout.row_pool import RowPool
from actors.rollout.step_layout import Feed
from actors.rollout.verification import LenientDrafts

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
        lenient: How some drafts are verified leniently; ``rows`` in it index ``drawing``.
        followers: Rows that take over the prompt that a sibling (the key) computes in this pass.
        prefill: Prompt and prefix tokens in the pass.
    """

    feed: Feed
    rows: Int64Array
    drawing: Int64Array
    logit_index: Int64Array
    drafts: Int64Array
    draft_lengths: Int64Array
    lenient: LenientDrafts | None = None
    followers: dict[int, list[int]] = field(default_factory=dict)
    prefill: int = 0

    def wanted(self) -> Int64Array | None:
        """Tokens whose log-probability the lenient rule needs, int64[draws] (0 where it needs none); or ``None``."""
        if self.lenient is None:
            return None
        tokens = np.zeros((len(self.drawing), self.drafts.shape[1] + 1), np.int64)
        tokens[self.lenient.rows, :-1] = np.maximum(self.drafts[self.lenient.rows], 0)
        return tokens[np.arange(tokens.shape[1]) <= self.draft_lengths[:, None]]


class PassPlanner:
    """Plans passes over the rows of a pool.

    ``prefill_tokens`` bounds the prompt, prefix and draft tokens of a pass; drafts get what prefill leaves.
    """

    def __init__(self, pool: RowPool, drafting: Drafting, prefill_tokens: int) -> None:
        self._pool = pool
        self._drafting = drafting
        self._prefill_tokens = prefill_tokens

    def plan(self, rows: Int64Array, version: int) -> Pass:
        """Plan one pass over ``rows`` (in order of slot, at least one) under the weights ``version``."""
        table = self._pool.table
        behind = table.length[rows] - table.cached[rows]
        prefill: list[tuple[int, int]] = []
        followers: dict[int, list[int]] = {}
        if (behind > 1).any():
            prefill, followers = self._plan_prefill(rows[behind > 1], version)
            behind = table.length[rows] - table.cached[rows]
        decoding = rows[behind <= 1]
        left = self._prefill_tokens - sum(amount for _, amount in prefill)
        proposal = self._drafting.propose(table, decoding, left)
        table.held[decoding] = True
        decoding, drafts, lengths = proposal.rows, proposal.drafts, proposal.lengths
        table.held[decoding] = False
        starts = table.length[decoding] - 1
        last = table.tokens[decoding, starts].astype(np.int64)
        counts = lengths + 1
        if drafts.shape[1]:
            wide = np.concatenate([last[:, None], drafts], axis=1)
            last = wide[np.arange(wide.shape[1]) < counts[:, None]]
        index = np.arange(len(last))
        if not prefill:
            feed = Feed(table.slot[decoding], starts, counts, last, len(decoding))
            return Pass(feed, decoding, decoding, index, drafts, lengths, proposal.lenient)
        tokens, drawing, places = [last], [], []
        at = len(last)
        for row, amount in prefill:
            start, prompt = int(table.cached[row]), int(table.prompt[row])
            tokens.append(table.tokens[row, start : start + amount].astype(np.int64))
            if start + amount == table.length[row] and not table.held[row]:
                drawing.append(row)
                places.append(at + amount - 1)
            for follower in (f for f in followers.get(row, ()) if not table.held[f]):
                drawing.append(follower)
                places.append(at + prompt - 1 - start)
            at += amount
        fed = np.concatenate([decoding, np.array([row for row, _ in prefill], np.int64)])
        amounts = np.array([amount for _, amount in prefill], np.int64)
        return Pass(
            feed=Feed(
                slots=table.slot[fed],
                starts=np.concatenate([starts, table.cached[fed[len(decoding) :]]]),
                counts=np.concatenate([counts, amounts]),
                tokens=np.concatenate(tokens),
                decoding=len(decoding),
            ),
            rows=fed,
            drawing=np.concatenate([decoding, np.array(drawing, np.int64)]),
            logit_index=np.concatenate([index, np.array(places, np.int64)]),
            drafts=np.pad(drafts, ((0, len(drawing)), (0, 0)), constant_values=-1),
            draft_lengths=np.pad(lengths, (0, len(drawing))),
            lenient=proposal.lenient,
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
