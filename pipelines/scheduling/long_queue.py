"""The queue of long groups, and which round comes next: short, long, or the remainder of an epoch.

Groups that wait are split into those that may run in a short round and those that must not hold one up: left behind too
often, or predicted to be long. Order is never lost: within a class, who waited longest goes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipelines.scheduling.policy import Launch, RoundState
from storage.records import GroupKey

LongRule = Literal["off", "quantile", "median"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """When a group is long, and when kept tokens are too old.

    Attributes:
        long_rule: ``quantile``: the longest ``long_share`` of recent predictions are long; ``median``: those above
            ``median_factor`` times their median; ``off``: predictions do not matter.
        long_share: Share of prompts that rule ``quantile`` calls long.
        median_factor: Multiple of the median predicted length for rule ``median``.
        max_deferrals: Times that a round may leave a group behind before it waits for a long round.
        resume: Groups left behind keep their tokens.
        max_staleness: Versions that a kept token may be old when it is trained.
    """

    long_rule: LongRule = "off"
    long_share: float = 0.1
    median_factor: float = 1.5
    max_deferrals: int = 1
    resume: bool = True
    max_staleness: int = 4


@dataclass(slots=True)
class Queues:
    """Waiting groups by what they may do next, each list in waiting order.

    Attributes:
        parked: Completely written; they only lack a place in a step.
        racers: Left behind, but allowed into another short round.
        short: Never launched and not predicted to be long.
        long: For long rounds only: left behind too often, predicted to be long, or too old to wait any longer.
    """

    parked: list[GroupKey] = field(default_factory=list)
    racers: list[GroupKey] = field(default_factory=list)
    short: list[GroupKey] = field(default_factory=list)
    long: list[GroupKey] = field(default_factory=list)

    @property
    def for_short_rounds(self) -> list[GroupKey]:
        """Groups that a short round may take, in the order in which it takes them."""
        return self.parked + self.racers + self.short

    @property
    def for_long_rounds(self) -> list[GroupKey]:
        """Groups that a long round takes, in order."""
        return self.parked + self.long


def predicted_long(state: RoundState, key: GroupKey, rules: QueueRules) -> bool:
    """Return True when the predictor speaks and the rule calls its forecast long."""
    book = state.forecasts
    forecast = None if book is None else book.get(key)
    if book is None or forecast is None or rules.long_rule == "off":
        return False
    if rules.long_rule == "median":
        return forecast.longest > rules.median_factor * book.median()
    percentile = book.percentile(key)
    return percentile is not None and percentile >= 1.0 - rules.long_share


def predicted_share(state: RoundState, rules: QueueRules) -> float:
    """Share of drawn prompts that the rule sends straight to the long queue, in [0, 1); 0 without predictions."""
    if state.forecasts is None or rules.long_rule == "off":
        return 0.0
    if rules.long_rule == "quantile":
        return rules.long_share
    return state.forecasts.share_above(rules.median_factor * state.forecasts.median())


def sort_waiting(state: RoundState, rules: QueueRules, keys: Iterable[GroupKey]) -> Queues:
    """Put the waiting groups ``keys`` into their queues."""
    queues = Queues()
    for key in keys:
        group = state.waiting[key]
        if rules.resume and group.deferrals and not group.missing and not _expired(state, key, rules):
            queues.parked.append(key)
        elif group.deferrals >= rules.max_deferrals or _last_chance(state, key, rules):
            queues.long.append(key)
        elif group.deferrals:
            queues.racers.append(key)
        elif predicted_long(state, key, rules):
            queues.long.append(key)
        else:
            queues.short.append(key)
    return queues


def first_launch(state: RoundState, rules: QueueRules, short_target: int) -> Launch:
    """Choose the round and what it starts with; only ``draw`` is set while more prompts must be looked at.

    * A long round as soon as ``prompts_per_step`` long groups wait, or when the kept tokens of one would be too old
      for any later step; it is then filled up with short groups.
    * Otherwise a short round of ``short_target`` groups.
    * When an epoch cannot fill either, what it left runs together, filled up from the next epoch (round class long: it
      waits for everybody). So no group is carried past the first step of the next epoch, and none is lost.
    """
    wanted = state.prompts_per_step
    left_over = [key for key in state.waiting if key.epoch < state.epoch]
    exhausted = state.available == 0 or state.left_in_epoch == 0
    queues = sort_waiting(state, rules, left_over or state.waiting)
    if len(queues.for_long_rounds) >= wanted and len(queues.long) > 0:
        return start(state, rules, queues.for_long_rounds[:wanted], long=True)
    if any(_last_chance(state, key, rules) for key in queues.long):
        keys = (queues.for_long_rounds + queues.racers + queues.short)[:wanted]
        fill = wanted - len(keys)
        return start(
            state, rules, keys, long=True, fresh=fill if state.available is None else min(fill, state.available)
        )
    candidates = queues.for_short_rounds
    if len(candidates) >= short_target:
        return start(state, rules, candidates[:short_target], long=False)
    if not left_over and not exhausted:
        return Launch(draw=_to_draw(state, rules, short_target - len(candidates)))
    remainder = (queues.parked + queues.long + queues.racers + queues.short)[:wanted]
    fill = wanted - len(remainder)
    if state.available is not None:
        fill = min(fill, state.available)
    return start(state, rules, remainder, long=True, fresh=fill)


def refill(state: RoundState, rules: QueueRules, lacking: int) -> Launch:
    """Replace ``lacking`` groups that left the round untrained, by groups of the round's class if any wait."""
    queues = sort_waiting(state, rules, state.waiting)
    long = state.round_class == "long"
    keys = (queues.for_long_rounds if long else queues.for_short_rounds)[:lacking]
    fresh = lacking - len(keys)
    if state.available is not None:
        fresh = min(fresh, state.available)
    return start(state, rules, keys, long=long, fresh=fresh)


def start(state: RoundState, rules: QueueRules, keys: Sequence[GroupKey], *, long: bool, fresh: int = 0) -> Launch:
    """Launch waiting groups, anew where their kept tokens would be too old at the optimiser step."""
    return Launch(
        fresh=fresh,
        deferred=tuple(keys),
        restart=frozenset(key for key in keys if _expired(state, key, rules)),
        round_class="long" if long else "short",
    )


def _expired(state: RoundState, key: GroupKey, rules: QueueRules) -> bool:
    oldest = state.waiting[key].oldest_version
    return oldest is not None and (not rules.resume or state.version - oldest > rules.max_staleness)


def _last_chance(state: RoundState, key: GroupKey, rules: QueueRules) -> bool:
    """Whether this is the last step that may train the tokens that the group keeps; nothing may race it then."""
    oldest = state.waiting[key].oldest_version
    return rules.resume and oldest is not None and state.version - oldest == rules.max_staleness


def _to_draw(state: RoundState, rules: QueueRules, lacking: int) -> int:
    """Prompts to draw for ``lacking`` short ones; never beyond the epoch, whose remainder is a matter of its own."""
    count = math.ceil(lacking / (1.0 - predicted_share(state, rules)))
    limits = [limit for limit in (state.left_in_epoch, state.available) if limit is not None]
    return min([count, *limits])
