"""Starts a run from a driver: checks, Ray, conductor, live view, and what a signal does.

The driver only watches. It may be a terminal, a submitted job or a notebook; the run's state lies with the conductor
and in the run directory.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from pipelines import conductor as conductor_module
from pipelines.active_runs import CONDUCTOR, check_detachable, namespace_of, refuse_second
from pipelines.cluster import check_placement, local_or_joined_ray
from pipelines.conductor import Conductor, Outcome
from pipelines.config import Config
from pipelines.config_loader import write_config
from pipelines.faults import brief, user_error
from pipelines.placement import coordination_need
from pipelines.plots import draw_curves
from pipelines.preflight import check_memory, check_run
from pipelines.progress import LiveView, print_summary
from pipelines.run_data import RunData, load_run_data, write_generated
from pipelines.session import MODEL_COMPONENT
from pipelines.status import RunStatus
from storage.checkpoints import Checkpoint, CheckpointError, CheckpointStore
from storage.errors import UserError
from storage.models import resolve_model
from storage.run_directory import RunDirectory, find_run

_POLL_S = 0.5
_STATUS_DEADLINE_S = 10.0


def train(
    config: Config,
    *,
    name: str,
    resume: Path | None = None,
    detach: bool = False,
    console: Console | None = None,
) -> int:
    """Train to the end, to a signal, or to a failure; returns the exit status.

    Args:
        config: The resolved configuration.
        name: Name of a new run, where ``config.run.name`` is empty.
        resume: Run directory to go on with.
        detach: Return as soon as the run has begun, and leave it to the cluster: it needs this process no more.
        console: Where people look; standard output by default.

    Returns:
        0 when the run finished, or stopped on request with everything saved, or goes on detached; 2 when the user can
        mend what failed; 1 otherwise.

    Raises:
        UserError: Bad input, before anything starts.
    """
    console = console or Console()
    if detach:
        check_detachable(config)
    if resume is not None:
        return _resume(config, RunDirectory.open(resume, Path(config.run.directory)), console, detach=detach)
    check_run(config)
    model_path = resolve_model(config.model, progress=console.print)
    data = load_run_data(config, model_path)
    check_memory(config, model_path, data.max_length)
    directory = RunDirectory.create(Path(config.run.directory), config.run.name or _fresh_name(name))
    with ExitStack() as held:
        held.enter_context(directory.lock())
        return _run(config, data, directory, None, console, held, train=True, detach=detach)


def evaluate(target: str, config: Config, *, console: Console | None = None) -> int:
    """Evaluate a run's newest checkpoint, a checkpoint, a Hugging Face directory or a model name.

    Returns:
        The exit status; the figures are printed and written to ``metrics.jsonl`` of a run directory of its own.
    """
    console = console or Console()
    model_path = find_model(target, config, console)
    check_run(_with_model(config, model_path))
    data = load_run_data(config, model_path, train=False)
    check_memory(config, model_path, data.max_length)
    directory = RunDirectory.create(Path(config.run.directory), config.run.name or _fresh_name("eval"))
    with ExitStack() as held:
        held.enter_context(directory.lock())
        return _run(config, data, directory, None, console, held, train=False)


def newest_intact(directory: RunDirectory, config: Config, console: Console) -> Checkpoint:
    """Return the newest checkpoint whose files are as they were written; later, damaged ones are removed and named.

    Raises:
        UserError: There is none.
    """
    store = CheckpointStore(directory.checkpoints, config.checkpoint.keep_last)
    for checkpoint in reversed(store.checkpoints()):
        try:
            checkpoint.verify()
        except CheckpointError as error:
            console.print(f"skipping {error}", highlight=False)
            continue
        store.truncate_after(checkpoint.step)
        return checkpoint
    raise UserError(f"{directory.path} has no complete checkpoint to resume from: start a new run, under another name")


def find_model(target: str, config: Config, console: Console) -> Path:
    """Return the Hugging Face directory that ``target`` means."""
    path = Path(target)
    run = find_run(target, Path(config.run.directory))
    if run is not None:
        newest = CheckpointStore(RunDirectory(run).checkpoints, config.checkpoint.keep_last).latest()
        if newest is None:
            raise UserError(f"{run} is a run without a complete checkpoint: there is no model to evaluate yet")
        return newest.component(MODEL_COMPONENT)
    if (path / MODEL_COMPONENT / "config.json").is_file():
        return path / MODEL_COMPONENT
    named: Path = resolve_model(config.model.model_copy(update={"path": target}), progress=console.print)
    return named


def _resume(config: Config, directory: RunDirectory, console: Console, *, detach: bool) -> int:
    # The lock comes first: another process that trains here would remove the checkpoint that is read.
    with ExitStack() as held:
        held.enter_context(directory.lock())
        checkpoint = newest_intact(directory, config, console)
        model_path = checkpoint.component(MODEL_COMPONENT)
        check_run(_with_model(config, model_path))
        data = load_run_data(config, model_path)
        check_memory(config, model_path, data.max_length)
        return _run(config, data, directory, checkpoint, console, held, train=True, detach=detach)


def _run(
    config: Config,
    data: RunData,
    directory: RunDirectory,
    checkpoint: Checkpoint | None,
    console: Console,
    held: ExitStack,
    *,
    train: bool,
    detach: bool = False,
) -> int:
    """Run to the end, or until the run can do without this process; ``held`` is the lock of the run directory."""
    with local_or_joined_ray(config, console) as dashboard:
        check_placement(config, console)
        refuse_second(directory.path.name)
        write_config(config, directory.config)  # only now: a run that could not start leaves its name free
        if checkpoint is None:
            write_generated(config, directory.path / "data")
        if detach:
            return _leave_to_the_cluster(config, data, directory, checkpoint, console, dashboard, held)
        outcome = _drive(config, data, directory, checkpoint, console, dashboard, train=train)
    return _report(outcome, directory, console)


def _with_model(config: Config, model_path: Path) -> Config:
    """Return the configuration with the model that is loaded: the base model may have gone since the run began."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(model_path)})})


def _drive(
    config: Config,
    data: RunData,
    directory: RunDirectory,
    checkpoint: Checkpoint | None,
    console: Console,
    dashboard: str,
    *,
    train: bool,
) -> Outcome:
    """Start the conductor, show what it does, pass signals on, and return how it ended."""
    actor = _conductor(config, directory, dashboard)
    pending = actor.run.remote(data, checkpoint, train=train)
    signals = _Signals(lambda: actor.stop.remote())
    latest = RunStatus(name=directory.path.name, directory=str(directory.path), started=time.time())

    def status() -> RunStatus:
        nonlocal latest
        try:
            latest = ray.get(actor.status.remote(), timeout=_STATUS_DEADLINE_S)
        except (ray.exceptions.RayError, TimeoutError):
            latest = replace(latest, updated=time.time())
        return latest

    try:
        with signals, LiveView(status, console=console) as view:
            while True:
                done, _ = ray.wait([pending], timeout=_POLL_S)
                view.update()
                if done:
                    break
        outcome: Outcome = ray.get(pending)
    except ray.exceptions.RayError as error:
        fault = user_error(error)
        outcome = Outcome(
            state="failed",
            fault="user" if fault else "internal",
            message=str(fault) if fault else f"the conductor died: {brief(error)}",
            evaluations={},
            checkpoint=_newest(directory, config),
            seconds=time.time() - latest.started,
        )
        with suppress(OSError):  # a full disk, perhaps: the message reaches the terminal all the same
            replace(latest, state="failed", message=outcome.message, updated=time.time()).save(directory.status)
    finally:
        ray.kill(actor)  # and with it all it owns: a Ray that was there before must not go on with an abandoned run
    return outcome


def _leave_to_the_cluster(
    config: Config,
    data: RunData,
    directory: RunDirectory,
    checkpoint: Checkpoint | None,
    console: Console,
    dashboard: str,
    held: ExitStack,
) -> int:
    """Start a conductor that outlives this process, and say how to reach it."""
    actor = _conductor(config, directory, dashboard, lifetime="detached")
    try:
        held.close()  # the conductor takes over the lock of the run directory, wherever it runs
        ray.get(actor.begin.remote(data, checkpoint), timeout=config.cluster.start_deadline_s)
    except (ray.exceptions.RayError, TimeoutError) as error:
        ray.kill(actor)
        fault = user_error(error)
        raise fault or UserError(
            f"the conductor has not begun within cluster.start_deadline_s={config.cluster.start_deadline_s:g} s "
            f"({brief(error)}): see that the cluster has room for it, and try again"
        ) from None
    name = directory.path.name
    for what, command in (
        ("goes on by itself", str(directory.path)),
        ("watch it", f"slipstream attach {name}"),
        ("stop it", f"slipstream attach {name} --stop"),
        ("steer it", f'python: import pipelines; run = pipelines.attach("{name}")'),
    ):
        console.print(f"{what + ':':<19}{command}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _conductor(config: Config, directory: RunDirectory, dashboard: str, **options: Any) -> Any:
    """Create the conductor of a run; raises ``UserError`` when the cluster has one of that name."""
    namespace = namespace_of(directory.path.name)
    remote = ray.remote(concurrency_groups=conductor_module.CONCURRENCY_GROUPS)(Conductor)
    options |= coordination_need(config).options()
    try:
        return remote.options(name=CONDUCTOR, namespace=namespace, max_restarts=0, **options).remote(
            config, str(directory.path.absolute()), namespace, dashboard
        )
    except ValueError:
        refuse_second(directory.path.name)  # somebody was quicker
        raise


def _report(outcome: Outcome, directory: RunDirectory, console: Console) -> int:
    if outcome.state == "failed":
        hint = f"; resume with: slipstream train --resume {directory.path}" if outcome.checkpoint else ""
        sys.stderr.write(f"error: {outcome.message.removesuffix('.')}{hint}\n")
        if outcome.fault == "internal":
            sys.stderr.write(f"details: {directory.events}\n")
        return 2 if outcome.fault == "user" else 1
    if directory.metrics.exists() and outcome.state == "finished":
        with suppress(UserError):  # a run of no steps has nothing to draw, or the disk is full by now
            draw_curves(directory.metrics, directory.path / "curves.png")
    print_summary(outcome, directory.path, console)
    return 0


def _newest(directory: RunDirectory, config: Config) -> str:
    latest = CheckpointStore(directory.checkpoints, config.checkpoint.keep_last).latest()
    return str(latest.path) if latest else ""


def _fresh_name(stem: str) -> str:
    return f"{stem.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"


class _Signals:
    """First Ctrl-C or SIGTERM: save and end. Second: end now, with the state of the last checkpoint."""

    def __init__(self, request_stop: Callable[[], Any]) -> None:
        self._request_stop = request_stop
        self._asked = False
        self._previous: Mapping[int, Any] = {}

    def __enter__(self) -> _Signals:
        self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: Any) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        name = signal.Signals(number).name
        sys.stderr.write(f"\n{name}: saving and stopping; once more to stop without saving\n")
        self._request_stop()
