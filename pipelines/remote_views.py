"""How commands that only read find a run, whether it is a folder or a URI."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pipelines.progress import load_status
from pipelines.status import RunStatus
from storage.checkpoints import CheckpointStore
from storage.errors import UserError
from storage.remote.address import is_address
from storage.remote.marker import read_marker
from storage.remote.view import checkpoint_steps, open_view
from storage.run_directory import RunDirectory


def find_readable(text: str | None, parent: Path, *parts: str) -> RunDirectory:
    """Find a run to read.

    Args:
        text: Its folder, the name of one in ``parent``, or its URI; None for the run in ``parent`` that changed last.
        parent: Folder of runs.
        parts: Prefixes of paths that are going to be read; of a remote run they are fetched, with metrics, status and
            configuration.

    Raises:
        UserError: There is no such run.
        StorageError: The store or the disk failed.
    """
    if text is not None and is_address(text):
        return RunDirectory(open_view(text).fetch(*parts))
    return RunDirectory.latest(parent) if text is None else RunDirectory.open(Path(text), parent)


def find_model_folder(target: str) -> str:
    """Return what ``slipstream eval`` is to evaluate as a path or name; a remote run's newest checkpoint is fetched.

    Raises:
        UserError: There is no such run, or it has no checkpoint yet.
        StorageError: The store or the disk failed.
    """
    if not is_address(target):
        return target
    view = open_view(target)
    checkpoint = view.newest_checkpoint()
    if not checkpoint:
        raise UserError(f"{view.address} is a run without a complete checkpoint: there is no model to evaluate yet")
    return str(view.fetch(f"{checkpoint}/model/") / checkpoint / "model")


def saved_steps(directory: RunDirectory) -> list[int]:
    """Steps of the complete checkpoints of a run, ascending; those of a remote one need not be here."""
    marker = read_marker(directory.path)
    if marker is not None and marker.names:
        return checkpoint_steps(marker.names)
    return [checkpoint.step for checkpoint in CheckpointStore(directory.checkpoints).checkpoints()]


def status_at(place: str) -> RunStatus | None:
    """Return the status of the run in a folder or at a URI; None where there is none that can be read."""
    if not is_address(place):
        return load_status(Path(place))
    with suppress(UserError):
        return load_status(open_view(place).fetch())
    return None


def readable_copy(directory: RunDirectory) -> Path:
    """Return a folder with status and metrics of a run that has just ended, on whatever machine it was at work."""
    if directory.ticket is None:
        return directory.path
    return open_view(directory.address).fetch()
