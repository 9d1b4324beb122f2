"""Whether a cluster can hold a run: the table of requested and available, and what can never be placed.

Ray would wait for ever for a label that nobody has or for a node that is large enough; here the same question is asked
of the list of nodes before anything starts. What is refused is proven: each rule is a necessary condition. Whether
everything fits together is a packing problem, so a packing that was not found is a doubt and no error.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from pipelines.config import Config
from pipelines.placement import Need, Node, learner_need, matches, needs_of, rollout_need

_NODE_ID = "ray.io/node-id"
_EPS = 1e-9


def placement_problems(config: Config, nodes: Sequence[Node]) -> list[str]:
    """Return what can never be placed on these nodes, one sentence each, naming the field and what there is."""
    needs = needs_of(config)
    problems: list[str] = []
    sound: list[Need] = []
    for need in needs:
        problem = _label_problem(need, nodes) or _size_problem(need, nodes) or _count_problem(need, nodes)
        if problem:
            problems.append(problem)
        else:
            sound.append(need)
    problems += _joint_problems(sound, nodes)
    problems += _beside_problems(config, nodes)
    return list(dict.fromkeys(problems))


def placement_doubts(config: Config, nodes: Sequence[Node]) -> list[str]:
    """Return what may wait or go to the wrong place, one sentence each."""
    doubts = []
    needs = needs_of(config)
    if not placement_problems(config, nodes):
        left = _unplaced(needs, nodes)
        if left:
            doubts.append(
                f"{left} may not fit beside the others: no node has enough left once they are placed; some actors may "
                f"wait until cluster.start_deadline_s={config.cluster.start_deadline_s:g} s"
            )
    doubts += [doubt for need in needs if (doubt := _trap(need, nodes))]
    for need in needs:
        idle = need.cpus_field and not need.cpus and not need.gpus
        if idle and need.count > 1 and sum(matches(need.labels, node) for node in nodes) > 1:
            doubts.append(
                f"{need.cpus_field}=0: Ray may put all {need.count} of {need.count_field} on one node, because they "
                "reserve nothing; reserve CPUs or GPUs to spread them"
            )
    return doubts


def _trap(need: Need, nodes: Sequence[Node]) -> str:
    """Say that Ray may wait for a part of a GPU on a full node.

    It counts what is left of all GPUs of a node together, and keeps an actor where that would do though no GPU has
    enough, whatever other nodes have.
    """
    if not 0 < need.gpus < 1:
        return ""
    alike = math.floor(1 / need.gpus + _EPS)
    for node in nodes:
        left = node.gpus * (1 - alike * need.gpus)
        if matches(need.labels, node) and left + _EPS >= need.gpus and need.count > node.gpus * alike:
            enough = node.gpus / (node.gpus * alike + 1)
            return (
                f"{need.gpus_field}={need.gpus:g}: a node of {node.gpus:g} GPUs that is full of them seems to have "
                f"{left:.3g} left, and Ray may wait there for ever for another one while other nodes are free; set it "
                f"above {enough:.3f}"
            )
    return ""


def table_lines(config: Config, nodes: Sequence[Node]) -> list[str]:
    """Return the table of what is requested and what there is, a line per role and resource, and who takes turns."""
    rows = [("role", "resource", "requested", "available", "nodes")]
    for need in needs_of(config):
        fitting = [node for node in nodes if matches(need.labels, node)]
        where = f"{len(fitting)} with {_words(need.labels)}" if need.labels else f"{len(fitting)}"
        amounts = {"CPU": (need.cpus, sum(n.cpus for n in fitting)), "GPU": (need.gpus, sum(n.gpus for n in fitting))}
        for resource, (each, there) in amounts.items():
            if each or (resource == "CPU" and not need.gpus):
                asked = f"{need.count} x {each:g} = {need.count * each:g}"
                rows.append((need.role, resource, asked, f"{there:g}", where))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, *_turns_line(config)]


def _turns_line(config: Config) -> list[str]:
    """Say what colocated roles share; a GPU that two of them take parts of is one."""
    if not config.colocated:
        return []
    shared = max(config.rollout.workers, config.learner.workers)
    where = f"{shared} GPU{'s' if shared > 1 else ''}" if config.learner.num_gpus else "the same CPUs and memory"
    return [f"cluster.placement=colocated: rollout and learner take turns on {where}"]


def _words(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def _label_problem(need: Need, nodes: Sequence[Node]) -> str:
    """Say that no node has the labels; names the nearest ones that exist."""
    if any(matches(need.labels, node) for node in nodes):
        return ""
    for key, value in need.labels.items():
        if not any(matches({key: value}, node) for node in nodes):
            there = _existing(nodes)
            near = difflib.get_close_matches(f"{key}={value}", there, n=1, cutoff=0.5)
            same_key = [label for label in there if label.startswith(f"{key}=")]
            if near or same_key:
                hint = f"did you mean {near[0] if near else same_key[0]}?"
            else:
                hint = f"there are {', '.join(there[:8])}" if there else "no node has labels (ray start --labels)"
            return f"{need.labels_field}: a label nobody has: {key}={value}; {hint}"
    return f"{need.labels_field}: no node has all of {_words(need.labels)}, though each of them exists"


def _existing(nodes: Iterable[Node]) -> list[str]:
    labels = {f"{k}={v}" for node in nodes for k, v in (node.labels or {}).items() if k != _NODE_ID}
    return sorted(labels, key=lambda label: (label.startswith("ray.io/"), label))


def _room(need: Need, node: Node) -> int:
    """How many of the actors alone fit on an empty node; exact, since they are alike."""
    by_cpus = need.count if need.cpus == 0 else math.floor(node.cpus / need.cpus + _EPS)
    if need.gpus == 0:
        by_gpus = need.count
    elif need.gpus < 1:  # a fraction lies on one GPU
        by_gpus = math.floor(node.gpus + _EPS) * math.floor(1 / need.gpus + _EPS)
    else:
        by_gpus = math.floor(node.gpus / need.gpus + _EPS)
    return min(by_cpus, by_gpus)


def _on(need: Need) -> str:
    return f" with {_words(need.labels)}" if need.labels else ""


def _size_problem(need: Need, nodes: Sequence[Node]) -> str:
    """Say that one actor is larger than any node."""
    fitting = [node for node in nodes if matches(need.labels, node)]
    if any(_room(need, node) for node in fitting):
        return ""
    for each, field, unit, most in (
        (need.cpus, need.cpus_field, "CPUs", max((node.cpus for node in fitting), default=0.0)),
        (need.gpus, need.gpus_field, "GPUs", max((node.gpus for node in fitting), default=0.0)),
    ):
        if each > most:
            return f"{field}={each:g}: the largest node{_on(need)} has {most:g} {unit}; ask for at most that"
    return (
        f"{need.cpus_field}={need.cpus:g} and {need.gpus_field}={need.gpus:g}: no node{_on(need)} has both; "
        "lower one of them"
    )


def _count_problem(need: Need, nodes: Sequence[Node]) -> str:
    """Say that too few of the actors fit, were they alone."""
    room = sum(_room(need, node) for node in nodes if matches(need.labels, node))
    if room >= need.count:
        return ""
    asked = [f"{field}={each:g}" for field, each in _asked(need)]
    return (
        f"{need.count_field}={need.count} with {' and '.join(asked)}: the nodes{_on(need)} have room for {room}; "
        "lower one of them, or add nodes"
    )


def _asked(need: Need) -> Iterator[tuple[str, float]]:
    if need.cpus:
        yield need.cpus_field, need.cpus
    if need.gpus:
        yield need.gpus_field, need.gpus


def _joint_problems(needs: Sequence[Need], nodes: Sequence[Node]) -> Iterator[str]:
    """Say which roles together ask for more than all nodes that any of them may use have: the smallest such sets."""
    for resource in ("CPU", "GPU"):
        amount = {id(n): n.count * (n.cpus if resource == "CPU" else n.gpus) for n in needs}
        askers = [need for need in needs if amount[id(need)]]
        found: list[set[int]] = []
        for size in range(2, len(askers) + 1):
            for group in combinations(askers, size):
                members = {id(need) for need in group}
                if any(smaller <= members for smaller in found):
                    continue
                usable = [node for node in nodes if any(matches(need.labels, node) for need in group)]
                there = sum(node.cpus if resource == "CPU" else node.gpus for node in usable)
                asked = sum(amount[id(need)] for need in group)
                if asked > there + _EPS:
                    found.append(members)
                    yield _joint_sentence(group, resource, asked, there)


def _beside_problems(config: Config, nodes: Sequence[Node]) -> Iterator[str]:
    """Say that no node has room for an engine and a learner, where the one goes to the node of the other."""
    if not config.colocated:
        return
    engine, learner = rollout_need(config), learner_need(config)
    fitting = [node for node in nodes if matches(engine.labels, node) and matches(learner.labels, node)]
    asked = engine.cpus + learner.cpus
    if fitting and all(node.cpus + _EPS < asked for node in fitting):
        yield (
            f"{engine.cpus_field}={engine.cpus:g} + {learner.cpus_field}={learner.cpus:g} = {asked:g} CPUs: with "
            f"cluster.placement=colocated one node must have both, the largest has {max(n.cpus for n in fitting):g}; "
            "lower one of them"
        )


def _joint_sentence(group: Sequence[Need], resource: str, asked: float, there: float) -> str:
    terms = []
    for need in group:
        field, each = (need.cpus_field, need.cpus) if resource == "CPU" else (need.gpus_field, need.gpus)
        terms.append(f"{field}={each:g}" + (f" x {need.count} ({need.count_field})" if need.count > 1 else ""))
    labels = {_words(need.labels) for need in group}
    where = f"nodes with {' or '.join(sorted(labels))}" if all(labels) else "nodes"
    return (
        f"{' + '.join(terms)} = {asked:g} {resource}s, the {where} have {there:g}: some actors would wait for ever; "
        "lower them, or add nodes"
    )


@dataclass(slots=True)
class _Spot:
    """What is left of a node while actors are placed on it: CPUs, and the free part of each GPU."""

    node: Node
    cpus: float
    gpus: list[float]

    def takes(self, need: Need) -> list[tuple[int, float]] | None:
        """Return the GPUs and the parts of them that an actor would get, None when it does not fit."""
        if self.cpus + _EPS < need.cpus or not matches(need.labels, self.node):
            return None
        if need.gpus >= 1:
            whole = [(index, 1.0) for index, rest in enumerate(self.gpus) if rest >= 1 - _EPS][: int(need.gpus)]
            return whole if len(whole) == int(need.gpus) else None
        if need.gpus > 0:
            parts = [index for index, rest in enumerate(self.gpus) if rest + _EPS >= need.gpus]
            return [(min(parts, key=lambda index: self.gpus[index]), need.gpus)] if parts else None
        return []


def _unplaced(needs: Sequence[Need], nodes: Sequence[Node]) -> str:
    """Place all actors, the most particular and largest first, and the first that fits nowhere; empty if all do.

    A node without GPUs is filled before one with them, and a fuller one before an emptier.
    """
    spots = [_Spot(node, node.cpus, [1.0] * int(node.gpus)) for node in nodes]
    for need in sorted(needs, key=lambda n: (sum(matches(n.labels, node) for node in nodes), -n.gpus, -n.cpus)):
        for number in range(need.count):
            options = [(spot, parts) for spot in spots if (parts := spot.takes(need)) is not None]
            if not options:
                return f"{need.role} ({number} of {need.count} placed)"
            spot, parts = min(options, key=lambda option: (len(option[0].gpus), option[0].cpus))
            spot.cpus -= need.cpus
            for index, part in parts:
                spot.gpus[index] -= part
    return ""
