"""Runs one round of generation: a training round that a policy steers, or an evaluation of some prompt sets."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from pipelines.backlog import Backlog, Waiting
from pipelines.config import Config
from pipelines.dispatching import Dispatching
from pipelines.flow import SampleFlow
from pipelines.held_out import held_out_work
from pipelines.interruption import unless_stopped
from pipelines.leases import SampleDone
from pipelines.length_forecasts import LengthForecasts
from pipelines.round_books import Progress, RoundBooks, RoundResult
from pipelines.run_data import RunData
from pipelines.scheduling.dispatch import Pool, Work
from pipelines.scheduling.policy import GroupProgress, Launch, RoundState, SchedulePolicy
from pipelines.scheduling.second_batching import UnfinishedRow, regroup
from pipelines.score_deadlines import ScoreDeadlines
from storage.ledger import Ledger
from storage.prompt_source import PromptSource
from storage.records import Assignment, GroupKey, Prompt, RoundClass, SampleHeader


@dataclass(slots=True)
class RoundRunner:
    """Acts on the decisions of a policy; the state that outlives a round lies in source, backlog and ledger."""

    config: Config
    data: RunData
    flow: SampleFlow
    source: PromptSource
    ledger: Ledger
    policy: SchedulePolicy
    dispatching: Dispatching
    forecasts: LengthForecasts
    score_deadlines: ScoreDeadlines
    stop: asyncio.Event
    backlog: Backlog = field(default_factory=Backlog)
    progress: Progress = field(default_factory=Progress)
    _duplicates: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def exhausted(self) -> bool:
        """True when there is no prompt left to launch."""
        return self.source.remaining == 0 and not self.backlog

    @property
    def open_epoch(self) -> int:
        """Smallest epoch of which groups may still be opened or launched."""
        oldest = self.backlog.oldest_epoch
        return self.source.epoch if oldest is None else min(oldest, self.source.epoch)

    async def train(self, step: int, version: int) -> RoundResult:
        """Launch and collect the groups of one step, under the weights ``version``.

        Raises:
            Interrupted: The run is asked to stop.
            UserError: Every single score failed.
        """
        size = self.config.rollout.samples_per_prompt
        books = RoundBooks(
            RoundState(
                step=step,
                prompts_per_step=self.config.rollout.prompts_per_step,
                available=self.source.remaining,
                waiting=self.backlog.view(self.flow, size),
                left_in_epoch=self.source.left_in_epoch,
                epoch=self.source.epoch,
                version=version,
                forecasts=self.forecasts.book,
            )
        )
        state = books.state
        self.progress = Progress()
        self.dispatching.start_round()
        generated, dropped, started = self.flow.generated, self.flow.dropped, time.time()
        while True:
            await self._plan(books)
            if self.policy.should_stop(state):
                break
            event = await self._next_event()
            await self._take(books, event)
        await self._leave_behind(books)
        self._check_scores(step, books.headers)
        self.forecasts.forget(tuple(books.headers))
        return RoundResult(
            keys=tuple(sorted(books.headers)),
            headers=books.headers,
            filtered=books.filtered,
            started=started,
            ended=time.time(),
            generated_tokens=self.flow.generated - generated,
            dropped_tokens=self.flow.dropped - dropped,
            errors=books.errors,
            scored=books.scored,
            round_class=state.round_class or "short",
            waiting=len(self.backlog),
            launched_lengths=tuple(books.lengths),
        )

    async def evaluate(self, step: int) -> dict[str, dict[GroupKey, list[SampleHeader]]]:
        """Write and score every held-out prompt; returns headers by split. Raises as :meth:`train`."""
        work = held_out_work(self.config, self.data, step)
        waiting = {assignment.key: assignment.group_size for assignment in work}
        self.progress = Progress(launched=sum(waiting.values()))
        workers = self.config.rollout.workers
        for worker in range(min(workers, len(work))):
            self.flow.dispatch(worker, work[worker::workers])
        while waiting:
            event = await self._next_event()
            if event.key not in waiting:  # a training group that a round left in scoring
                continue
            self.progress.add(event)
            waiting[event.key] -= 1
            if not waiting[event.key]:
                del waiting[event.key]
        self.progress.check(f"evaluation after step {step}")
        found: dict[str, dict[GroupKey, list[SampleHeader]]] = {name: {} for name in self.data.evaluation}
        for assignment in work:
            found.setdefault(assignment.key.split, {})[assignment.key] = self.flow.headers(assignment.key)
        return found

    def state(self) -> dict[str, Any]:
        """What outlives a round, as JSON values."""
        return {
            "backlog": self.backlog.state(),
            "forecasts": self.forecasts.state(),
            "score_deadlines": self.score_deadlines.state(),
            "duplicates": [[*place, count] for place, count in self._duplicates.items()],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken; groups that waited with tokens begin anew."""
        self.backlog.load_state(state["backlog"], {prompt.index: prompt for prompt in self.data.train})
        self.forecasts.load_state(state["forecasts"])
        self.score_deadlines.load_state(state.get("score_deadlines", {}))
        self._duplicates = {(epoch, prompt): count for epoch, prompt, count in state["duplicates"]}

    def quiet(self) -> AbstractAsyncContextManager[Any]:
        """Enter it to look at :meth:`state` while no group is between two places."""
        return nullcontext()

    async def close(self) -> None:
        """Stop whatever runs beside the rounds."""

    def _check_scores(self, step: int, headers: Mapping[GroupKey, Sequence[SampleHeader]]) -> None:
        """Raise ``UserError`` when nothing of a step has a score; of a few late answers alone, all may have failed."""
        if all(header.reward is None for group in headers.values() for header in group):
            self.progress.check(f"step {step + 1}")

    async def _plan(self, books: RoundBooks) -> None:
        """Draw and launch what the policy asks for."""
        while True:
            launch = self.policy.plan(books.state)
            if launch.draw:
                await self._draw(books, launch.draw)
                continue
            if launch.starts:
                await self._launch(books, launch)
                books.state.waves += 1
            return

    async def _draw(self, books: RoundBooks, count: int) -> None:
        drawn = self._next_prompts(count)
        await self.forecasts.predict(drawn)
        for key, prompt in drawn.items():
            self.backlog.add(key, prompt)
        self._refresh(books)

    def _next_prompts(self, count: int) -> dict[GroupKey, Prompt]:
        drawn: dict[GroupKey, Prompt] = {}
        for _ in range(count):
            following = self.source.next()
            if following is None:
                break
            key, prompt = following
            self.ledger.open(key)
            drawn[key] = prompt
        return drawn

    def _refresh(self, books: RoundBooks) -> None:
        state = books.state
        state.available = self.source.remaining
        state.left_in_epoch = self.source.left_in_epoch
        state.epoch = self.source.epoch
        state.waiting = self.backlog.view(self.flow, self.config.rollout.samples_per_prompt)

    async def _launch(self, books: RoundBooks, launch: Launch) -> None:
        fresh = self._next_prompts(launch.fresh)
        taken = {key: self.backlog.take(key) for key in launch.deferred}
        taken |= {key: Waiting(prompt) for key, prompt in fresh.items()}
        for key in launch.repeats:
            original = taken[key].prompt if key in taken else books.prompts.get(key)
            taken[self._repeat(key)] = Waiting(original or self.backlog.prompt(key))
        self.flow.drop(launch.restart)
        await self.forecasts.predict({key: waiting.prompt for key, waiting in taken.items()})
        books.state.round_class = books.state.round_class or launch.round_class
        launched: list[tuple[Work, Assignment]] = []
        for key, waiting in taken.items():
            launched += self._open(books, key, waiting, launch)
        self._refresh(books)
        self.progress.launched += sum(len(assignment.samples) for _, assignment in launched)
        second = self.config.schedule.second_batching and launch.round_class == "long"
        places = (
            self._regroup(launched)
            if second
            else self.dispatching.give(launched, long_round=launch.round_class == "long")
        )
        for key in taken:
            self.ledger.lease(key, f"rollout-{places.get(key, 0)}", self.ledger.attempts(key))
        for key in taken:  # groups that were complete while they waited
            await self._judge(books, key)

    def _open(
        self, books: RoundBooks, key: GroupKey, waiting: Waiting, launch: Launch
    ) -> list[tuple[Work, Assignment]]:
        """Enter a group into the books; returns what is to be written of it, if anything is."""
        needed = self.config.rollout.samples_per_prompt
        leases = self.flow.leases(key)
        size = max(len(leases), math.ceil(needed * launch.sample_ratio - 1e-9) if not leases else needed)
        indices = sorted([*leases, *(index for index in range(size) if index not in leases)][:size])
        done = [index for index, lease in leases.items() if lease.stage in ("scoring", "scored", "failed")]
        scored = [index for index in done if leases[index].stage == "scored"]
        failed = [index for index in done if leases[index].stage == "failed"]
        books.state.groups[key] = GroupProgress(
            size=size,
            needed=needed if size > needed else 0,
            written=len(done),
            finished=len(scored) + len(failed),
            tokens=sum(leases[index].tokens for index in scored),
            deferrals=waiting.deferrals,
        )
        books.prompts[key] = waiting.prompt
        books.order[key] = scored
        books.seen.update((key, index) for index in (*scored, *failed))
        missing = tuple(i for i in indices if i not in leases or leases[i].stage == "partial")
        if not missing:
            return []
        for index in missing:
            if index in leases:
                leases[index].waits = False
        assignment = self._assignment(key, waiting.prompt, missing, size, launch.round_class)
        return [(self._work(key, missing), assignment)]

    def _work(self, key: GroupKey, missing: Sequence[int], pool: Pool | None = None) -> Work:
        leases, book = self.flow.leases(key), self.forecasts.book
        written = max((leases[index].tokens for index in missing if index in leases), default=0)
        return Work(
            key=key,
            rows=len(missing),
            tokens=None if book is None else book.remaining(key, written),
            percentile=None if book is None else book.percentile(key),
            pool=pool,
        )

    def _regroup(self, launched: Sequence[tuple[Work, Assignment]]) -> dict[GroupKey, int]:
        """Second batching: rows with about as much left run together, whichever group they belong to."""
        by_key = {assignment.key: assignment for _, assignment in launched}
        book = self.forecasts.book
        rows: list[UnfinishedRow] = []
        for key, assignment in by_key.items():
            leases = self.flow.leases(key)
            for index in assignment.samples:
                written = leases[index].tokens if index in leases else 0
                left = None if book is None else book.remaining(key, written)
                rows.append(
                    UnfinishedRow(key, index, self.config.rollout.max_tokens - written if left is None else left)
                )
        places: dict[GroupKey, int] = {}
        for batch in regroup(rows, self.dispatching.slots()):
            parts = [
                self._assignment(key, by_key[key].prompt, indices, by_key[key].group_size, "long")
                for key, indices in batch.by_group().items()
            ]
            self.dispatching.give_rows(batch.worker, parts)
            for part in parts:
                places.setdefault(part.key, batch.worker)
        return places

    def _assignment(
        self, key: GroupKey, prompt: Prompt, samples: tuple[int, ...], size: int, round_class: RoundClass
    ) -> Assignment:
        return Assignment(
            key=key,
            prompt=prompt,
            samples=samples,
            group_size=size,
            sampling=self.data.training_sampling(self.config),
            run_seed=self.config.run.seed,
            round_class=round_class,
        )

    def _repeat(self, key: GroupKey) -> GroupKey:
        place = (key.epoch, key.prompt)
        self._duplicates[place] = self._duplicates.get(place, 0) + 1
        repeat = key._replace(duplicate=self._duplicates[place])
        self.ledger.open(repeat)
        return repeat

    async def _take(self, books: RoundBooks, event: SampleDone) -> None:
        """Enter what happened to a sample."""
        group = books.state.groups.get(event.key)
        if group is None and event.header is not None and event.key in self.backlog:
            # A round left it in scoring: its lease knows, and the predictor must not miss the long ones.
            size = self.config.rollout.samples_per_prompt
            self.forecasts.observe(self.backlog.prompt(event.key), [event.header], size)
        lease = self.flow.current(event)
        if lease is None or group is None or group.verdict is not None or (event.key, event.index) in books.seen:
            return
        if event.interrupted:
            if self.stop.is_set():
                return
            lease.waits = False
            work = self._work(event.key, [event.index], "long" if self.config.schedule.pools.long.workers else None)
            again = self._assignment(event.key, books.prompts[event.key], (event.index,), group.size, "long")
            self.dispatching.give([(work, again)])
            return
        books.seen.add((event.key, event.index))
        group.finished += 1
        self.progress.add(event)
        if event.header is not None:
            books.scored += 1
            books.lengths.append(event.header.tokens)
            group.tokens += event.header.tokens
            books.errors += event.header.reward_status in ("error", "timeout")
            books.order[event.key].append(event.index)
            self.forecasts.observe(books.prompts[event.key], [event.header], group.size)
        await self._judge(books, event.key)

    async def _judge(self, books: RoundBooks, key: GroupKey) -> None:
        """Settle a group that has all the samples it needs."""
        group = books.state.groups[key]
        arrived = books.order[key]
        if group.verdict is not None or (len(arrived) < group.quota and group.finished < group.size):
            return
        if len(arrived) < group.quota:
            group.verdict = "filter"
            self._end(books, key, "worker_crashed")
            return
        keep = sorted(arrived[: group.quota])
        if group.size > group.quota:
            self.flow.cut(key, keep)
        known = self.flow.headers(key)
        group.verdict = self.policy.on_finish(books.state, key, [header.reward for header in known])
        if group.verdict == "filter":
            scored = sum(header.reward is not None for header in known)
            self._end(books, key, "zero_variance" if scored > 1 else "unscored")
            return
        self.ledger.ready(key)
        books.headers[key] = known

    async def _leave_behind(self, books: RoundBooks) -> None:
        """Stop the groups that still run, and let them wait as the policy says."""
        state = books.state
        running = state.running()
        if not running:
            return
        actions = {}
        for key in running:
            written = [i for i, lease in self.flow.leases(key).items() if lease.stage in ("scoring", "scored")]
            state.groups[key].written = len(written)
            actions[key] = self.policy.on_stop(state, key)
            if actions[key] == "park":  # it has what it needs, once that is scored
                self.flow.cut(key, written)
        self.dispatching.revoke(running)
        stopping = [key for key in running if actions[key] != "park"]
        while self.flow.writing(stopping):
            await unless_stopped(self.flow.interrupt(stopping), self.stop)
        for key in running:
            if actions[key] == "restart":
                self.flow.drop([key])
            self.ledger.release(key, "deferred")
            self.backlog.add(key, books.prompts[key], state.groups[key].deferrals + 1)

    def _end(self, books: RoundBooks, key: GroupKey, reason: str) -> None:
        self.ledger.end(key, reason)
        self.flow.drop([key])
        self.forecasts.forget([key])
        books.filtered[reason] = books.filtered.get(reason, 0) + 1

    async def _next_event(self) -> SampleDone:
        if self.flow.failure is not None:
            raise self.flow.failure
        if not self.flow.events.empty() and not self.stop.is_set():
            event = self.flow.events.get_nowait()
        else:
            event = await unless_stopped(self.flow.events.get(), self.stop)
        if self.flow.failure is not None:
            raise self.flow.failure
        return event
