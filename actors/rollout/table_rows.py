"""Drafts from the indexes that the automaton is compared with: tables by level, and similar contexts.

These indexes keep no state for a row; each pass looks the last tokens of every row up, row by row. That is slow beside
the automaton, and meant for comparisons.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from actors.drafts.pack import ContextIndex
from actors.rollout.engine import RunningRows
from actors.rollout.row_sources import PROMPT, Candidates

Int64Array = npt.NDArray[np.int64]

_CONTEXT = 16
"""Last tokens of a row that are looked up; more than any of the indexes reads."""


class TableRows:
    """Rows whose prompt has a :class:`ContextIndex`."""

    def __init__(self) -> None:
        self._indexes: dict[int, ContextIndex] = {}

    def __len__(self) -> int:
        return len(self._indexes)

    def open(self, handle: int, index: ContextIndex) -> None:
        """Let a row draft from ``index``."""
        self._indexes[handle] = index

    def close(self, handle: int) -> None:
        """Let go of a row."""
        self._indexes.pop(handle, None)

    def offer(self, rows: RunningRows, limit: Int64Array, candidates: Candidates) -> None:
        """Write a candidate of at most ``limit`` (int64[rows]) tokens for each row; counts are unknown: 1."""
        if not self._indexes:
            return
        tokens, counts, ratios, matched, lengths = candidates.of(PROMPT)
        for row, handle in enumerate(rows.handles.tolist()):
            index = self._indexes.get(handle)
            if index is None:
                continue
            end = int(rows.length[row])
            context = rows.tokens[handle, max(end - _CONTEXT, 0) : end]
            draft, match = index.draft(context, min(int(limit[row]), tokens.shape[1]))
            size = len(draft)
            tokens[row, :size] = draft
            counts[row, :size] = ratios[row, :size] = 1.0
            matched[row, :size] = match + np.arange(size)
            lengths[row] = size
