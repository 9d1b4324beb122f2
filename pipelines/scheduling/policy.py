"""What a scheduling policy decides, and what it may know. Pure: no clock, no Ray, no randomness of its own.

The conductor and the simulator call the same objects, in this order:

1. ``plan`` at the start of a round and after every group that finished. A launch may ask for prompts to be drawn only,
   so that their lengths can be predicted first; ``plan`` is then called again at once.
2. ``on_finish`` for a group that has all the samples it needs, scored.
3. ``should_stop`` after every ``plan``.
4. ``on_stop`` for each group still running when the round stops. The group then waits (:class:`WaitingGroup`) with one
   deferral more, until a later launch names it.

A group is in one place only: in the source, waiting (drawn and not running), launched in this round, or settled in the
ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pipelines.scheduling.forecasts import ForecastBook
from storage.records import GroupKey, RoundClass

Verdict = Literal["keep", "filter"]
StopAction = Literal["restart", "resume", "park"]


@dataclass(slots=True)
class GroupProgress:
    """How far a launched group is.

    Attributes:
        size: Samples launched.
        needed: Samples that make the group complete; 0 means all of them. Fewer where samples are over-launched: the
            first ``needed`` to be scored are kept, the others are cut off.
        written: Samples whose tokens are all written.
        finished: Samples written and scored.
        tokens: Tokens written by finished samples.
        deferrals: Times that a round left the group behind before.
        verdict: None until the group is complete.
    """

    size: int
    needed: int = 0
    written: int = 0
    finished: int = 0
    tokens: int = 0
    deferrals: int = 0
    verdict: Verdict | None = None

    @property
    def quota(self) -> int:
        """Samples that make the group complete."""
        return self.needed or self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingGroup:
    """A group that was drawn from the source and is not running; its ledger key is queued.

    Attributes:
        deferrals: Times that a round left it behind; 0 for a group that never ran.
        oldest_version: Version of the oldest token that it keeps; None when it keeps none.
        tokens: Tokens that it keeps, over all samples.
        longest: Tokens of its longest unfinished sample.
        missing: Samples that are not written to their end; 0 for a parked group, which only lacks its place in a step.
    """

    deferrals: int = 0
    oldest_version: int | None = None
    tokens: int = 0
    longest: int = 0
    missing: int = 0


@dataclass(slots=True)
class RoundState:
    """What is known about the round in progress.

    Attributes:
        step: Optimiser step that the round feeds, from 0.
        prompts_per_step: Groups that the step should train.
        available: Prompts that the source can still give; None when it never ends.
        groups: Launched groups in launch order.
        waves: Times that ``plan`` has launched something in this round.
        waiting: Groups that were drawn and do not run, oldest first: never launched, or left behind by a round.
        left_in_epoch: Prompts that the source can still give before its next epoch begins; None when epochs do not
            matter.
        epoch: Epoch of the prompt that the source gives next.
        version: Version of the weights that the round generates with.
        round_class: Kind of the round: that of its first launch; None before.
        forecasts: Predicted lengths of drawn groups; None while the predictor is silent.
    """

    step: int
    prompts_per_step: int
    available: int | None
    groups: dict[GroupKey, GroupProgress] = field(default_factory=dict)
    waves: int = 0
    waiting: dict[GroupKey, WaitingGroup] = field(default_factory=dict)
    left_in_epoch: int | None = None
    epoch: int = 0
    version: int = 0
    round_class: RoundClass | None = None
    forecasts: ForecastBook | None = None

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
        fresh: Prompts to draw from the source and start.
        draw: Prompts to draw from the source into ``RoundState.waiting`` without starting them. ``plan`` is called
            again as soon as their lengths are predicted (or the predictor has missed its deadline).
        deferred: Waiting groups to start, or to go on with, in this order.
        restart: Those of ``deferred`` that begin anew: the tokens that they keep are too old to be trained, or are not
            wanted. They count as waste.
        repeats: Groups (of ``deferred`` or launched before) to write once more, each under a key of its own: the
            original's with the next ``duplicate`` number.
        sample_ratio: Samples to launch for each sample that a group needs, at least 1.
        round_class: Kind of round, which decides the engine limits.
    """

    fresh: int = 0
    draw: int = 0
    deferred: tuple[GroupKey, ...] = ()
    restart: frozenset[GroupKey] = frozenset()
    repeats: tuple[GroupKey, ...] = ()
    sample_ratio: float = 1.0
    round_class: RoundClass = "short"

    @property
    def empty(self) -> bool:
        """True when there is nothing to start and nothing to draw."""
        return not (self.fresh or self.draw or self.deferred or self.repeats)

    @property
    def starts(self) -> bool:
        """True when something begins to run; such a launch counts as a wave."""
        return bool(self.fresh or self.deferred or self.repeats)


class SchedulePolicy(Protocol):
    """Decides; the conductor acts."""

    def plan(self, state: RoundState) -> Launch:
        """Return what to launch or draw now; called at the start of a round and whenever a group finished."""

    def on_finish(self, state: RoundState, key: GroupKey, rewards: Sequence[float | None]) -> Verdict:
        """Judge a group that is complete and scored; ``None`` marks a sample without a reward."""

    def should_stop(self, state: RoundState) -> bool:
        """Return True when the round's groups can go to the learner."""

    def on_stop(self, state: RoundState, key: GroupKey) -> StopAction:
        """Say what becomes of a group that is still running when the round stops.

        ``resume``: stop its rows, keep finished siblings and partial tokens, go on later. ``restart``: stop its rows
        and drop all of it. ``park``: nothing of it is left to write (scores are missing); leave it, and let it take
        its place in a later step.
        """


def zero_variance(rewards: Sequence[float | None]) -> bool:
    """Return True when a group teaches nothing: fewer than two rewards, or all of them equal."""
    known = [reward for reward in rewards if reward is not None]
    return len(known) < 2 or max(known) - min(known) < 1e-9
