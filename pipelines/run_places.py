"""Where runs lie: in folders on this machine, or at URIs, mirrored from a folder on the machine at work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pipelines.cluster import cluster_nodes, coming_nodes
from pipelines.config import Config
from pipelines.run_data import RunData
from storage.remote.address import Address, is_address
from storage.remote.held_run import HeldRun, hold_existing, hold_new
from storage.remote.objects import Objects
from storage.remote.staging import refuse_existing
from storage.run_directory import RunDirectory


def claim(config: Config, name: str, held: ExitStack) -> RunDirectory:
    """Make the run directory of a new run; it is ours until ``held`` is closed.

    Raises:
        UserError: There is a run of that name, or the directory cannot be made or written to.
    """
    place = config.run.directory
    if is_address(place):
        directory: RunDirectory = held.enter_context(hold_new(Address.parse(place).child(name)))
    else:
        directory = RunDirectory.create(Path(place), name)
    held.enter_context(directory.lock())
    return directory


def take_up(run: Path | str, config: Config, say: Callable[[str], None], held: ExitStack) -> RunDirectory:
    """Hold the directory of a run to go on with; it is ours until ``held`` is closed.

    Args:
        run: Its folder, the name of one in ``run.directory``, or its URI.
        config: Of the run.
        say: Told what takes time.
        held: Closed when the run is over.

    Raises:
        UserError: There is no such run, or another process writes to it.
    """
    text = str(run) if is_address(str(run)) else RunDirectory.open(Path(run), Path(config.run.directory)).address
    if is_address(text):
        directory: RunDirectory = held.enter_context(hold_existing(Address.parse(text, "--resume"), say))
    else:
        directory = RunDirectory(Path(text))
    held.enter_context(directory.lock())
    return directory


def at_home(config: Config, directory: RunDirectory) -> Config:
    """Return the configuration of a run whose directory may have been moved since it was written."""
    if directory.ticket is None:
        return config
    parent = str(Address.parse(directory.address).parent)
    return config.model_copy(update={"run": config.run.model_copy(update={"directory": parent})})


def hand_out(directory: RunDirectory, data: RunData, *, resumed: bool) -> RunData:
    """Send a run with a remote directory there for the first time; call it when Ray was joined.

    On a cluster of several machines, which share no disk, its model goes along, and what is returned says where roles
    find it. A resumed run has it in its checkpoint.

    Raises:
        StorageError: The store failed.
    """
    if not isinstance(directory, HeldRun):
        return data
    nodes = cluster_nodes()
    directory.spread = len(nodes) + len(coming_nodes(nodes)) > 1
    if directory.spread and not resumed:
        return replace(data, model_path=directory.send_model(Path(data.model_path)))
    directory.send()
    return data


def refuse_taken(config: Config) -> None:
    """Raise ``UserError`` where a new run would meet one of its name at a URI: before its model is loaded."""
    if is_address(config.run.directory) and config.run.name:
        refuse_existing(Objects(Address.parse(config.run.directory).child(config.run.name)))
