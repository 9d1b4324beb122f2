"""What a rollout worker drafts from: indexes of earlier answers by prompt, and the previous answer of each sample slot.

A pack is immutable and holds numpy arrays only, so an object store hands it over without a copy. It speaks of prompts
by hash; a second, independent hash tells two prompts apart that share the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from storage.errors import UserError
from storage.history.index.automaton_set import AutomatonSet
from storage.history.index.compiled import read_only
from storage.history.index.fuzzy import FuzzyIndex
from storage.history.index.levels import LevelIndex, Order
from storage.history.index.suffix_automaton import Automaton, build
from storage.history.schema import prompt_hash
from storage.records import FinishReason, Float32Array, Int32Array, SamplingParams, TopTokens

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

IndexKind = Literal["automaton", "levels", "fuzzy"]
ContextIndex = LevelIndex | FuzzyIndex

PROMPT_TAIL = 5
"""Last prompt tokens that an indexed answer begins with, so that there is a match before its first token."""

SHARED_KEY = 0
"""Key of the one automaton over answers to other prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAnswer:
    """One earlier answer.

    Attributes:
        token_ids: int32[n], up to the first token that the policy did not write.
        logprobs: float32[n], under the law that each token was drawn from.
        sample: Sample slot, 0 to group size - 1.
        visit: Visits of the prompt since; 0 is the latest.
        oldest_version: Smallest version of the weights among its tokens.
        finish_reason: How it ended.
        temperature, top_p, top_k: How its tokens were drawn.
        top: The likeliest tokens at each place, if they are wanted and were recorded.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    sample: int
    visit: int = 0
    oldest_version: int = 0
    finish_reason: FinishReason = "stop"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    top: TopTokens | None = None

    @property
    def complete(self) -> bool:
        """Whether it can be reused as a whole; aborted and failed ones cannot."""
        return self.finish_reason in ("stop", "length") and len(self.token_ids) > 0

    def copy(self) -> PastAnswer:
        """Return the same answer in memory of its own."""
        top = None if self.top is None else self.top.copy()
        return replace(self, token_ids=self.token_ids.copy(), logprobs=self.logprobs.copy(), top=top)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastPrompt:
    """A prompt and its earlier answers, in any order."""

    prompt_ids: Int32Array
    answers: Sequence[PastAnswer]


@dataclass(frozen=True, slots=True, eq=False)
class PreviousAnswers:
    """The latest answer of each sample slot, ascending by (key, sample).

    Attributes:
        keys: uint64[answers], prompt hash; samples: int64[answers], sample slot.
        starts: int64[answers + 1], where each answer lies in ``tokens`` and ``logprobs``.
        tokens: int32[total]; logprobs: float32[total].
        oldest: int64[answers], smallest version among its tokens.
        temperature, top_p: float32[answers]; top_k: int64[answers], how it was drawn.
        top: int32 and float32[total, K], the likeliest tokens at each place; ``None`` when no answer came with any.
    """

    keys: UInt64Array
    samples: Int64Array
    starts: Int64Array
    tokens: Int32Array
    logprobs: Float32Array
    oldest: Int64Array
    temperature: Float32Array
    top_p: Float32Array
    top_k: Int64Array
    top: TopTokens | None

    @classmethod
    def of(cls, prompts: Sequence[PastPrompt]) -> PreviousAnswers:
        """Keep the latest complete answer of each slot; aborted and failed ones are no drafts."""
        latest: dict[tuple[int, int], PastAnswer] = {}
        for prompt in prompts:
            key = prompt_hash(prompt.prompt_ids)
            for answer in prompt.answers:
                known = latest.get((key, answer.sample))
                if answer.complete and (known is None or answer.visit < known.visit):
                    latest[key, answer.sample] = answer
        slots = sorted(latest)
        answers = [latest[slot] for slot in slots]
        starts = np.zeros(len(answers) + 1, np.int64)
        np.cumsum([len(a.token_ids) for a in answers], out=starts[1:])
        none: list[npt.NDArray[Any]] = [np.zeros(0)]
        tokens = np.concatenate([a.token_ids for a in answers] or none).astype(np.int32)
        logprobs = np.concatenate([a.logprobs for a in answers] or none).astype(np.float32)
        for array in (starts, tokens, logprobs):
            read_only(array)  # as after an object store: one compiled variant
        return cls(
            keys=np.array([key for key, _ in slots], np.uint64),
            samples=np.array([sample for _, sample in slots], np.int64),
            starts=starts,
            tokens=tokens,
            logprobs=logprobs,
            oldest=np.array([a.oldest_version for a in answers], np.int64),
            temperature=np.array([a.temperature for a in answers], np.float32),
            top_p=np.array([a.top_p for a in answers], np.float32),
            top_k=np.array([a.top_k for a in answers], np.int64),
            top=TopTokens.join([a.top for a in answers], [len(a.token_ids) for a in answers]),
        )

    def find(self, key: int, sample: int) -> int:
        """Return the index of a slot's answer, or -1."""
        first, last = self.slots(key)
        at = first + int(np.searchsorted(self.samples[first:last], sample))
        return at if at < last and int(self.samples[at]) == sample else -1

    def slots(self, key: int) -> tuple[int, int]:
        """Return the indexes of the first answer to a prompt and of the one behind its last; equal when it has none."""
        found = np.uint64(key)
        return int(np.searchsorted(self.keys, found)), int(np.searchsorted(self.keys, found, "right"))

    def same_law(self, at: int, sampling: SamplingParams) -> bool:
        """Return whether an answer was drawn as ``sampling`` draws."""
        return (
            float(self.temperature[at]) == np.float32(sampling.temperature)
            and float(self.top_p[at]) == np.float32(sampling.top_p)
            and int(self.top_k[at]) == sampling.top_k
        )

    @property
    def nbytes(self) -> int:
        """Memory of all arrays in bytes."""
        arrays = [getattr(self, name) for name in self.__slots__]
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DraftPack:
    """Drafts for a set of prompts.

    Attributes:
        generation: Counts what its maker has made; a higher one knows more.
        prompts: uint64[prompts], hashes of its prompts, ascending; checks: uint64[prompts], their second hashes.
        automata: Index of each prompt's answers by prompt hash; empty where ``tables`` hold the indexes.
        previous: The latest answer of each sample slot.
        shared: Indexes of answers to other prompts: one under ``SHARED_KEY``, or one by hash of the prompt that they
            are near to; ``None`` without.
        tables: Indexes of another kind, by prompt hash, for comparison with the automata.
    """

    generation: int
    prompts: UInt64Array
    checks: UInt64Array
    automata: AutomatonSet
    previous: PreviousAnswers
    shared: AutomatonSet | None = None
    tables: Mapping[int, ContextIndex] = field(default_factory=dict)

    def knows(self, key: int) -> bool:
        """Return whether there is history of a prompt with hash ``key``."""
        return self._place(key) >= 0

    def holds(self, key: int, prompt_ids: Int32Array) -> bool:
        """Return whether there is history of this very prompt, and not only of one with the same hash."""
        at = self._place(key)
        return at >= 0 and int(self.checks[at]) == prompt_check(prompt_ids)

    def _place(self, key: int) -> int:
        at = int(np.searchsorted(self.prompts, np.uint64(key)))
        return at if at < len(self.prompts) and int(self.prompts[at]) == key else -1

    @property
    def nbytes(self) -> int:
        """Memory of all arrays in bytes."""
        shared = 0 if self.shared is None else self.shared.nbytes
        tables = sum(table.nbytes for table in self.tables.values())
        prompts = self.prompts.nbytes + self.checks.nbytes
        return self.automata.nbytes + self.previous.nbytes + shared + tables + prompts


def prompt_check(prompt_ids: Int32Array) -> int:
    """Return a hash of the ids that is independent of :func:`storage.history.schema.prompt_hash`."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(prompt_ids, dtype="<i4").tobytes(), seed=1)


def build_pack(
    prompts: Sequence[PastPrompt],
    *,
    generation: int,
    recency: float = 0.7,
    index: IndexKind | None = "automaton",
    order: Order = "frequency",
    heat_half_life: float = 2.0,
    indexes: Mapping[int, Automaton] | None = None,
    shared: Mapping[int, Automaton] | None = None,
) -> DraftPack:
    """Index the earlier answers of some prompts.

    Args:
        prompts: Prompts that rollouts are about to answer, with the answers in their window; a prompt may occur once.
            Of two prompts with one hash the first is served and the other goes without.
        generation: Number of the pack.
        recency: Weight of an answer relative to one that is a visit younger, in (0, 1]; automata only.
        index: Kind of the prompts' own indexes; ``None`` builds none, for drafts from previous answers alone.
        order: Which continuation tables by level prefer.
        heat_half_life: Visits after which an entry of tables by level counts half.
        indexes: Automata that exist already, by prompt hash; the others are built.
        shared: Automata of answers for prompts without history, by ``SHARED_KEY`` (for all of them) or by the hash of
            the prompt that they are to serve.

    Raises:
        UserError: A prompt occurs twice, an answer's arrays differ in length, or its ids cannot be indexed.
    """
    owners: dict[int, PastPrompt] = {}
    for prompt in prompts:
        key = prompt_hash(prompt.prompt_ids)
        if key in owners and np.array_equal(owners[key].prompt_ids, prompt.prompt_ids):
            raise UserError(f"a draft pack of {len(prompts)} prompts holds one of them twice: merge their answers")
        owners.setdefault(key, prompt)
        for answer in prompt.answers:
            if len(answer.token_ids) != len(answer.logprobs):
                raise UserError(
                    f"an answer of sample slot {answer.sample} has {len(answer.token_ids)} tokens and "
                    f"{len(answer.logprobs)} logprobs: the history that it was read from is damaged"
                )
            if answer.top is not None and len(answer.top.ids) != len(answer.token_ids):
                raise UserError(
                    f"an answer of sample slot {answer.sample} has {len(answer.token_ids)} tokens and the likeliest "
                    f"ones of {len(answer.top.ids)} places: the history that it was read from is damaged"
                )
    keys = sorted(owners)
    known = indexes or {}
    answered = [key for key in keys if owners[key].answers]
    automata = {
        key: known[key] if key in known else index_answers([owners[key]], recency)
        for key in answered
        if index == "automaton"
    }
    return DraftPack(
        generation=generation,
        prompts=np.array(keys, np.uint64),
        checks=np.array([prompt_check(owners[key].prompt_ids) for key in keys], np.uint64),
        automata=AutomatonSet.pack(automata),
        previous=PreviousAnswers.of([owners[key] for key in keys]),
        shared=AutomatonSet.pack(dict(shared)) if shared else None,
        tables={
            key: _table(owners[key], index, order, heat_half_life)
            for key in answered
            if index is not None and index != "automaton"
        },
    )


def index_answers(prompts: Sequence[PastPrompt], recency: float) -> Automaton:
    """Index answers, the oldest first, each behind the last tokens of its prompt."""
    visits, documents = _documents(prompts)
    return build(documents, [recency**visit for visit in visits])


def _table(prompt: PastPrompt, kind: IndexKind, order: Order, half_life: float) -> ContextIndex:
    visits, documents = _documents([prompt])
    if kind == "fuzzy":
        return FuzzyIndex.build(documents)
    return LevelIndex.build(documents, visits, order=order, half_life=half_life)


def _documents(prompts: Sequence[PastPrompt]) -> tuple[list[int], list[Int32Array]]:
    """Visits since each answer, and the answers behind the last tokens of their prompts, the oldest first."""
    answers = [(answer, prompt.prompt_ids[-PROMPT_TAIL:]) for prompt in prompts for answer in prompt.answers]
    answers.sort(key=lambda entry: -entry[0].visit)
    return [answer.visit for answer, _ in answers], [np.concatenate([tail, a.token_ids]) for a, tail in answers]
