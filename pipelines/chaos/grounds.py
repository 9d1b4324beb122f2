"""Where the storm takes place: a Ray of its own, one with emulated nodes, or the cluster that was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from rich.console import Console

from pipelines.active_runs import find_conductor
from pipelines.chaos.targets import Process
from pipelines.cluster import local_or_joined_ray
from pipelines.config import Config
from pipelines.emulated_nodes import EmulatedNodes
from pipelines.quiet_ray import init_quietly
from storage.errors import UserError

_NODE_CPUS = 4
_BEGIN_S = 300.0
_TAIL_LINES = 15


@dataclass(slots=True)
class Grounds:
    """A Ray that is up.

    Attributes:
        address: How other processes join it.
        cluster: Its emulated nodes; None where there are none.
    """

    address: str
    cluster: EmulatedNodes | None = None

    def nodes(self) -> list[str]:
        """Ids of the emulated worker nodes that may die."""
        return [] if self.cluster is None else self.cluster.ids()

    def kill_node(self, node: str) -> None:
        """End all processes of an emulated node at once, and add another one like it."""
        assert self.cluster is not None  # without one there are no nodes to choose from
        self.cluster.kill(node)


@contextmanager
def grounds(config: Config, nodes: int, console: Console) -> Iterator[Grounds]:
    """Start or join a Ray; what was started is ended with the block.

    Args:
        config: Says which cluster to join, if any.
        nodes: Emulated worker nodes; 0 for none.
        console: Where people look.

    Raises:
        UserError: The cluster cannot be joined or started, or nodes are to be emulated in one that is there already.
    """
    if not nodes:
        with local_or_joined_ray(config, console):
            yield Grounds(ray.get_runtime_context().gcs_address)
        return
    if config.cluster.address or os.environ.get("RAY_ADDRESS"):
        raise UserError("--nodes emulates nodes on this machine: leave out cluster.address, and unset RAY_ADDRESS")
    cluster = EmulatedNodes(nodes, _NODE_CPUS)
    try:
        init_quietly(address=cluster.address)
        yield Grounds(cluster.address, cluster)
    finally:
        ray.shutdown()
        cluster.shutdown()


def begin_run(place: Grounds, arguments: Sequence[str], log: Path) -> None:
    """Start a detached run by the command that users have; what it prints goes to ``log``.

    Raises:
        UserError: It did not begin; with the last lines that it printed.
    """
    command = [sys.executable, "-m", "pipelines", "train", *arguments, "--detach"]
    with log.open("wb") as output:
        try:
            status = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_ADDRESS": place.address},
                timeout=_BEGIN_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    if status:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
        raise UserError(f"the training run did not begin (status {status}); its last words:\n{tail}")


def end_run(run: str) -> None:
    """Kill what is left of a run; its conductor takes the rest along."""
    conductor = find_conductor(run)
    if conductor is not None:
        ray.kill(conductor)


def on_node(living: Sequence[Process], node: str) -> list[Process]:
    """Processes that die with a node."""
    return [process for process in living if process.node == node]
