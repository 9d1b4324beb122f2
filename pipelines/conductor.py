"""The conductor: one named async actor that owns every payload of a run and answers whoever asks about it.

It decides nothing about schedules (policies do), computes nothing (roles do) and fetches no payload.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray

from pipelines.config import Config
from pipelines.controls import Controls, What
from pipelines.knobs import Change, Knob, Value
from pipelines.run_data import RunData
from pipelines.session import Session
from pipelines.status import RunStatus
from pipelines.supervisor import Outcome, Supervisor
from storage.checkpoints import Checkpoint
from storage.run_directory import RunTicket

CONCURRENCY_GROUPS = {"work": 1, "control": 16, "requests": 64}
"""``requests`` wait for a step's end or for an answer: they must not keep others from a look or a stop."""

_LINGER_S = 10.0
"""Time that the conductor of a detached run answers after its end, for those who watch."""

T = TypeVar("T")


class Conductor:
    """Wrap with ``ray.remote(concurrency_groups=CONCURRENCY_GROUPS)``."""

    _name = "?"  # Ray asks for it also where an actor cannot be made, and would lose the reason

    def __init__(
        self,
        config: Config,
        directory: str,
        namespace: str,
        dashboard_url: str = "",
        ticket: RunTicket | None = None,
    ) -> None:
        """Remember what to run; :meth:`run` starts everything.

        Args:
            config: The resolved configuration.
            directory: The run directory.
            namespace: Ray namespace of the run.
            dashboard_url: For people; may be empty.
            ticket: Of a run with a remote directory. Then ``directory`` is its folder on the driver's machine; here it
                may have to be fetched first.

        Raises:
            UserError: There is no such run, or the store or the disk failed.
        """
        self._supervisor = Supervisor(config, directory, namespace, dashboard_url, ticket)
        self._name = self._supervisor.name
        self._alone: Any = None
        context = ray.get_runtime_context()
        if context.was_current_actor_reconstructed:
            # Only the conductor of a detached run is restarted by Ray, and nobody is there to call it. Without retries
            # the call is lost where this process learns that the actor is restarting before it learns that it lives.
            again = {"name": "run[conductor]", "max_task_retries": -1}
            self._alone = context.current_actor.go_on.options(**again).remote()

    def __repr__(self) -> str:
        """Name shown on the Ray dashboard."""
        return f"Conductor({self._name})"

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def status(self) -> RunStatus:
        """Return what the run is doing."""
        return self._supervisor.snapshot()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def stop(self) -> None:
        """Ask the run to save the last finished step and end; returns at once."""
        self._supervisor.stop()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def pause(self) -> None:
        """Have the run rest as soon as the step in progress is done; again while it rests changes nothing."""
        await self._steer(lambda controls: controls.pause())

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def resume(self) -> None:
        """Have a resting run go on; a run that does not rest goes on as it is."""
        await self._steer(lambda controls: controls.resume())

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def knobs(self) -> tuple[Knob, ...]:
        """Return the fields that may change while the run goes on, with their values."""
        return await self._steer(lambda controls: controls.knobs())

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def set(self, name: str, value: Value) -> Change:
        """Change a knob from the next step on; raises ``UserError`` for a value that it does not take."""
        return await self._steer(lambda controls: controls.set(name, value))

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def metrics(self, last: int) -> list[dict[str, Any]]:
        """Return the newest records of ``metrics.jsonl``, oldest first."""
        return [] if self._supervisor.session is None else self._supervisor.session.recent.last(last)

    @ray.method(concurrency_group="requests")  # type: ignore[untyped-decorator]
    async def request(self, what: What) -> Any:
        """Write a checkpoint (returns its folder) or evaluate (returns metrics) when the step in progress is done."""

        async def asked(controls: Controls, _: Session) -> Any:
            return await controls.request(what)

        return await self._supervisor.steer(asked)

    @ray.method(concurrency_group="requests")  # type: ignore[untyped-decorator]
    async def sample(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        n: int,
        temperature: float | None,
        max_tokens: int | None,
        deadline_s: float,
    ) -> list[str]:
        """Answer a prompt with the current policy; no part of the training."""

        async def answered(controls: Controls, session: Session) -> list[str]:
            return await controls.answer(
                session.roles, prompt, n=n, temperature=temperature, max_tokens=max_tokens, deadline_s=deadline_s
            )

        return await self._supervisor.steer(answered)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def begin(self, data: RunData, resume: Checkpoint | None) -> None:
        """Train without a driver: the conductor holds the lock of the run directory, and ends itself.

        The call of :meth:`run` is the conductor's own, so that it does not die with the driver that asked for it.

        Raises:
            UserError: Another process uses the run directory.
        """
        self._supervisor.lock()
        myself = ray.get_runtime_context().current_actor
        self._alone = myself.run.options(name="run[conductor]").remote(data, resume)

    @ray.method(concurrency_group="work")  # type: ignore[untyped-decorator]
    async def run(self, data: RunData, resume: Checkpoint | None, *, train: bool = True) -> Outcome:
        """Train (or only evaluate, with ``train=False``) to the end and say how it went; never raises."""
        outcome = await self._supervisor.run(data, resume, train)
        if self._alone is not None:
            await self._leave(outcome)
        return outcome

    @ray.method(concurrency_group="work")  # type: ignore[untyped-decorator]
    async def go_on(self) -> None:
        """Take over from the conductor of a detached run that died; called by itself alone."""
        if not self._supervisor.ended():  # else it died while it lingered
            await self._leave(await self._supervisor.take_over())
        ray.kill(ray.get_runtime_context().current_actor)

    async def _leave(self, outcome: Outcome) -> None:
        """End this process, as no driver will, once watchers have seen the end."""
        await self._supervisor.close(outcome)
        await asyncio.sleep(_LINGER_S)
        ray.kill(ray.get_runtime_context().current_actor)

    async def _steer(self, act: Callable[[Controls], T]) -> T:
        """Do something with the controls on the session's event loop, to which they belong."""

        async def acted(controls: Controls, _: Session) -> T:
            return act(controls)

        return await self._supervisor.steer(acted)
