"""Runs one round of generation: a training round that a policy steers, or an evaluation of some prompt sets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pipelines.config import Config
from pipelines.flow import SampleDone, SampleFlow
from pipelines.run_data import SAMPLED_SUFFIX, RunData
from pipelines.scheduling.policy import GroupProgress, Launch, RoundState, SchedulePolicy
from storage.errors import UserError
from storage.ledger import Ledger
from storage.prompt_source import PromptSource
from storage.records import Assignment, GroupKey, SampleHeader, SamplingParams

T = TypeVar("T")


class Interrupted(Exception):
    """The run was asked to stop while it waited."""


@dataclass(slots=True)
class Progress:
    """Samples of the round in progress, for people who watch.

    Attributes:
        launched: Samples asked for.
        done: Samples that came back, scored or given up.
        failed: Samples without a score because something failed.
        first_error: What happened to the first of those.
        started: Wall-clock second of the start.
    """

    launched: int = 0
    done: int = 0
    failed: int = 0
    first_error: str = ""
    started: float = field(default_factory=time.time)

    def add(self, event: SampleDone) -> None:
        """Count a sample."""
        self.done += 1
        error = event.error if event.header is None else event.header.error
        if event.header is None or event.header.reward_status in ("error", "timeout"):
            self.failed += 1
            self.first_error = self.first_error or error

    def check(self, what: str) -> None:
        """Raise ``UserError`` when something failed for every single answer of the round."""
        if self.done and self.failed == self.done:
            raise UserError(
                f"{what}: none of the {self.done} answers got a score, so there is nothing to learn from; the first "
                f"error: {self.first_error}. Mend that (reward.functions names the functions) before the run goes on"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What a training round brought.

    Attributes:
        keys: Groups for the learner, sorted.
        headers: Headers of their samples, by group, in index order.
        filtered: Groups that ended without being trained, by reason.
        started: Wall-clock second of the first dispatch.
        ended: Wall-clock second at which the last needed sample was scored and known here.
        launched_tokens: Tokens of all samples that were finished in the round, trained or not.
        errors: Samples whose reward failed or timed out; scored: samples that came back.
    """

    keys: tuple[GroupKey, ...]
    headers: Mapping[GroupKey, Sequence[SampleHeader]]
    filtered: Mapping[str, int]
    started: float
    ended: float
    launched_tokens: int
    errors: int
    scored: int


@dataclass(slots=True)
class RoundRunner:
    """Acts on the decisions of a policy; the state that outlives a round lies in source and ledger."""

    config: Config
    data: RunData
    flow: SampleFlow
    source: PromptSource
    ledger: Ledger
    policy: SchedulePolicy
    stop: asyncio.Event
    progress: Progress = field(default_factory=Progress)
    _ordinal: int = 0

    async def train(self, step: int) -> RoundResult:
        """Launch and collect the groups of one step.

        Raises:
            Interrupted: The run is asked to stop.
            UserError: Every single score failed.
        """
        state = RoundState(
            step=step, prompts_per_step=self.config.rollout.prompts_per_step, available=self.source.remaining
        )
        self.progress = Progress()
        self._ordinal = 0  # groups map to workers by their place in the step, whatever happened before
        headers: dict[GroupKey, Sequence[SampleHeader]] = {}
        filtered: dict[str, int] = {}
        started, tokens, errors, scored = time.time(), 0, 0, 0
        while True:
            launch = self.policy.plan(state)
            if not launch.empty:
                self._launch(state, launch)
                state.waves += 1
            if self.policy.should_stop(state):
                break
            event = await self._next_event()
            group = state.groups[event.key]
            group.finished += 1
            self.progress.add(event)
            if event.header is not None:
                scored += 1
                group.tokens += event.header.tokens
                tokens += event.header.tokens
                errors += event.header.reward_status in ("error", "timeout")
            if group.finished == group.size:
                reason = self._judge(state, event.key, headers)
                if reason:
                    filtered[reason] = filtered.get(reason, 0) + 1
        self.progress.check(f"step {step + 1}")
        return RoundResult(
            keys=tuple(sorted(headers)),
            headers=headers,
            filtered=filtered,
            started=started,
            ended=time.time(),
            launched_tokens=tokens,
            errors=errors,
            scored=scored,
        )

    async def evaluate(self, step: int) -> dict[str, dict[GroupKey, list[SampleHeader]]]:
        """Write and score every held-out prompt; returns headers by split, greedy and, where asked for, sampled.

        Raises as :meth:`train`.
        """
        samples = self.config.evaluation.samples
        splits: list[tuple[str, str, int, SamplingParams]] = []
        for name in self.data.evaluation:
            splits.append((name, name, 1, self.data.greedy_sampling(self.config)))
            if samples:
                splits.append((name + SAMPLED_SUFFIX, name, samples, self.data.training_sampling(self.config)))
        waiting: dict[GroupKey, int] = {}
        sizes: dict[GroupKey, int] = {}
        assignments: list[Assignment] = []
        for split, name, size, sampling in splits:
            for prompt in self.data.evaluation[name]:
                key = GroupKey(split, step, prompt.index)
                waiting[key] = sizes[key] = size
                assignments.append(
                    Assignment(
                        key=key,
                        prompt=prompt,
                        samples=tuple(range(size)),
                        group_size=size,
                        sampling=sampling,
                        run_seed=self.config.run.seed,
                    )
                )
        self.progress = Progress(launched=sum(sizes.values()))
        self._ordinal = 0
        self._dispatch(assignments)
        while waiting:
            event = await self._next_event()
            self.progress.add(event)
            waiting[event.key] -= 1
            if not waiting[event.key]:
                del waiting[event.key]
        self.progress.check(f"evaluation after step {step}")
        found: dict[str, dict[GroupKey, list[SampleHeader]]] = {split: {} for split, *_ in splits}
        for key, size in sizes.items():
            found[key.split][key] = self.flow.headers(key, size)
        return found

    def _launch(self, state: RoundState, launch: Launch) -> None:
        size = self.config.rollout.samples_per_prompt
        sampling = self.data.training_sampling(self.config)
        assignments: list[Assignment] = []
        for _ in range(launch.fresh):
            drawn = self.source.next()
            if drawn is None:
                break
            key, prompt = drawn
            self.ledger.open(key)
            state.groups[key] = GroupProgress(size=size)
            assignments.append(
                Assignment(
                    key=key,
                    prompt=prompt,
                    samples=tuple(range(size)),
                    group_size=size,
                    sampling=sampling,
                    run_seed=self.config.run.seed,
                    round_class=launch.round_class,
                )
            )
        state.available = self.source.remaining
        self.progress.launched += size * len(assignments)
        for worker, key in self._dispatch(assignments):
            self.ledger.lease(key, f"rollout-{worker}", 0)

    def _dispatch(self, assignments: Sequence[Assignment]) -> list[tuple[int, GroupKey]]:
        """Deal groups out to the workers in turn, one call a worker, so that the mapping depends on the keys alone."""
        workers = self.config.rollout.workers
        dealt: list[list[Assignment]] = [[] for _ in range(workers)]
        for assignment in assignments:
            dealt[self._ordinal % workers].append(assignment)
            self._ordinal += 1
        for worker, mine in enumerate(dealt):
            if mine:
                self.flow.dispatch(worker, mine)
        return [(worker, a.key) for worker, mine in enumerate(dealt) for a in mine]

    def _judge(self, state: RoundState, key: GroupKey, headers: dict[GroupKey, Sequence[SampleHeader]]) -> str:
        """Settle a group whose samples are all in; returns the reason when it is not trained."""
        group = state.groups[key]
        known = self.flow.headers(key, group.size)
        if len(known) < group.size:
            group.verdict = "filter"
            return self._end(key, "worker_crashed")
        group.verdict = self.policy.on_finish(state, key, [header.reward for header in known])
        if group.verdict == "filter":
            scored = sum(header.reward is not None for header in known)
            return self._end(key, "zero_variance" if scored > 1 else "unscored")
        self.ledger.ready(key)
        headers[key] = known
        return ""

    def _end(self, key: GroupKey, reason: str) -> str:
        self.ledger.end(key, reason)
        self.flow.forget([key])
        return reason

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


async def unless_stopped(awaitable: Awaitable[T], stop: asyncio.Event) -> T:
    """Await something, or raise :class:`Interrupted` as soon as ``stop`` is set."""
    wanted = asyncio.ensure_future(awaitable)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({wanted, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise Interrupted
        return wanted.result()
    finally:
        stopped.cancel()
        if not wanted.done():
            wanted.cancel()
