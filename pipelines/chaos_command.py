"""``slipstream chaos``: kills parts of a training run at random and checks that it keeps its laws."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from storage.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from pipelines.chaos.account import Account
    from pipelines.chaos.targets import Draw
    from pipelines.config import Config

BROKEN = 1
NEVER = 1_000_000
_STOP_S = 120.0

SMALL = (
    f"run.steps={NEVER}",
    f"run.restarts={NEVER}",  # a storm may strike twice between two checkpoints, and no law says that it must not
    "data.prompts=48",
    "rollout.workers=2",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=64",
    "rollout.max_rows=16",
    "rollout.threads=1",
    "reward.workers=2",
    "learner.threads=1",
    "learner.schedule=constant",
    "evaluation.before=false",
    "evaluation.after=false",
    "evaluation.every=0",
    "checkpoint.every=2",
    "speculation.source=history",
    "schedule.dispatch=skew_aware",
    "cluster.object_store_mb=128",
    "cluster.dashboard=false",
)
"""Steps of a second or two with every role in use: drafts from history, predicted lengths, two workers of each kind."""


def chaos(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PRESET|FILE FIELD=VALUE",
            help="A preset or a YAML file first (default: baseline), then overrides; the rest is made small.",
        ),
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", min=0.0, help="How long to kill.")] = 5.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Decides who is killed, in which order.")] = 0,
    nodes: Annotated[
        int, typer.Option("--nodes", min=0, help="Emulate so many worker nodes on this machine, and kill them, too.")
    ] = 0,
    deadline: Annotated[
        float,
        typer.Option("--deadline", min=1.0, help="Longest recovery before the run counts as stalled, in seconds."),
    ] = 120.0,
    keep: Annotated[Path | None, typer.Option("--keep", metavar="FOLDER", help="Keep the run in this folder.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the figures.")] = None,
) -> None:
    """Kill parts of a small training run at random, each once the run has recovered from the last, and check its laws.

    Rollout and reward workers, the learner, the draft retriever, the conductor, queues, the length predictor and the
    driver that watches the run die by SIGKILL, now and then two at once. Afterwards every prompt must have been trained
    exactly once in each epoch, or have ended with a reason, on the weights that survive; archive, ledger and metrics
    must agree; and no recovery may have taken longer than the deadline. The exit status is 1 when a law broke.

    [bold]Examples[/bold]

    [cyan]slipstream chaos[/cyan]
    Five minutes over a run of its own, on a local Ray.

    [cyan]slipstream chaos --minutes 20 --seed 7 --json chaos.json[/cyan]
    A longer storm whose figures are kept; another seed kills in another order.

    [cyan]slipstream chaos streamrl --nodes 2[/cyan]
    Over a streaming run on two emulated nodes, which are killed as a whole, too.

    [cyan]slipstream chaos cluster.address=10.0.0.1:6379 run.directory=/shared/runs[/cyan]
    In a cluster that is there: only processes of the run that is started for it are killed.
    """
    from pipelines.terminal import report_console

    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise UserError(f"--json {json_path}: the folder does not exist")
    console = report_console()
    account = rage(settings or (), console, minutes=minutes, seed=seed, nodes=nodes, deadline_s=deadline, keep=keep)
    account.show(console)
    if json_path is not None:
        json_path.write_text(json.dumps(account.figures(), indent=2) + "\n", encoding="utf-8")
    if not account.holds:
        raise typer.Exit(BROKEN)


def rage(
    settings: Sequence[str],
    console: Console,
    *,
    minutes: float,
    seed: int,
    nodes: int = 0,
    deadline_s: float = 120.0,
    keep: Path | None = None,
    strikes: Iterator[Draw] | None = None,
) -> Account:
    """Start a run, kill parts of it for some minutes, stop it and check what it left.

    Args:
        settings: As for ``slipstream train``.
        console: Where people look.
        minutes: How long to kill.
        seed: Decides who is killed.
        nodes: Emulated nodes; 0 for none.
        deadline_s: Longest recovery. Unit: seconds.
        keep: Folder that the run is kept in; None: it is removed.
        strikes: What to kill, and when; None for everything that the run has, as ``seed`` decides.

    Raises:
        UserError: The configuration is not valid, or no run could be started with it.
    """
    from pipelines.chaos.drivers import Driver
    from pipelines.chaos.grounds import begin_run, end_run, grounds
    from pipelines.chaos.laws import check_run
    from pipelines.chaos.storm import Storm
    from pipelines.chaos.targets import draws
    from pipelines.config_loader import load, split_arguments
    from pipelines.emulated_nodes import ON_NODES
    from storage.run_directory import RunDirectory

    source, given = split_arguments(settings)
    name = f"chaos-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    with _folder(keep, given) as parent:
        fixed = [*SMALL, *(ON_NODES if nodes else ())]
        fixed += [f"run.name={name}", *([] if parent is None else [f"run.directory={parent}"])]
        taken = {text.partition("=")[0] for text in given}
        arguments = [*([source] if source else []), *(f for f in fixed if f.partition("=")[0] not in taken), *given]
        config = load(arguments).config
        directory = RunDirectory(Path(config.run.directory).absolute() / config.run.name)
        what = kinds_of(config, nodes)
        console.print(f"killing {', '.join(what)} of {directory.path.name} for {minutes:g} min", highlight=False)
        with grounds(config, nodes, console) as place:
            driver = Driver(config.run.name, place.address, directory.path.with_name(f"{config.run.name}.driver.log"))
            try:
                begin_run(place, arguments, directory.path.with_name(f"{config.run.name}.log"))
                storm = Storm(
                    run=config.run.name,
                    directory=directory.path,
                    place=place,
                    draws=draws(seed, what) if strikes is None else strikes,
                    deadline_s=deadline_s,
                    tell=lambda strike: console.print(strike.line(), markup=False, highlight=False, soft_wrap=True),
                    driver=driver,
                )
                account = storm.rage(minutes)
                account.problems += _stop(config.run.name)
            finally:
                driver.kill()
                end_run(config.run.name)
        account.verdict = check_run(directory)
    return account


def kinds_of(config: Config, nodes: int) -> list[str]:
    """What a run has that can be killed, in a fixed order."""
    found = ["conductor", "driver", "learner", "queue", "reward", "rollout"]
    if config.tracking.rollouts != "off" or config.speculation.source != "off":
        found.append("retriever")
    if config.predicts_lengths:
        found.append("predictor")
    if nodes:
        found.append("node")
    return found


@contextmanager
def _folder(keep: Path | None, given: Sequence[str]) -> Iterator[Path | None]:
    """The parent of the run directory; None where the user has named one."""
    if any(text.startswith("run.directory=") for text in given):
        yield None
    elif keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
    else:
        with tempfile.TemporaryDirectory(prefix="slipstream-chaos-", ignore_cleanup_errors=True) as name:
            yield Path(name)


def _stop(run: str) -> list[str]:
    """Have the run save and end; returns what went wrong."""
    from pipelines.run_handle import attach

    try:
        handle = attach(run)
        with suppress(UserError):  # it has ended by itself, which the storm has noticed
            handle.stop()
        deadline = time.monotonic() + _STOP_S
        for status in handle.follow():
            if status.state == "failed":
                return [f"the run failed when it was stopped: {status.message}"]
            if status.terminal:
                return []
            if time.monotonic() > deadline:
                return [f"the run has not stopped within {_STOP_S:g} s"]
    except UserError as error:
        return [f"the run cannot be stopped: {error}"]
    return []
