"""Turns the history of a run into draft packs: observes finished groups, keeps their indexes, hands packs out.

Knows neither Ray nor queues. An index is built when its prompt is observed, away from anybody who waits, and only what
was evicted has to be built when a pack is asked for.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actors.drafts.options import SpeculationOptions
from actors.drafts.pack import SHARED_KEY, DraftPack, PastAnswer, PastPrompt
from actors.drafts.prompt_indexes import Indexed, PromptIndexes, Shared, Stamp
from storage.files import StorageError
from storage.history.index.construction import VOCABULARY
from storage.history.index.nearest import NearestPrompts
from storage.history.rows import Answer
from storage.history.schema import prompt_hash
from storage.history.store import HistoryStore
from storage.records import Group, Int32Array, SamplingParams

log = logging.getLogger(__name__)

_BYTES_PER_TOKEN = 120
"""What an index takes at most; decides how many tokens of other prompts a shared index may cover."""
_SHARED_SHARE = 0.25
"""Share of the memory for indexes that the shared one may take."""
_NEAREST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAnswers:
    """Answers on their way to another node, a sixth of the size of their indexes.

    Attributes:
        stamps: Of every prompt that was asked for and has answers, by prompt hash.
        prompts: Those of them whose answers changed.
        shared: Answers for the prompts without; none in it where the node has those of its stamp.
    """

    stamps: Mapping[int, Stamp]
    prompts: Mapping[int, PastPrompt]
    shared: Shared | None


class DraftRetriever:
    """One store and the indexes over it. Thread-safe: one thread observes while another one asks for packs."""

    def __init__(self, store: HistoryStore, options: SpeculationOptions) -> None:
        """Serve drafts out of ``store``, which belongs to this object from now on."""
        self._store = store
        self._options = options
        self._lock = threading.RLock()
        self._indexes = PromptIndexes(options)
        self._origin = secrets.randbits(62)
        self._observed: dict[int, int] = {}
        self._indexing = True
        self._epoch = -1
        self._shared: Shared | None = None
        self._prompts: dict[int, Int32Array] | None = None
        self._nearest: NearestPrompts | None = None
        self.failure = ""
        """Why new answers are no longer stored; empty while they are."""

    def observe(self, step: int, groups: Sequence[Group], sampling: SamplingParams) -> None:
        """Store the finished groups of a step, durably, and index their prompts anew.

        A store that cannot be written ends storing (``failure`` says why) and nothing else: what is known stays known.
        """
        with self._lock:
            if self.failure:
                return
            try:
                self._turn_epoch(max((group.key.epoch for group in groups), default=self._epoch))
                self._store.append(step, groups, sampling)
                self._store.sync()
            except StorageError as error:
                self.failure = str(error)
                log.warning("answers are no longer kept for drafts: %s", error)
                return
        if self._options.source == "off":
            return
        for group in groups:
            with self._lock:
                key = prompt_hash(group.prompt.token_ids)
                self._observed[key] = self._observed.get(key, 0) + 1
                self._indexes.forget(key)
                self._past(group.prompt.token_ids, index=self._indexing)
        if self._options.unseen == "global" and self._indexing:
            with self._lock:
                self._indexes.share(self._recent())

    def pack(self, prompts: Sequence[Int32Array]) -> DraftPack:
        """Return the drafts for some prompts, int32[n] each; prompts that occur twice count once."""
        with self._lock:
            self._indexing = True
            past, unseen = self._sorted_out(prompts, index=True)
            return self._indexes.pack(past.values(), self._shared_answers(unseen))

    def answers(self, prompts: Sequence[Int32Array], known: Mapping[int, Stamp]) -> PastAnswers:
        """Return the answers in the window to some prompts, for a node that makes its own indexes of them.

        Args:
            prompts: int32[n] each; those that occur twice count once.
            known: Stamps of what that node holds, by prompt hash and, of the shared answers, under ``SHARED_KEY``; what
                has not changed since is left out.
        """
        with self._lock:
            self._indexing = False  # nobody reads the indexes here, until somebody asks for a pack again
            past, unseen = self._sorted_out(prompts, index=False)
            stamps = {key: (self._origin, self._observed.get(key, 0)) for key in past}
            shared = self._shared_answers(unseen)
            if shared is not None and shared.stamp is not None and shared.stamp == known.get(SHARED_KEY):
                shared = Shared({}, shared.stamp)
            return PastAnswers(
                stamps=stamps,
                prompts={key: prompt for key, (prompt, _) in past.items() if known.get(key) != stamps[key]},
                shared=shared,
            )

    def _sorted_out(
        self, prompts: Sequence[Int32Array], *, index: bool
    ) -> tuple[dict[int, Indexed], dict[int, Int32Array]]:
        """Prompts that have answers, with their indexes, and the ids of the others, by prompt hash."""
        past: dict[int, Indexed] = {}
        unseen: dict[int, Int32Array] = {}
        for ids in prompts:
            key = prompt_hash(ids)
            if key in past:
                continue
            found = self._past(ids, index=index)
            if found[0].answers:
                past[key] = found
            else:
                unseen[key] = ids
        return past, unseen

    def stats(self) -> dict[str, float]:
        """Indexes held, their memory in bytes, bytes of the store's log, and the store's generation."""
        return {
            "indexes": float(len(self._indexes)),
            "index_bytes": float(self._indexes.nbytes),
            "wal_bytes": float(self._store.wal_bytes),
            "store_generation": float(self._store.generation),
            "packs": float(self._indexes.generation),
        }

    def close(self) -> None:
        """Close the store; raises ``HistoryError`` when the last answers cannot be made durable."""
        with self._lock:
            if not self.failure:
                self._store.close()

    def _turn_epoch(self, epoch: int) -> None:
        """At the first answers of another epoch, put the log into a segment and drop visits out of the window."""
        if epoch > self._epoch >= 0:
            self._store.seal()
            if len(self._store.segments) > 1:
                self._store.compact(self._options.window)
        self._epoch = max(epoch, self._epoch)

    def _past(self, prompt_ids: Int32Array, *, index: bool = False) -> Indexed:
        """Return the answers to a prompt that are in the window, with their index where it is asked for."""
        held = self._indexes.get(prompt_ids)
        if held is not None and (held[1] is not None or not index):
            return held
        prompt = PastPrompt(prompt_ids=prompt_ids, answers=self._answers(prompt_ids)) if held is None else held[0]
        return self._indexes.put(prompt, index=index)

    def _answers(self, prompt_ids: Int32Array) -> list[PastAnswer]:
        """The answers in the window; of each slot the one that may be reused keeps its likeliest tokens.

        Tokens that no index holds cost the answer that they are in, or the prompt, its drafts, and nobody else's.
        """
        served: set[int] = set()
        past: list[PastAnswer] = []
        if not _indexable(prompt_ids):
            return past
        for age, visit in enumerate(self._store.visits(prompt_ids, self._options.window)):
            for answer in visit:
                if not _indexable(answer.tokens):
                    continue
                keep_top = self._options.top_tokens > 0 and answer.sample_idx not in served
                past.append(past_answer(answer, age, keep_top=keep_top))
                if past[-1].complete:
                    served.add(answer.sample_idx)
        return past

    def _shared_answers(self, unseen: dict[int, Int32Array]) -> Shared | None:
        if not unseen or self._options.unseen == "off" or self._options.source in ("off", "previous_epoch"):
            return None
        if self._options.unseen == "global":
            return self._recent()
        near = self._nearest_prompts()
        if near is None or self._prompts is None:
            return None
        shared: dict[int, list[PastPrompt]] = {}
        for key, ids in unseen.items():
            neighbours = [self._past(self._prompts[int(other)])[0] for other in near.nearest(ids, _NEAREST)[0]]
            if neighbours := [prompt for prompt in neighbours if prompt.answers]:
                shared[key] = neighbours
        return Shared(shared) if shared else None

    def _recent(self) -> Shared:
        """The newest answers to any prompt, as much as the shared index may hold; read once per change of the store."""
        stamp = self._origin, self._store.wal_bytes + self._store.generation
        if self._shared is None or self._shared.stamp != stamp:
            most = int(self._options.index_mb * 1e6 * _SHARED_SHARE / _BYTES_PER_TOKEN)
            answers = [
                past_answer(answer, 0) for answer in self._store.recent_answers(most) if _indexable(answer.tokens)
            ]
            nobody = PastPrompt(prompt_ids=np.zeros(0, np.int32), answers=answers)
            self._shared = Shared({SHARED_KEY: [nobody]}, stamp)
        return self._shared

    def _nearest_prompts(self) -> NearestPrompts | None:
        if self._prompts is None or self._nearest is None or len(self._prompts) < len(self._indexes):
            self._prompts = {key: ids.copy() for key, ids in self._store.prompts() if _indexable(ids)}
            self._nearest = NearestPrompts.build(self._prompts) if self._prompts else None
        return self._nearest


def past_answer(answer: Answer, visit: int, *, keep_top: bool = False) -> PastAnswer:
    """Return a stored answer as drafts need it: copied, and cut at the first token that the policy did not write.

    The likeliest tokens at each place, which take most of the space, come along with ``keep_top`` only.
    """
    mask = answer.policy_mask()
    end = len(mask) if mask.all() else int(mask.argmin())
    return PastAnswer(
        token_ids=answer.tokens[:end].copy(),
        logprobs=answer.logprobs[:end].copy(),
        sample=answer.sample_idx,
        visit=visit,
        oldest_version=answer.oldest_version,
        finish_reason=answer.finish_reason if end == len(mask) else "abort",
        temperature=answer.temperature,
        top_p=answer.top_p,
        top_k=answer.top_k,
        top=answer.top.part(0, end).copy() if keep_top and answer.top is not None else None,
    )


def _indexable(tokens: Int32Array) -> bool:
    return not len(tokens) or (int(tokens.min()) >= 0 and int(tokens.max()) < VOCABULARY)
