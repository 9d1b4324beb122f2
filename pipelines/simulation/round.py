"""One round on the virtual clock: launches, events in the order of their time, and the stop."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipelines.scheduling.dispatch import Work, WorkerLoad
from pipelines.scheduling.policy import GroupProgress, Launch, RoundState, WaitingGroup
from pipelines.scheduling.second_batching import UnfinishedRow, regroup
from pipelines.simulation.measures import RoundRecord
from pipelines.simulation.replica import IDLE, Replica, Row, Span
from storage.records import GroupKey

if TYPE_CHECKING:
    from pipelines.simulation.simulator import Simulation


class SimulatedRound:
    """Acts on the decisions of the policy in one round, as the conductor does in a real one."""

    def __init__(self, run: Simulation, record: bool) -> None:
        """Open the round of the run's next step; with ``record`` it keeps spans for charts."""
        self.run = run
        self.now = 0.0
        self.spans: list[Span] | None = [] if record else None
        cluster = run.cluster
        self.replicas = [Replica(i, cluster, cluster.slots, spans=self.spans) for i in range(cluster.replicas)]
        self.assigned = [0] * cluster.replicas
        self.home: dict[GroupKey, set[int]] = {}
        self.events: list[tuple[float, int, int, GroupKey | None, int]] = []
        self.due = [IDLE] * cluster.replicas
        self.ticket = 0
        self.generated = self.wasted = 0
        self.queueing: set[int] = set()
        self.waits = self._grading_waits()
        self.state = RoundState(
            step=run.step,
            prompts_per_step=run.workload.prompts_per_step,
            available=run.source.remaining,
            waiting=run.waiting,
            left_in_epoch=run.source.left_in_epoch,
            epoch=run.source.epoch,
            version=run.step,
            forecasts=run.book,
        )

    def play(self) -> RoundRecord:
        """Run the round to its stop, train, and return its record."""
        policy, state = self.run.policy, self.state
        while True:
            while not (launch := policy.plan(state)).empty:
                self._launch(launch)
                if launch.starts:
                    state.waves += 1
                    break
            if policy.should_stop(state):
                break
            self._until_a_group_finishes()
        return self._stop()

    def _launch(self, launch: Launch) -> None:
        run, state = self.run, self.state
        run.draw(launch.draw)
        if launch.starts:
            keys = [*launch.deferred, *run.draw(launch.fresh)]
            keys += [run.repeat(key) for key in launch.repeats]
            state.round_class = state.round_class or launch.round_class
            self._start(keys, launch)
        state.available, state.left_in_epoch = run.source.remaining, run.source.left_in_epoch
        state.epoch, state.forecasts = run.source.epoch, run.book

    def _start(self, keys: Sequence[GroupKey], launch: Launch) -> None:
        run = self.run
        resumed: list[UnfinishedRow] = []
        work: list[Work] = []
        for key in keys:
            group, waited = run.groups[key], run.waiting.pop(key)
            if key in launch.restart:
                self.wasted += group.drop()
            if not len(group.lengths):
                group.begin(run.lengths, launch.sample_ratio)
                if group.attempt == 0:
                    run.launched.append(group.lengths)
            missing = group.missing()
            done = len(group.lengths) - len(missing)
            self.state.groups[key] = GroupProgress(
                size=len(group.lengths),
                needed=group.needed,
                written=done,
                finished=done,
                deferrals=waited.deferrals,
            )
            self.home[key] = set()
            run.ledger.lease(key, "replica", run.ledger.attempts(key))
            if done >= group.needed:
                self._push(self.now, -1, key, -1)
            elif run.workload.second_batching and waited.tokens:
                resumed += [UnfinishedRow(key, index, self._remaining(key, group.written[index])) for index in missing]
            else:
                work.append(self._work(key, len(missing), waited.longest))
        self._place(work)
        self._place_rows(resumed)

    def _work(self, key: GroupKey, rows: int, written: int) -> Work:
        book = self.run.book
        if book is None:
            return Work(key=key, rows=rows)
        return Work(key=key, rows=rows, tokens=book.remaining(key, written), percentile=book.percentile(key))

    def _remaining(self, key: GroupKey, written: int) -> float:
        """Predicted rest of a row; without a prediction as much as it has: residual life grows with age."""
        book = self.run.book
        forecast = None if book is None else book.get(key)
        return float(max(1, written)) if forecast is None else forecast.remaining(written)

    def _place(self, work: Sequence[Work]) -> None:
        if not work:
            return
        by_replica: dict[int, list[Row]] = {}
        for placement in self.run.dispatcher.place(work, self._loads()):
            rows = self._rows(placement.work.key, placement.priority)
            by_replica.setdefault(placement.worker, []).extend(rows)
            self.replicas[placement.worker].limit = self._limit(placement.batch_limit)
        self._submit(by_replica)

    def _place_rows(self, rows: Sequence[UnfinishedRow]) -> None:
        if not rows:
            return
        slots = {replica.index: self._limit(replica.limit) for replica in self.replicas}
        by_replica: dict[int, list[Row]] = {}
        for batch in regroup(rows, slots):
            for key, indices in batch.by_group().items():
                remaining = max(row.remaining for row in batch.rows if row.key == key)
                by_replica.setdefault(batch.worker, []).extend(self._rows(key, remaining, indices))
        self._submit(by_replica)

    def _rows(self, key: GroupKey, priority: float, indices: Iterable[int] | None = None) -> list[Row]:
        group = self.run.groups[key]
        return [
            Row(key, index, int(group.lengths[index]), group.written[index], priority, shared=place > 0)
            for place, index in enumerate(group.missing() if indices is None else indices)
        ]

    def _submit(self, by_replica: dict[int, list[Row]]) -> None:
        for index, rows in by_replica.items():
            self.assigned[index] += len(rows)
            for row in rows:
                self.home[row.key].add(index)
            self.replicas[index].submit(self.now, rows)
            self._schedule(index)

    def _limit(self, batch_limit: int) -> int:
        long_rows = self.run.workload.long_rows
        return min(batch_limit, long_rows) if long_rows and self.state.round_class == "long" else batch_limit

    def _loads(self, *, queues: bool = False) -> list[WorkerLoad]:
        slots = self.run.cluster.slots
        return [
            WorkerLoad(
                index=replica.index,
                pool="regular",
                slots=replica.limit if queues else slots,
                assigned=self.assigned[replica.index],
                running=replica.running,
                queued=tuple(self._work(rows[0].key, len(rows), rows[0].written) for rows in replica.unstarted())
                if queues and replica.queued
                else (),
            )
            for replica in self.replicas
        ]

    def _push(self, time: float, replica: int, key: GroupKey | None, index: int) -> None:
        self.ticket += 1
        heapq.heappush(self.events, (time, self.ticket, replica, key, index))

    def _schedule(self, index: int) -> None:
        """Put the replica's next event on the clock; an earlier entry for it becomes void."""
        replica = self.replicas[index]
        if replica.queued:
            self.queueing.add(index)
        else:
            self.queueing.discard(index)
        due = replica.next_event()
        self.due[index] = due
        if due < IDLE:
            self._push(due, index, None, -1)

    def _until_a_group_finishes(self) -> None:
        while True:
            time, _, index, key, sample = heapq.heappop(self.events)
            if index >= 0 and key is None:
                if self.due[index] != time:
                    continue
                self.now = time
                self._rows_ended(index, self.replicas[index].complete_event())
                continue
            assert key is not None
            self.now = time
            if self._scored(key, sample):
                return

    def _rows_ended(self, index: int, rows: Sequence[Row]) -> None:
        run = self.run
        self._schedule(index)
        for row in rows:
            self.generated += run.groups[row.key].add_tokens(row, run.step)
            self.state.groups[row.key].written += 1
            self._push(self.now + next(self.waits), -1, row.key, row.index)
        replica = self.replicas[index]
        if rows and self.queueing and not replica.queued and replica.running < replica.limit:
            self._rebalance()

    def _rebalance(self) -> None:
        for move in self.run.dispatcher.rebalance(self._loads(queues=True)):
            rows = self.replicas[move.source].stop(self.now, {move.work.key})
            self.home[move.work.key].discard(move.source)
            self.assigned[move.source] -= len(rows)
            self._schedule(move.source)
            for place, row in enumerate(rows):
                row.shared = place > 0
            self._submit({move.target: rows})

    def _grading_waits(self) -> Iterator[float]:
        """Seconds from the end of an answer to its score, answer by answer."""
        rng = np.random.default_rng((self.run.workload.seed, 3, self.run.step))
        while True:
            yield from self.run.cluster.grading_seconds(rng.random(1024)).tolist()

    def _scored(self, key: GroupKey, sample: int) -> bool:
        """Count a score; returns True when it makes its group complete."""
        progress, group = self.state.groups[key], self.run.groups[key]
        if progress.verdict is not None:
            return False
        if sample >= 0:
            group.scored.append(sample)
            progress.finished += 1
            progress.tokens += int(group.lengths[sample])
        if progress.finished < progress.quota:
            return False
        rewards = [float(place % 2) for place in range(progress.quota)]
        progress.verdict = self.run.policy.on_finish(self.state, key, rewards)
        self.run.ledger.ready(key)
        if progress.written < progress.size:
            self._cut_surplus(key)
        return True

    def _cut_surplus(self, key: GroupKey) -> None:
        """Stop the siblings that an over-launched group does not need any more."""
        run = self.run
        for index in self.home[key]:
            for row in self.replicas[index].stop(self.now, {key}):
                self.generated += run.groups[key].add_tokens(row, run.step)
            self._schedule(index)

    def _stop(self) -> RoundRecord:
        run, state, cluster = self.run, self.state, self.run.cluster
        outcomes = dict.fromkeys(state.kept(), "trained")
        for replica in self.replicas:
            for row in replica.stop(self.now):
                self.generated += run.groups[row.key].add_tokens(row, run.step)
        for key in state.running():
            outcomes[key] = self._defer(key)
        kept = sorted(state.kept())
        for key in kept:
            group = run.groups[key]
            trained = set(group.trained_samples())
            self.wasted += sum(count for index, count in enumerate(group.written) if index not in trained)
        tokens, stale = run.settle(kept)
        uses = [replica.use for replica in self.replicas]
        return RoundRecord(
            step=state.step,
            round_class=state.round_class or "short",
            rollout_s=self.now,
            train_s=cluster.train_seconds(tokens),
            sync_s=cluster.sync_s,
            trained=len(kept),
            launched=len(state.groups),
            generated=self.generated,
            trained_tokens=tokens,
            stale_tokens=stale,
            wasted=self.wasted,
            busy_s=sum(use.busy_s for use in uses),
            row_s=sum(use.row_s for use in uses),
            slot_s=self.now * sum(use.most_rows for use in uses),
            preemptions=sum(use.preemptions for use in uses),
            spans=tuple(self.spans or ()),
            outcomes=outcomes if self.spans is not None else {},
        )

    def _defer(self, key: GroupKey) -> str:
        """Do with a running group what the policy says; returns what became of it."""
        run = self.run
        action = run.policy.on_stop(self.state, key)
        group, deferrals = run.groups[key], self.state.groups[key].deferrals + 1
        run.ledger.release(key, "deferred")
        if action == "restart":
            self.wasted += group.drop()
            run.waiting[key] = WaitingGroup(deferrals=deferrals, missing=group.needed)
            return "dropped"
        # Scores that are still missing arrive while the learner works.
        unfinished = set(group.missing())
        known = set(group.scored)
        group.scored += [i for i in range(len(group.lengths)) if i not in unfinished and i not in known]
        run.waiting[key] = group.waiting(deferrals)
        return "deferred"
