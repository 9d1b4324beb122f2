"""Tail batching (RollPacker, arXiv 2509.21009 section 3): race short rounds, and let the long groups run together.

A short round launches more groups than the step trains and keeps the first to finish; the others wait. When a step's
worth of them has gathered, a long round runs them without a race. With an over-launch of 1.25 that is one long round
after four short ones, and every prompt is trained as often as without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pipelines.scheduling.long_queue import QueueRules, first_launch, predicted_share, refill
from pipelines.scheduling.policy import Launch, RoundState, StopAction, Verdict, zero_variance
from storage.records import GroupKey


class TailBatching:
    """Over-launch, keep the first ``prompts_per_step`` whole groups, defer the rest.

    The law of the samples: exact under stamped versions when deferred groups are resumed; short by about 2 % when they
    are restarted, since a group is then accepted by its own length; short by about 20 % when samples are over-launched
    too (RollPacker's own setting).
    """

    def __init__(
        self,
        rules: QueueRules,
        *,
        overlaunch_prompts: float = 1.25,
        overlaunch_samples: float = 1.0,
        dynamic_sampling: bool = False,
        max_refills: int = 0,
    ) -> None:
        """Set the race.

        Args:
            rules: Who is long, and what deferred groups keep.
            overlaunch_prompts: Groups launched for each group that the step trains, at least 1.
            overlaunch_samples: Samples launched for each sample that a group needs, at least 1.
            dynamic_sampling: Drop groups whose rewards are all equal, and replace them.
            max_refills: Most further waves that replace dropped groups.
        """
        self._rules = rules
        self._overlaunch = overlaunch_prompts
        self._sample_ratio = overlaunch_samples
        self._dynamic_sampling = dynamic_sampling
        self._max_refills = max_refills if dynamic_sampling else 0

    def plan(self, state: RoundState) -> Launch:
        """Start a short or a long round, or replace groups that dynamic sampling dropped."""
        if not state.waves:
            # Predicted-long prompts are a part of the surplus: they need not be launched to be deferred, so that long
            # rounds come as often with a predictor as without.
            surplus = self._overlaunch * (1.0 - predicted_share(state, self._rules))
            launch = first_launch(state, self._rules, _ceil(max(1.0, surplus) * state.prompts_per_step))
            return self._with_samples(launch)
        if state.waves > self._max_refills:
            return Launch()
        missing = state.prompts_per_step - len(state.kept())
        running = len(state.running())
        if missing <= 0 or running >= missing or (state.round_class == "long" and running):
            return Launch()
        wanted = missing if state.round_class == "long" else _ceil(self._overlaunch * missing)
        return self._with_samples(refill(state, self._rules, wanted - running))

    def on_finish(self, state: RoundState, key: GroupKey, rewards: Sequence[float | None]) -> Verdict:
        """Filter zero-variance groups under dynamic sampling; they are consumed, never deferred."""
        return "filter" if self._dynamic_sampling and zero_variance(rewards) else "keep"

    def should_stop(self, state: RoundState) -> bool:
        """Stop a short round with its last needed group; a long round, when all of its groups are in."""
        if state.round_class == "short" and len(state.kept()) >= state.prompts_per_step:
            return True
        return not state.running() and self.plan(state).empty

    def on_stop(self, state: RoundState, key: GroupKey) -> StopAction:
        """Keep what a group has, or have it begin anew, as configured."""
        if not self._rules.resume:
            return "restart"
        group = state.groups[key]
        return "park" if group.written >= group.quota else "resume"

    def _with_samples(self, launch: Launch) -> Launch:
        if launch.round_class == "long" or self._sample_ratio == 1.0 or not launch.starts:
            return launch
        return replace(launch, sample_ratio=self._sample_ratio)


def _ceil(groups: float) -> int:
    """Round up, past the rounding of a product such as 1.1 * 10."""
    return math.ceil(groups - 1e-9)
