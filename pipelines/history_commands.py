"""`slipstream history`: look at, compact, export and check the answers that a run drafts from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from storage.errors import UserError

DAMAGED = 1

history_app = typer.Typer(
    help="Look at the answers that a run drafts from: count, show, compact, export, verify.", no_args_is_help=True
)

Run = Annotated[
    str | None,
    typer.Argument(help="Run directory, its name in runs/, or a URI; default: the run that changed last."),
]


@history_app.command()
def stats(run: Run = None) -> None:
    """Count answers, tokens, prompts and bytes; estimate repetition and entropy.

    [bold]Example[/bold]

    [cyan]slipstream history stats runs/baseline-20250101-120000[/cyan]
    """

    from pipelines import history_view
    from pipelines.terminal import report_console

    history_view.print_stats(_find_run(run), report_console())


@history_app.command()
def show(
    run: Run = None,
    prompt: Annotated[int | None, typer.Option("--prompt", min=0, help="Only this row of the data.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="Only prompts whose text has this in it.")] = None,
    visits: Annotated[int, typer.Option("--visits", min=1, help="Newest visits of a prompt to print.")] = 2,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most prompts to print.")] = 3,
) -> None:
    """Print the newest answers to prompts: as text where the run's tokenizer is there, else as token ids.

    [bold]Examples[/bold]

    [cyan]slipstream history show[/cyan]
    The prompts that were answered last.

    [cyan]slipstream history show runs/baseline-20250101-120000 --prompt 7 --visits 4[/cyan]
    What the policy wrote to prompt 7 the last four times.

    [cyan]slipstream history show --text "Add up"[/cyan]
    Prompts with these words.
    """

    from pipelines import history_view
    from pipelines.terminal import report_console

    directory = _find_run(run)
    history_view.print_answers(directory, report_console(), prompt=prompt, fragment=text, visits=visits, limit=limit)


@history_app.command()
def compact(
    run: Run = None,
    window: Annotated[int, typer.Option("--window", min=1, help="Newest visits of each prompt to keep.")] = 4,
) -> None:
    """Merge all files into one and drop answers older than the newest visits of their prompt.

    [bold]Example[/bold]

    [cyan]slipstream history compact runs/baseline-20250101-120000 --window 4[/cyan]
    The archive in rollouts/ keeps what is dropped here.
    """

    from pipelines import history_view
    from pipelines.terminal import report_console

    history_view.compact(_find_run(run, writes=True), window, report_console())


@history_app.command()
def export(
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="FILE.parquet, FILE.arrow or FILE.jsonl.")],
    run: Run = None,
) -> None:
    """Write all answers into one file for other tools, a row each.

    [bold]Example[/bold]

    [cyan]slipstream history export runs/baseline-20250101-120000 --to answers.parquet[/cyan]
    """

    from pipelines import history_view
    from pipelines.terminal import report_console

    history_view.export(_find_run(run), to, report_console())


@history_app.command()
def verify(run: Run = None) -> None:
    """Check every checksum and every row; exit status 1 and a list when something is damaged.

    [bold]Example[/bold]

    [cyan]slipstream history verify runs/baseline-20250101-120000[/cyan]
    """

    from pipelines import history_view
    from pipelines.terminal import report_console

    if not history_view.verify(_find_run(run), report_console()):
        raise typer.Exit(DAMAGED)


@history_app.command()
def forecast(
    run: Run = None,
    ratio: Annotated[
        float | None,
        typer.Option("--ratio", min=0, help="Cost of one more draft token over a row's share of a pass, measured."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Answers that are decoded at once.")] = 64,
) -> None:
    """Predict what each way of drafting would bring, from a run's own answers; needs no model.

    [bold]Example[/bold]

    [cyan]slipstream history forecast runs/baseline-20250101-120000[/cyan]
    Works for every run that keeps its rollouts, with or without drafts.
    """

    from pipelines import forecast_view
    from pipelines.terminal import report_console

    forecast_view.print_forecast(
        _find_run(run, "rollouts/train/"), report_console(), measured_ratio=ratio, max_rows=rows
    )


def _find_run(text: str | None, *parts: str, writes: bool = False) -> Path:
    """Return a run directory that has a history; raises ``UserError`` otherwise.

    Args:
        text: As the commands take it.
        parts: What is read beside the history.
        writes: The history is going to be changed.
    """
    from pipelines.config import RunOptions
    from pipelines.remote_views import find_readable

    run = find_readable(text, Path(RunOptions().directory), "history/", *parts)
    if writes and run.address != str(run.path):
        raise UserError(f"{run.address}: a history at a URI cannot be changed from here, its run does that by itself")
    if not run.history.is_dir():
        raise UserError(
            f"{run.address} has no history to draft from: only runs with speculation.source other than off keep one "
            f"(`slipstream show {run.address}` prints the answers in rollouts/, if those were kept)"
        )
    return run.path
