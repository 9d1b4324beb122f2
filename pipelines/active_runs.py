"""Runs that are going on in the Ray cluster that this process has joined, by the names of their conductors."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import Any

import ray

from pipelines.config import Config
from pipelines.joining import START_HEAD
from pipelines.status import RunStatus
from storage.errors import UserError

CONDUCTOR = "conductor"
_PREFIX = "slipstream-"
_ANSWER_S = 10.0
_VANISH_S = 20.0


def namespace_of(run: str) -> str:
    """Return the Ray namespace of a run's actors."""
    return _PREFIX + run


def active_runs() -> list[str]:
    """Return the names of the runs whose conductor lives, sorted."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    spaces = {actor["namespace"] for actor in actors if actor["name"] == CONDUCTOR}
    return sorted(space.removeprefix(_PREFIX) for space in spaces if space.startswith(_PREFIX))


def find_conductor(run: str) -> Any | None:
    """Return the conductor of a run; None when there is none."""
    try:
        return ray.get_actor(CONDUCTOR, namespace=namespace_of(run))
    except ValueError:
        return None


def wait_for_orphans(run: str, spared: Collection[str] = ()) -> None:
    """Return when no actor of a run but its conductor and ``spared`` has a name any more, or after a while.

    Actors go with the conductor that owned them, but not in the same moment; until then their names are taken, and so
    are the resources that they reserve.
    """
    space, deadline, known = namespace_of(run), time.monotonic() + _VANISH_S, {CONDUCTOR, *spared}
    while time.monotonic() < deadline:
        actors = ray.util.list_named_actors(all_namespaces=True)
        if not any(actor["namespace"] == space and actor["name"] not in known for actor in actors):
            return
        time.sleep(0.1)


def refuse_second(run: str) -> None:
    """Make sure that a run of this name can start: one that has ended and still answers for a while gives way.

    Raises:
        UserError: A run of this name is going on.
    """
    conductor = find_conductor(run)
    if conductor is None:
        return
    try:
        status: RunStatus | None = ray.get(conductor.status.remote(), timeout=_ANSWER_S)
    except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
        status = None  # busy, or Ray is about to start it again
    except ray.exceptions.RayActorError:
        return  # it was about to go
    if status is None or not status.terminal:
        at = f", at step {status.step} of {status.steps}" if status is not None else ""
        raise UserError(
            f"a run of the name {run} is going on in this cluster already{at}: watch it with `slipstream attach "
            f"{run}`, stop it with `slipstream attach {run} --stop`, or choose another run.name"
        )
    ray.kill(conductor)
    deadline = time.monotonic() + _VANISH_S
    while find_conductor(run) is not None and time.monotonic() < deadline:
        time.sleep(0.1)


def check_detachable(config: Config) -> None:
    """Raise ``UserError`` where the Ray that a run would use ends with this process; call it before anything starts."""
    if ray.is_initialized():
        own = bool(ray._private.worker._global_node.is_head())
    else:
        own = not (config.cluster.address or os.environ.get("RAY_ADDRESS"))
    if own:
        raise UserError(
            "a detached run needs a Ray cluster that outlives this program, and the local Ray that it starts ends with "
            f"it: start one ({START_HEAD}) and name it (RAY_ADDRESS=auto, or cluster.address=HOST:PORT), or leave "
            "--detach out"
        )
