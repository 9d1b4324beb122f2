"""The draft retrieval actor of a node whose rollouts are far from the run's history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from actors.drafts.options import SpeculationOptions
from storage.records import Int32Array

if TYPE_CHECKING:
    from actors.drafts.pack import DraftPack

CONCURRENCY_GROUPS = {"packs": 1, "control": 1}

_FETCH_S = 60.0


class NodeDraftWorker:
    """Makes the packs of one node; wrap with ``ray.remote(concurrency_groups=CONCURRENCY_GROUPS)``.

    It keeps nothing that could be lost: one that died is started again by Ray and asks for what it needs.
    """

    _name = "?"  # Ray asks for it also where an actor cannot be made, and would lose the reason

    def __init__(self, name: str, options: SpeculationOptions) -> None:
        """Know nothing yet."""
        from actors.drafts.node_retriever import NodeRetriever  # numba, which the conductor does not need

        self._name = name
        self._retriever = NodeRetriever(options)

    def __repr__(self) -> str:
        """Name shown on the Ray dashboard."""
        return f"NodeDraftWorker({self._name})"

    @ray.method(concurrency_group="packs")  # type: ignore[untyped-decorator]
    def pack(self, history: Any, prompts: list[Int32Array], after_step: int) -> DraftPack | None:
        """Return the drafts for some prompts out of what the role ``history`` knows; None when it keeps no history.

        Raises:
            ray.exceptions.RayError: That role died or does not answer; rollouts then go on without drafts.
        """
        return self._retriever.pack(
            prompts, lambda known: ray.get(history.answers.remote(prompts, known, after_step), timeout=_FETCH_S)
        )

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def health(self) -> dict[str, float]:
        """Return counters of the indexes."""
        return self._retriever.stats()
