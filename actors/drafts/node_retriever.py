"""Draft packs on a node that has no history of its own: answers come from the run's retriever, indexes are made here.

Indexes take about six times the room of the answers. So answers travel, each version of them once, and every node
spends its own cores on the indexes that its rollouts read where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from actors.drafts.options import SpeculationOptions
from actors.drafts.pack import SHARED_KEY, DraftPack
from actors.drafts.prompt_indexes import Indexed, PromptIndexes, Stamp
from actors.drafts.retriever import PastAnswers
from storage.history.schema import prompt_hash
from storage.records import Int32Array

Fetch = Callable[[Mapping[int, Stamp]], PastAnswers | None]
"""Asks the run's retriever for what changed since some stamps; None where no history is kept."""


class NodeRetriever:
    """Indexes of the prompts that are answered on one node. Not thread-safe."""

    def __init__(self, options: SpeculationOptions) -> None:
        """Know nothing yet."""
        self._indexes = PromptIndexes(options)
        self._stamps: dict[int, Stamp] = {}

    def pack(self, prompts: Sequence[Int32Array], fetch: Fetch) -> DraftPack | None:
        """Return the drafts for some prompts, int32[n] each; those that occur twice count once."""
        held: dict[int, Indexed] = {}
        for ids in prompts:
            found = self._indexes.get(ids)
            if found is not None:
                held[prompt_hash(ids)] = found
        known = {key: self._stamps[key] for key in held}
        if self._indexes.shared_stamp is not None:
            known[SHARED_KEY] = self._indexes.shared_stamp
        fresh = fetch(known)
        if fresh is None:
            return None
        for key, prompt in fresh.prompts.items():
            # What comes out of the object store is a view of all that came at once, and would keep it there.
            held[key] = self._indexes.put(replace(prompt, answers=[answer.copy() for answer in prompt.answers]))
            self._stamps[key] = fresh.stamps[key]
        return self._indexes.pack([held[key] for key in fresh.stamps], fresh.shared)

    def stats(self) -> dict[str, float]:
        """Indexes held, their memory in bytes, and packs made."""
        return {
            "indexes": float(len(self._indexes)),
            "index_bytes": float(self._indexes.nbytes),
            "packs": float(self._indexes.generation),
        }
