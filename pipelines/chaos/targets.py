"""What may be killed: the processes of one run, by what they do, and who is next.

A process is known by its place in the run (``rollout-1``, ``learner``), which its successor takes over. Before a signal
is sent, a task on the process's own node looks whether that pid still is a worker of this Ray session.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil
import ray
from ray._private.state import actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipelines.active_runs import CONDUCTOR, namespace_of
from pipelines.length_forecasts import application_of

NODE = "node"
DRIVER = "driver"
DRAFTS = "drafts-"
"""Begin of the places of retrievers that belong to one node."""
_QUEUE = "queue"
_PREDICTOR = "predictor"
_KINDS = {
    "rollout": "rollout",
    "reward": "reward",
    "learner": "learner",
    "history": "retriever",
    "drafts": "retriever",
    CONDUCTOR: CONDUCTOR,
}
_SERVE_SPACE, _SERVE_PREFIX = "serve", "SERVE_REPLICA::"
_KILL_S = 60.0
_PAIRS = 0.2
_PAUSE_S = (0.0, 3.0)


@dataclass(frozen=True, slots=True)
class Process:
    """A living process of a run.

    Attributes:
        place: Its place in the run, without the number of its incarnation.
        kind: What it does: rollout, reward, learner, retriever, conductor, queue, predictor or driver.
        pid: Its process id on its node.
        node: Ray's id of that node; empty for a driver.
    """

    place: str
    kind: str
    pid: int
    node: str


@dataclass(frozen=True, slots=True)
class Draw:
    """What comes next: the kinds to kill at once, which of several, and how long to wait before."""

    kinds: tuple[str, ...]
    which: float
    pause_s: float

    def choose(self, living: Mapping[str, Process]) -> list[Process]:
        """Pick a process of each kind; a kind of which none lives right now is left out, and so are nodes."""
        chosen = []
        for kind in self.kinds:
            places = sorted(place for place, process in living.items() if process.kind == kind)
            if places:
                chosen.append(living[places[int(self.which * len(places))]])
        return chosen


def draws(seed: int, kinds: Sequence[str]) -> Iterator[Draw]:
    """Yield what comes next, for ever and the same for the same seed: each kind once in a random order, then again.

    Now and then a second kind dies in the same moment; any two may meet.
    """
    rng = random.Random(seed)
    while True:
        for kind in rng.sample(list(kinds), len(kinds)):
            others = [other for other in kinds if other != kind]
            second = (rng.choice(others),) if others and rng.random() < _PAIRS else ()
            yield Draw((kind, *second), rng.random(), rng.uniform(*_PAUSE_S))


def living(run: str) -> dict[str, Process]:
    """Return the processes of a run that Ray calls alive, by place."""
    found: dict[str, Process] = {}
    replica = f"{_SERVE_PREFIX}{application_of(run)}#"
    for named in ray.util.list_named_actors(all_namespaces=True):
        name, space = named["name"], named["namespace"]
        if space == namespace_of(run):
            place = name.split(".")[0]
            kind = _QUEUE if place.endswith("-queue") else _KINDS.get(place.split("-")[0], "")
        elif space == _SERVE_SPACE and name.startswith(replica):
            place = kind = _PREDICTOR
        else:
            continue
        try:
            actor = ray.get_actor(name, namespace=space)
        except ValueError:  # it has just gone
            continue
        info = actors(actor._actor_id.hex())
        if kind and info and info["State"] == "ALIVE" and info["Pid"]:
            found[place] = Process(place, kind, info["Pid"], info["Address"]["NodeID"])
    return found


def kill(process: Process) -> str:
    """End a process of this Ray session with SIGKILL, on whatever node; returns why it was spared, or nothing."""
    there = NodeAffinitySchedulingStrategy(process.node, soft=False)
    remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(end_worker)
    try:
        spared: str = ray.get(remote.remote(process.pid, session_name()), timeout=_KILL_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        return f"its node does not answer ({type(error).__name__})"
    return spared


def session_name() -> str:
    """Name of the Ray session that this process belongs to."""
    return str(ray._private.worker.global_worker.node.session_name)


def end_worker(pid: int, session: str) -> str:
    """Send SIGKILL to a worker of a Ray session on this machine; returns why not, or nothing.

    Args:
        pid: The process.
        session: Name of the session: its parent must be a raylet of that one, and its title that of an actor.
    """
    try:
        process = psutil.Process(pid)
        title, parent = " ".join(process.cmdline()), process.parent()
        above = "" if parent is None else " ".join(parent.cmdline())
    except psutil.Error:
        return "it has gone already"
    if not title.startswith("ray::") or title.startswith("ray::IDLE") or "raylet" not in above or session not in above:
        return f"process {pid} is something else by now ({title[:80]})"
    os.kill(pid, signal.SIGKILL)
    return ""
