"""Asks the draft retrieval role for packs before the rollouts that use them start.

A pack is asked for while the learner trains, and travels as a reference: nobody here waits for it. Without the role, or
without history, rollouts decode plainly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pipelines.roles import Roles
from storage.records import TRAIN_SPLIT, Assignment, Prompt


class DraftRequests:
    """Packs asked for; one per run."""

    def __init__(self, roles: Roles) -> None:
        """Ask the role of ``roles``, whichever lives."""
        self._roles = roles
        self._ahead: tuple[frozenset[int], Any] | None = None
        self.on = True
        """False while drafts are switched off; packs are then not asked for, and workers do not draft."""
        self.recorded = 0
        """Last step whose groups were sent to the role: packs know at least so much."""
        self.nodes: Mapping[int, str] = {}
        """Ray's id of the node of each rollout worker, as far as it is known."""

    @property
    def active(self) -> bool:
        """True when rollouts draft from history."""
        return self.on and self._roles.config.speculation.source != "off" and self._roles.history is not None

    def prefetch(self, prompts: Sequence[Prompt], under_way: Collection[int]) -> None:
        """Ask for the pack of prompts that are about to be launched.

        Not when one of them is among ``under_way``, the rows whose answers are about to be recorded: the pack would
        lack its latest visit.
        """
        self._ahead = None
        wanted = frozenset(prompt.index for prompt in prompts)
        if self.active and prompts and wanted.isdisjoint(under_way) and not all(map(self._far, self.nodes)):
            self._ahead = wanted, self._ask(prompts)

    def packs(self, worker: int, assignments: Sequence[Assignment]) -> list[Any]:
        """References to the packs that cover some assignments of a worker; none for evaluations and without history.

        A worker on another node than the history gets its packs from a retriever on its own.
        """
        if not self.active:
            return []
        prompts = {a.prompt.index: a.prompt for a in assignments if a.key.split == TRAIN_SPLIT}
        if not prompts:
            return []
        if self._far(worker):
            return [self._ask(list(prompts.values()), self.nodes[worker])]
        if self._ahead is not None and self._ahead[0] >= prompts.keys():
            return [self._ahead[1]]
        return [self._ask(list(prompts.values()))]

    def _far(self, worker: int) -> bool:
        home = self._roles.history_node
        return bool(home) and self.nodes.get(worker, home) != home

    def _ask(self, prompts: Sequence[Prompt], node: str = "") -> Any:
        assert self._roles.history is not None
        ids, history = [prompt.token_ids for prompt in prompts], self._roles.history.actor
        self._roles.forget_retrievers(set(self.nodes.values()))
        if node:
            return self._roles.retriever_on(node).actor.pack.remote(history, ids, self.recorded)
        return history.pack.remote(ids, self.recorded)
