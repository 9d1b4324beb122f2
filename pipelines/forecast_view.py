"""Prints what `slipstream history forecast` found."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipelines.config_loader import load_config_file
from pipelines.forecast import Forecast, forecast
from storage.history.archive import RolloutArchive
from storage.run_directory import RunDirectory

_GOOD = 1.1
_SETTINGS = {
    "hybrid": " speculation.source=hybrid",
    "previous_epoch": " speculation.source=previous_epoch",
    "aimd": " speculation.draft_length=aimd",
}
"""What a drafter needs beside the preset histospec."""


def print_forecast(run: Path, console: Console, *, measured_ratio: float | None, max_rows: int) -> None:
    """Walk the rollouts of ``run`` with every drafter and print what each would bring.

    Raises:
        UserError: The run keeps no rollouts, or has visited no prompt twice.
    """
    directory = RunDirectory(run)
    options = load_config_file(directory.config).speculation
    with console.status("walking the recorded answers"):
        found = forecast(RolloutArchive(directory.rollouts), options, measured_ratio=measured_ratio, max_rows=max_rows)
    _print_table("speed-up over plain decoding, by cost ratio c", found.rows(), console)
    _print_table("how predictable each epoch was", found.epoch_rows(), console)
    console.print(
        "c is the cost of one more draft token over a row's share of a plain pass: .01 to .03 where the engine waits "
        "for memory (few rows, the tail of a step), .1 to .3 and more where it computes (many rows).",
        highlight=False,
    )
    console.print(_advice(found), highlight=False)


def _advice(found: Forecast) -> str:
    ratio = found.ratios[-1] if len(found.ratios) > 4 else found.ratios[len(found.ratios) // 2]
    best = found.best(ratio)
    gain = best.speedups[ratio]
    if gain < _GOOD:
        return f"At c = {ratio:.3g} no drafter promises more than {gain:.2f}x: leave speculation.source off."
    return (
        f"At c = {ratio:.3g} the best is {best.drafter} with {gain:.2f}x (acceptance length "
        f"{best.acceptance_length:.2f}): try `slipstream train histospec{_SETTINGS.get(best.drafter, '')}`."
    )


def _print_table(title: str, rows: list[list[str]], console: Console) -> None:
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)
