"""The conductor: one named async actor that owns every payload of a run and answers whoever asks about it.

It decides nothing about schedules (policies do), computes nothing (roles do) and fetches no payload.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ray

from pipelines.config import Config
from pipelines.faults import brief, user_error
from pipelines.interruption import Interrupted
from pipelines.run_data import RunData
from pipelines.session import Session
from pipelines.status import RunStatus, StatusBoard
from storage.checkpoints import Checkpoint, CheckpointStore
from storage.run_directory import RunDirectory

log = logging.getLogger(__name__)

CONCURRENCY_GROUPS = {"work": 1, "control": 16}

_STATUS_EVERY_S = 2.0


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


class Conductor:
    """Wrap with ``ray.remote(concurrency_groups=CONCURRENCY_GROUPS)``."""

    def __init__(self, config: Config, directory: str, namespace: str, dashboard_url: str = "") -> None:
        """Remember what to run; :meth:`run` starts everything."""
        self._config = config
        self._directory = RunDirectory.open(Path(directory))
        self._namespace = namespace
        self._dashboard_url = dashboard_url
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Session | None = None
        self._board = StatusBoard(self._directory.path.name, directory, steps=0, dashboard_url=dashboard_url)
        self._started = time.time()
        _log_to(self._directory.events)

    def __repr__(self) -> str:
        """Name shown on the Ray dashboard."""
        return f"Conductor({self._directory.path.name})"

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def status(self) -> RunStatus:
        """Return what the run is doing."""
        return self._board.snapshot()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def stop(self) -> None:
        """Ask the run to save the last finished step and end; returns at once."""
        if self._loop is None:
            self._stop.set()
        else:  # each concurrency group has an event loop of its own, and an event belongs to one
            self._loop.call_soon_threadsafe(self._stop.set)

    @ray.method(concurrency_group="work")  # type: ignore[untyped-decorator]
    async def run(self, data: RunData, resume: Checkpoint | None, *, train: bool = True) -> Outcome:
        """Train (or only evaluate, with ``train=False``) to the end and say how it went; never raises."""
        self._loop = asyncio.get_running_loop()
        try:
            state = await self._run(data, resume, train)
            return self._outcome(state)
        except Exception as error:  # supervision: whatever broke, the driver must get a report and not a hang
            fault = user_error(error)
            if fault is None:
                log.exception("the run failed")
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
        return Outcome(
            state=state,
            fault=fault,
            message=message,
            evaluations=self._session.evaluations if self._session else {},
            checkpoint=str(latest.path) if latest else "",
            seconds=time.time() - self._started,
        )

    async def _run(self, data: RunData, resume: Checkpoint | None, train: bool) -> Literal["finished", "stopped"]:
        session = Session(
            self._config,
            self._directory,
            data,
            resume,
            namespace=self._namespace,
            dashboard_url=self._dashboard_url,
            stop=self._stop,
            train=train,
        )
        self._session, self._board = session, session.board
        ticker = asyncio.create_task(self._tick(session))
        try:
            await session.start()
            return await (session.train() if train else session.evaluate_only())
        except Interrupted:  # before there was anything to save
            return "stopped"
        finally:
            ticker.cancel()
            await session.close()

    async def _tick(self, session: Session) -> None:
        """Keep status file and gauges fresh while the main loop waits."""
        while True:
            session.observe()
            self._save_status()
            await asyncio.sleep(_STATUS_EVERY_S)

    def _save_status(self) -> None:
        try:
            self._board.snapshot().save(self._directory.status)
        except OSError as error:
            log.warning("cannot write %s: %s", self._directory.status, error)


def _log_to(path: Path) -> None:
    """Send this process's log to the run directory, where it survives Ray's session folder."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
