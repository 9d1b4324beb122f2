"""What drivers may ask of a run that is going on: to pause, to change a knob, to save, to evaluate, to answer a prompt.

Everything but an answer is done between two steps, where learner, ledger and weights agree; so a request never meets a
half-done step, and what two drivers ask for at once is done one after the other, in the order in which it came.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import ray

from actors.bundles import Question
from pipelines.config import Config
from pipelines.faults import brief, user_error
from pipelines.knobs import Change, Knob, Knobs, Value
from pipelines.roles import Roles
from storage.errors import UserError
from storage.records import GroupKey, request_id

log = logging.getLogger(__name__)

QUESTION_SPLIT = "@question"
"""Split of the keys of answers to people; no held-out set can have a name with an @."""
MOST_ANSWERS = 64
KEPT_RECORDS = 1000
_ATTEMPTS = 3

What = Literal["checkpoint", "evaluation"]


class Steered(Protocol):
    """What controls move: a session between two steps."""

    step: int

    async def adopt(self, changed: frozenset[str]) -> None:
        """Go on under the configuration that the controls hold now, of which some fields have ``changed``."""

    async def save_now(self) -> str:
        """Write a checkpoint and return its folder."""

    async def evaluate_now(self) -> Mapping[str, float]:
        """Evaluate the current policy and return the metrics."""

    async def rest(self, news: asyncio.Event) -> None:
        """Wait for news; raises ``Interrupted`` when the run is to stop."""


class RecentMetrics:
    """A tracker that keeps the newest records for drivers: their nodes may not share a disk with the run."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin with what a resumed run has logged before."""
        self._records: deque[dict[str, Any]] = deque((dict(record) for record in records), maxlen=KEPT_RECORDS)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep one record under the names of ``metrics.jsonl``; a number that is not finite is None there, too."""
        plain = {name: value if isinstance(value, str) else _finite(float(value)) for name, value in metrics.items()}
        self._records.append({"step": step, "time": time.time(), **plain})

    def close(self) -> None:
        """Nothing is open."""

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the newest ``count`` records, oldest first."""
        return list(self._records)[-count:]


class Controls:
    """Requests of all drivers; one per session. Every method belongs to the session's event loop.

    Attributes:
        paused: True when the run is to rest at the next boundary.
    """

    def __init__(self, config: Config, *, train: bool, saved: Mapping[str, Any] | None = None) -> None:
        """Start with the configuration of the run, and with the knobs that a checkpoint ``saved``."""
        self.paused = False
        self._train = train
        self._requests: list[tuple[What, asyncio.Future[Any]]] = []
        self._news = asyncio.Event()
        self._running_step = 0
        self._finished_steps = 0
        self._ended = ""
        self._asked = 0
        self._knobs = Knobs(config, saved or {})

    def follow(self, before: Controls) -> None:
        """Go on from the controls of a session that died: a run that rests goes on resting."""
        self.paused = before.paused
        self._asked = before._asked  # a question of before may still wait in a worker, and has its number

    @property
    def config(self) -> Config:
        """The configuration that holds now."""
        return self._knobs.config

    @property
    def wiring(self) -> Config:
        """The same, but with the source of drafts that workers are built for, whether drafts are on or off."""
        return self._knobs.wiring

    @property
    def drafting(self) -> bool:
        """False while drafts are switched off."""
        return self.config.speculation.source != "off"

    def pause(self) -> None:
        """Have the run rest at the next boundary."""
        self._check_open()
        if not self.paused:
            log.info("a driver asks for a pause")
        self.paused = True

    def resume(self) -> None:
        """Have the run go on."""
        self._check_open()
        if self.paused:
            log.info("a driver lets the run go on")
        self.paused = False
        self._news.set()

    def knobs(self) -> tuple[Knob, ...]:
        """Return what may be changed, with the present values."""
        return self._knobs.all()

    def set(self, name: str, value: Value) -> Change:
        """Change a knob from the next step on.

        Raises:
            UserError: It is no knob, the value is not one that it takes here, or the run has ended.
        """
        self._check_open()
        before, after = self._knobs.set(name, value)
        step = (self._running_step or self._finished_steps) + 1
        if after != before:
            log.info("a driver sets %s from %s to %s, from step %d on", name, before, after, step)
            self._news.set()
        return Change(name=name, before=before, after=after, step=step)

    async def request(self, what: What) -> Any:
        """Have something done at the next boundary and return what came of it."""
        self._check_open()
        if what == "evaluation" and not self.config.evaluation.sets:
            raise UserError("there is nothing to evaluate on: the run was started without evaluation.sets")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests.append((what, future))
        log.info("a driver asks for a %s", what)
        self._news.set()
        return await future

    async def serve(self, run: Steered) -> float:
        """Do what was asked for, and rest while the run is paused; returns the seconds of rest."""
        rested = 0.0
        self._finished_steps, self._running_step = run.step, 0
        while True:
            self._news.clear()
            await self._apply(run)
            while self._requests:
                await self._do(run, *self._requests[0])
            if self._knobs.pending:
                continue
            if not self.paused:
                break
            began = time.perf_counter()
            await run.rest(self._news)
            rested += time.perf_counter() - began
        self._running_step = run.step + 1
        return rested

    def saved(self) -> dict[str, dict[str, Value]]:
        """Knobs that differ from the configuration, accepted ones included, for a checkpoint."""
        return self._knobs.saved()

    def end(self, how: str, checkpoint: str) -> None:
        """Answer whoever still waits: a checkpoint was written at the end, the rest was not done."""
        self._ended = how
        for what, future in self._requests:
            if future.done():
                continue
            if what == "checkpoint" and checkpoint and how != "failed":
                future.set_result(checkpoint)
            else:
                future.set_exception(UserError(f"the run {how} before the {what} was made"))
        self._requests.clear()

    async def answer(
        self,
        roles: Roles,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        n: int,
        temperature: float | None,
        max_tokens: int | None,
        deadline_s: float,
    ) -> list[str]:
        """Have a rollout worker answer a prompt with the weights that it is on.

        Raises:
            UserError: An argument is out of range, the prompt cannot be rendered, or no worker lives long enough.
        """
        self._check_open(steering=False)
        config, data = self.config, roles.data
        if not 1 <= n <= MOST_ANSWERS:
            raise UserError(f"n={n}: ask for 1 to {MOST_ANSWERS} answers at a time")
        if temperature is not None and not 0 <= temperature <= 10:
            raise UserError(f"temperature={temperature}: give a number from 0 (greedy) to 10")
        if max_tokens is not None and not 1 <= max_tokens <= config.rollout.max_tokens:
            raise UserError(
                f"max_tokens={max_tokens}: give 1 to {config.rollout.max_tokens} (rollout.max_tokens, which the "
                "engines of this run are laid out for)"
            )
        if not roles.rollout:
            raise UserError("the run is still starting, nobody can answer yet: try again in a few seconds")
        sampling = data.training_sampling(config)
        self._asked += 1
        number = self._asked
        key = GroupKey(QUESTION_SPLIT, number, 0)
        question = Question(
            prompt=prompt,
            requests=tuple(request_id(config.run.seed, key, index) for index in range(n)),
            sampling=replace(
                sampling,
                temperature=sampling.temperature if temperature is None else temperature,
                max_tokens=max_tokens or sampling.max_tokens,
            ),
            chat_template=config.model.chat_template,
            system_prompt=config.data.system_prompt,
            deadline_s=deadline_s,
        )
        for attempt in range(_ATTEMPTS):
            role = roles.rollout[(number + attempt) % len(roles.rollout)]
            try:
                texts: list[str] = await role.actor.answer.options(name=f"answer[{role.name}]").remote(question)
                return texts
            except ray.exceptions.RayError as error:
                fault = user_error(error)
                if fault is not None:
                    raise fault from None
                last = brief(error)
            await asyncio.sleep(1.0)  # its successor is on the way
        raise UserError(f"no rollout worker lived long enough to answer ({last}): see `slipstream status`")

    def _check_open(self, *, steering: bool = True) -> None:
        if self._ended:
            raise UserError(f"the run has {self._ended}: there is nothing left to steer")
        if steering and not self._train:
            raise UserError("this run only evaluates: it has no steps to pause, to change or to save")

    async def _apply(self, run: Steered) -> None:
        if self._knobs.pending:
            await run.adopt(self._knobs.apply())

    async def _do(self, run: Steered, what: What, future: asyncio.Future[Any]) -> None:
        """Carry out the oldest request; what breaks breaks the run, and whoever asked hears of it."""
        try:
            result = await (run.save_now() if what == "checkpoint" else run.evaluate_now())
        except Exception as error:
            self._requests.pop(0)
            if not future.done():
                future.set_exception(UserError(f"the {what} was not made: {error or 'the run stops'}"))
            raise
        self._requests.pop(0)
        if not future.done():  # who asked may have gone
            future.set_result(result)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
