"""The synchronous schedule: launch a step's prompts, wait for all of them, train."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.scheduling.long_queue import QueueRules, start
from pipelines.scheduling.policy import Launch, RoundState, StopAction, Verdict, zero_variance
from storage.records import GroupKey


class AllAtOnce:
    """Every launched group is waited for; on-policy and unbiased.

    With ``dynamic_sampling`` (DAPO, arXiv 2503.14476 section 3.2) groups whose rewards are all equal leave the batch
    and fresh prompts take their place, in at most ``max_refills`` further waves.
    """

    def __init__(self, *, dynamic_sampling: bool = False, max_refills: int = 0, max_staleness: int = 0) -> None:
        """Set the filter (none: every group is kept), and how many versions old a kept token may be."""
        self._dynamic_sampling = dynamic_sampling
        self._max_refills = max_refills if dynamic_sampling else 0
        self._rules = QueueRules(resume=max_staleness > 0, max_staleness=max_staleness)

    def plan(self, state: RoundState) -> Launch:
        """Launch what the step still lacks, a whole wave at a time; groups that wait (after a timeout) come first."""
        if state.waves > self._max_refills or (state.waves and state.running()):
            return Launch(fresh=0)
        lacking = state.prompts_per_step - len(state.kept())
        waiting = tuple(state.waiting)[: max(0, lacking)]
        fresh = max(0, lacking - len(waiting))
        return start(
            state,
            self._rules,
            waiting,
            long=False,
            fresh=fresh if state.available is None else min(fresh, state.available),
        )

    def on_finish(self, state: RoundState, key: GroupKey, rewards: Sequence[float | None]) -> Verdict:
        """Filter zero-variance groups under dynamic sampling."""
        return "filter" if self._dynamic_sampling and zero_variance(rewards) else "keep"

    def should_stop(self, state: RoundState) -> bool:
        """Stop when nothing runs and nothing more would be launched."""
        return not state.running() and self.plan(state).empty

    def on_stop(self, state: RoundState, key: GroupKey) -> StopAction:
        """A round never stops with running groups unless the run is interrupted; they then start afresh."""
        return "restart"
