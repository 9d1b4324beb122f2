"""The streaming pipeline: answers are written, scored and gathered while the learner trains.

A pump takes what happens to samples and launches groups whenever staleness and slots allow it; a step takes complete
groups as soon as there are enough. What leaves a step untrained for its age is decided at the learner's door, by the
versions that the engines stamped.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pipelines.interruption import unless_stopped
from pipelines.leases import SampleDone
from pipelines.round_books import Progress, RoundBooks, RoundResult
from pipelines.rounds import RoundRunner
from pipelines.scheduling.admission import ReadyGroup, StreamAdmission, choose
from pipelines.scheduling.policy import Launch, RoundState
from storage.records import TRAIN_SPLIT, GroupKey, SampleHeader

_WAKE = SampleDone(GroupKey("", 0, 0), -2, None)


class StreamRunner(RoundRunner):
    """Runs the stream; the same face as :class:`RoundRunner`. Call :meth:`start` once."""

    _pump_task: asyncio.Task[None] | None = None

    def start(self, version: int) -> None:
        """Begin to take events, under the published weights ``version``; :meth:`open` lets training groups in."""
        assert isinstance(self.policy, StreamAdmission)
        self._admission = self.policy
        self._max_staleness = self.config.asynchrony.max_staleness
        self._books = RoundBooks(
            RoundState(step=0, prompts_per_step=self.config.rollout.prompts_per_step, available=self.source.remaining)
        )
        self._books.state.version = version
        self._ready: dict[GroupKey, ReadyGroup] = {}
        self._floors: dict[GroupKey, int] = {}
        self._launched: dict[GroupKey, int] = {}
        self._counter = 0
        self._marks = (0, 0)
        self._evaluating: asyncio.Queue[SampleDone] = asyncio.Queue()
        self._news = asyncio.Condition()
        self._failure: BaseException | None = None
        self._admitting = False
        self._launching = False
        self._busy = asyncio.Lock()
        self.dispatching.on_room = lambda: self.flow.events.put_nowait(_WAKE)
        self.flow.fleet.on_version = lambda: self.flow.events.put_nowait(_WAKE)
        self._pump_task = asyncio.get_running_loop().create_task(self._pump())

    def open(self) -> None:
        """Let training groups in; evaluations before that have the engines for themselves."""
        self._admitting = True
        self.flow.events.put_nowait(_WAKE)

    def quiet(self) -> asyncio.Lock:
        """As the round runner's: while it is held, every group is in exactly one of the books."""
        return self._busy

    @property
    def exhausted(self) -> bool:
        """True when nothing is under way and there is no prompt left to launch."""
        return self._nothing_left and not self._books.state.groups

    @property
    def _nothing_left(self) -> bool:
        return super().exhausted and not self._launching

    async def train(self, step: int, version: int) -> RoundResult:
        """Return the groups of a step as soon as there are enough of them.

        Raises:
            Interrupted: The run is asked to stop.
            UserError: Every single score since the last step failed.
        """
        books, started = self._books, time.time()
        if self._admission.learning:  # the step before made no version
            await self.advance(version)
        chosen = await unless_stopped(self._chosen(version), self.stop)
        keys = tuple(sorted(group.key for group in chosen))
        headers = {key: books.headers[key] for key in keys}
        self._check_scores(step, headers)
        result = RoundResult(
            keys=keys,
            headers=headers,
            filtered=dict(books.filtered),
            started=started,
            ended=time.time(),
            generated_tokens=self.flow.generated - self._marks[0],
            dropped_tokens=self.flow.dropped - self._marks[1],
            errors=books.errors,
            scored=books.scored,
            waiting=len(books.state.groups) - len(keys),
            launched_lengths=tuple(books.lengths),
        )
        self._marks = (self.flow.generated, self.flow.dropped)
        books.filtered.clear()
        books.lengths.clear()
        books.errors = books.scored = 0
        self.progress = Progress(launched=self.progress.launched - self.progress.done)
        for key in keys:
            self._settle(key)
        self._admission.learning = True
        self.forecasts.forget(keys)
        return result

    async def evaluate(self, step: int) -> dict[str, dict[GroupKey, list[SampleHeader]]]:
        """As the round runner's; waits until every worker has the published weights, which a step does not."""
        await unless_stopped(self._up_to_date(), self.stop)
        if self._failure is not None:
            raise self._failure
        return await super().evaluate(step)

    async def advance(self, version: int) -> None:
        """Take note that a step is over, and new weights may be published: more may be launched."""
        async with self._busy:
            self._books.state.version = version
            self._admission.learning = False
            await self._age(version)
        self.flow.events.put_nowait(_WAKE)

    async def lower_bound(self, max_staleness: int) -> None:
        """Admit and train nothing older than ``max_staleness`` from here on; what is too old already begins anew."""
        async with self._busy:
            self._max_staleness = self._admission.max_staleness = max_staleness
            await self._age(self._books.state.version, unfinished=True)
        self.flow.events.put_nowait(_WAKE)

    def state(self) -> dict[str, Any]:
        """As the round runner's; groups under way begin anew after a resume."""
        state = super().state()
        under_way = [[str(key), 0] for key, group in self._books.state.groups.items() if group.verdict != "filter"]
        state["backlog"] = [*state["backlog"], *under_way]
        return state

    async def close(self) -> None:
        """Stop the pump, if it was started."""
        if self._pump_task is None:
            return
        self._pump_task.cancel()
        await asyncio.gather(self._pump_task, return_exceptions=True)

    async def _chosen(self, version: int) -> list[ReadyGroup]:
        """Wait for the groups of a step; whatever gets too old for it meanwhile begins anew."""
        while True:
            async with self._busy:
                await self._age(version)
            async with self._news:
                await self._news.wait_for(
                    lambda: self._failure is not None or self._choice() is not None or bool(self._stale(version))
                )
            if self._failure is not None:
                raise self._failure
            chosen = None if self._stale(version) else self._choice()
            if chosen is not None:
                return chosen

    async def _up_to_date(self) -> None:
        version, versions = self._books.state.version, self.flow.fleet.versions
        workers = range(self.config.rollout.workers)
        async with self._news:
            await self._news.wait_for(
                lambda: self._failure is not None or all(versions.get(index, 0) >= version for index in workers)
            )

    async def _pump(self) -> None:
        """Take events and launch, for ever; what breaks is raised by whoever waits for a step."""
        try:
            while True:
                event = await self.flow.events.get()
                if self.flow.failure is not None:
                    raise self.flow.failure
                if event.key.split not in ("", TRAIN_SPLIT):
                    self._evaluating.put_nowait(event)
                async with self._busy:
                    if event.key.split == TRAIN_SPLIT:
                        await self._take(self._books, event)
                    if self._admitting and not self.stop.is_set():
                        await self._admit()
                async with self._news:
                    self._news.notify_all()
        except Exception as error:  # handed to train and evaluate
            self._failure = error
            self._evaluating.put_nowait(_WAKE)
            async with self._news:
                self._news.notify_all()

    async def _admit(self) -> None:
        self._refresh(self._books)
        self._admission.free_rows = self.dispatching.free_rows(self._admission.oldest_start(self._books.state.version))
        before = set(self._books.state.groups)
        await self._plan(self._books)
        for key in self._books.state.groups:
            if key not in before:
                self._counter += 1
                self._launched[key] = self._counter
            if key not in self._floors and key not in self._ready:
                leases = self.flow.leases(key).values()
                if leases:  # else it waits for a worker, and grows no older
                    self._floors[key] = min(lease.begins for lease in leases)

    async def _launch(self, books: RoundBooks, launch: Launch) -> None:
        self._launching = True  # what is drawn from the source is in no book while its length is predicted
        try:
            await super()._launch(books, launch)
        finally:
            self._launching = False

    async def _judge(self, books: RoundBooks, key: GroupKey) -> None:
        await super()._judge(books, key)
        group = books.state.groups[key]
        if group.verdict == "filter":
            self._settle(key)
        elif group.verdict == "keep" and key not in self._ready:
            self._counter += 1
            written = [h.oldest_version for h in books.headers[key] if h.oldest_version >= 0]
            oldest = min(written, default=books.state.version)  # answers without a token do not age
            self._ready[key] = ReadyGroup(key, self._counter, self._launched.get(key, self._counter), oldest)
            self._floors.pop(key, None)

    def _settle(self, key: GroupKey) -> None:
        """Take a group out of the books: it goes to the learner, or is gone."""
        books = self._books
        tables: list[dict[GroupKey, Any]] = [books.state.groups, books.prompts, books.order, books.headers]
        for table in (*tables, self._ready, self._floors, self._launched):
            table.pop(key, None)
        books.seen = {identity for identity in books.seen if identity[0] != key}

    def _choice(self) -> list[ReadyGroup] | None:
        """Groups of the step at the present version; None while it waits for more, or for groups that are due."""
        books, state = self._books, self._books.state
        wanted = state.prompts_per_step
        filtered = sum(count for reason, count in books.filtered.items() if reason != "stale")
        unfinished = list(self._floors.values())
        if len(self._ready) < wanted:
            if self._admission.gives_up(filtered, len(self._ready), wanted):
                # Most will teach nothing either, so there is room for them later; what is due now must still come.
                unfinished = [floor for floor in unfinished if state.version - floor >= self._max_staleness]
            elif not (self._nothing_left and len(self._ready) == len(state.groups)):
                return None
        return choose(
            self._ready.values(),
            unfinished,
            wanted,
            consumption=self.config.asynchrony.consumption,
            version=state.version,
            max_staleness=self._max_staleness,
            # With a bound of 0 everything has to be trained at once anyway.
            waits=self.config.asynchrony.on_stale == "wait" and self._max_staleness > 0,
        )

    def _stale(self, version: int, *, unfinished: bool = False) -> list[GroupKey]:
        """What is too old for the step at ``version``, as configured; groups still written only on demand."""
        policy = self.config.asynchrony.on_stale
        if policy in ("accept", "decay"):
            return []
        stale = [g.key for g in self._ready.values() if version - g.oldest_version > self._max_staleness]
        if policy == "cancel_early" or unfinished:
            stale += [key for key, floor in self._floors.items() if version - floor > self._max_staleness]
        return stale

    async def _age(self, version: int, *, unfinished: bool = False) -> None:
        """Give up what is too old for the step at ``version``; held off from the pump by the caller."""
        stale = self._stale(version, unfinished=unfinished)
        if not stale:
            return
        running = [key for key in stale if key in self._floors]
        self.dispatching.revoke(running)
        while self.flow.writing(running):
            await self.flow.interrupt(running)
        for key in stale:
            if key not in self._books.state.groups:
                continue
            prompt = self._books.prompts[key]
            self.flow.drop([key])
            self.ledger.release(key, "stale")
            self._settle(key)
            self._books.filtered["stale"] = self._books.filtered.get("stale", 0) + 1
            self.backlog.add(key, prompt, 1)
        self.flow.events.put_nowait(_WAKE)  # their places are free

    async def _next_event(self) -> SampleDone:
        """Events of an evaluation; those of training are the pump's."""
        event = await unless_stopped(self._evaluating.get(), self.stop)
        if self._failure is not None:
            raise self._failure
        return event
