"""The command line. Everything heavy is imported by the command that needs it, so that help is quick."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from pipelines.cache_commands import cache_app
from pipelines.chaos_command import chaos
from pipelines.cluster_commands import cluster_app
from pipelines.dashboard_command import dashboard
from pipelines.history_commands import history_app
from pipelines.simulate_command import simulate
from storage.errors import UserError
from storage.files import FULL, describe_failure

USER_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    name="slipstream",
    help="""Post-train language models with reinforcement learning on Ray, with fast rollouts.

Start with [bold]slipstream train[/bold]: it trains a built-in model on a built-in task in a few minutes, without a GPU.
`slipstream COMMAND --help` explains each command with examples.""",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(history_app, name="history")
app.add_typer(cluster_app, name="cluster")
app.add_typer(cache_app, name="cache")
app.command()(simulate)
app.command()(dashboard)
app.command()(chaos)

_RUN_HELP = "Run directory, its name in runs/, a URI, or a place of several runs; default: the run that changed last."
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PRESET|FILE FIELD=VALUE",
        help="A preset or a YAML file first (default: baseline), then overrides section.field=value.",
    ),
]
Run = Annotated[str | None, typer.Argument(help=_RUN_HELP)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, 1 (failure), 2 (user error) or 130 (interrupted)."""
    # Threads of torch sleep while they wait: in this process, and in those that a local Ray starts from it (elsewhere
    # the actors see to it). Spinning ones of several processes take the cores from each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # One heap for each of a dozen threads would hold on to a gigabyte in the processes that load a real model.
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    status = _run(arguments)
    try:
        sys.stdout.flush()
    except OSError:
        # The reader (head, less) has gone, or the disk that the output goes to is full; without this the interpreter
        # complains about it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _run(arguments: Sequence[str] | None) -> int:
    try:
        app(args=list(sys.argv[1:] if arguments is None else arguments) or ["--help"], prog_name="slipstream")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        return USER_ERROR
    except OSError as error:
        if error.errno not in FULL:
            raise
        typer.echo(f"error: {describe_failure('cannot write', Path(str(error.filename or 'a file')), error)}", err=True)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


@app.command()
def train(
    settings: Settings = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on with a run: directory, name in runs/, or URI.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print what would run; starts nothing.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave the run to the Ray cluster and return; see slipstream attach.")
    ] = False,
) -> None:
    """Train a model.

    [bold]Examples[/bold]

    [cyan]slipstream train[/cyan]
    The built-in model learns running sums on this machine.

    [cyan]slipstream train model=smollm2 data.train=prompts.jsonl reward.functions='[{function: numeric}]'[/cyan]
    A model, a prompt file and a way to score answers.

    [cyan]slipstream train run.yaml rollout.samples_per_prompt=16 --dry-run[/cyan]
    Check a YAML file of your own with one field changed.

    [cyan]slipstream train --resume runs/baseline-20250101-120000 run.steps=80[/cyan]
    Go on from the last checkpoint, for longer.
    """
    from pipelines import config_loader

    if resume is None:
        resolved = config_loader.load(settings or ())
        directory = None
    else:
        directory = _find_run(resume)
        resolved = config_loader.load_for_resume(directory, settings or ())
    if dry_run:
        from pipelines.dry_run import print_dry_run

        print_dry_run(resolved, resume=directory)
        return
    from pipelines import launch

    for warning in resolved.config.warnings():
        typer.echo(f"warning: {warning}", err=True)
    raise typer.Exit(launch.train(resolved.config, name=resolved.name, resume=directory, detach=detach))


@app.command("eval")
def evaluate(
    target: Annotated[
        str, typer.Argument(help="Run (also a URI), checkpoint or Hugging Face directory, or name of a model.")
    ],
    settings: Settings = None,
) -> None:
    """Measure a model on the held-out sets: greedy accuracy and, with samples, mean@k and pass@k.

    A run or a checkpoint is evaluated with the settings of its run, anything else with those of the preset.

    [bold]Examples[/bold]

    [cyan]slipstream eval runs/baseline-20250101-120000[/cyan]
    The last checkpoint of a run, on the sets that it was trained with.

    [cyan]slipstream eval smollm2 evaluation.sets.hard=hard.jsonl evaluation.samples=8[/cyan]
    A model on one more set, with mean@8 and pass@8.
    """
    from pipelines import config_loader
    from pipelines.remote_views import find_model_folder

    target = find_model_folder(target)
    resolved = config_loader.load_for_evaluation(target, settings or ())
    from pipelines import launch

    raise typer.Exit(launch.evaluate(target, resolved.config))


@app.command()
def status(
    run: Run = None,
    plot: Annotated[bool, typer.Option("--plot", help="Also draw the learning curve into the run directory.")] = False,
) -> None:
    """Show how a run is doing: step, reward, speed, time left and what it waits for.

    [bold]Examples[/bold]

    [cyan]slipstream status[/cyan]
    The run that changed last.

    [cyan]slipstream status runs/baseline-20250101-120000 --plot[/cyan]
    A certain run, while it trains or afterwards, with a picture of its curves.
    """
    from pipelines import show as show_module

    directory = _find_run(run)
    show_module.status(directory)
    if plot:
        show_module.plot(directory)
    _tell_of_others(run, directory)


@app.command("runs")
def list_runs(
    place: Annotated[
        str | None, typer.Argument(help="Folder of runs, or a URI below which there are some; default: runs/.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most runs to print.")] = 20,
) -> None:
    """List runs, the one that changed last first: state, step, reward, held-out accuracy.

    [bold]Examples[/bold]

    [cyan]slipstream runs[/cyan]
    Those in runs/, and those at work on this machine with their directory at a URI.

    [cyan]slipstream runs s3://BUCKET/runs[/cyan]
    Those at a URI.
    """
    from pipelines import run_list
    from pipelines.config import RunOptions
    from pipelines.terminal import report_console

    run_list.list_runs(place, Path(RunOptions().directory), report_console(), limit=limit)


@app.command()
def attach(
    run: Annotated[str, typer.Argument(help="Name or directory of a run; default: the only one that goes on.")] = "",
    address: Annotated[str, typer.Option("--address", help="Ray cluster, host:port; default: RAY_ADDRESS.")] = "",
    stop: Annotated[bool, typer.Option("--stop", help="Ask the run to save and end.")] = False,
) -> None:
    """Watch a run that goes on in a Ray cluster; Ctrl-C leaves it alone.

    [bold]Examples[/bold]

    [cyan]slipstream attach[/cyan]
    The only run of the cluster, as `train` shows it.

    [cyan]slipstream attach baseline-20250101-120000 --stop[/cyan]
    Have it save its last step and end.

    From Python: [cyan]import pipelines; run = pipelines.attach()[/cyan]
    """
    from pipelines import run_handle

    raise typer.Exit(run_handle.watch(run, address, stop=stop))


@app.command()
def show(
    run: Run = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Training step; default: the last kept.")] = None,
    prompt: Annotated[int | None, typer.Option("--prompt", min=0, help="Only this row of the data.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most prompts to print.")] = 3,
    split: Annotated[str, typer.Option("--split", help="train, or the name of a held-out set.")] = "train",
    order: Annotated[
        Literal["data", "best", "worst"], typer.Option("--order", help="Which prompts come first.")
    ] = "data",
) -> None:
    """Print prompts, answers, rewards and advantages of a step.

    [bold]Examples[/bold]

    [cyan]slipstream show[/cyan]
    A few prompts of the latest step of the latest run.

    [cyan]slipstream show runs/baseline-20250101-120000 --step 12 --prompt 7[/cyan]
    All answers to prompt 7 in step 12.

    [cyan]slipstream show --split heldout --order worst[/cyan]
    Where the policy still fails in the latest evaluation.
    """
    from pipelines import show as show_module

    show_module.show(_find_run(run), step=step, prompt=prompt, limit=limit, split=split, order=order)


@app.command("config")
def list_config(
    wanted: Annotated[
        str, typer.Argument(metavar="FILTER", help="Part of a field's name, or a word of its meaning.")
    ] = "",
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print a complete, commented file with the defaults.")
    ] = False,
) -> None:
    """List the fields of the configuration with default, range, unit and meaning.

    [bold]Examples[/bold]

    [cyan]slipstream config[/cyan]
    Everything, by section.

    [cyan]slipstream config rollout[/cyan]
    One section, or all fields with a word in their name.

    [cyan]slipstream config --yaml > run.yaml[/cyan]
    A file to edit, for `slipstream train run.yaml`.
    """
    from pipelines import config_docs
    from pipelines.terminal import report_console

    if as_yaml:
        if wanted:
            raise UserError("--yaml prints the whole configuration: drop the filter")
        typer.echo(config_docs.commented_yaml(), nl=False)
        return
    config_docs.print_fields(config_docs.find_fields(wanted), report_console())


@app.command()
def bench(
    name: Annotated[str | None, typer.Argument(help="Which benchmark; without it, all are listed.")] = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="OPTION=VALUE", help="Options of the benchmark.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the figures.")] = None,
) -> None:
    """Measure something side by side in one run and print a table.

    [bold]Examples[/bold]

    [cyan]slipstream bench[/cyan]
    What can be measured, a line each.

    [cyan]slipstream bench engine --json engine.json[/cyan]
    Tokens per second of the rollout engine over transformers.generate.
    """
    from pipelines.bench import harness

    harness.run_bench(name, json_path, options or ())


@app.command("serve-predictor")
def serve_predictor(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="FIELD=VALUE", help="Overrides of the section length_predictor, without its name."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen at; loopback unless told.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen at.")] = 8000,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="FILE", help="Read the predictor's state from here, and keep it.")
    ] = None,
    history: Annotated[
        str | None, typer.Option("--history", metavar="RUN", help="Learn from the answers of a run first.")
    ] = None,
    address: Annotated[str, typer.Option("--address", help="Ray cluster to join; default: a local Ray.")] = "",
) -> None:
    """Serve the length predictor over HTTP: POST /predict, POST /observe, GET /healthz, /metrics, /openapi.json.

    [bold]Examples[/bold]

    [cyan]slipstream serve-predictor --history runs/baseline-20250101-120000[/cyan]
    A predictor that knows the lengths of a run.

    [cyan]curl -s localhost:8000/predict -H 'content-type: application/json' -d '{"prompts": [{"text": "7+5="}]}'[/cyan]
    """
    from pipelines import config_loader, predictor_service

    overrides = [f"length_predictor.{text}" for text in settings or ()]
    options = config_loader.load(overrides).config.length_predictor
    raise typer.Exit(
        predictor_service.serve_predictor(options, host=host, port=port, state=state, history=history, address=address)
    )


@app.command()
def version() -> None:
    """Print the versions of Slipstream and of what its results depend on."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    for package in ("slipstream", "ray", "torch", "transformers", "numpy", "pyarrow"):
        try:
            typer.echo(f"{package} {version_of(package)}")
        except PackageNotFoundError:
            typer.echo(f"{package} (not installed)")
    typer.echo(f"python {platform.python_version()} on {platform.platform()}")


def _find_run(text: str | None) -> Path:
    from pipelines.config import RunOptions
    from pipelines.remote_views import find_readable

    return find_readable(text, Path(RunOptions().directory)).path


def _tell_of_others(text: str | None, found: Path) -> None:
    """Say how to list the other runs, where a place was named and not a run."""
    from pipelines.config import RunOptions
    from pipelines.remote_views import other_runs
    from storage.run_directory import RunDirectory

    others = other_runs(text, Path(RunOptions().directory), RunDirectory(found))
    if others > 0:
        place = "" if text is None else f" {shlex.quote(text)}"
        typer.echo(f"{others} more run{'s' * (others > 1)} there: slipstream runs{place}")
