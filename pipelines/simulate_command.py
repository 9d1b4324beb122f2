"""``slipstream simulate``: what each schedule would bring on a cluster of a given size, without a model and a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from storage.errors import UserError

_SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
_SWEEP_STEPS = 5


def simulate(
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of the cluster, 1 to 1024.")] = 128,
    gpus_per_replica: Annotated[int, typer.Option("--gpus-per-replica", help="GPUs that share one model.")] = 1,
    prompts: Annotated[
        int, typer.Option("--prompts", min=0, help="Prompts trained per step; 0: four for each GPU.")
    ] = 0,
    samples: Annotated[int, typer.Option("--samples", min=2, help="Answers per prompt.")] = 8,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each schedule; 5 is one period.")] = 10,
    overlaunch: Annotated[float, typer.Option("--overlaunch", help="Groups launched per group trained.")] = 1.25,
    slots: Annotated[int, typer.Option("--slots", help="Answers that a replica decodes at once.")] = 64,
    kv_tokens: Annotated[int, typer.Option("--kv-tokens", help="Tokens that a replica's cache holds.")] = 900_000,
    p50: Annotated[float, typer.Option("--p50", help="Median length of an answer in tokens.")] = 1160.0,
    p90: Annotated[float, typer.Option("--p90", help="90th percentile of the length in tokens.")] = 4115.0,
    cap: Annotated[int, typer.Option("--cap", help="Longest answer in tokens.")] = 16_384,
    prompt_share: Annotated[
        float, typer.Option("--prompt-share", help="Share of the variance of log-lengths that belongs to the prompt.")
    ] = 0.65,
    predictor: Annotated[
        float, typer.Option("--predictor", help="Correlation of the predictor with the prompt's effect; 0: none.")
    ] = 0.7,
    recorded: Annotated[
        str | None, typer.Option("--recorded", metavar="RUN", help="Take the lengths of a run instead of a law.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of lengths and order.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="PATH", help="Charts: PATH.png, PATH.html, PATH-sweep.png.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep/--no-sweep", help="Also vary the share of long answers (not for a recorded run).")
    ] = True,
) -> None:
    """Simulate the schedules on a virtual clock: the same policies as in training, on a cluster of any size.

    [bold]Examples[/bold]

    [cyan]slipstream simulate[/cyan]
    128 GPUs and published lengths: time, utilisation, waste and staleness of each schedule.

    [cyan]slipstream simulate --gpus 32 --recorded runs/baseline-20250101-120000 --output schedules[/cyan]
    With the lengths that a run wrote, and charts of one step of each schedule.

    [cyan]slipstream simulate --p50 600 --p90 6000 --cap 32768 --predictor 0[/cyan]
    A heavier tail, and no predictor.
    """
    from rich.table import Table

    from pipelines.simulation.cluster import ClusterModel
    from pipelines.simulation.gantt import draw_gantt, draw_sweep
    from pipelines.simulation.lengths import LengthModel, LogNormalLengths, RecordedLengths
    from pipelines.simulation.page import write_page
    from pipelines.simulation.scenarios import long_share_sweep, simulate_case, standard_cases
    from pipelines.simulation.simulator import Workload
    from pipelines.simulation.table import COLUMNS, DENOMINATORS, setting, table_rows
    from pipelines.terminal import report_console

    cluster = ClusterModel(gpus=gpus, gpus_per_replica=gpus_per_replica, slots=slots, kv_tokens=kv_tokens)
    law = LogNormalLengths(p50=p50, p90=p90, cap=cap, prompt_share=prompt_share, correlation=predictor, seed=seed)
    lengths: LengthModel = law
    if recorded is not None:
        from pipelines.remote_views import find_readable

        run = find_readable(recorded, Path("runs"), "rollouts/train/")
        lengths = RecordedLengths.read(run.rollouts, correlation=predictor, seed=seed)
    if output is not None and not output.absolute().parent.is_dir():
        raise UserError(f"--output {output}: the folder {output.absolute().parent} does not exist: make it first")
    per_step = prompts or 4 * gpus
    workload = Workload(prompts_per_step=per_step, samples=samples, prompts=per_step * steps, seed=seed)
    console = report_console()
    cases = standard_cases(overlaunch, predictor=predictor > 0)
    results = []
    with console.status("simulating") as status:
        for case in cases:
            status.update(f"simulating: {case.name}")
            results.append(simulate_case(case, cluster, lengths, workload, record=output is not None))
    rows = table_rows(results)
    notes = [setting(cluster, lengths.describe(), workload), *DENOMINATORS]
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, style="dim")

    curves: dict[str, list[float]] = {}
    if sweep and recorded is None:
        short = Workload(prompts_per_step=per_step, samples=samples, prompts=per_step * _SWEEP_STEPS, seed=seed)
        with console.status("simulating other shares of long answers"):
            curves = long_share_sweep(cluster, law, short, cases[:3], _SHARES)
        swept = Table(
            "utilisation; answers above four medians:", *(f"{share:.0%}" for share in _SHARES), box=None, pad_edge=False
        )
        for name, values in curves.items():
            swept.add_row(name, *(f"{value:.1%}" for value in values))
        console.print()
        console.print(swept)
    if output is not None:
        written = [draw_gantt(results, output.with_name(output.name + ".png"))]
        page = output.with_name(output.name + ".html")
        written.append(
            write_page(page, results, columns=COLUMNS, rows=rows, notes=notes, curves=curves, shares=_SHARES)
        )
        if curves:
            written.append(draw_sweep(curves, _SHARES, output.with_name(output.name + "-sweep.png")))
        for path in written:
            console.print(f"wrote {path}", highlight=False)
