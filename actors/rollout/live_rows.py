"""Drafts from what is being written right now: siblings of the running group, the row's own text, and the prompt."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actors.drafts.pack import PROMPT_TAIL
from actors.rollout.engine import RunningRows
from actors.rollout.row_sources import LIVE, Candidates, grown
from storage.history.index.live_automaton import LiveAutomaton

Int64Array = npt.NDArray[np.int64]

_DOCUMENTS = 16
"""Rows that a group gets room for at a time."""
_IDLE_GROUPS = 32
"""Groups without an open row that are kept, for siblings that are still to be admitted."""


@dataclass(slots=True)
class _Group:
    """Documents of a group: all of them, those not given out, and how many rows are open."""

    documents: list[int]
    free: list[int] = field(default_factory=list)
    rows: int = 0


class LiveRows:
    """One growing index for all groups. Texts are read when a pass asks for drafts, and not before."""

    def __init__(self) -> None:
        self._index = LiveAutomaton()
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._group: dict[int, int] = {}
        self._document = np.full(8, -1, np.int64)
        self._read = np.zeros(8, np.int64)

    def __len__(self) -> int:
        return len(self._group)

    @property
    def nbytes(self) -> int:
        """Memory of the index in bytes."""
        return self._index.nbytes

    def open(self, handle: int, group: int, prompt: int) -> None:
        """Add a row with ``prompt`` prompt tokens to a group; the group's first row brings the whole prompt along."""
        self._document = grown(self._document, handle + 1, -1)
        self._read = grown(self._read, len(self._document), 0)
        found = self._groups.setdefault(group, _Group([]))
        begin = max(prompt - PROMPT_TAIL, 0)
        if not found.free:
            numbers = self._index.add_group(_DOCUMENTS).tolist()
            found.documents += numbers
            found.free = numbers[::-1]
            begin = 0
        found.rows += 1
        self._idle.pop(group, None)
        self._group[handle] = group
        self._document[handle] = found.free.pop()
        self._read[handle] = begin

    def close(self, handle: int) -> None:
        """Let go of a row; its text stays for its siblings while the group is kept."""
        group = self._group.pop(handle, None)
        if group is None:
            return
        self._document[handle] = -1
        found = self._groups[group]
        found.rows -= 1
        if found.rows:
            return
        self._idle[group] = None
        if len(self._idle) > _IDLE_GROUPS:
            oldest, _ = self._idle.popitem(last=False)
            self._index.remove(self._groups.pop(oldest).documents)

    def offer(self, rows: RunningRows, limit: Int64Array, candidates: Candidates) -> None:
        """Read the new tokens of ``rows`` and write a candidate of at most ``limit`` (int64[rows]) tokens for each."""
        if not self._group:
            return
        self._document = grown(self._document, len(rows.tokens), -1)
        self._read = grown(self._read, len(self._document), 0)
        document = self._document[rows.handles]
        self._index.extend_rows(document, rows.tokens, rows.handles, self._read[rows.handles], rows.length)
        self._read[rows.handles] = rows.length
        self._index.draft_rows(
            document,
            limit,
            *candidates.of(LIVE),
        )
