"""`slipstream cluster`: what a cluster file needs before `ray up` can use it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

cluster_app = typer.Typer(help="Cluster files for `ray up`.", no_args_is_help=True)


@cluster_app.callback()
def cluster() -> None:
    """Cluster files for `ray up`."""


@cluster_app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="Cluster file; default: cluster.yaml.")] = Path("cluster.yaml"),
) -> None:
    """Check a cluster file and the size of the upload; starts nothing.

    [bold]Example[/bold]

    [cyan]slipstream cluster check pipelines/presets/cluster_onprem.yaml[/cyan]
    """
    from pipelines.cluster_check import check_cluster

    check_cluster(file)
