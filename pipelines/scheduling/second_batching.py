"""Second batching: the unfinished rows of a round, regrouped by how much is left of each.

Rows that have about the same number of tokens ahead end together, so their batch stays full until its end. Rows of one
group may part: siblings share a prompt, not a length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.records import GroupKey


@dataclass(frozen=True, slots=True)
class UnfinishedRow:
    """A row that was stopped: sample ``index`` of group ``key``; ``remaining`` is its predicted rest in tokens."""

    key: GroupKey
    index: int
    remaining: float


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows that one worker should decode together, longest first."""

    worker: int
    rows: tuple[UnfinishedRow, ...]

    def by_group(self) -> Mapping[GroupKey, tuple[int, ...]]:
        """Sample indices by group, in order of first appearance: one assignment each."""
        found: dict[GroupKey, list[int]] = {}
        for row in self.rows:
            found.setdefault(row.key, []).append(row.index)
        return {key: tuple(sorted(indices)) for key, indices in found.items()}


def regroup(rows: Sequence[UnfinishedRow], slots: Mapping[int, int]) -> list[RowBatch]:
    """Deal rows out to workers in runs of similar remaining length.

    Args:
        rows: The unfinished rows.
        slots: Rows that each worker of the pool decodes at once, by its number.

    Returns:
        Batches in the order of their start, each at most as large as its worker's slots. The longest rows come first
        and get the smallest share of a worker: with fewer rows than slots, workers get equal numbers of rows.

    Raises:
        ValueError: There is no slot.
    """
    if not slots or min(slots.values()) < 1:
        raise ValueError(f"second batching needs workers with at least one slot each, got {dict(slots)}")
    ordered = sorted(rows, key=lambda row: (-row.remaining, row.key, row.index))
    batches: list[RowBatch] = []
    start = 0
    while start < len(ordered):
        left = len(ordered) - start
        share = -(-left // len(slots)) if left < sum(slots.values()) else left
        for worker, room in sorted(slots.items()):
            end = min(start + min(room, share), len(ordered))
            if end > start:
                batches.append(RowBatch(worker, tuple(ordered[start:end])))
            start = end
    return batches
