"""Asks a draft source for drafts, makes them fit the pass, and keeps the engine safe from a source that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from actors.rollout.engine import Drafts, DraftSource, Request, RunningRows
from actors.rollout.row_table import RowTable
from actors.rollout.verification import LenientDrafts
from storage.records import TopTokens

T = TypeVar("T")

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What decoding rows feed behind their last token.

    Attributes:
        rows: int64[n], those that take part in the pass.
        drafts: int64[n, longest], padded with -1.
        lengths: int64[n].
        lenient: How some of them are verified leniently; ``rows`` in it index this batch.
    """

    rows: Int64Array
    drafts: Int64Array
    lengths: Int64Array
    lenient: LenientDrafts | None = None


class Drafting:
    """The engine's side of a draft source; with ``source`` None all rows decode plainly.

    Attributes:
        failure: Why drafts were switched off; empty while all is well.
    """

    def __init__(self, source: DraftSource | None, vocabulary: int) -> None:
        """Stand before ``source``; ``vocabulary`` is the number of token ids that the model can read."""
        self.failure = ""
        self._source = source
        self._vocabulary = vocabulary

    def open(self, handle: int, request: Request) -> bool:
        """Tell of a row that got a slot; True when it must not draw before it was asked for a draft."""
        source = self._source
        return source is not None and self._guarded(lambda: bool(source.open(handle, request)), False)

    def close(self, handle: int) -> None:
        """Tell of a row that left."""
        source = self._source
        if source is not None:
            self._guarded(lambda: source.close(handle), None)

    def observe(self, handles: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Tell how rows fared; those without a draft are left out."""
        source = self._source
        if source is None or not self._ready(source) or not drafted.any():
            return
        some = drafted > 0
        self._guarded(lambda: source.observe(handles[some], drafted[some], accepted[some]), None)

    def propose(self, table: RowTable, rows: Int64Array, budget: int) -> Proposal:
        """Ask for drafts of ``rows``, and cut them so that they hold ``budget`` tokens at most.

        A row whose lenient draft gets none of the budget waits for the next pass: it must not draw what the draft is
        there to say.
        """
        plain = Proposal(rows, np.zeros((len(rows), 0), np.int64), np.zeros(len(rows), np.int64))
        source = self._source
        if source is None or not self._ready(source) or not len(rows):
            return plain
        length = table.length[rows]
        running = RunningRows(rows, table.tokens, table.prompt[rows], length, table.limit[rows] - length - 1)

        def proposal() -> Proposal:
            drafts = source.propose(running)
            return plain if drafts is None else self._fitted(drafts, running, table, budget)

        return self._guarded(proposal, plain)

    def _ready(self, source: DraftSource) -> bool:
        return self._guarded(lambda: source.ready, False)

    def _fitted(self, drafts: Drafts, running: RunningRows, table: RowTable, budget: int) -> Proposal:
        rows = running.handles
        tokens = np.asarray(drafts.tokens)
        if tokens.ndim != 2 or len(tokens) != len(rows) or np.shape(drafts.lengths) != (len(rows),):
            raise ValueError(
                f"drafts for {len(rows)} rows have tokens of shape {tokens.shape} and lengths of "
                f"{np.shape(drafts.lengths)}"
            )
        if not tokens.shape[1]:
            return Proposal(rows, np.zeros((len(rows), 0), np.int64), np.zeros(len(rows), np.int64))
        wanted = np.clip(drafts.lengths, 0, np.minimum(running.room, tokens.shape[1])).astype(np.int64)
        tokens = tokens[:, : int(wanted.max())].astype(np.int64)
        inside = np.arange(tokens.shape[1]) < wanted[:, None]
        # The model cannot read an id that it has no embedding for, so a draft ends before one.
        readable = np.logical_and.accumulate((tokens >= 0) & (tokens < self._vocabulary) & inside, axis=1)
        wanted = readable.sum(axis=1, dtype=np.int64)
        reach = wanted
        if tokens.shape[1] and table.old[rows].any():  # nothing is emitted behind the place where a row turns
            turns = table.turning(rows, tokens) & (np.arange(tokens.shape[1]) < wanted[:, None])
            reach = np.where(turns.any(axis=1), turns.argmax(axis=1) + 1, wanted)
        lengths = np.clip(budget - (np.cumsum(reach) - reach), 0, reach)
        lenient = np.zeros(len(rows), np.bool_) if drafts.lenience is None else ~np.isnan(drafts.lenience)
        lenient &= wanted > 0
        cut = lenient & (lengths < wanted)
        stay = ~(cut & (lengths == 0))
        width = int(lengths.max())
        inside = np.arange(width) < lengths[:, None]
        proposal = Proposal(rows[stay], np.where(inside, tokens[:, :width], -1)[stay], lengths[stay])
        at = np.flatnonzero(lenient & stay)
        if not len(at):
            return proposal
        shape = None if drafts.logprobs is None else drafts.logprobs.shape
        if drafts.lenience is None or drafts.logprobs is None or shape != drafts.tokens.shape:
            raise ValueError(f"lenient drafts need log-probabilities of shape {drafts.tokens.shape}, not {shape}")
        tops = () if drafts.tops is None else tuple(self._top(drafts.tops[i], int(lengths[i])) for i in at.tolist())
        verified = LenientDrafts(
            rows=np.cumsum(stay)[at] - 1,
            lenience=drafts.lenience[at].astype(np.float64),
            logprobs=drafts.logprobs[at, :width],
            cut=cut[at],
            tops=tops,
        )
        return Proposal(proposal.rows, proposal.drafts, proposal.lengths, verified)

    def _top(self, top: TopTokens | None, length: int) -> TopTokens | None:
        """Check the likeliest tokens of a draft that is verified as far as ``length``; ids beyond the vocabulary go."""
        if top is None:
            return None
        if top.ids.ndim != 2 or top.ids.shape != top.logprobs.shape or len(top.ids) < length:
            raise ValueError(
                f"likeliest tokens of shape {top.ids.shape}, with log-probabilities of shape {top.logprobs.shape}, for "
                f"a lenient draft of {length} tokens"
            )
        ids = top.ids[:length]
        return TopTokens(ids=np.where(ids < self._vocabulary, ids, np.int32(-1)), logprobs=top.logprobs[:length])

    def _guarded(self, call: Callable[[], T], otherwise: T) -> T:
        """Call the source; after an exception it is gone, for speed must never cost a run."""
        try:
            return call()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            self._source = None
            _LOG.warning("drafts are off for the rest of this engine's life: %s", self.failure, exc_info=True)
            return otherwise
