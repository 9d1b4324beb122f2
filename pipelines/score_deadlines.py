"""Gives answers to training prompts a deadline of their own for their score, and learns from what scores cost.

The rule is :class:`RewardDeadlines`. Held-out answers always have the ceiling: what a policy learns must not decide how
long its examiner waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.config import Config
from pipelines.flow import SampleFlow
from pipelines.scheduling.reward_deadlines import RewardDeadlines
from pipelines.step_metrics import is_correct
from storage.records import TRAIN_SPLIT, GroupKey, SampleHeader


class ScoreDeadlines:
    """Listens to the scores of a flow; one per run. Without ``schedule.reward_deadlines.adaptive`` it does nothing."""

    def __init__(self, flow: SampleFlow, config: Config) -> None:
        """Set the deadlines of ``flow`` from now on."""
        options = config.schedule.reward_deadlines
        self._correct_at = config.evaluation.correct_at
        self._rule: RewardDeadlines | None = None
        self._given: list[float] = []
        self._short = 0
        if not options.adaptive:
            return
        self._ceiling = config.reward.timeout_s
        self._rule = RewardDeadlines(floor_s=options.floor_s, ceiling_s=self._ceiling, factor=options.factor)
        flow.deadline = self._deadline
        flow.on_scored = self._observe

    def metrics(self) -> dict[str, float]:
        """Deadlines given out since the last call."""
        if not self._given:
            return {}
        metrics = {
            "reward/deadline_s": sum(self._given) / len(self._given),
            "reward/deadline_short_share": self._short / len(self._given),
        }
        self._given.clear()
        self._short = 0
        return metrics

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        return {} if self._rule is None else self._rule.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken."""
        if self._rule is not None and state:
            self._rule.load_state(state)

    def _deadline(self, key: GroupKey) -> float | None:
        if self._rule is None or key.split != TRAIN_SPLIT:
            return None
        seconds = self._rule.deadline(key.prompt)
        self._given.append(seconds)
        self._short += seconds < self._ceiling
        return seconds

    def _observe(self, header: SampleHeader) -> None:
        if self._rule is None or header.key.split != TRAIN_SPLIT:
            return
        self._rule.observe(header.key.prompt, header.score_s, correct=bool(is_correct(header, self._correct_at)))
