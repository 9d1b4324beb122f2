"""What a scheduling policy decides, and what it may know. Pure: no clock, no Ray, no randomness of its own.

The conductor and the simulator call the same objects: ``plan`` for what to launch, ``on_finish`` for a group whose
samples are all scored, ``should_stop`` after every event, and ``on_stop`` for each group still running when a round is
stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from storage.records import GroupKey, RoundClass

Verdict = Literal["keep", "filter"]
StopAction = Literal["restart", "resume", "park"]


@dataclass(slots=True)
class GroupProgress:
    """How far a launched group is.

    Attributes:
        size: Samples in the group.
        finished: Samples written and scored.
        tokens: Tokens written by finished samples.
        verdict: None until every sample is scored.
    """

    size: int
    finished: int = 0
    tokens: int = 0
    verdict: Verdict | None = None


@dataclass(slots=True)
class RoundState:
    """What is known about the round in progress.

    Attributes:
        step: Optimiser step that the round feeds, from 0.
        prompts_per_step: Groups that the step should train.
        available: Prompts that the source can still give; None when it never ends.
        groups: Launched groups in launch order.
        waves: Times that ``plan`` has launched something in this round.
        deferred: Groups that earlier rounds left unfinished, oldest first.
    """

    step: int
    prompts_per_step: int
    available: int | None
    groups: dict[GroupKey, GroupProgress] = field(default_factory=dict)
    waves: int = 0
    deferred: Sequence[GroupKey] = ()

    def kept(self) -> list[GroupKey]:
        """Groups that are complete and go to the learner."""
        return [key for key, group in self.groups.items() if group.verdict == "keep"]

    def running(self) -> list[GroupKey]:
        """Groups with samples outstanding."""
        return [key for key, group in self.groups.items() if group.verdict is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start now.

    Attributes:
        fresh: Prompts to draw from the source.
        deferred: Deferred groups to go on with.
        round_class: Kind of round, which decides the engine limits.
    """

    fresh: int
    deferred: tuple[GroupKey, ...] = ()
    round_class: RoundClass = "short"

    @property
    def empty(self) -> bool:
        """True when there is nothing to start."""
        return not self.fresh and not self.deferred


class SchedulePolicy(Protocol):
    """Decides; the conductor acts."""

    def plan(self, state: RoundState) -> Launch:
        """Return what to launch now; called at the start of a round and whenever a group finished."""

    def on_finish(self, state: RoundState, key: GroupKey, rewards: Sequence[float | None]) -> Verdict:
        """Judge a group whose samples are all scored; ``None`` marks a sample without a reward."""

    def should_stop(self, state: RoundState) -> bool:
        """Return True when the round's groups can go to the learner."""

    def on_stop(self, state: RoundState, key: GroupKey) -> StopAction:
        """Say what becomes of a group that is still running when the round stops."""


def zero_variance(rewards: Sequence[float | None]) -> bool:
    """Return True when a group teaches nothing: fewer than two rewards, or all of them equal."""
    known = [reward for reward in rewards if reward is not None]
    return len(known) < 2 or max(known) - min(known) < 1e-9
