"""Tables keyed by the last 3 to 5 tokens: a draft of 5 to 10 tokens by the longest key that is known.

The fixed scheme that the automaton is compared with. A table's entry is the continuation of the key with the most heat,
where each occurrence adds heat that halves with every half-life, or simply the latest continuation. A key's
continuations count as whole runs of tokens, not token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from storage.errors import UserError
from storage.history.index.compiled import Float64Array, Int, Int32Array, Int64Array, UInt64Array, compiled, read_only
from storage.history.index.hashing import hash_range, hash_ranges
from storage.history.index.suffix_automaton import join

Order = Literal["frequency", "recency"]

LEVELS = ((3, 5), (4, 7), (5, 10))
"""Tokens of a key, and of the draft that it stands for: a longer match is worth a longer draft."""


@dataclass(frozen=True, slots=True, eq=False)
class LevelIndex:
    """Immutable tables over one text; nothing but arrays, as in an automaton.

    Attributes:
        text: int32[tokens], all documents, oldest first.
        key_length: int64[levels], tokens of the keys of each level, longest first.
        level_start: int64[levels + 1], where the entries of each level lie.
        keys: uint64[entries], hashes of keys, ascending within a level.
        position: int32[entries], where in ``text`` the draft of a key starts; its key lies before it.
        length: int32[entries], tokens of the draft; fewer than the level's where a document ended.
    """

    text: Int32Array
    key_length: Int64Array
    level_start: Int64Array
    keys: UInt64Array
    position: Int32Array
    length: Int32Array

    @classmethod
    def build(
        cls,
        documents: Sequence[npt.NDArray[Any]],
        ages: Sequence[float],
        *,
        order: Order = "frequency",
        half_life: float = 2.0,
        levels: Sequence[tuple[int, int]] = LEVELS,
    ) -> LevelIndex:
        """Build the tables of ``documents``.

        Args:
            documents: One-dimensional integer arrays of token ids below 2**20; among those of one age, oldest first.
            ages: Visits since each document was written, 0 or more.
            order: ``frequency`` prefers the continuation with the most heat, the latest of equals; ``recency`` the
                latest one.
            half_life: Age, in visits, at which an occurrence counts half.
            levels: Tokens of a key and of its draft, for each level.

        Raises:
            UserError: Ages or settings that cannot be, and as :func:`storage.history.index.suffix_automaton.build`.
        """
        age = np.asarray(ages, np.float64)
        if age.shape != (len(documents),) or not bool(np.all(np.isfinite(age) & (age >= 0))):
            raise UserError(
                f"an index of {len(documents)} documents needs an age, 0 or more, for each, not {list(ages)}"
            )
        if not half_life > 0:
            raise UserError(f"speculation.heat_half_life must be above 0, not {half_life}")
        if order not in ("frequency", "recency"):
            raise UserError(f"speculation.order must be frequency or recency, not {order!r}")
        if not levels or any(key < 1 or draft < 1 for key, draft in levels):
            raise UserError(f"levels need keys and drafts of at least one token each, not {list(levels)}")
        by_age = np.argsort(-age, kind="stable")
        text, starts = join([documents[number] for number in by_age])
        heat = 0.5 ** (np.repeat(age[by_age], np.diff(starts)) / half_life)
        levels = sorted(levels, reverse=True)
        tables = [_table(text, starts, heat, key, draft, order) for key, draft in levels]
        sizes = [len(keys) for keys, _, _ in tables]
        return cls(
            text=read_only(text),
            key_length=read_only(np.array([key for key, _ in levels], np.int64)),
            level_start=read_only(np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))),
            keys=read_only(np.concatenate([keys for keys, _, _ in tables])),
            position=read_only(np.concatenate([position for _, position, _ in tables]).astype(np.int32)),
            length=read_only(np.concatenate([length for _, _, length in tables]).astype(np.int32)),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def draft(self, context: Int32Array, width: int) -> tuple[Int32Array, int]:
        """Return the draft of the longest key that ``context`` ends with.

        Args:
            context: int32[n], what a row has so far; its last few tokens will do.
            width: Most tokens to draft.

        Returns:
            int32[k], at most ``width`` tokens (none without a match), and the tokens of the key (0 without a match).
        """
        entry, matched = _find(self.text, self.key_length, self.level_start, self.keys, self.position, context)
        if entry < 0:
            return np.zeros(0, np.int32), 0
        start = int(self.position[entry])
        return self.text[start : start + min(max(width, 0), int(self.length[entry]))], int(matched)


def _table(
    text: Int32Array, starts: Int64Array, heat: Float64Array, key_length: int, draft_length: int, order: Order
) -> tuple[UInt64Array, Int64Array, Int64Array]:
    """Return the keys of a level, ascending, and where the draft of each one starts and how long it is."""
    sizes = np.diff(starts)
    at = np.arange(len(text))
    at = at[at - np.repeat(starts[:-1], sizes) >= key_length]
    stop = np.minimum(at + draft_length, np.repeat(starts[1:], sizes)[at])
    keys, drafts = hash_ranges(text, at - key_length, at), hash_ranges(text, at, stop)
    # Equal runs behind equal keys side by side, the latest one last.
    ranks = np.lexsort((at, drafts, keys))
    keys, drafts, at, stop = keys[ranks], drafts[ranks], at[ranks], stop[ranks]
    last = _ends((keys, drafts))
    first = np.append(0, last[:-1] + 1) if len(last) else last
    total = np.add.reduceat(heat[at], first) if len(last) else heat[:0]
    keys, at, stop = keys[last], at[last], stop[last]
    # The best run of each key last.
    ranks = np.lexsort((at, total, keys) if order == "frequency" else (at, keys))
    keys, at, stop = keys[ranks], at[ranks], stop[ranks]
    last = _ends((keys,))
    return keys[last], at[last], (stop - at)[last]


def _ends(columns: tuple[UInt64Array, ...]) -> Int64Array:
    """Return where runs of equal rows end."""
    if not len(columns[0]):
        return np.zeros(0, np.int64)
    changes = np.zeros(len(columns[0]) - 1, np.bool_)
    for column in columns:
        changes |= column[1:] != column[:-1]
    return np.append(np.flatnonzero(changes), len(columns[0]) - 1)


@compiled
def _find(
    text: Int32Array,
    key_length: Int64Array,
    level_start: Int64Array,
    keys: UInt64Array,
    position: Int32Array,
    context: Int32Array,
) -> tuple[Int, Int]:
    """Return the entry of the longest key that ``context`` ends with and the key's length, or -1 and 0."""
    for level in range(len(key_length)):
        size = key_length[level]
        if size > len(context):
            continue
        first = len(context) - size
        wanted = hash_range(context, first, len(context))
        start, stop = level_start[level], level_start[level + 1]
        entry = start + np.searchsorted(keys[start:stop], wanted)
        if entry < stop and keys[entry] == wanted:
            same = True
            for i in range(size):
                same = same and text[position[entry] - size + i] == context[first + i]
            if same:
                return entry, size
    return -1, 0
