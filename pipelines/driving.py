"""A driver's part of a run: creates the conductor, shows what it does, passes signals on, and replaces it when it dies.

Everything that has to outlive a conductor is in the run directory, so its successor begins where `--resume` would. The
conductor of a detached run has no driver: Ray starts it again, and it takes over by itself.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from pipelines import conductor as conductor_module
from pipelines.active_runs import CONDUCTOR, namespace_of, refuse_second, wait_for_orphans
from pipelines.conductor import Conductor
from pipelines.config import Config
from pipelines.faults import RunLost, cause_of_death, survivable, user_error
from pipelines.monitoring import newest_step
from pipelines.placement import coordination_need
from pipelines.progress import LiveView
from pipelines.restarts import Restarts, restart_point
from pipelines.run_data import RunData
from pipelines.session import MODEL_COMPONENT
from pipelines.status import RunStatus
from pipelines.supervisor import Outcome
from storage.checkpoints import Checkpoint, CheckpointStore
from storage.errors import UserError
from storage.run_directory import RunDirectory

_POLL_S = 0.5
_STATUS_DEADLINE_S = 10.0


class Drive:
    """One run with a driver that stays."""

    def __init__(self, config: Config, directory: RunDirectory, console: Console, dashboard: str) -> None:
        """Drive the run of ``directory``; people look at ``console``."""
        self._config = config
        self._directory = directory
        self._console = console
        self._dashboard = dashboard
        self._actor: Any = None
        self._latest = RunStatus(name=directory.path.name, directory=directory.address, started=time.time())

    def to_the_end(self, data: RunData, checkpoint: Checkpoint | None, *, train: bool) -> Outcome:
        """Run from ``checkpoint``, or from the start, and return how it ended; a training survives its conductor."""
        began = time.time()
        signals = Signals(self._request_stop)
        try:
            with signals, LiveView(self._status, console=self._console) as view:
                while True:
                    try:
                        return self._with_one_conductor(data, checkpoint, view, train=train)
                    except ray.exceptions.RayError as error:
                        if not train or signals.asked or not survivable(error):
                            raise
                        checkpoint = self._go_back(error)
                    if checkpoint is not None:
                        data = replace(
                            data, model_path=self._directory.reach(checkpoint.component(MODEL_COMPONENT).absolute())
                        )
        except (ray.exceptions.RayError, RunLost, UserError) as error:
            return self._failure(error, time.time() - began)

    def _with_one_conductor(
        self, data: RunData, checkpoint: Checkpoint | None, view: LiveView, *, train: bool
    ) -> Outcome:
        actor = self._actor = start_conductor(self._config, self._directory, self._dashboard)
        try:
            pending = actor.run.remote(data, checkpoint, train=train)
            done: list[Any] = []
            while not done:
                done, _ = ray.wait([pending], timeout=_POLL_S)
                view.update()
            outcome: Outcome = ray.get(pending)
            return outcome
        finally:
            ray.kill(actor)  # and with it all it owns: a Ray that was there before must not go on with an abandoned run

    def _go_back(self, error: Exception) -> Checkpoint | None:
        """Return the checkpoint that a new conductor goes on from; raises ``RunLost`` after too many deaths."""
        wait_for_orphans(self._directory.path.name)
        refuse_second(self._directory.path.name)
        self._directory.refill()
        restarts = Restarts.of(self._directory, self._config.run.restarts)
        reached, _ = newest_step(self._directory.metrics)
        point = restart_point(self._directory, self._config.checkpoint.keep_last)
        step = 0 if point is None else point.step
        what = f"the conductor died{cause_of_death(error)}"
        if not restarts.allow(step, reached):
            raise RunLost(f"{what}; it is not started again: {restarts.refusal()}") from error
        self._console.print(f"{what}: going on from step {step}", markup=False, highlight=False, soft_wrap=True)
        return point

    def _failure(self, error: Exception, seconds: float) -> Outcome:
        fault = user_error(error)
        lost = isinstance(error, RunLost)
        message = str(fault) if fault else str(error) if lost else f"the conductor died{cause_of_death(error)}"
        with suppress(UserError):  # its network may be what failed
            self._directory.refill()
        latest = CheckpointStore(self._directory.checkpoints, self._config.checkpoint.keep_last).latest()
        with suppress(OSError):  # a full disk, perhaps: the message reaches the terminal all the same
            ended = replace(self._latest, state="failed", message=message, updated=time.time())
            ended.save(self._directory.status)
        with suppress(UserError):
            self._directory.send()
        return Outcome(
            state="failed",
            fault="user" if fault else "internal",
            message=message,
            evaluations={},
            checkpoint=self._directory.where(latest.path) if latest else "",
            seconds=seconds,
        )

    def _status(self) -> RunStatus:
        try:
            self._latest = ray.get(self._actor.status.remote(), timeout=_STATUS_DEADLINE_S)
        except (ray.exceptions.RayError, TimeoutError):
            self._latest = replace(self._latest, updated=time.time())
        return self._latest

    def _request_stop(self) -> None:
        if self._actor is not None:
            self._actor.stop.remote()


def start_conductor(config: Config, directory: RunDirectory, dashboard: str, *, detached: bool = False) -> Any:
    """Create the conductor of a run; raises ``UserError`` when the cluster has one of that name.

    A detached one is started again by Ray for as often as it dies; it says itself when that is enough.
    """
    namespace = namespace_of(directory.path.name)
    remote = ray.remote(concurrency_groups=conductor_module.CONCURRENCY_GROUPS)(Conductor)
    options: dict[str, Any] = {"max_restarts": 0}
    if detached:
        config = _with_absolute_paths(config)
        options = {"lifetime": "detached", "max_restarts": -1, "max_task_retries": 0}
    options |= coordination_need(config).options()
    try:
        return remote.options(name=CONDUCTOR, namespace=namespace, **options).remote(
            config, str(directory.path.absolute()), namespace, dashboard, directory.ticket
        )
    except ValueError:
        refuse_second(directory.path.name)  # somebody was quicker
        raise


def _with_absolute_paths(config: Config) -> Config:
    """Return a configuration that a conductor can read prompts and model by, wherever Ray starts it again."""

    def absolute(source: str) -> str:
        return str(Path(source).absolute()) if Path(source).exists() else source

    data = config.data.model_copy(update={"train": absolute(config.data.train)})
    sets = {name: absolute(source) for name, source in config.evaluation.sets.items()}
    evaluation = config.evaluation.model_copy(update={"sets": sets})
    model = config.model.model_copy(update={"path": absolute(config.model.path)})
    return config.model_copy(update={"data": data, "evaluation": evaluation, "model": model})


class Signals:
    """First Ctrl-C or SIGTERM: save and end. Second: end now, with the state of the last checkpoint.

    Attributes:
        asked: True after the first one.
    """

    def __init__(self, request_stop: Callable[[], Any]) -> None:
        """Call ``request_stop`` at the first signal."""
        self.asked = False
        self._request_stop = request_stop
        self._previous: Mapping[int, Any] = {}

    def __enter__(self) -> Signals:
        self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        name = signal.Signals(number).name
        sys.stderr.write(f"\n{name}: saving and stopping; once more to stop without saving\n")
        self._request_stop()
