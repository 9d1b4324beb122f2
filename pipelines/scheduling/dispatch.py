"""Which worker writes which group, and in which order: dealt out evenly, or placed by predicted length.

A dispatcher is pure: groups and workers in, placements out. It places work that has not started; what runs stays where
it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pipelines.scheduling.allocation import Workload, dynamic_allocation
from pipelines.scheduling.latency_table import LatencyTable
from storage.records import GroupKey

Pool = Literal["regular", "long"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A group (or the unfinished rows of one) to place.

    Attributes:
        key: The group.
        rows: Samples to write.
        tokens: Predicted tokens that its longest row still needs; None while the predictor is silent.
        percentile: Place of its predicted length among recent groups, in [0, 1); None while the predictor is silent.
        pool: Pool that it must run in, for instance after it used up its budget in the other; None leaves it open.
    """

    key: GroupKey
    rows: int
    tokens: float | None = None
    percentile: float | None = None
    pool: Pool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A rollout worker as the dispatcher sees it.

    Attributes:
        index: Number of the worker.
        pool: Pool that its resources belong to.
        slots: Rows that it decodes at once.
        assigned: Samples given to it in this round. Depends on keys alone, not on timing.
        running: Rows that it decodes now.
        queued: Groups given to it that have not started, in the order in which it will start them.
    """

    index: int
    pool: Pool
    slots: int
    assigned: int = 0
    running: int = 0
    queued: tuple[Work, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """Give ``work`` to ``worker``; rows of higher ``priority`` are admitted to its engine first.

    ``batch_limit`` is the number of rows that the worker should decode at once in this round.
    """

    work: Work
    worker: int
    priority: float
    batch_limit: int


@dataclass(frozen=True, slots=True)
class Move:
    """Take an unstarted group from one worker's queue and give it to another worker."""

    work: Work
    source: int
    target: int


class Dispatcher(Protocol):
    """Places work."""

    def place(self, work: Sequence[Work], workers: Sequence[WorkerLoad]) -> list[Placement]:
        """Return one placement for each piece of work, in the order in which they should be issued."""

    def rebalance(self, workers: Sequence[WorkerLoad]) -> list[Move]:
        """Return moves of unstarted work from long queues to workers with free slots."""


class LeastLoaded:
    """Each group goes to the worker with the fewest samples assigned in this round, the lowest index first.

    Groups of equal size are dealt out in turn, whatever the timing: the mapping of groups to workers then depends on
    the order of keys alone, which exact resumption needs. For the same reason nothing is moved later.
    """

    def place(self, work: Sequence[Work], workers: Sequence[WorkerLoad]) -> list[Placement]:
        """Deal the groups out in the given order; raises ``ValueError`` without workers."""
        _some(workers)
        slots = {worker.index: worker.slots for worker in workers}
        heap = [(worker.assigned, worker.index) for worker in workers]
        heapq.heapify(heap)
        placements = []
        for item in work:
            assigned, index = heap[0]
            heapq.heapreplace(heap, (assigned + item.rows, index))
            placements.append(Placement(item, index, 0.0, slots[index]))
        return placements

    def rebalance(self, workers: Sequence[WorkerLoad]) -> list[Move]:
        """Move nothing."""
        return []


class SkewAware:
    """Long groups go to a pool of their own, longest first (StreamRL, arXiv 2504.15930, algorithm 2).

    Groups are sorted by predicted length (the fused ranks of the predictor). The longest ``tail_share`` are the tail.
    Workers of pool ``long`` are the tail's; where the configuration makes no such pool, :func:`dynamic_allocation`
    splits the workers for each round. Inside a pool the longest group goes first to the worker with the least
    predicted work (4/3 of the optimum at worst). While the predictor is silent, groups are dealt out as by
    :class:`LeastLoaded`.
    """

    def __init__(self, latency: LatencyTable, *, tail_share: float = 0.2) -> None:
        """Set the measured latency of a pass (seconds by rows) and the share of groups that are the tail."""
        self._latency = latency
        self._tail_share = tail_share

    def place(self, work: Sequence[Work], workers: Sequence[WorkerLoad]) -> list[Placement]:
        """Place all of ``work``, longest first; raises ``ValueError`` without workers."""
        _some(workers)
        if all(item.percentile is None and item.pool is None for item in work):
            return LeastLoaded().place(work, workers)
        ordered = sorted(work, key=lambda item: (-_length(item), item.key))
        tail_count = round(self._tail_share * sum(item.pool is None for item in work))
        tail, regular = [], []
        for item in ordered:
            if item.pool == "long" or (item.pool is None and tail_count > 0):
                tail.append(item)
                tail_count -= item.pool is None
            else:
                regular.append(item)
        pools = self._split(tail, regular, workers)
        if pools is None:
            return _longest_first(ordered, workers, None)
        long_pool, regular_pool, limit = pools
        return _longest_first(tail, long_pool, limit) + _longest_first(regular, regular_pool, None)

    def rebalance(self, workers: Sequence[WorkerLoad]) -> list[Move]:
        """Let workers with free slots and nothing queued take the heads of the fullest queues, until they are full.

        Work that must run in one pool stays there; everything else may cross over, so that nothing waits for a slot
        while another pool is idle.
        """
        queues = {worker.index: list(worker.queued) for worker in workers if worker.queued}
        rows = {index: sum(item.rows for item in queue) for index, queue in queues.items()}
        moves: list[Move] = []
        takers = [worker for worker in workers if not worker.queued and worker.running < worker.slots]
        for worker in sorted(takers, key=lambda taker: (taker.running, taker.index)):
            free = worker.slots - worker.running
            while free > 0:
                donors = [index for index, queue in queues.items() if queue and queue[0].pool in (None, worker.pool)]
                if not donors:
                    break
                source = max(donors, key=lambda index: (rows[index], -index))
                item = queues[source].pop(0)
                rows[source] -= item.rows
                free -= item.rows
                moves.append(Move(item, source, worker.index))
        return moves

    def _split(
        self, tail: Sequence[Work], regular: Sequence[Work], workers: Sequence[WorkerLoad]
    ) -> tuple[Sequence[WorkerLoad], Sequence[WorkerLoad], int | None] | None:
        """Workers of the tail, workers of the rest, and the batch limit of the former (None: their slots).

        None when all workers take both.
        """
        dedicated = [worker for worker in workers if worker.pool == "long"]
        others = [worker for worker in workers if worker.pool == "regular"]
        if dedicated and others:
            return dedicated, others, None
        if not tail or not regular or len(workers) < 2:
            return None
        slots = min(worker.slots for worker in workers)
        allocation = dynamic_allocation(Workload.of(tail), Workload.of(regular), len(workers), slots, self._latency)
        if not allocation.long_workers:
            return None
        free_first = sorted(workers, key=lambda worker: (worker.assigned, worker.index))
        # Workers with the highest numbers, so that the regular ones keep theirs from round to round.
        return free_first[-allocation.long_workers :], free_first[: -allocation.long_workers], allocation.long_batch


def _length(item: Work) -> float:
    """What work is sorted by: its rank where it has one; ahead of all ranks where it must run in the long pool."""
    return (1.0 if item.pool == "long" else 0.0) + (item.percentile or 0.0)


def _longest_first(work: Sequence[Work], workers: Sequence[WorkerLoad], limit: int | None) -> list[Placement]:
    known = [item.tokens for item in work if item.tokens is not None]
    typical = sum(known) / len(known) if known else 1.0
    slots = {worker.index: min(worker.slots, limit or worker.slots) for worker in workers}
    heap = [(worker.assigned * typical / slots[worker.index], worker.index) for worker in workers]
    heapq.heapify(heap)
    placements = []
    for place, item in enumerate(work):
        load, index = heap[0]
        tokens = typical if item.tokens is None else item.tokens
        heapq.heapreplace(heap, (load + item.rows * tokens / slots[index], index))
        placements.append(Placement(item, index, float(len(work) - place), slots[index]))
    return placements


def _some(workers: Sequence[WorkerLoad]) -> None:
    if not workers:
        raise ValueError("there is no worker to place work on")
