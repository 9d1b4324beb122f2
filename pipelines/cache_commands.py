"""`slipstream cache`: what this machine keeps to be quick another time, and how to give the space back."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from storage.errors import UserError

cache_app = typer.Typer(help="What is kept on this machine: list it, give its space back.", no_args_is_help=False)


@cache_app.callback(invoke_without_command=True)
def cache(context: typer.Context) -> None:
    """List what is kept on this machine: models, copies of remote runs, and runs at work on their way to a URI.

    Copies of remote runs are bounded by themselves: the least recently used go first. Nothing in use is removed.

    [bold]Examples[/bold]

    [cyan]slipstream cache[/cyan]
    What there is, how large it is, and who uses it.

    [cyan]slipstream cache clear[/cyan]
    Give back what can be fetched again.
    """
    if context.invoked_subcommand is not None:
        return
    from pipelines.cache_view import print_cache
    from pipelines.terminal import report_console

    print_cache(report_console())


@cache_app.command()
def clear(
    kinds: Annotated[list[str] | None, typer.Argument(metavar="KIND", help="views, fetched; default: both.")] = None,
    unused_days: Annotated[
        float, typer.Option("--unused-days", min=0, help="Only what nobody has used for so many days.")
    ] = 0.0,
) -> None:
    """Remove the copies of remote runs that no process uses; they are fetched again when they are wanted.

    [bold]Examples[/bold]

    [cyan]slipstream cache clear[/cyan]
    All of them.

    [cyan]slipstream cache clear fetched --unused-days 7[/cyan]
    Models of remote runs that no role has loaded for a week.
    """
    from pipelines.cache_view import print_removed
    from pipelines.terminal import report_console
    from storage.remote.kept import KINDS, entries, remove

    chosen = [kind for kind in KINDS if not kinds or kind in kinds]
    unknown = sorted(set(kinds or ()) - set(KINDS))
    if unknown:
        raise UserError(
            f"slipstream cache clear {unknown[0]}: there is no such kind; it can be {' or '.join(KINDS)} (what else "
            "`slipstream cache` lists is not there twice, or costs minutes to make: remove its folder yourself)"
        )
    now = time.time()
    wanted = [entry for entry in entries() if entry.kind in chosen and now - entry.used >= unused_days * 86400]
    gone = [entry for entry in wanted if remove(entry)]
    print_removed(report_console(), gone, [entry for entry in wanted if entry not in gone])
