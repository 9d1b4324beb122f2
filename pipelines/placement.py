"""What each role asks of the node that it runs on: CPUs, GPUs (fractions share one) and node labels.

Wiring takes Ray's options from here and the preflight its table, so that what is checked is what is asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.config import Config

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"(?:[A-Za-z0-9.-]{{1,253}}/)?{_NAME}")
_SELECTOR = re.compile(rf"!?(?:in\({_NAME}(?:, ?{_NAME})*\)|{_NAME})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the like actors of a role ask for.

    Attributes:
        role: Name of the role, for people.
        count: How many actors.
        count_field: Field that says how many; empty where there is always one.
        cpus: Ray CPUs that each reserves; cpus_field is where that is set.
        gpus: Ray GPUs that each reserves; gpus_field is where that is set, empty for a role that takes none.
        labels: Label selector that its node must satisfy; labels_field is where that is set.
    """

    role: str
    count: int
    count_field: str = ""
    cpus: float
    cpus_field: str
    gpus: float = 0.0
    gpus_field: str = ""
    labels: Mapping[str, str]
    labels_field: str

    def options(self) -> dict[str, Any]:
        """Return the options of ``ray.remote`` that place one of the actors."""
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        if self.labels:
            options["label_selector"] = dict(self.labels)
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that is up, or one that the cluster may add.

    Attributes:
        name: Address, or node type.
        cpus: CPUs in all, whoever uses them.
        gpus: GPUs in all.
        labels: Its labels; None when they are not known before it is up.
    """

    name: str
    cpus: float
    gpus: float
    labels: Mapping[str, str] | None


def rollout_need(config: Config) -> Need:
    """Return what rollout workers of the regular pool ask for."""
    rollout = config.rollout
    return Need(
        role="rollout",
        count=rollout.workers - config.schedule.pools.long.workers,
        count_field="rollout.workers",
        cpus=rollout.num_cpus,
        cpus_field="rollout.num_cpus",
        gpus=rollout.num_gpus,
        gpus_field="rollout.num_gpus",
        labels=rollout.labels,
        labels_field="rollout.labels",
    )


def long_need(config: Config) -> Need:
    """Return what rollout workers of the long pool ask for; what it leaves open is as in the regular pool."""
    regular, long = rollout_need(config), config.schedule.pools.long
    pool = "schedule.pools.long"
    return Need(
        role="rollout, long pool",
        count=long.workers,
        count_field=f"{pool}.workers",
        cpus=long.num_cpus or regular.cpus,
        cpus_field=f"{pool}.num_cpus" if long.num_cpus else regular.cpus_field,
        gpus=long.num_gpus or regular.gpus,
        gpus_field=f"{pool}.num_gpus" if long.num_gpus else regular.gpus_field,
        labels=long.labels or regular.labels,
        labels_field=f"{pool}.labels" if long.labels else regular.labels_field,
    )


def reward_need(config: Config) -> Need:
    """Return what reward workers ask for."""
    return Need(
        role="reward",
        count=config.reward.workers,
        count_field="reward.workers",
        cpus=config.reward.num_cpus,
        cpus_field="reward.num_cpus",
        labels=config.reward.labels,
        labels_field="reward.labels",
    )


def learner_need(config: Config) -> Need:
    """Return what each learner asks for."""
    return Need(
        role="learner, beside rollout" if config.colocated else "learner",
        count=config.learner.workers,
        count_field="learner.workers",
        cpus=config.learner.num_cpus,
        cpus_field="learner.num_cpus",
        gpus=config.learner.num_gpus,
        gpus_field="learner.num_gpus",
        labels=config.learner.labels,
        labels_field="learner.labels",
    )


def coordination_need(config: Config) -> Need:
    """Return what conductor, queues and history ask for: no CPU of their own, but perhaps a node that stays."""
    return Need(
        role="conductor",
        count=1,
        cpus=0.0,
        cpus_field="",
        labels=config.cluster.labels,
        labels_field="cluster.labels",
    )


def needs_of(config: Config) -> list[Need]:
    """Return what all roles of a run ask for; roles without actors are left out."""
    predictor = Need(
        role="length predictor",
        count=int(config.predicts_lengths),
        cpus=config.length_predictor.num_cpus,
        cpus_field="length_predictor.num_cpus",
        labels={},
        labels_field="",
    )
    needs = [
        coordination_need(config),
        rollout_need(config),
        long_need(config),
        reward_need(config),
        learner_need(config),
        predictor,
    ]
    return [need for need in needs if need.count]


def request_problems(config: Config) -> list[str]:
    """Return the requests that Ray would refuse on any cluster: malformed labels, parts of several GPUs."""
    return list(dict.fromkeys(_malformed(config)))  # pools may share a field: said once


def _malformed(config: Config) -> Iterator[str]:
    for need in needs_of(config):
        for key, value in need.labels.items():
            if not _KEY.fullmatch(key):
                yield f"{need.labels_field}: {key!r} is no label: letters, digits, - _ . after an optional prefix/"
            if not _SELECTOR.fullmatch(value):
                yield f"{need.labels_field}.{key}={value!r} is no label value: write a, !a, in(a,b) or !in(a,b)"
        if need.gpus > 1 and need.gpus != int(need.gpus):
            yield (
                f"{need.gpus_field}={need.gpus:g}: more than one GPU must be a whole number; "
                f"use {math.floor(need.gpus)} or {math.ceil(need.gpus)}"
            )


def matches(labels: Mapping[str, str], node: Node) -> bool:
    """Return whether a node satisfies a label selector; one that is not up yet may have any label."""
    return node.labels is None or all(_holds(value, node.labels.get(key)) for key, value in labels.items())


def _holds(selector: str, value: str | None) -> bool:
    negated = selector.startswith("!")
    body = selector.removeprefix("!")
    choices = body[3:-1].split(",") if body.startswith("in(") else [body]
    return (value in [choice.strip() for choice in choices]) != negated
