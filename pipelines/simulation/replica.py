"""One rollout engine on the virtual clock: continuous batching, prefill, a bounded cache with preemption."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from dataclasses import dataclass, field

from pipelines.simulation.cluster import ClusterModel
from storage.records import GroupKey

IDLE = math.inf


@dataclass(slots=True)
class Row:
    """One answer that is being written.

    Attributes:
        key: Its group.
        index: Its place among the siblings.
        length: Tokens that it will have.
        written: Tokens that it has. While it runs this is what it had when it was admitted.
        priority: Rows with a higher value are admitted first.
        admitted: Pass of the replica before which it was admitted.
        began: Virtual second of that.
        slot: Slot that it occupies.
        shared: Its prompt is in the cache already, through a sibling.
        ticket: Marks its stay in the engine, 0 while it waits: entries of earlier stays are void.
    """

    key: GroupKey
    index: int
    length: int
    written: int = 0
    priority: float = 0.0
    admitted: int = 0
    began: float = 0.0
    slot: int = -1
    shared: bool = False
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """A stay of a row in a slot, for charts: ``done`` says that its answer was complete at the end."""

    key: GroupKey
    index: int
    replica: int
    slot: int
    begin: float
    end: float
    done: bool


@dataclass(slots=True)
class ReplicaUse:
    """What a replica did in a round: seconds with rows, row-seconds, tokens, preemptions, most rows at once."""

    busy_s: float = 0.0
    row_s: float = 0.0
    tokens: int = 0
    preemptions: int = 0
    most_rows: int = 0


@dataclass(slots=True)
class Replica:
    """Advances all admitted rows by one token a pass; passes take what the cluster's model says.

    Between two events (a row ends, or the cache is full) nothing changes but the context, so the passes between are
    added up in closed form.
    """

    index: int
    cluster: ClusterModel
    limit: int
    clock: float = 0.0
    use: ReplicaUse = field(default_factory=ReplicaUse)
    spans: list[Span] | None = None
    _rows: dict[tuple[GroupKey, int], Row] = field(default_factory=dict)
    _ends: list[tuple[int, int, Row]] = field(default_factory=list)
    _waiting: list[tuple[float, int, Row]] = field(default_factory=list)
    _pass: int = 0
    _context: int = 0
    _stall: float = 0.0
    _ticket: int = 0
    _free: list[int] = field(default_factory=list)

    @property
    def running(self) -> int:
        """Rows that are being decoded."""
        return len(self._rows)

    @property
    def queued(self) -> int:
        """Rows that wait for a slot."""
        return len(self._waiting)

    def submit(self, now: float, rows: list[Row]) -> None:
        """Queue rows at virtual second ``now``; they are admitted by priority, then in order."""
        self.advance(now)
        if not self._rows:
            self.clock = max(self.clock, now)
        for row in rows:
            self._ticket += 1
            insort(self._waiting, (-row.priority, self._ticket, row))
        self._admit()

    def next_event(self) -> float:
        """Virtual second at which a row ends or is preempted; infinite when nothing runs."""
        passes = self._passes_to_event()
        if not passes:
            return IDLE
        return self.clock + self._stall + self.cluster.passes_seconds(passes, len(self._rows), self._context)

    def complete_event(self) -> list[Row]:
        """Go to :meth:`next_event`; returns the rows that ended there."""
        self._move(self._passes_to_event())
        ended = []
        while self._ends and self._ends[0][0] <= self._pass:
            _, ticket, row = heapq.heappop(self._ends)
            if row.ticket == ticket:
                self._remove(row, done=True)
                ended.append(row)
        while self._rows and self._context + len(self._rows) > self.cluster.kv_tokens and len(self._rows) > 1:
            youngest = max(self._rows.values(), key=lambda row: (row.admitted, -row.priority, row.key, row.index))
            self._remove(youngest, done=False)
            self.use.preemptions += 1
            youngest.shared = False
            self._ticket += 1
            # Ahead of everything else: it has waited for its slot before.
            insort(self._waiting, (-math.inf, -self._ticket, youngest))
        self._admit()
        return ended

    def advance(self, now: float) -> None:
        """Do the whole passes that end by ``now``; no event may lie before it."""
        if not self._rows or now <= self.clock + self._stall:
            return
        passes = self.cluster.passes_within(now - self.clock - self._stall, len(self._rows), self._context)
        self._move(min(passes, self._passes_to_event()))

    def stop(self, now: float, keys: set[GroupKey] | None = None) -> list[Row]:
        """Stop rows of the groups ``keys`` (of all for None) at ``now``; returns them with what they have written."""
        self.advance(now)
        stopped = [row for row in self._rows.values() if keys is None or row.key in keys]
        for row in stopped:
            self._remove(row, done=False)
        waiting = [row for *_, row in self._waiting if keys is None or row.key in keys]
        if waiting:
            self._waiting = [entry for entry in self._waiting if keys is not None and entry[2].key not in keys]
        if stopped:
            self._admit()
        return stopped + waiting

    def unstarted(self) -> list[list[Row]]:
        """Groups none of whose rows here have begun, in the order in which they will."""
        begun = {key for key, _ in self._rows}
        groups: dict[GroupKey, list[Row]] = {}
        for *_, row in self._waiting:
            if row.key not in begun:
                groups.setdefault(row.key, []).append(row)
        return list(groups.values())

    def _passes_to_event(self) -> int:
        while self._ends and self._ends[0][1] != self._ends[0][2].ticket:
            heapq.heappop(self._ends)
        if not self._rows:
            return 0
        passes = self._ends[0][0] - self._pass
        room = (self.cluster.kv_tokens - self._context) // len(self._rows)
        return max(1, passes if len(self._rows) == 1 else min(passes, room))

    def _move(self, passes: int) -> None:
        rows = len(self._rows)
        seconds = self._stall + self.cluster.passes_seconds(passes, rows, self._context)
        self.clock += seconds
        self._stall = 0.0
        self._pass += passes
        self._context += rows * passes
        use = self.use
        use.busy_s += seconds
        use.row_s += rows * seconds
        use.tokens += rows * passes

    def _admit(self) -> None:
        cluster = self.cluster
        while self._waiting and len(self._rows) < self.limit:
            row = self._waiting[0][2]
            context = cluster.prompt_tokens + row.written
            if self._rows and self._context + context + len(self._rows) + 1 > cluster.kv_tokens:
                break
            self._waiting.pop(0)
            self._stall += cluster.prefill_s * (row.written + (0 if row.shared else cluster.prompt_tokens))
            row.admitted, row.began = self._pass, self.clock
            if self.spans is not None:
                row.slot = heapq.heappop(self._free) if self._free else len(self._rows)
            self._rows[row.key, row.index] = row
            self._context += context
            self._ticket += 1
            row.ticket = self._ticket
            heapq.heappush(self._ends, (self._pass + row.length - row.written, self._ticket, row))
        self.use.most_rows = max(self.use.most_rows, len(self._rows))

    def _remove(self, row: Row, *, done: bool) -> None:
        del self._rows[row.key, row.index]
        row.ticket = 0
        row.written += self._pass - row.admitted
        self._context -= self.cluster.prompt_tokens + row.written
        if self.spans is not None:
            self.spans.append(Span(row.key, row.index, self.index, row.slot, row.began, self.clock, done))
            heapq.heappush(self._free, row.slot)
