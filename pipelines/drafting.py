"""Asks the draft retrieval role for packs before the rollouts that use them start.

A pack is asked for while the learner trains, and travels as a reference: nobody here waits for it. Without the role, or
without history, rollouts decode plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.roles import Roles
from storage.records import TRAIN_SPLIT, Assignment, Prompt


class DraftRequests:
    """Packs asked for; one per run."""

    def __init__(self, roles: Roles) -> None:
        """Ask the role of ``roles``, whichever lives."""
        self._roles = roles
        self._ahead: tuple[frozenset[int], Any] | None = None

    @property
    def active(self) -> bool:
        """True when rollouts draft from history."""
        return self._roles.config.speculation.source != "off" and self._roles.history is not None

    def prefetch(self, prompts: Sequence[Prompt]) -> None:
        """Ask for the pack of prompts that are about to be launched."""
        if self.active and prompts:
            self._ahead = frozenset(p.index for p in prompts), self._ask(prompts)

    def packs(self, assignments: Sequence[Assignment]) -> list[Any]:
        """References to the packs that cover some assignments; none for evaluations and without history."""
        if not self.active:
            return []
        prompts = {a.prompt.index: a.prompt for a in assignments if a.key.split == TRAIN_SPLIT}
        if not prompts:
            return []
        if self._ahead is not None and self._ahead[0] >= prompts.keys():
            return [self._ahead[1]]
        return [self._ask(list(prompts.values()))]

    def _ask(self, prompts: Sequence[Prompt]) -> Any:
        assert self._roles.history is not None
        return self._roles.history.actor.pack.remote([prompt.token_ids for prompt in prompts])
