"""What streaming-generator methods yield: first a small header, then the payload that nobody but its consumer fetches.

Samples travel in bundles, since a message between processes costs about as much as decoding a hundred tokens of a
small model. An envelope in a queue is ``(header, [ref, ...])``: a bare reference would be resolved to its value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.drafts.options import GateMode
from storage.records import (
    Assignment,
    Float32Array,
    GroupKey,
    Prompt,
    Sample,
    SampleHeader,
    SamplingParams,
    WeightsManifest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleHeader:
    """Announces a bundle of samples; ``samples[i]`` of the payload is described by ``items[i]``.

    Attributes:
        items: One header per sample.
        worker: Who yields it.
        busy_s: Seconds this worker's engine has been busy since it started.
        passes: Engine steps since then; row_passes: rows that emitted tokens, summed over them.
        version: Version that the worker's engine is on.
        drafts: What the worker's draft source counts (see ``HistoryDrafts.metrics``); empty without one.
    """

    items: tuple[SampleHeader, ...]
    worker: str
    busy_s: float
    version: int
    drafts: Mapping[str, float] = field(default_factory=dict)
    passes: int = 0
    row_passes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Payload: finished samples and the prompts they answer."""

    samples: tuple[Sample, ...]
    prompts: Mapping[GroupKey, Prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardEnvelope:
    """Queue item for reward workers.

    Attributes:
        header: Says which samples of the bundle are to be scored.
        refs: One reference to a :class:`Bundle`.
        deadlines: Seconds that the score of an answer may take, by group; without an entry, ``reward.timeout_s``.
    """

    header: BundleHeader
    refs: list[Any]
    deadlines: Mapping[GroupKey, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where the tokens lie that an interrupted sample goes on behind.

    Attributes:
        key: Its group; index: its position among its siblings.
        position: Its position in the bundle.
        refs: One reference to a :class:`Bundle`.
    """

    key: GroupKey
    index: int
    position: int
    refs: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a rollout worker's ``generate``.

    Attributes:
        number: Names the call, so that some of its samples can be stopped.
        assignments: What to write.
        resumptions: Samples of theirs that begin with tokens written earlier.
        packs: References to draft packs.
        row_limit: Rows that the worker should decode at once while it works on this call; 0: as many as it can.
        drafts: Whether its rows may be drafted for; gate: which rule decides whether drafts pay. Both hold for the
            worker from here on, and need no call of their own, which a successor of the worker would miss.
        term: Of the worker, that the call belongs to.
    """

    number: int
    assignments: tuple[Assignment, ...]
    resumptions: tuple[Resumption, ...] = ()
    packs: tuple[Any, ...] = ()
    row_limit: int = 0
    drafts: bool = True
    gate: GateMode = "auto"
    term: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt of a person who watches, to be answered by the current policy; no part of the training.

    Attributes:
        prompt: Text, or chat messages with ``role`` and ``content``.
        requests: Identity of each answer's request, which also keys its noise; no training sample has one of them.
        sampling: How to draw.
        chat_template, system_prompt: How the run renders its prompts.
        deadline_s: Longest time that it may take.
    """

    prompt: str | Sequence[Mapping[str, str]]
    requests: tuple[int, ...]
    sampling: SamplingParams
    chat_template: bool | None
    system_prompt: str
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnvelope:
    """Where the samples of one complete group lie.

    Attributes:
        key: Ledger key.
        places: For each sibling in index order, (position in ``refs``, position in that bundle).
        refs: References to scored bundles.
    """

    key: GroupKey
    places: tuple[tuple[int, int], ...]
    refs: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnvelope:
    """All groups of a step for the learner, in one message: one for each group would cost a round trip each."""

    step: int
    groups: tuple[GroupEnvelope, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RateEnvelope:
    """Tells the learner its peak learning rate from the next step on; nothing is answered."""

    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnvelope:
    """Tells the learner to write its components under ``directory``, or to send them to ``uri`` if that is not here."""

    directory: str
    uri: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEnvelope:
    """Queue item for the history role: groups that were trained or evaluated.

    Attributes:
        split: ``train`` or the evaluation set.
        step: Step that they belong to.
        groups: Where the samples are.
        advantages: Per group, float32[group size]; empty for an evaluation.
    """

    split: str
    step: int
    groups: tuple[GroupEnvelope, ...]
    advantages: Mapping[GroupKey, Float32Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopEnvelope:
    """Ends the loop of the consumer that takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerHeader:
    """What the learner tells the conductor.

    Attributes:
        kind: ``ready`` once, before the first step; ``trained``; ``saved``.
        step: Step that was trained; -1 otherwise.
        version: Version of the weights after the event.
        manifest: Describes the payload, a flat uint8 buffer; None where no new weights exist (the payload is None).
        metrics: Numbers of the step.
        advantages: Per group, float32[group size].
        directory: Where components were saved.
        alarms: What a person should read about the step.
    """

    kind: str
    version: int
    step: int = -1
    manifest: WeightsManifest | None = None
    metrics: Mapping[str, float]
    advantages: Mapping[GroupKey, Float32Array]
    directory: str = ""
    alarms: tuple[str, ...] = ()


def refs_in(item: Any) -> list[Any]:
    """References that a queue item holds; those that several of its groups share are named for each of them."""
    if isinstance(item, StepEnvelope | RecordEnvelope):
        return [ref for group in item.groups for ref in group.refs]
    return list(item.refs) if isinstance(item, RewardEnvelope) else []


def gather(bundles: Sequence[Bundle], places: Sequence[tuple[int, int]]) -> tuple[Prompt, tuple[Sample, ...]]:
    """Pick the siblings of one group out of fetched bundles."""
    samples = tuple(bundles[ref].samples[position] for ref, position in places)
    first_ref, _ = places[0]
    return bundles[first_ref].prompts[samples[0].key], samples


def bundles_of(samples: Sequence[Sample], prompts: Mapping[GroupKey, Prompt]) -> Bundle:
    """Pack samples with just the prompts that they need."""
    return Bundle(samples=tuple(samples), prompts={sample.key: prompts[sample.key] for sample in samples})
