"""Length split: short and long prompts never share a round, by prediction alone, without a race.

The rounds of short prompts (80 to 90 % of all) end early because nobody in them is expected to be long; long prompts
gather until they fill a round. Selection sees prompts only, so the samples stay on-policy and unbiased. A wrong
prediction holds up its whole round, so alone this brings far less than a race (``slipstream simulate`` shows both).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pipelines.scheduling.long_queue import QueueRules, first_launch, refill
from pipelines.scheduling.policy import Launch, RoundState, StopAction, Verdict, zero_variance
from storage.records import GroupKey

Oversample = Literal["launch", "repeat"]


class LengthSplit:
    """Short batches and long-only batches (public name of the technique: dynamic batching).

    While the predictor is silent every prompt counts as short, in arrival order.
    """

    def __init__(
        self,
        rules: QueueRules,
        *,
        oversample: Oversample = "launch",
        ratio: float = 1.2,
        dynamic_sampling: bool = False,
        max_refills: int = 0,
    ) -> None:
        """Set the split.

        Args:
            rules: Which predictions count as long.
            oversample: ``launch``: further fresh prompts take the places of the long ones in a short batch; ``repeat``:
                a short batch holds fewer prompts, and some of them twice, under keys of their own.
            ratio: Groups in a short batch for each different prompt in it (``repeat``), at least 1.
            dynamic_sampling: Drop groups whose rewards are all equal, and replace them.
            max_refills: Most further waves that replace dropped groups.
        """
        self._rules = rules
        self._ratio = ratio if oversample == "repeat" else 1.0
        self._dynamic_sampling = dynamic_sampling
        self._max_refills = max_refills if dynamic_sampling else 0

    def plan(self, state: RoundState) -> Launch:
        """Start a batch of one class, or replace groups that dynamic sampling dropped."""
        wanted = state.prompts_per_step
        if not state.waves:
            distinct = math.ceil(wanted / self._ratio - 1e-9)
            launch = first_launch(state, self._rules, distinct)
            if launch.round_class == "short" and launch.deferred:
                repeats = self._repeats(launch.deferred, wanted - distinct)
                return replace(launch, repeats=repeats)
            return launch
        if state.waves > self._max_refills or state.running():
            return Launch()
        return refill(state, self._rules, max(0, wanted - len(state.kept())))

    def on_finish(self, state: RoundState, key: GroupKey, rewards: Sequence[float | None]) -> Verdict:
        """Filter zero-variance groups under dynamic sampling."""
        return "filter" if self._dynamic_sampling and zero_variance(rewards) else "keep"

    def should_stop(self, state: RoundState) -> bool:
        """Stop when nothing runs and nothing more would be launched."""
        return not state.running() and self.plan(state).empty

    def on_stop(self, state: RoundState, key: GroupKey) -> StopAction:
        """A round never stops with running groups unless the run is interrupted; they then start afresh."""
        return "restart"

    @staticmethod
    def _repeats(keys: Sequence[GroupKey], count: int) -> tuple[GroupKey, ...]:
        """The groups to write twice: the first of the batch, so that the choice depends on the order of draws alone."""
        return tuple(keys[index % len(keys)] for index in range(count))
