"""Reward deadlines that adapt to the slowest correct answer (RollPacker, arXiv 2509.21009 section 4.3)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

PROMPTS_KEPT = 65_536


class RewardDeadlines:
    """Deadline of a score: T = min(max(floor, factor * anchor), ceiling), in seconds.

    The anchor is the longest time that a correct answer to the same prompt has taken. Endless loops in wrong programs
    then cost a few times what a right one costs, instead of the whole ceiling. Without a correct answer so far the
    deadline is the ceiling: an unknown prompt is given every chance.
    """

    def __init__(self, *, floor_s: float = 2.0, ceiling_s: float = 30.0, factor: float = 1.5) -> None:
        """Set the bounds in seconds and the multiple of the anchor (RollPacker: 2 s, 30 s and 1.5).

        Raises:
            ValueError: The floor is above the ceiling, or a value is not positive.
        """
        if not 0 < floor_s <= ceiling_s or factor <= 0:
            raise ValueError(
                f"reward deadlines need 0 < floor <= ceiling and a positive factor, got floor {floor_s:g} s, ceiling "
                f"{ceiling_s:g} s, factor {factor:g}"
            )
        self._floor = floor_s
        self._ceiling = ceiling_s
        self._factor = factor
        self._anchors: OrderedDict[int, float] = OrderedDict()

    def deadline(self, prompt: int) -> float:
        """Seconds that a score of an answer to ``prompt`` (its row number) may take."""
        anchor = self._anchors.get(prompt)
        if anchor is None:
            return self._ceiling
        return min(max(self._floor, self._factor * anchor), self._ceiling)

    def observe(self, prompt: int, seconds: float, *, correct: bool) -> None:
        """Learn from a score that took ``seconds``; wrong answers teach nothing. The oldest prompts are forgotten."""
        if not correct or seconds <= 0:
            return
        self._anchors[prompt] = max(seconds, self._anchors.pop(prompt, 0.0))
        if len(self._anchors) > PROMPTS_KEPT:
            self._anchors.popitem(last=False)

    def state(self) -> dict[str, Any]:
        """Anchors as JSON values."""
        return {"anchors": [[prompt, seconds] for prompt, seconds in self._anchors.items()]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken."""
        self._anchors = OrderedDict((int(prompt), float(seconds)) for prompt, seconds in state["anchors"])
