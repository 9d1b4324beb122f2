"""Joins the Ray that is asked for, or starts one of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import yaml
from rich.console import Console

from pipelines.config import Config
from pipelines.joining import join
from pipelines.placement import Node
from pipelines.placement_check import placement_doubts, placement_problems, table_lines
from pipelines.preflight import raise_problems
from pipelines.quiet_ray import init_quietly
from storage.errors import UserError

log = logging.getLogger(__name__)

_BOOTSTRAP = Path.home() / "ray_bootstrap_config.yaml"
_NODE_TYPE = "ray.io/node-group"
_PLENTY = 1024.0
_START_ATTEMPTS = 2
_CALLS_SHOWN = 3_000
"""Calls that the dashboard of a local Ray knows, 3 kB each; by itself Ray would keep 100,000, and a million ids of
those that it has dropped."""
_CALL_LIMITS = (
    "RAY_task_events_max_num_task_in_gcs",
    "RAY_task_events_max_dropped_task_attempts_tracked_per_job_in_gcs",
)
_TOO_SLOW = "timed out during startup"
_HOPE = "cluster.wait_for_nodes=true waits for an autoscaler instead"


@contextmanager
def local_or_joined_ray(config: Config, console: Console) -> Iterator[str]:
    """Join the cluster that is asked for, or start a local Ray; yields the dashboard's URL.

    A Ray that this process uses already (a notebook's, say) is used and left alone.

    Raises:
        UserError: The cluster cannot be reached, or the local Ray cannot be started.
    """
    if ray.is_initialized():
        yield ""
        return
    address = config.cluster.address or os.environ.get("RAY_ADDRESS", "")
    context = _join(config, address) if address else _start(config)
    if address:
        console.print(f"joined the Ray cluster at {address}", highlight=False)
    url = getattr(context, "dashboard_url", "") or ""
    try:
        yield f"http://{url}" if url else ""
    finally:
        ray.shutdown()


def check_placement(config: Config, console: Console) -> None:
    """Print what is requested and what the Ray that is joined has; call it before any actor starts.

    Raises:
        UserError: The run can never be placed, not on the nodes that an autoscaler may add either. Each problem names
            its field and the nearest thing that exists.
    """
    nodes = cluster_nodes()
    problems = placement_problems(config, nodes)
    if problems or len(nodes) > 1:
        for line in table_lines(config, nodes):
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    for doubt in placement_doubts(config, nodes):
        console.print(f"warning: {doubt}", markup=False, highlight=False, soft_wrap=True)
    raise_problems(refusals(config, nodes))
    deadline = f"cluster.start_deadline_s={config.cluster.start_deadline_s:g} s"
    for problem in problems:
        console.print(f"{problem}: waiting up to {deadline} for more nodes", markup=False, highlight=False)


def refusals(config: Config, nodes: Sequence[Node]) -> list[str]:
    """Return what can never be placed: not on these nodes, and not on those that an autoscaler may add."""
    if config.cluster.wait_for_nodes or not placement_problems(config, nodes):
        return []
    hopeless = placement_problems(config, [*nodes, *coming_nodes(nodes)])
    return [*hopeless[:-1], f"{hopeless[-1]} ({_HOPE})"] if hopeless else []


def shortage(config: Config) -> str:
    """Say what the run asks for that the cluster does not have; empty when there is enough."""
    return "; ".join(placement_problems(config, cluster_nodes()))


def cluster_nodes() -> list[Node]:
    """Return the nodes that are up in the Ray that this process has joined."""
    return [
        Node(
            name=str(node["NodeManagerAddress"]),
            cpus=float(node["Resources"].get("CPU", 0.0)),
            gpus=float(node["Resources"].get("GPU", 0.0)),
            labels=dict(node.get("Labels") or {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def coming_nodes(nodes: Sequence[Node], file: Path = _BOOTSTRAP) -> list[Node]:
    """Return the nodes that the autoscaler may add to ``nodes``, one of them the head.

    Known on a head that ``ray up`` started only, from the cluster file that it left there. Where that does not say what
    a machine has, it counts as one that can hold anything.
    """
    try:
        cluster = yaml.safe_load(file.read_text(encoding="utf-8"))
        types, most = cluster["available_node_types"], int(cluster.get("max_workers", 0))
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return []
    coming = []
    for name, kind in types.items():
        if name == cluster.get("head_node_type") and len(types) > 1:
            continue
        resources = kind.get("resources") or {}
        node = Node(
            name=name,
            cpus=float(resources.get("CPU", 0.0 if resources else _PLENTY)),
            gpus=float(resources.get("GPU", 0.0 if resources else _PLENTY)),
            labels={**kind["labels"]} if kind.get("labels") else None,
        )
        up = sum((other.labels or {}).get(_NODE_TYPE) == name for other in nodes)
        coming += [node] * max(0, int(kind.get("max_workers", most)) - up)
    return coming[: max(0, most - (len(nodes) - 1))]


def peek(config: Config) -> list[Node]:
    """Return the nodes of the cluster that a run would join (``cluster.address`` or RAY_ADDRESS); starts nothing.

    Raises:
        UserError: The cluster cannot be joined from here.
    """
    if ray.is_initialized():
        return cluster_nodes()
    _join(config, config.cluster.address or os.environ["RAY_ADDRESS"])
    try:
        return cluster_nodes()
    finally:
        ray.shutdown()


def _join(config: Config, address: str) -> Any:
    origin = f"cluster.address={address}" if config.cluster.address else f"RAY_ADDRESS={address}"
    advice = "check that the cluster is up and the address is its head's, or leave it empty for a local Ray"
    return join(address, origin, advice)


def _start(config: Config, attempts: int = _START_ATTEMPTS) -> Any:
    for limit in _CALL_LIMITS:
        os.environ.setdefault(limit, str(_CALLS_SHOWN))
    try:
        return init_quietly(
            address="local",
            include_dashboard=config.cluster.dashboard,
            dashboard_host="127.0.0.1",
            object_store_memory=config.cluster.object_store_mb * 1024 * 1024,
        )
    except Exception as error:
        slow = _TOO_SLOW in str(error)  # a plain Exception: a busy machine took more than 30 s for a process of Ray
        if slow:
            ray.shutdown()
            if attempts > 1:
                log.warning("Ray took too long to start; starting it again")
                return _start(config, attempts - 1)
        elif not isinstance(error, (OSError, RuntimeError, ValueError)):
            raise
        advice = "see what else keeps this machine busy" if slow else "lower that if memory is short"
        raise UserError(
            f"a local Ray cannot be started (cluster.object_store_mb={config.cluster.object_store_mb}): "
            f"{_first_line(error)}; {advice}, and see that Ray may write to its temporary folder (RAY_TMPDIR)"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
