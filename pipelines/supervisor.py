"""Takes a run to its end, through the deaths of its parts: each sends it back to its newest checkpoint."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import ray

from pipelines.active_runs import wait_for_orphans
from pipelines.config import Config
from pipelines.controls import Controls
from pipelines.events_log import log_to
from pipelines.faults import RunLost, brief, survivable, user_error
from pipelines.interruption import Interrupted, quietly, unless_stopped
from pipelines.length_forecasts import remove_predictor
from pipelines.mirroring import Mirroring
from pipelines.monitoring import newest_step
from pipelines.plots import CURVES_FILE, draw_curves
from pipelines.progress import load_status
from pipelines.restarts import Restarts, restart_point
from pipelines.roles import Spares
from pipelines.run_data import RunData, load_run_data
from pipelines.session import MODEL_COMPONENT, Session
from pipelines.silent_nodes import outlast_silent_nodes
from pipelines.status import MAX_ALARMS, RunStatus, StatusBoard
from storage.checkpoints import Checkpoint, CheckpointStore
from storage.errors import UserError
from storage.models import resolve_model
from storage.remote.held_run import MODEL, HeldRun
from storage.remote.parcels import local_folder
from storage.run_directory import RunDirectory, RunTicket

log = logging.getLogger(__name__)

_STATUS_EVERY_S = 2.0
_LOCK_PATIENCE_S = 30.0
"""A killed process holds its lock for a moment longer than Ray calls it alive."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        state: ``finished``; ``stopped`` on request; ``failed``.
        fault: ``user`` when the user can mend it (exit status 2), ``internal`` otherwise; empty without failure.
        message: What happened, in one or two sentences.
        evaluations: Metrics of the first and of the last evaluation, by ``before`` and ``after``.
        checkpoint: Newest complete checkpoint; empty when there is none.
        seconds: Wall-clock time of this process's part of the run.
    """

    state: Literal["finished", "stopped", "failed"]
    fault: Literal["", "user", "internal"] = ""
    message: str = ""
    evaluations: Mapping[str, Mapping[str, float]]
    checkpoint: str = ""
    seconds: float


class Supervisor:
    """Keeps one run going, session after session; lives within the conductor's process.

    Attributes:
        name: Name of the run.
        session: The attempt that is going on; None before the first and between two.
    """

    def __init__(
        self, config: Config, directory: str, namespace: str, dashboard_url: str, ticket: RunTicket | None
    ) -> None:
        """Open the run directory; the arguments are the conductor's.

        Raises:
            UserError: There is no such run, or the store or the disk failed.
        """
        self.name = Path(directory).name
        self.session: Session | None = None
        self._config = config
        self._remote = None if ticket is None else HeldRun.adopt(ticket)
        self._directory = self._remote or RunDirectory.open(Path(directory))
        self._mirroring: Mirroring | None = None
        self._namespace = namespace
        self._dashboard_url = dashboard_url
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._board = StatusBoard(
            self._directory.path.name, self._directory.address, steps=0, dashboard_url=dashboard_url
        )
        self._started = time.time()
        self._lock = ExitStack()
        self._before: Controls | None = None
        self._alarms: list[str] = []
        self._spares = Spares()
        self._events = log_to(self._directory.events)

    def snapshot(self) -> RunStatus:
        """Return what the run is doing."""
        return self._board.snapshot()

    def ended(self) -> bool:
        """Whether the run had ended when its status was last written."""
        status = load_status(self._directory.path)
        return status is not None and status.terminal

    def stop(self) -> None:
        """Ask the run to save the last finished step and end; returns at once, from any thread."""
        if self._loop is None:
            self._stop.set()
        else:  # each concurrency group has an event loop of its own, and an event belongs to one
            self._loop.call_soon_threadsafe(self._stop.set)

    def lock(self) -> None:
        """Keep the run directory for this process; raises UserError where another one uses it."""
        self._lock.enter_context(self._directory.lock())

    async def run(self, data: RunData, resume: Checkpoint | None, train: bool) -> Outcome:
        """Train (or only evaluate) to the end and say how it went; never raises."""
        self._loop = asyncio.get_running_loop()
        try:
            outcome = await self._to_the_end(await self._placed(data, resume), self._here(resume), train)
        except Exception as error:  # supervision, as below
            outcome = self._failure(error)
        await self._release()
        return await self._sent(outcome)

    async def take_over(self) -> Outcome:
        """Go on with the run of a conductor that died; never raises."""
        self._loop = asyncio.get_running_loop()
        try:
            outcome = await self._taken_over()
        except Exception as error:  # supervision, as below
            outcome = self._failure(error)
        await self._release()
        return await self._sent(outcome)

    async def close(self, outcome: Outcome) -> None:
        """Let go of the run directory of a run without a driver, and draw what its driver would have drawn."""
        if outcome.state == "finished" and self._mirroring is None:
            await asyncio.to_thread(self._draw)
        log.info("the run has %s%s", outcome.state, f": {outcome.message}" if outcome.message else "")
        self._lock.close()

    async def steer(self, act: Callable[[Controls, Session], Coroutine[Any, Any, T]]) -> T:
        """Do something with the controls on the session's event loop, to which they belong.

        Raises:
            UserError: There is no session yet.
        """
        if self.session is None or self._loop is None:
            raise UserError("the run has not begun yet: try again in a few seconds")
        session = self.session
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(act(session.controls, session), self._loop))

    async def _taken_over(self) -> Outcome:
        """Find out by itself what the dead conductor was given, and go on from the newest checkpoint."""
        await self._take_lock()
        await asyncio.to_thread(wait_for_orphans, self._directory.path.name)
        resume = self._go_back(RunLost("the conductor died"))
        config = self._config
        model = self._base_model() if resume is None else resume.component(MODEL_COMPONENT)
        data = await asyncio.to_thread(load_run_data, config, model)
        return await self._to_the_end(await self._placed(data, resume), resume, train=True)

    async def _take_lock(self) -> None:
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                self.lock()
                return
            except UserError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.5)

    async def _to_the_end(self, data: RunData, resume: Checkpoint | None, train: bool) -> Outcome:
        """Run until it has ended; a death that leaves everything else standing only sends it back to a checkpoint."""
        while True:
            try:
                return self._outcome(await self._run(data, resume, train))
            except Exception as error:  # supervision: whatever broke, the driver must get a report and not a hang
                if not train or not survivable(error):
                    return self._failure(error)
                try:
                    resume = self._go_back(error)
                except Exception as refusal:
                    return self._failure(refusal)
            data = await self._placed(data, resume)

    def _here(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """The same checkpoint in the run directory of this machine."""
        if checkpoint is None or self._remote is None:
            return checkpoint
        return replace(checkpoint, path=self._directory.checkpoints / checkpoint.path.name)

    async def _placed(self, data: RunData, resume: Checkpoint | None) -> RunData:
        """Begin to mirror a run with a remote directory, and say where roles find the model that they begin with."""
        if self._remote is not None and self._mirroring is None:
            self._mirroring = await Mirroring.open(self._remote, lambda text: self._board.alarm(text))
        if resume is None:
            return replace(data, model_path=base) if (base := self._model_address()) else data
        if self._mirroring is not None:
            await self._mirroring.begin_at(resume)
        component = resume.path.absolute() / MODEL_COMPONENT
        if self._remote is not None:
            component = self._directory.checkpoints / resume.path.name / MODEL_COMPONENT
        return replace(data, model_path=self._directory.reach(component))

    def _model_address(self) -> str:
        """URI of the model that the run began with; empty where all roles find it by its path."""
        return self._directory.where(self._directory.path / MODEL) if self._remote and self._remote.spread else ""

    def _base_model(self) -> Path:
        address = self._model_address()
        return local_folder(address) if address else resolve_model(self._config.model)

    async def _sent(self, outcome: Outcome) -> Outcome:
        """Send the rest of a run with a remote directory, with the picture that its driver cannot draw."""
        if self._mirroring is None:
            return outcome
        if outcome.state == "finished":
            await asyncio.to_thread(self._draw)
        problem = await self._mirroring.close(finished=outcome.state == "finished", refresh=self._save_status)
        if not problem or problem in outcome.message:
            return outcome
        so_far = outcome.message.removesuffix(".") or f"the run has {outcome.state}"
        message = f"{so_far}, but {problem}"
        log.error("%s", message)
        self._board.enter("failed", message=message)
        self._save_status()
        return replace(outcome, state="failed", fault=outcome.fault or "user", message=message)

    async def _release(self) -> None:
        """End what the last session has left: none follows."""
        spares, self._spares = self._spares, Spares()
        for role in spares.rollout.values():
            ray.kill(role.actor)
        if spares.predictor:
            await quietly(asyncio.to_thread(remove_predictor, self.name))

    def _draw(self) -> None:
        try:
            draw_curves(self._directory.metrics, self._directory.path / CURVES_FILE)
        except UserError as error:  # a run of no steps has nothing to draw, or the disk is full by now
            log.warning("no picture of the curves: %s", error)

    def _go_back(self, death: Exception) -> Checkpoint | None:
        """Return the checkpoint to go on from after a death; None begins anew.

        Raises:
            RunLost: There were too many deaths without a new checkpoint.
            UserError: There is nothing intact to go on from, or the disk refused something.
        """
        restarts = Restarts.of(self._directory, self._config.run.restarts)
        reached, _ = newest_step(self._directory.metrics)
        point = restart_point(self._directory, self._config.checkpoint.keep_last)
        step = 0 if point is None else point.step
        if not restarts.allow(step, reached):
            raise RunLost(f"{brief(death)}; it is not started again: {restarts.refusal()}") from death
        where = "from the beginning, as there is no checkpoint yet" if point is None else f"from step {step}"
        lost = f", finished steps lost: {reached - step}" if reached > step else ""
        message = f"{brief(death)}; the run went on {where}{lost}"
        log.warning("%s (death %d since that checkpoint)", message, restarts.fruitless, exc_info=death)
        self._alarms.append(message)
        if self.session is not None:
            self.session.controls.end("restarted", "")
            self._before, self.session = self.session.controls, None
        self._board.enter("starting", message=message)
        self._save_status()
        return point

    def _failure(self, error: Exception) -> Outcome:
        fault = user_error(error)
        if fault is None:
            log.error("the run failed", exc_info=error)
            return self._outcome("failed", "internal", brief(error))
        log.error("the run failed: %s", fault)
        return self._outcome("failed", "user", str(fault))

    def _outcome(
        self,
        state: Literal["finished", "stopped", "failed"],
        fault: Literal["", "user", "internal"] = "",
        message: str = "",
    ) -> Outcome:
        self._board.enter(state, message=message)
        self._save_status()
        latest = CheckpointStore(self._directory.checkpoints, self._config.checkpoint.keep_last).latest()
        checkpoint = self._directory.where(latest.path) if latest else ""
        if self.session is not None:
            self.session.controls.end(state, checkpoint)
        return Outcome(
            state=state,
            fault=fault,
            message=message,
            evaluations=self.session.evaluations if self.session else {},
            checkpoint=checkpoint,
            seconds=time.time() - self._started,
        )

    async def _run(self, data: RunData, resume: Checkpoint | None, train: bool) -> Literal["finished", "stopped"]:
        try:
            await unless_stopped(outlast_silent_nodes(), self._stop)
        except Interrupted:
            return "stopped"
        session = Session(
            self._config,
            self._directory,
            data,
            resume,
            namespace=self._namespace,
            dashboard_url=self._dashboard_url,
            stop=self._stop,
            train=train,
            before=self._before,
            mirroring=self._mirroring,
            spares=self._spares,
        )
        self.session, self._board, self._spares = session, session.board, Spares()
        for message in self._alarms[-MAX_ALARMS:]:
            self._board.alarm(message)
        ticker = asyncio.create_task(self._tick(session))
        goes_on = False
        try:
            await session.start()
            return await (session.train() if train else session.evaluate_only())
        except Interrupted:  # before there was anything to save
            return "stopped"
        except Exception as error:
            goes_on = train and survivable(error)
            raise
        finally:
            ticker.cancel()
            self._spares = await session.close(spare=goes_on)

    async def _tick(self, session: Session) -> None:
        """Keep status file and gauges fresh while the main loop waits."""
        while True:
            session.observe()
            self._save_status()
            await asyncio.sleep(_STATUS_EVERY_S)

    def _save_status(self) -> None:
        if self._events.failure and not any(self._events.failure in alarm for alarm in self._alarms):
            self._alarms.append(f"lines of the log are missing: {self._events.failure}")
            self._board.alarm(self._alarms[-1])
        try:
            self._board.snapshot().save(self._directory.status)
        except OSError as error:
            log.warning("cannot write %s: %s", self._directory.status, error)
