"""``slipstream cluster check``: what can be told about a cluster file and an upload before machines start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.cluster_file import ClusterFile, load_cluster_file
from pipelines.cluster_laws import Selector, notes, problems
from pipelines.terminal import report_console
from pipelines.upload import Upload, check_upload, readable
from storage.errors import UserError

DEFAULT_FILE = "cluster.yaml"


def check_cluster(
    file: Path | str = DEFAULT_FILE,
    *,
    selectors: Mapping[str, Selector] | None = None,
    directory: Path | str = ".",
    console: Console | None = None,
) -> None:
    """Check a cluster file and what ``ray job submit --working-dir`` would upload; print both. Starts nothing.

    Args:
        file: The file for ``ray up``.
        selectors: Labels that the nodes of each role must have, by role; none by default.
        directory: Where ``ray up`` and ``ray job submit`` will run.
        console: Where people look; standard output by default.

    Raises:
        UserError: With every problem found, each with its field and what to do.
    """
    console = console or report_console()
    directory = Path(directory).absolute()
    cluster = load_cluster_file(file)
    found = problems(cluster, selectors or {}, directory)
    try:
        upload = check_upload(directory)
    except UserError as error:
        found.append(str(error))
    if found:
        raise UserError("\n  ".join([f"{len(found)} problem{'s' * (len(found) > 1)} in {file}:", *found]))
    _print(cluster, upload, console)


def _print(cluster: ClusterFile, upload: Upload, console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("nodes", "at most", "labels", "machine"):
        table.add_column(title)
    for kind in cluster.node_kinds():
        labels = ", ".join(f"{k}={'(its own)' if v is None else v}" for k, v in kind.labels.items())
        table.add_row(kind.name, str(kind.most), labels, str(kind.config.get("InstanceType", "")))
    console.print(table)
    for note in notes(cluster):
        console.print(Text(f"note: {note}"))
    console.print(
        f"upload of --working-dir: {readable(upload.size)} in {upload.files} files (limit {readable(upload.limit)})",
        highlight=False,
    )
    console.print(f"{cluster.path} is fine for: RAY_AUTH_MODE=token ray up {cluster.path}", highlight=False)
