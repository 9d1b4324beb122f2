"""How commands that only read find a run, whether it is a folder or a URI."""

from __future__ import annotations

import difflib
from contextlib import suppress
from pathlib import Path

from pipelines.liveness import is_alive
from pipelines.progress import load_status
from pipelines.status import RunStatus
from storage.checkpoints import CheckpointStore
from storage.errors import UserError
from storage.remote.address import Address, is_address
from storage.remote.kept import entries
from storage.remote.marker import read_marker
from storage.remote.staging import run_names, staged_runs
from storage.remote.view import checkpoint_steps, open_view
from storage.run_directory import RunDirectory, find_run, run_names_in

_SUGGESTIONS = 3


def find_readable(text: str | None, parent: Path, *parts: str) -> RunDirectory:
    """Find a run to read.

    Args:
        text: Its folder, the name of one in ``parent``, its URI, or a folder or URI of several, which means the one of
            them that changed last; None for the run that changed last in ``parent``, or that is at work on this machine
            with its directory at a URI.
        parent: Folder of runs.
        parts: Prefixes of paths that are going to be read; of a remote run they are fetched, with metrics, status and
            configuration.

    Raises:
        UserError: There is no such run.
        StorageError: The store or the disk failed.
    """
    if text is None:
        return _newest(parent)
    if is_address(text):
        return RunDirectory(open_view(text).fetch(*parts))
    if find_run(text, parent) is None and run_names_in(Path(text)):
        return RunDirectory.latest(Path(text))
    try:
        return RunDirectory.open(Path(text), parent)
    except UserError as error:
        near = _near(Path(text).name)
        raise UserError(f"{error} (at a URI: {near})" if near else str(error)) from None


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


def other_runs(text: str | None, parent: Path, found: RunDirectory) -> int:
    """Return how many more runs there are where ``text`` names a place and not a run; see :func:`find_readable`."""
    if text is None:
        place = parent
    elif is_address(text):
        address = Address.parse(text, "run")
        return 0 if str(address) == found.address else len(run_names(address)) - 1
    else:
        place = Path(text)
        if found.path.absolute() == place.absolute():
            return 0
    return len([name for name in run_names_in(place) if (place / name).absolute() != found.path.absolute()])


def at_work_here() -> list[Path]:
    """Folders of the runs that are at work on this machine with their directory at a URI."""
    found = []
    for path in staged_runs():
        status = load_status(path)
        if status is not None and not status.terminal and is_alive(status):
            found.append(path)
    return found


def _newest(parent: Path) -> RunDirectory:
    try:
        return RunDirectory.latest(parent, at_work_here())
    except UserError as error:
        seen = list(_seen().values())[:_SUGGESTIONS]
        hint = f"; at URIs this machine knows {', '.join(seen)}" if seen else ""
        raise UserError(f"{error}{hint}") from None


def _near(name: str) -> str:
    """URIs of the runs that this machine knows and whose names are near one, for a message."""
    seen = _seen()
    return " or ".join(seen[close] for close in difflib.get_close_matches(name, seen, _SUGGESTIONS, 0.6))


def _seen() -> dict[str, str]:
    """URIs of the runs that this machine has worked on or looked at and still has something of, by name."""
    uris = [marker.uri for path in staged_runs() if (marker := read_marker(path)) is not None]
    uris += [entry.uri for entry in reversed(entries()) if entry.uri]
    return {Address.parse(uri).name: uri for uri in reversed(uris)}
