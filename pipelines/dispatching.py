"""Acts on a dispatcher's placements: gives groups to rollout workers, holding back what has not started.

With ``dispatch: least_loaded`` each worker gets all of its groups at once, so that the mapping depends on keys alone.
With ``skew_aware`` a worker gets what fits its slots and one group more; the rest waits here, where it can still be
moved to a worker that runs dry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from actors.rollout.paced import PROFILES
from pipelines.config import Config
from pipelines.flow import SampleFlow
from pipelines.scheduling.dispatch import Dispatcher, LeastLoaded, Placement, Pool, Work, WorkerLoad
from pipelines.scheduling.latency_table import LatencyTable
from pipelines.scheduling.options import ScheduleOptions
from storage.records import Assignment, GroupKey


def assumed_latency(config: Config) -> LatencyTable:
    """Return the law of a decoding pass that workers are split by: the paced one, else that of the middle profile.

    Only its shape matters, how much slower a pass gets with more rows.
    """
    pacing = config.rollout.pacing
    profile = PROFILES["middle" if pacing.profile == "off" else pacing.profile]
    t0 = pacing.t0_ms / 1000
    return LatencyTable.affine(t0, t0 * (profile.row + profile.token), config.rollout.max_rows)


@dataclass(slots=True)
class _Worker:
    """One rollout worker: its pool, what it was given in this round, and what it will get."""

    pool: Pool
    slots: int
    assigned: int = 0
    limit: int = 0
    queue: deque[tuple[Work, Assignment]] = field(default_factory=deque)


class Dispatching:
    """The hand that gives work out; one per run."""

    def __init__(self, flow: SampleFlow, dispatcher: Dispatcher, config: Config, *, live: bool = False) -> None:
        """Give work to the workers of ``flow`` as ``dispatcher`` says.

        With ``live``, for streams, loads are what workers have not written yet, not what they got in a round.
        """
        self._flow = flow
        self._dispatcher = dispatcher
        self._live = live
        self._holds_back = live or not isinstance(dispatcher, LeastLoaded)
        self._oldest: int | None = None
        self.on_room: Callable[[], None] = lambda: None
        """Called when a worker has written a sample."""
        self._options: ScheduleOptions = config.schedule
        rollout, long = config.rollout, config.schedule.pools.long
        first_long = rollout.workers - long.workers
        self._workers = [
            _Worker("long", long.max_rows or rollout.max_rows)
            if index >= first_long
            else _Worker("regular", rollout.max_rows)
            for index in range(rollout.workers)
        ]
        flow.on_written = self._written

    def start_round(self) -> None:
        """Forget what workers were given before: groups map to workers by their place in the round alone."""
        for worker in self._workers:
            worker.assigned = 0

    def give(self, pairs: Sequence[tuple[Work, Assignment]], *, long_round: bool = False) -> dict[GroupKey, int]:
        """Place work and start what can start; returns the worker of each group."""
        by_work = {id(work): assignment for work, assignment in pairs}
        placements = self._dispatcher.place([work for work, _ in pairs], self._loads())
        for placement in placements:
            self._enqueue(placement, by_work[id(placement.work)], long_round)
        self._issue()
        return {placement.work.key: placement.worker for placement in placements}

    def give_rows(self, worker: int, assignments: Sequence[Assignment]) -> None:
        """Give rows to a certain worker, to be decoded together."""
        self._workers[worker].assigned += sum(len(a.samples) for a in assignments)
        self._send(worker, assignments)

    def slots(self) -> dict[int, int]:
        """Rows that each worker of the long pool decodes at once, by number; of all workers where there is no pool."""
        long = {index: worker.slots for index, worker in enumerate(self._workers) if worker.pool == "long"}
        return long or {index: worker.slots for index, worker in enumerate(self._workers)}

    def free_rows(self, oldest_version: int) -> int:
        """Rows that workers could take now; only those whose rows begin under ``oldest_version`` or newer get any."""
        self._oldest = oldest_version
        self._issue()  # what waited for a worker that has caught up
        return sum(
            max(0, worker.slots - self._flow.rows(index) - _rows(worker))
            for index, worker in enumerate(self._workers)
            if self._fresh(index)
        )

    def revoke(self, keys: Collection[GroupKey]) -> None:
        """Take groups back that have not started."""
        for worker in self._workers:
            worker.queue = deque(entry for entry in worker.queue if entry[0].key not in keys)

    def unstarted(self) -> set[GroupKey]:
        """Groups that wait here for a worker."""
        return {work.key for worker in self._workers for work, _ in worker.queue}

    def _loads(self) -> list[WorkerLoad]:
        everyone = [
            WorkerLoad(
                index=index,
                pool=worker.pool,
                slots=worker.slots,
                assigned=self._flow.rows(index) + _rows(worker) if self._live else worker.assigned,
                running=self._flow.rows(index),
                queued=tuple(work for work, _ in worker.queue),
            )
            for index, worker in enumerate(self._workers)
        ]
        # Where all lag, what was interrupted still needs a place; it starts there once that worker has caught up.
        return [load for load in everyone if self._fresh(load.index)] or everyone

    def _fresh(self, index: int) -> bool:
        return self._oldest is None or self._flow.fleet.opening_versions.get(index, 0) >= self._oldest

    def _enqueue(self, placement: Placement, assignment: Assignment, long_round: bool) -> None:
        worker = self._workers[placement.worker]
        worker.assigned += placement.work.rows
        worker.limit = placement.batch_limit if placement.batch_limit < worker.slots else 0
        if long_round and self._options.long_rows:
            worker.limit = min(worker.limit or worker.slots, self._options.long_rows)
        worker.queue.append((placement.work, self._with_stay(assignment, placement, worker.pool)))

    def _with_stay(self, assignment: Assignment, placement: Placement, pool: Pool) -> Assignment:
        """Add priority and the limits of the pool; a sample that has been interrupted too often ends there."""
        timeouts, long = self._options.timeouts, self._options.pools.long
        budget = (long.tokens, long.wall_s) if pool == "long" else (timeouts.tokens, timeouts.wall_s)
        leases = self._flow.leases(assignment.key)
        stays = max((leases[index].stays for index in assignment.samples if index in leases), default=0)
        return replace(
            assignment,
            priority=placement.priority,
            stay_tokens=budget[0],
            stay_s=budget[1],
            last_stay=stays >= timeouts.max_resumes,
        )

    def _issue(self) -> None:
        """Start what workers have room for; without holding back, everything."""
        for index, worker in enumerate(self._workers):
            if not self._fresh(index):
                continue
            ready: list[Assignment] = []
            running = self._flow.rows(index)
            while worker.queue and (not self._holds_back or running < (worker.limit or worker.slots)):
                work, assignment = worker.queue.popleft()
                running += work.rows
                ready.append(assignment)
            if ready:
                self._send(index, ready)

    def _send(self, index: int, assignments: Sequence[Assignment]) -> None:
        self._flow.dispatch(index, assignments, row_limit=self._workers[index].limit)

    def _written(self, _worker: int, _key: GroupKey) -> None:
        """A sample left its worker: let waiting groups move up, or over to where there is room."""
        if not self._holds_back:
            return
        if self._live:
            self.on_room()
        if not any(w.queue for w in self._workers):
            return
        for move in self._dispatcher.rebalance(self._loads()):
            source, target = self._workers[move.source], self._workers[move.target]
            for entry in source.queue:
                if entry[0] is move.work:
                    source.queue.remove(entry)
                    source.assigned -= move.work.rows
                    target.assigned += move.work.rows
                    target.queue.append(entry)
                    break
        self._issue()


def _rows(worker: _Worker) -> int:
    """Rows that wait for a worker."""
    return sum(work.rows for work, _ in worker.queue)
