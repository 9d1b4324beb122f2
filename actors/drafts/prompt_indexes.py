"""Answers to prompts with their indexes, as many as there is memory for: what draft packs are put together from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actors.drafts.options import SpeculationOptions
from actors.drafts.pack import DraftPack, PastPrompt, build_pack, index_answers
from storage.history.index.suffix_automaton import Automaton
from storage.history.schema import prompt_hash
from storage.records import Int32Array

Indexed = tuple[PastPrompt, Automaton | None]
"""A prompt with its answers, and their index; None for kinds of index that a pack makes itself."""

Stamp = tuple[int, int]
"""Says of some answers which retriever knows them, and its count of their changes."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Answers for prompts without any of their own.

    Attributes:
        answers: As ``shared`` of :func:`actors.drafts.pack.build_pack`.
        stamp: Equal stamps stand for equal answers, which need not be given again; ``None`` for answers of one pack.
    """

    answers: Mapping[int, Sequence[PastPrompt]]
    stamp: Stamp | None = None


class PromptIndexes:
    """Indexes by prompt, the least recently used dropped above ``speculation.index_mb``. Not thread-safe.

    Attributes:
        nbytes: Memory of all answers and indexes held.
    """

    def __init__(self, options: SpeculationOptions) -> None:
        """Hold nothing yet."""
        self.nbytes = 0
        self._options = options
        self._held: OrderedDict[int, Indexed] = OrderedDict()
        self._generation = 0
        self._shared: tuple[Stamp, dict[int, Automaton]] | None = None

    def __len__(self) -> int:
        return len(self._held)

    @property
    def generation(self) -> int:
        """Packs made so far."""
        return self._generation

    def get(self, prompt_ids: Int32Array) -> Indexed | None:
        """Return what is held of a prompt, int32[n]; of another one with the same hash nothing is."""
        key = prompt_hash(prompt_ids)
        held = self._held.get(key)
        if held is None or not np.array_equal(held[0].prompt_ids, prompt_ids):
            return None
        self._held.move_to_end(key)
        return held

    def put(self, prompt: PastPrompt, *, index: bool = True) -> Indexed:
        """Hold the answers to a prompt, with their index if it is wanted, in the place of what its hash has."""
        options = self._options
        wanted = index and prompt.answers and options.index == "automaton" and options.source != "previous_epoch"
        made = prompt, index_answers([prompt], options.recency) if wanted else None
        if prompt.answers:
            key = prompt_hash(prompt.prompt_ids)
            self.forget(key)
            self._held[key] = made
            self.nbytes += _size(*made)
            while self.nbytes > options.index_mb * 1e6 and len(self._held) > 1:
                self.forget(next(iter(self._held)))
        return made

    def forget(self, key: int) -> None:
        """Drop what is held under a prompt hash."""
        held = self._held.pop(key, None)
        if held is not None:
            self.nbytes -= _size(*held)

    @property
    def shared_stamp(self) -> Stamp | None:
        """Stamp of the shared answers whose indexes are held."""
        return None if self._shared is None else self._shared[0]

    def share(self, shared: Shared | None) -> dict[int, Automaton]:
        """Return the indexes of shared answers; those with a stamp are made once."""
        if shared is None:
            return {}
        if shared.stamp is not None and self._shared is not None and self._shared[0] == shared.stamp:
            return self._shared[1]
        made = {key: index_answers(answers, self._options.recency) for key, answers in shared.answers.items()}
        if shared.stamp is not None:
            self._shared = shared.stamp, made
        return made

    def pack(self, chosen: Iterable[Indexed], shared: Shared | None) -> DraftPack:
        """Make a pack of prompts, each of them once, with an index of the shared answers."""
        options, found = self._options, list(chosen)
        self._generation += 1
        return build_pack(
            [prompt for prompt, _ in found],
            generation=self._generation,
            recency=options.recency,
            index=None if options.source == "previous_epoch" else options.index,
            order=options.order,
            heat_half_life=options.heat_half_life,
            shared=self.share(shared),
            indexes={prompt_hash(prompt.prompt_ids): index for prompt, index in found if index is not None},
        )


def _size(prompt: PastPrompt, index: Automaton | None) -> int:
    held = sum(answer.token_ids.nbytes + answer.logprobs.nbytes for answer in prompt.answers)
    held += sum(answer.top.nbytes for answer in prompt.answers if answer.top is not None)
    return held + (0 if index is None else index.nbytes)
