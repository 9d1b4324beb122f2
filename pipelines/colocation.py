"""What ``cluster.placement: colocated`` asks of the rest of a configuration.

Rollout engines and learner then share hardware and take turns, so nothing may be written while the learner learns. On
GPUs the sharing is Ray's: it gives a part of a GPU to whom it fits best. An engine that takes more than half of one has
it to itself among engines, and leaves just the room that a learner asks for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.config import Config

_ASKED = "cluster.placement=colocated"
_EPS = 1e-9


def colocation_conflicts(config: Config) -> list[str]:
    """Return one sentence for each field that does not go with taking turns, with the nearest choice."""
    if not config.colocated:
        return []
    return [*_overlaps(config), *_labels(config), *_shares(config)]


def colocation_doubts(config: Config) -> list[str]:
    """Return what is allowed with colocated engines and learner and probably not meant."""
    rollout, learner = config.rollout, config.learner
    if not config.colocated or learner.workers <= rollout.workers:
        return []
    return [
        f"learner.workers={learner.workers} exceeds rollout.workers={rollout.workers}: with {_ASKED} some learners "
        "have no engine beside them, and their hardware idles while answers are written"
    ]


def _overlaps(config: Config) -> Iterator[str]:
    """What writes while the learner learns, or under weights that sleep takes away."""
    if config.asynchrony.pipeline == "stream":
        yield (
            f"asynchrony.pipeline=stream writes answers while the learner learns, and {_ASKED} has the engines sleep "
            "then: set asynchrony.pipeline=step, or cluster.placement=disaggregated"
        )
    if config.asynchrony.partial == "split":
        yield (
            f"asynchrony.partial=split begins answers under the weights before the newest, and with {_ASKED} engines "
            "wake with the newest only: set asynchrony.partial=off, or cluster.placement=disaggregated"
        )


def _labels(config: Config) -> Iterator[str]:
    if config.learner.labels != config.rollout.labels:
        yield (
            f"learner.labels and rollout.labels differ, and with {_ASKED} the learner goes where the engines are: give "
            "both the same"
        )


def _shares(config: Config) -> Iterator[str]:
    """How much of a GPU the engines and the learner take."""
    learner, gpus = config.learner, config.learner.num_gpus
    field = f"learner.num_gpus={gpus:g}"
    long = config.schedule.pools.long
    engines = [("rollout.num_gpus", config.rollout.num_gpus)]
    if long.workers and long.num_gpus:
        engines.append(("schedule.pools.long.num_gpus", long.num_gpus))
    if not gpus and not any(each for _, each in engines):
        return
    for name, each in engines:
        engine = f"{name}={each:g}"
        if not gpus or not each:
            yield (
                f"{engine} and {field}: with {_ASKED} they share GPUs, so both need a part of one: for instance "
                f"{name}=0.9 and learner.num_gpus=0.1"
            )
        elif each <= 0.5:
            yield (
                f"{engine}: with {_ASKED} two engines would fit on one GPU, and a learner on another; set {name} above "
                f"0.5, for instance {name}=0.9 and learner.num_gpus=0.1"
            )
        elif each + gpus > 1 + _EPS:
            least = math.floor((1 - gpus) * 100 + _EPS) / 100
            choice = f"{name}={least:g}" if least > 0.5 else f"{name}=0.9 and learner.num_gpus=0.1"
            yield (
                f"{engine} + {field} = {each + gpus:g}: with {_ASKED} both share one GPU, so they may take 1 together: "
                f"set {choice}"
            )
    if gpus and learner.workers > 1:
        yield (
            f"learner.workers={learner.workers} with {_ASKED} and {field}: Ray places a group of learners apart "
            "from engines, and even two on one GPU; set learner.workers=1, or cluster.placement=disaggregated"
        )
