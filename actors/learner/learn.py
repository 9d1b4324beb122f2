"""The learner's loop: it pulls commands and yields what came of them. Whoever owns the channel owns the threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from actors.bundles import LearnerHeader
from actors.learner.learner import Learner, StepReport
from actors.memory import release_freed_memory
from actors.weights import pack
from storage.records import Group, WeightsManifest
from storage.remote.parcels import outgoing

__all__ = [
    "Command",
    "Learner",
    "LearnerChannel",
    "LearnerEvent",
    "Save",
    "Saved",
    "SetLearningRate",
    "StepReport",
    "Stop",
    "TimedChannel",
    "TrainBatch",
    "Trained",
    "announce",
    "learn",
]  # fmt: skip

MODEL_COMPONENT = "model"
TRAINER_COMPONENT = "learner"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Train on one global batch of complete, scored groups."""

    step: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write the components ``model`` and ``learner`` under the folder ``path``.

    Where that is on another machine and not shared, they are sent to ``uri`` instead.
    """

    path: str
    uri: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLearningRate:
    """Take another peak learning rate from the next batch on; the only command without an event."""

    value: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop."""


Command = TrainBatch | SetLearningRate | Save | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A batch is done.

    Attributes:
        report: What the step did.
        manifest: Describes the weights to publish; None when there is no new version: the step moved nothing, or it is
            not this step's turn.
        buffer: uint8[nbytes], those weights; None together with ``manifest``, and on every rank but the leading one.
    """

    report: StepReport
    manifest: WeightsManifest | None
    buffer: npt.NDArray[np.uint8] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The components lie under ``path``: the folder that was asked for, or the URI."""

    path: str


LearnerEvent = Trained | Saved


class LearnerChannel(Protocol):
    """Where commands come from."""

    def receive(self) -> Command:
        """Wait for the next command."""


class TimedChannel(LearnerChannel, Protocol):
    """A channel that knows when the groups of the last batch were all here, on the clock ``time.perf_counter``."""

    received: float


def learn(learner: Learner, channel: LearnerChannel, *, takes_turns: bool = False) -> Iterator[LearnerEvent]:
    """Carry out commands until :class:`Stop`, one event per batch and per save, in order.

    Pull-based: the next command is received only when the caller asks for the next event, so a slow consumer of weights
    holds the learner back instead of piling up snapshots. With ``takes_turns`` nothing but weights and moments is held
    when an event is yielded: somebody else computes on the same hardware until the next command.
    """
    while True:
        command = channel.receive()
        if isinstance(command, TrainBatch):
            yield _trained(learner, command, takes_turns)  # no local name: a snapshot must not outlive the step
        elif isinstance(command, Save):
            with outgoing(command.path, command.uri) as parcel:
                learner.save_model(parcel.path / MODEL_COMPONENT)
                learner.save(parcel.path / TRAINER_COMPONENT)
            _rest(takes_turns)
            yield Saved(path=parcel.place)
        elif isinstance(command, SetLearningRate):
            learner.set_learning_rate(command.value)
        else:
            return


def _trained(learner: Learner, batch: TrainBatch, takes_turns: bool) -> Trained:
    report = learner.train_step(batch.groups, batch.step)
    manifest, buffer = _packed(learner) if report.published else (None, None)
    _rest(takes_turns)
    return Trained(report=report, manifest=manifest, buffer=buffer)


def _rest(takes_turns: bool) -> None:
    """Let go of what is free; gradients went with the update that used them."""
    if takes_turns:
        release_freed_memory(gpu=True)


def _packed(learner: Learner) -> tuple[WeightsManifest | None, npt.NDArray[np.uint8] | None]:
    """Pack what is published; every rank must call it, the leading one has the result."""
    weights = learner.published()
    return pack(weights, learner.version) if learner.leads else (None, None)


def announce(
    learner: Learner, channel: TimedChannel, *, takes_turns: bool = False
) -> Iterator[tuple[LearnerHeader, npt.NDArray[np.uint8] | None]]:
    """Run :func:`learn` and yield what the conductor is told: first what is published now, then each event.

    A buffer is forgotten as soon as the next pair is asked for: a snapshot is as large as the model, and none may live
    on through the next step.
    """
    manifest, buffer = _packed(learner)
    _rest(takes_turns)
    yield LearnerHeader(kind="ready", version=learner.version, manifest=manifest, metrics={}, advantages={}), buffer
    del buffer
    for event in learn(learner, channel, takes_turns=takes_turns):
        if isinstance(event, Trained):
            seconds = time.perf_counter() - channel.received
            header = LearnerHeader(
                kind="trained",
                version=learner.version,
                step=event.report.step,
                manifest=event.manifest,
                metrics={**event.report.metrics, "seconds_total": seconds},
                advantages=event.report.advantages,
                alarms=event.report.alarms,
            )
            buffer = event.buffer
            del event
            yield header, buffer
            del buffer
        else:
            version = learner.version
            yield LearnerHeader(kind="saved", version=version, metrics={}, advantages={}, directory=event.path), None
