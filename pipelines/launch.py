"""Starts a run from a driver: checks, Ray, conductor, live view, and what a signal does.

The driver only watches. It may be a terminal, a submitted job or a notebook; the run's state lies with the conductor
and in the run directory.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import ray
from rich.console import Console

from pipelines.active_runs import check_detachable, refuse_second
from pipelines.cluster import check_placement, local_or_joined_ray
from pipelines.config import Config
from pipelines.config_loader import write_config
from pipelines.driving import Drive, start_conductor
from pipelines.faults import brief, user_error
from pipelines.plots import draw_curves
from pipelines.preflight import check_memory, check_run
from pipelines.progress import print_summary
from pipelines.remote_views import readable_copy
from pipelines.restarts import Restarts, newest_intact
from pipelines.run_data import RunData, load_run_data, write_generated
from pipelines.run_places import at_home, claim, hand_out, refuse_taken, take_up
from pipelines.session import MODEL_COMPONENT
from pipelines.supervisor import Outcome
from storage.checkpoints import Checkpoint, CheckpointStore
from storage.errors import UserError
from storage.models import resolve_model
from storage.run_directory import RunDirectory, find_run


def train(
    config: Config,
    *,
    name: str,
    resume: Path | str | None = None,
    detach: bool = False,
    console: Console | None = None,
) -> int:
    """Train to the end, to a signal, or to a failure; returns the exit status.

    Args:
        config: The resolved configuration.
        name: Name of a new run, where ``config.run.name`` is empty.
        resume: Run directory to go on with: its folder, name or URI.
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
        return _resume(config, resume, console, detach=detach)
    check_run(config)
    refuse_taken(config)
    model_path = resolve_model(config.model, progress=console.print)
    data = load_run_data(config, model_path)
    check_memory(config, model_path, data.max_length)
    with ExitStack() as held:
        directory = claim(config, config.run.name or _fresh_name(name), held)
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
    with ExitStack() as held:
        directory = claim(config, config.run.name or _fresh_name("eval"), held)
        return _run(config, data, directory, None, console, held, train=False)


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


def _resume(config: Config, run: Path | str, console: Console, *, detach: bool) -> int:
    # The lock comes first: another process that trains here would remove the checkpoint that is read.
    with ExitStack() as held:
        directory = take_up(run, config, lambda text: console.print(text, highlight=False), held)
        config = at_home(config, directory)
        store = CheckpointStore(directory.checkpoints, config.checkpoint.keep_last)
        checkpoint = newest_intact(store, lambda text: console.print(text, highlight=False))
        if checkpoint is None:
            raise UserError(
                f"{directory.address} has no complete checkpoint to resume from: start a new run, under another name"
            )
        model_path = checkpoint.component(MODEL_COMPONENT)
        check_run(_with_model(config, model_path))
        Restarts.of(directory, config.run.restarts).forgive()
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
        _write_down(config, directory, new=checkpoint is None)  # only now: see there
        data = hand_out(directory, data, resumed=checkpoint is not None)
        if detach:
            return _leave_to_the_cluster(config, data, directory, checkpoint, console, dashboard, held)
        outcome = Drive(config, directory, console, dashboard).to_the_end(data, checkpoint, train=train)
    return _report(outcome, directory, console)


def _write_down(config: Config, directory: RunDirectory, *, new: bool) -> None:
    """Write what the run is given; a run that could not start leaves its name free."""
    data = directory.path / "data"
    try:
        write_config(config, directory.config)
        if new:
            write_generated(config, data)
    except UserError:
        if new:
            directory.config.unlink(missing_ok=True)
            shutil.rmtree(data, ignore_errors=True)
        raise


def _with_model(config: Config, model_path: Path) -> Config:
    """Return the configuration with the model that is loaded: the base model may have gone since the run began."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(model_path)})})


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
    actor = start_conductor(config, directory, dashboard, detached=True)
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
        ("goes on by itself", directory.address),
        ("watch it", f"slipstream attach {name}"),
        ("stop it", f"slipstream attach {name} --stop"),
        ("steer it", f'python: import pipelines; run = pipelines.attach("{name}")'),
    ):
        console.print(f"{what + ':':<19}{command}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _report(outcome: Outcome, directory: RunDirectory, console: Console) -> int:
    if outcome.state == "failed":
        place = shlex.quote(directory.address)
        hint = f"; resume with: slipstream train --resume {place}" if outcome.checkpoint else ""
        sys.stderr.write(f"error: {outcome.message.removesuffix('.')}{hint}\n")
        if outcome.fault == "internal":
            sys.stderr.write(f"details: {directory.where(directory.events)}\n")
        return 2 if outcome.fault == "user" else 1
    folder = readable_copy(directory)
    if directory.ticket is None and directory.metrics.exists() and outcome.state == "finished":
        with suppress(UserError):  # a run of no steps has nothing to draw, or the disk is full by now
            draw_curves(directory.metrics, directory.path / "curves.png")
    print_summary(outcome, folder, console)
    return 0


def _fresh_name(stem: str) -> str:
    return f"{stem.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
