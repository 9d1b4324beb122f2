"""Streaming admission: how many groups may be under way, and which complete ones the next step trains.

AReaL (arXiv 2505.24298, equation 3) admits a trajectory while floor((N - 1) / B) <= i + eta: N groups counted from the
start of the run, B groups a step, i the version of the weights, eta the allowed staleness. Whatever is admitted could
then be trained in order within the bound. Groups that left untrained do not count, their places are given out again.
Here i counts steps: one without a gradient, or between two publications, makes no version, but its places are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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

    def oldest_start(self, version: int) -> int:
        """Version that answers launched while ``version`` is the newest must at least begin under: no worker gets any
        before it has taken the newest weights.

        The inequality counts on it. An answer that begins under the version before is due one step sooner than its
        place: at a bound of 1 the next step would wait for it, with the learner idle for as long as it is written.
        """
        return version - self._lag

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
    ready: Iterable[ReadyGroup],
    unfinished: Iterable[int],
    count: int,
    *,
    consumption: Consumption,
    version: int,
    max_staleness: int,
    waits: bool,
) -> list[ReadyGroup] | None:
    """Return what the step at ``version`` trains: groups in the order of ``consumption``, as far as the bound lets it.

    Whatever the order, so many old groups are among them that later steps can train the rest of their age within the
    bound. Where these are not complete yet the step ``waits`` for them (the result is None), or else goes without.

    Args:
        ready: Complete groups.
        unfinished: Of each group under way, the oldest version that any of its tokens may have.
        count: Groups of a step.
        consumption: Which of them come first.
        version: Version of the newest weights.
        max_staleness: Versions that a trained token may be old.
        waits: Whether the step waits for what it owes.
    """

    def rank(group: ReadyGroup) -> tuple[int, int]:
        if consumption == "fifo":
            return group.launched, 0
        return (-group.oldest_version if consumption == "freshest" else 0), group.completed

    queue = sorted(ready, key=rank)
    ages = Counter(group.oldest_version for group in queue) + Counter(unfinished)
    chosen: list[ReadyGroup] = []
    total = 0
    for age in sorted(ages):
        total += ages[age]
        steps_after_this = max(0, age + max_staleness - version)
        owed = min(count, total - steps_after_this * count) - len(chosen)
        if owed <= 0:
            continue
        due = [group for group in queue if group.oldest_version <= age][:owed]
        if waits and len(due) < owed:
            return None
        chosen += due
        queue = [group for group in queue if group not in due]
    return chosen + queue[: count - len(chosen)]
