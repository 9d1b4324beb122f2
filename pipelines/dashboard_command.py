"""`slipstream dashboard`: the Grafana dashboard, and how to start Prometheus and Grafana beside Ray."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from storage.errors import UserError

FILE = "slipstream.json"
_LATEST = "session_latest/metrics"


def dashboard(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Where to write it; default: the folder that Grafana reads for the Ray that runs here."),
    ] = None,
) -> None:
    """Write the Grafana dashboard of runs, and print how to start Prometheus and Grafana.

    [bold]Examples[/bold]

    [cyan]slipstream dashboard[/cyan]
    On the head, while Ray runs: Grafana shows the dashboard within seconds.

    [cyan]slipstream dashboard ~/dashboards[/cyan]
    To a folder of your own, which outlives the Ray session.
    """
    root = ray_folder()
    provisioned = root / _LATEST / "grafana" / "dashboards"
    if folder is None and not provisioned.is_dir():
        raise UserError(
            f"no Ray with a dashboard has run here ({provisioned} does not exist): start one, or name a folder, "
            "slipstream dashboard FOLDER"
        )
    path = write_dashboard(folder or provisioned)
    typer.echo(f"wrote {path}")
    for line in instructions(root, None if folder is None else folder.absolute()):
        typer.echo(line)


def write_dashboard(folder: Path) -> Path:
    """Write the dashboard into ``folder``, which is made if need be, and return the file.

    Raises:
        UserError: The folder cannot be written.
    """
    from pipelines.grafana import dashboard as model

    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        path.write_text(json.dumps(model(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot write the dashboard there: {error.strerror}; name another folder") from error
    return path


def ray_folder() -> Path:
    """Return the folder in which Ray keeps its sessions on this machine."""
    places = [os.environ.get("RAY_TMPDIR"), os.environ.get("TMPDIR") if sys.platform.startswith("linux") else None]
    return Path(next(filter(None, places), "/tmp")) / "ray"


def instructions(root: Path, folder: Path | None) -> list[str]:
    """Return what to run, commands indented.

    Args:
        root: Folder of Ray's sessions.
        folder: Where the dashboard lies; None for the folder of the present session, which Grafana reads already.
    """
    settings = ["RAY_PROMETHEUS_HOST=http://localhost:9090", "RAY_GRAFANA_HOST=http://localhost:3000"]
    if folder is not None:
        settings.append(f"RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR={folder}")
    # Ray's own launcher knows the standard place of sessions only.
    prometheus = (
        "ray metrics launch-prometheus"
        if root == Path("/tmp/ray")
        else f"prometheus --config.file {root / _LATEST / 'prometheus' / 'prometheus.yml'}"
    )
    return [
        "",
        "On the head, before Ray starts there (its pages then show charts"
        + (", and Grafana reads this folder):" if folder is not None else "):"),
        *(f"  export {setting}" for setting in settings),
        "Prometheus, once Ray runs:",
        f"  {prometheus}",
        "Grafana, from https://grafana.com/grafana/download, with the settings that Ray has written:",
        f"  grafana-server --homepath /usr/share/grafana --config {root / _LATEST / 'grafana' / 'grafana.ini'} web",
        "Then open:",
        "  http://localhost:3000/d/slipstream",
        "",
        "Both listen on all addresses by default; on a shared network add --web.listen-address=127.0.0.1:9090 to",
        "Prometheus and set GF_SERVER_HTTP_ADDR=127.0.0.1 for Grafana, and reach them through SSH.",
    ]
