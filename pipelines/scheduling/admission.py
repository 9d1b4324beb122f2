"""Streaming admission: how many groups may be under way, and which complete ones the next step trains.

AReaL (arXiv 2505.24298, equation 3) admits a trajectory while floor((N - 1) / B) <= i + eta: N groups counted from the
start of the run, B groups a step, i the version of the weights, eta the allowed staleness. Whatever is admitted could
then be trained in order within the bound. Groups that left untrained do not count, their places are given out again.
Here i counts steps: one without a gradient, or between two publications, makes no version, but its places are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.scheduling.policy import Launch, RoundState, StopAction, Verdict, zero_variance
from storage.records import GroupKey

Consumption = Literal["ready", "fifo", "freshest"]


class StreamAdmission:
    """A policy without rounds: launches whenever the inequality and the slots allow it."""

    def __init__(
        self,
        *,
        max_staleness: int,
        samples_per_prompt: int,
        dynamic_sampling: bool = False,
        max_refills: int = 0,
        lag: int = 0,
    ) -> None:
        """Set the bound, the rows of a group, and whether groups with equal rewards are replaced.

        ``max_refills`` is how many batches may be replaced for one step before it goes on with fewer groups.
        ``lag`` is by how many versions answers begin under older weights than the newest; the bound is less by so many.
        """
        self.max_staleness = max_staleness
        """Versions that a trained token may be old."""
        self._lag = lag
        self._rows = samples_per_prompt
        self._dynamic_sampling = dynamic_sampling
        self._max_refills = max_refills
        self.learning = False
        """Whether the learner has a batch, whose places are not free yet."""
        self.free_rows = 0
        """Rows that engines could take now."""

    def quota(self, state: RoundState) -> int:
        """Groups that may still be admitted under the inequality."""
        steps = self.max_staleness - self._lag + 1 - self.learning
        under_way = sum(group.verdict != "filter" for group in state.groups.values())
        return max(0, steps * state.prompts_per_step - under_way)

    def plan(self, state: RoundState) -> Launch:
        """Launch groups that wait (cut short before) and then fresh prompts, as many as may and can run."""
        count = min(self.quota(state), -(-self.free_rows // self._rows) if self.free_rows > 0 else 0)
        waiting = tuple(state.waiting)[:count]
        fresh = count - len(waiting)
        if state.available is not None:
            fresh = min(fresh, state.available)
        return Launch(fresh=fresh, deferred=waiting, restart=frozenset(waiting))

    def on_finish(self, state: RoundState, key: GroupKey, rewards: Sequence[float | None]) -> Verdict:
        """Filter zero-variance groups under dynamic sampling."""
        return "filter" if self._dynamic_sampling and zero_variance(rewards) else "keep"

    def gives_up(self, filtered: int, ready: int, wanted: int) -> bool:
        """Whether a step goes on with the ``ready`` groups, since ``filtered`` others taught nothing."""
        return self._dynamic_sampling and filtered + ready >= (1 + self._max_refills) * wanted

    def should_stop(self, state: RoundState) -> bool:
        """A stream does not stop."""
        return False

    def on_stop(self, state: RoundState, key: GroupKey) -> StopAction:
        """Groups that are cut short begin anew."""
        return "restart"


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A complete, scored group.

    Attributes:
        key: Its key.
        completed: Order of completion.
        launched: Order of launch.
        oldest_version: Version of its oldest token.
    """

    key: GroupKey
    completed: int
    launched: int
    oldest_version: int


def choose(
    ready: Iterable[ReadyGroup], count: int, *, consumption: Consumption, version: int, max_staleness: int
) -> list[ReadyGroup]:
    """Return the groups that the step at ``version`` trains.

    Those for which it is the last chance come first whatever the order, so that the bound costs no group its turn.
    """

    def rank(group: ReadyGroup) -> tuple[bool, int, int]:
        patient = version - group.oldest_version < max_staleness
        if consumption == "fifo":
            return patient, group.launched, 0
        if consumption == "freshest":
            return patient, -group.oldest_version, group.completed
        return patient, group.completed, 0

    return sorted(ready, key=rank)[:count]


def last_chances(floors: Mapping[GroupKey, int], version: int, max_staleness: int) -> list[GroupKey]:
    """Return the unfinished groups that must not miss the step at ``version``.

    ``floors`` holds, by group, the oldest version that any of its tokens may have. With a bound of 0 everything has to
    be trained at once anyway, and nothing is held up for it.
    """
    return [key for key, floor in floors.items() if version - floor >= max_staleness]
