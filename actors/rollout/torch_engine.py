"""The rollout engine on PyTorch: continuous batching, shared prompts, verified drafts, hot weights.

A step is one forward pass over the tokens of all rows (two while rows drain under older weights): the last token and
the draft of each running row, and what new rows must prefill. Rows keep to the lowest slots of the key/value cache, so
that decoding reads it without a copy; finished rows are replaced before the next pass.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from actors.rollout.engine import Completion, DraftSource, Request, RowView, StepObserver, StepStats, SwapMode
from actors.rollout.packed_model import PackedModel
from actors.rollout.row_table import RowTable
from actors.rollout.sampling import Sampler, position_keys, request_key
from actors.rollout.slot_cache import SlotCache, Snapshot
from actors.rollout.step_layout import Feed, plan_pass
from actors.rollout.stopping import StopStrings
from actors.rollout.verification import accepted_counts
from actors.weights import WeightsError, unpack, verify
from storage.records import FinishReason, WeightsManifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Int64Array = npt.NDArray[np.int64]
_NO_ROWS: Int64Array = np.zeros(0, np.int64)


@dataclass(slots=True)
class _Pass:
    """Rows of one forward pass, decoding rows first, and what is to be drawn from it."""

    feed: Feed
    rows: Int64Array
    drafts: Int64Array
    draft_lengths: Int64Array
    drawing: Int64Array
    logit_index: Int64Array
    followers: dict[int, list[int]]
    prefill: int


@dataclass(slots=True)
class _Tally:
    """Counts of one step."""

    passes: int = 0
    rows: int = 0
    tokens: int = 0
    prefill: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0


class TorchEngine:
    """Writes answers with a transformers model; see :class:`actors.rollout.engine.RolloutEngine`."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        max_rows: int,
        max_length: int,
        dtype: str = "auto",
        device: str = "auto",
        run_seed: int = 0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        drafts: DraftSource | None = None,
        version: int = 0,
        prefill_tokens: int = 8192,
    ) -> None:
        """Load a model and make an empty engine.

        Args:
            model_path: Local Hugging Face directory.
            max_rows: Slots: rows that run or are parked at once.
            max_length: Longest prompt with its answer; cut to the model's context. Unit: tokens.
            dtype: ``float32`` or ``bfloat16``; ``auto`` is float32 on a CPU and bfloat16 elsewhere.
            device: Torch device; ``auto`` is a GPU where there is one.
            run_seed: With the request's id it keys the sampling noise.
            tokenizer: Needed for requests with stop strings only.
            drafts: Proposes continuations that are verified; ``None`` decodes one token a pass.
            version: Version of the weights at ``model_path``.
            prefill_tokens: Most prompt and prefix tokens in one pass; longer work is spread over several.

        Raises:
            UserError: The model is not one that this engine can run.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        self._model = PackedModel.load(model_path, dtype, device)
        context = getattr(self._model.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self.max_length = min(max_length, context or max_length)
        self.max_rows = max_rows
        self.prefill_tokens = prefill_tokens
        self._version = version
        self._run_seed = run_seed
        self._tokenizer = tokenizer
        self._drafts = drafts
        self._spare: PackedModel | None = None
        self._loaded: int | None = None
        self._old: PackedModel | None = None
        self._old_version = -1
        self._cache = SlotCache(max_rows, self.max_length)
        self._sampler = Sampler(self._model.vocabulary, self._model.device)
        self._table = RowTable(max_rows)
        self._active: Int64Array = _NO_ROWS
        self._index: dict[int, int] = {}
        self._parked: dict[int, int] = {}
        self._queue: list[tuple[float, int, Request]] = []
        self._queued: set[int] = set()
        self._order = 0
        self._groups: dict[int, set[int]] = {}
        self._waiting_groups: Counter[int] = Counter()
        self._prompts: dict[int, Snapshot] = {}
        self._observers: list[StepObserver] = []

    @property
    def version(self) -> int:
        """Version of the weights that new rows are written with."""
        return self._version

    @property
    def running(self) -> int:
        """Rows that hold a slot and are being written."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    @property
    def parked(self) -> int:
        """Aborted rows whose key/value state is kept."""
        return len(self._parked)

    @property
    def draining(self) -> int:
        """Rows that finish under the weights before the active ones."""
        return int(self._table.old[self._active].sum())

    def add_observer(self, observer: StepObserver) -> None:
        """Call ``observer`` after every step."""
        self._observers.append(observer)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none; raises ``ValueError`` that names the request when one can never run."""
        fresh: set[int] = set()
        for request in requests:
            self._check(request)
            if request.request_id in fresh or request.request_id in self._queued or request.request_id in self._index:
                raise ValueError(f"request {request.request_id} is already in the engine")
            fresh.add(request.request_id)
        for request in requests:
            heapq.heappush(self._queue, (-request.priority, self._order, request))
            self._order += 1
            self._queued.add(request.request_id)
            if request.group is not None:
                self._waiting_groups[request.group] += 1

    def step(self) -> list[Completion]:
        """Run one forward pass for all active rows and return the requests that finished; [] when idle."""
        begin = time.perf_counter()
        finished: list[Completion] = []
        self._admit(finished)
        if not len(self._active):
            return finished
        self._compact()
        tally = _Tally()
        old = self._table.old[self._active]
        if self._old is not None and old.any():
            self._run(self._old, self._old_version, self._active[old], finished, tally)
            rest = self._active[~self._table.old[self._active]]
        else:
            rest = self._active
        if len(rest):
            self._run(self._model, self._version, rest, finished, tally)
        self._retire_old()
        seconds = time.perf_counter() - begin
        stats = StepStats(
            rows=tally.rows,
            tokens=tally.tokens,
            prefill_tokens=tally.prefill,
            emitted=tally.emitted,
            drafted=tally.drafted,
            accepted=tally.accepted,
            waiting=self.waiting,
            seconds=seconds,
            paced_seconds=seconds,
            passes=tally.passes,
        )
        for observer in self._observers:
            observer(stats)
        return finished

    def abort(self, request_ids: Sequence[int] | None = None, *, keep_state: bool = False) -> list[Completion]:
        """Stop some requests (all when None) and return their partial answers; ids that are not here are ignored."""
        wanted = None if request_ids is None else set(request_ids)
        done: list[Completion] = []
        for request_id, index in list(self._index.items()):
            if wanted is None or request_id in wanted:
                keep = keep_state and bool(self._table.cached[index] > 0) and not self._table.old[index]
                done.append(self._completion(index, "abort", kept=keep))
                if keep:
                    self._leave(index)
                    self._parked[request_id] = index
                else:
                    self._release(index)
        kept: list[tuple[float, int, Request]] = []
        for entry in self._queue:
            request = entry[2]
            if wanted is None or request.request_id in wanted:
                done.append(Completion(request_id=request.request_id, segments=request.prefix, finish_reason="abort"))
                self._dequeued(request)
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self._queue = kept
        if not keep_state:
            for request_id in list(self._parked):
                if wanted is None or request_id in wanted:
                    self._unpark(request_id)
        self._retire_old()
        return done

    def load_weights(self, manifest: WeightsManifest, buffer: npt.NDArray[np.uint8]) -> None:
        """Verify a snapshot and load it beside the active one, which goes on being used.

        Raises:
            WeightsError: The snapshot is damaged or does not fit the model, or rows still drain under the weights that
                it would overwrite (there are two copies of the weights at most): step until ``draining`` is 0.
        """
        if self._old is not None:
            raise WeightsError(
                f"weights version {manifest.version} cannot be loaded while {self.draining} rows drain under version "
                f"{self._old_version}; step until they have finished, or abort them"
            )
        verify(manifest, buffer)
        state = unpack(manifest, buffer)
        self._loaded = None
        if self._spare is None:
            self._spare = self._model.twin()
        self._spare.load_state(state)
        self._loaded = manifest.version

    def activate_weights(self, version: int, mode: SwapMode = "reprefill") -> None:
        """Make a loaded snapshot the active one between two steps; raises ``WeightsError`` when it is not loaded."""
        if self._spare is None or self._loaded != version:
            raise WeightsError(f"weights version {version} is not loaded; loaded is {self._loaded}")
        previous = self._model
        self._model, self._spare, self._loaded = self._spare, None, None
        if mode == "drain" and len(self._active):
            self._old, self._old_version = previous, self._version
            self._table.old[self._active] = True
        else:
            self._spare = previous
        self._version = version
        self._prompts.clear()
        if mode == "reprefill":
            self._table.cached[self._active] = 0
            for index in self._active.tolist():
                self._table[index].prompt_version = -1
        if mode != "keep_kv":
            for request_id in list(self._parked):
                self._unpark(request_id)

    # Admission and slots.

    def _check(self, request: Request) -> None:
        name, sampling = f"request {request.request_id}", request.sampling
        ids = np.concatenate([request.prompt_ids, *(s.token_ids for s in request.prefix)])
        if not len(request.prompt_ids):
            raise ValueError(f"{name}: the prompt is empty")
        if len(request.prompt_ids) >= self.max_length:
            raise ValueError(
                f"{name}: a prompt of {len(request.prompt_ids)} tokens leaves no room in {self.max_length} tokens"
            )
        if ids.min() < 0 or ids.max() >= self._model.vocabulary:
            raise ValueError(f"{name}: token ids must lie in 0..{self._model.vocabulary - 1}")
        if sampling.max_tokens < 1 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise ValueError(f"{name}: impossible sampling parameters {sampling}")
        if sampling.stop_strings and (self._tokenizer is None or not all(sampling.stop_strings)):
            raise ValueError(f"{name}: stop strings must not be empty, and need an engine with a tokenizer")

    def _dequeued(self, request: Request) -> None:
        self._queued.discard(request.request_id)
        if request.group is not None:
            self._waiting_groups[request.group] -= 1
            if self._waiting_groups[request.group] <= 0:
                del self._waiting_groups[request.group]
                self._prompts.pop(request.group, None)

    def _admit(self, finished: list[Completion]) -> None:
        """Give slots to waiting requests, highest priority first, while rows are free or parked ones can go."""
        opened: list[int] = []
        while self._queue:
            request = self._queue[0][2]
            reason = self._ended_already(request)
            resumed = request.request_id in self._parked
            full = len(self._active) + len(opened) + len(self._parked) >= self.max_rows
            if reason is None and full and not resumed and not self._evict():
                break
            heapq.heappop(self._queue)
            if reason is not None:
                finished.append(
                    Completion(request_id=request.request_id, segments=request.prefix, finish_reason=reason)
                )
            else:
                opened.append(self._open(request))
            self._dequeued(request)
        if opened:
            self._active = np.concatenate([self._active, np.array(opened, np.int64)])
            self._sort()

    def _ended_already(self, request: Request) -> FinishReason | None:
        if not request.prefix:
            return None
        length = sum(len(s.token_ids) for s in request.prefix)
        last = request.prefix[-1]
        if (
            last.source == "policy"
            and len(last.token_ids)
            and int(last.token_ids[-1]) in request.sampling.stop_token_ids
        ):
            return "stop"
        if length >= request.sampling.max_tokens or len(request.prompt_ids) + length >= self.max_length:
            return "length"
        return None

    def _open(self, request: Request) -> int:
        """Open a row for a request: over its parked state, or behind a prompt that is already computed."""
        table = self._table
        index, cached, prompt_version = self._parked.pop(request.request_id, -1), 0, -1
        if index >= 0:
            slot, cached, prompt_version = int(table.slot[index]), int(table.cached[index]), table[index].prompt_version
            before = table.tokens[index, :cached].copy()
        else:
            index = table.free_index()
            taken = {int(table.slot[i]) for i in range(self.max_rows) if table.rows[i] is not None}
            slot = next(s for s in range(self.max_rows) if s not in taken)
            before = np.zeros(0, np.int32)
        sampling = request.sampling
        stops = None
        if sampling.stop_strings:
            stops = StopStrings(sampling.stop_strings, self._decode)
        table.open(
            index,
            request,
            key=request_key(self._run_seed, request.request_id),
            limit=min(len(request.prompt_ids) + sampling.max_tokens, self.max_length),
            slot=slot,
            stops=stops,
        )
        if cached:
            # Whatever the new request shares with the parked tokens is computed already; the last token is fed again.
            shared = min(cached, int(table.length[index]) - 1)
            same = before[:shared] == table.tokens[index, :shared]
            table.cached[index] = shared if same.all() else int(same.argmin())
            if table.cached[index] >= table.prompt[index]:
                table[index].prompt_version = prompt_version
        self._index[request.request_id] = index
        if request.group is not None:
            self._groups.setdefault(request.group, set()).add(index)
        return index

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _evict(self) -> bool:
        """Drop the parked row that is worth least; False when there is none."""
        if not self._parked:
            return False

        def worth(request_id: int) -> tuple[bool, float, int]:
            index = self._parked[request_id]
            return request_id in self._queued, self._table[index].request.priority, int(self._table.cached[index])

        self._unpark(min(self._parked, key=worth))
        return True

    def _unpark(self, request_id: int) -> None:
        self._table.rows[self._parked.pop(request_id)] = None

    def _leave(self, index: int) -> None:
        """Take a row out of the running ones; it keeps its slot."""
        request = self._table[index].request
        self._active = self._active[self._active != index]
        del self._index[request.request_id]
        group = request.group
        if group is None:
            return
        members = self._groups[group]
        members.discard(index)
        # Siblings that still wait get the prompt from here.
        if group in self._waiting_groups and group not in self._prompts and self._has_prompt(index, self._version):
            self._prompts[group] = self._cache.snapshot(int(self._table.slot[index]), int(self._table.prompt[index]))
        if not members:
            del self._groups[group]

    def _release(self, index: int) -> None:
        """Take a row out and free its slot."""
        self._leave(index)
        self._table.rows[index] = None

    def _has_prompt(self, index: int, version: int) -> bool:
        table = self._table
        return bool(table.cached[index] >= table.prompt[index]) and table[index].prompt_version == version

    def _sort(self) -> None:
        self._active = self._active[np.argsort(self._table.slot[self._active])]

    def _compact(self) -> None:
        """Move running rows to the lowest slots, so that decoding sees them as one view of the cache."""
        table, active = self._table, self._active
        count = len(active)
        if int(table.slot[active[-1]]) < count:
            return
        owner = {int(table.slot[i]): i for i in range(self.max_rows) if table.rows[i] is not None}
        running = set(table.slot[active].tolist())
        holes = iter([s for s in range(count) if s not in running])
        for index in active[table.slot[active] >= count].tolist():
            source, target = int(table.slot[index]), next(holes)
            parked = owner.get(target)
            if parked is None:
                self._cache.copy(source, [target], int(table.cached[index]))
            else:
                self._cache.swap(source, target, int(max(table.cached[index], table.cached[parked])))
                table.slot[parked] = source
                owner[source] = parked
            table.slot[index] = target
        self._sort()

    def _retire_old(self) -> None:
        if self._old is not None and not self.draining:
            self._spare, self._old, self._old_version = self._old, None, -1

    # One pass.

    def _run(
        self, model: PackedModel, version: int, rows: Int64Array, finished: list[Completion], tally: _Tally
    ) -> None:
        work = self._lay_out(rows, version)
        if work is None:
            return
        table = self._table
        self._cache.reserve(int((work.feed.starts + work.feed.counts).max()))
        plan, token_ids = plan_pass(work.feed, self._cache.capacity, model.windows, model.device)
        index = torch.from_numpy(work.logit_index).to(model.device)
        logits = model.forward(plan, self._cache, token_ids, index)
        tally.passes += 1
        tally.tokens += len(work.feed.tokens)
        tally.prefill += work.prefill
        for leader, followers in work.followers.items():
            prompt = int(table.prompt[leader])
            self._cache.copy(int(table.slot[leader]), table.slot[followers].tolist(), prompt)
            table.cached[followers] = prompt
        table.cached[work.rows] += work.feed.counts
        for i in work.rows[work.feed.decoding :].tolist() + [i for f in work.followers.values() for i in f]:
            if table.cached[i] >= table.prompt[i] and table[i].prompt_version < 0:
                table[i].prompt_version = version
        self._draw(work, logits, version, finished, tally)

    def _lay_out(self, rows: Int64Array, version: int) -> _Pass | None:
        """Decide what each row feeds; ``None`` when all rows have to wait (never for a whole step)."""
        table = self._table
        behind = table.length[rows] - table.cached[rows]
        followers: dict[int, list[int]] = {}
        prefill: list[tuple[int, int]] = []
        if (behind > 1).any():
            prefill, followers = self._plan_prefill(rows[behind > 1], version)
            behind = table.length[rows] - table.cached[rows]
        following = [i for f in followers.values() for i in f]
        decoding = rows[behind == 1]
        drafts, lengths = self._propose(decoding)
        counts = lengths + 1
        tokens = [table.tokens[decoding, table.length[decoding] - 1].astype(np.int64)]
        if drafts.shape[1]:
            wide = np.concatenate([tokens[0][:, None], drafts], axis=1)
            tokens = [wide[np.arange(wide.shape[1]) < counts[:, None]]]
        drawing, index = decoding, np.arange(int(counts.sum()))
        if not prefill and not following:
            feed = Feed(table.slot[decoding], table.cached[decoding], counts, tokens[0], len(decoding))
            return _Pass(feed, decoding, drafts, lengths, drawing, index, {}, 0) if len(decoding) else None
        filled = np.array([i for i, _ in prefill], np.int64)
        amounts = np.array([n for _, n in prefill], np.int64)
        drawn: list[int] = []
        places: list[int] = []
        at = int(counts.sum())
        for i, amount in prefill:
            start = int(table.cached[i])
            tokens.append(table.tokens[i, start : start + amount].astype(np.int64))
            if start + amount == table.length[i]:
                drawn.append(i)
                places.append(at + amount - 1)
            for follower in followers.get(i, ()):
                drawn.append(follower)
                places.append(at + int(table.prompt[i]) - 1 - start)
            at += amount
        everyone = np.concatenate([decoding, filled])
        feed = Feed(
            slots=table.slot[everyone],
            starts=table.cached[everyone],
            counts=np.concatenate([counts, amounts]),
            tokens=np.concatenate(tokens),
            decoding=len(decoding),
        )
        return _Pass(
            feed=feed,
            rows=everyone,
            drafts=np.pad(drafts, ((0, len(drawn)), (0, 0))),
            draft_lengths=np.concatenate([lengths, np.zeros(len(drawn), np.int64)]),
            drawing=np.concatenate([decoding, np.array(drawn, np.int64)]),
            logit_index=np.concatenate([index, np.array(places, np.int64)]),
            followers=followers,
            prefill=int(amounts.sum()),
        )

    def _plan_prefill(self, rows: Int64Array, version: int) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
        """Share prompts and split work: (row, tokens to feed) pairs, and the rows that follow a leader's prompt.

        A row whose prompt is computed elsewhere copies it. Of siblings that all lack it, one computes it; those with
        nothing behind the prompt draw from the leader's own logits, those with a prefix wait for the next pass.
        """
        table = self._table
        budget = self.prefill_tokens
        prefill: list[tuple[int, int]] = []
        followers: dict[int, list[int]] = {}
        leaders: dict[int, tuple[int, int]] = {}
        for i in rows.tolist():
            prompt, group = int(table.prompt[i]), table[i].request.group
            if group is not None and table.cached[i] == 0 and prompt > 1:
                if group in leaders:
                    leader, amount = leaders[group]
                    start = int(table.cached[leader])
                    if table.length[i] == prompt and start + amount >= prompt > start:
                        followers.setdefault(leader, []).append(i)
                    continue
                self._copy_prompt(i, group, version)
            behind = int(table.length[i] - table.cached[i])
            if behind == 1:
                continue
            amount = min(behind, budget)
            if group is not None and table.cached[i] < prompt:
                leaders[group] = (i, amount)
            if amount:
                prefill.append((i, amount))
                budget -= amount
        return prefill, followers

    def _copy_prompt(self, index: int, group: int, version: int) -> None:
        """Copy the group's prompt into a row's slot when it is computed under ``version`` somewhere."""
        table = self._table
        source = next((i for i in self._groups[group] if i != index and self._has_prompt(i, version)), None)
        slot, prompt = int(table.slot[index]), int(table.prompt[index])
        if source is not None:
            self._cache.copy(int(table.slot[source]), [slot], prompt)
        elif group in self._prompts and version == self._version:
            self._cache.restore(self._prompts[group], slot)
        else:
            return
        # The last prompt token is fed again, for its logits, when nothing stands behind it.
        table.cached[index] = min(prompt, int(table.length[index]) - 1)
        table[index].prompt_version = version

    def _propose(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Drafts int64[rows, longest], padded with -1, and their lengths int64[rows]."""
        none = np.zeros(len(rows), np.int64)
        if self._drafts is None or not len(rows):
            return np.zeros((len(rows), 0), np.int64), none
        table = self._table
        room = table.limit[rows] - table.length[rows] - 1
        views = []
        for i, space in zip(rows.tolist(), room.tolist(), strict=True):
            request = table[i].request
            views.append(RowView(request.request_id, request.group, request.prompt_ids, table.answer(i), space))
        proposed = self._drafts.propose(views)
        lengths = np.minimum([len(p) for p in proposed], room).astype(np.int64)
        drafts = np.full((len(rows), int(lengths.max())), -1, np.int64)
        for line, draft, length in zip(drafts, proposed, lengths.tolist(), strict=True):
            line[:length] = draft[:length]
        if drafts.size and int(drafts.max()) >= self._model.vocabulary:
            raise ValueError("the draft source proposed a token that is not in the vocabulary")
        return drafts, lengths

    def _draw(self, work: _Pass, logits: torch.Tensor, version: int, finished: list[Completion], tally: _Tally) -> None:
        """Draw tokens, accept drafts, append what is emitted and end the rows that are complete."""
        table, rows = self._table, work.drawing
        if not len(rows):
            return
        counts = work.draft_lengths + 1
        width = int(counts.max())
        steps = np.arange(width)
        real = steps < counts[:, None]
        spread = np.repeat(rows, counts)
        answered = table.length[rows] - table.prompt[rows]
        positions = (answered[:, None] + steps)[real]
        drawn, drawn_logprobs = self._sampler.sample(
            logits,
            position_keys(table.key[spread], positions),
            table.temperature[spread],
            table.top_p[spread],
            table.top_k[spread],
        )
        tokens = np.full((len(rows), width), -1, np.int64)
        logprobs = np.zeros((len(rows), width), np.float32)
        tokens[real] = drawn.cpu().numpy()
        logprobs[real] = drawn_logprobs.float().cpu().numpy()
        accepted = accepted_counts(tokens, work.drafts, work.draft_lengths)
        emitted = accepted + 1
        inside = steps < emitted[:, None]
        # A row ends with its first stop id, and before its first token that could not be computed.
        stopping = (tokens[:, :, None] == table.stop_ids[rows][:, None, :]).any(axis=2) & (tokens >= 0) & inside
        stopped = np.asarray(stopping.any(axis=1))
        emitted = np.where(stopped, stopping.argmax(axis=1) + 1, emitted)
        broken = ~np.isfinite(logprobs) & inside
        failed = np.asarray(broken.any(axis=1))
        if failed.any():
            first = np.where(failed, broken.argmax(axis=1), width)
            failed = first < emitted
            stopped &= ~failed
            emitted = np.minimum(emitted, first)
        now = time.time()
        changed = (table.version[rows] != version) & (emitted > 0)
        if changed.any():
            table.mark(rows[changed], version)
        table.reserve(int((table.length[rows] + emitted).max()))
        inside = steps < emitted[:, None]
        lines, columns = np.repeat(rows, emitted), (table.length[rows][:, None] + steps)[inside]
        table.tokens[lines, columns] = tokens[inside]
        table.logprobs[lines, columns] = logprobs[inside]
        table.length[rows] += emitted
        for j in np.flatnonzero(table.watched[rows] & (emitted > 0)).tolist():
            row = table[int(rows[j])]
            assert row.stops is not None
            fresh = int(answered[j])
            end = row.stops.first_completion(table.answer(int(rows[j])), row.stops_from, fresh)
            if end is not None:
                emitted[j] = end + 1 - fresh
                table.length[rows[j]] = table.prompt[rows[j]] + end + 1
                stopped[j], failed[j] = True, False
        accepted = np.minimum(accepted, emitted)
        table.cached[rows] = table.length[rows] - 1
        first_pass = rows[(table.passes[rows] == 0) & (emitted > 0)]
        for i in first_pass.tolist():
            table[i].first_token = now
        table.passes[rows] += emitted > 0
        table.drafted[rows] += work.draft_lengths
        table.accepted[rows] += accepted
        tally.rows += int((emitted > 0).sum())
        tally.emitted += int(emitted.sum())
        tally.drafted += int(work.draft_lengths.sum())
        tally.accepted += int(accepted.sum())
        if self._drafts is not None:
            for j in np.flatnonzero(work.draft_lengths).tolist():
                request_id = table[int(rows[j])].request.request_id
                self._drafts.observe(request_id, int(work.draft_lengths[j]), int(accepted[j]))
        over = table.length[rows] >= table.limit[rows]
        for j in np.flatnonzero(stopped | over | failed).tolist():
            i = int(rows[j])
            if failed[j]:
                error = f"the logits of the next token are not finite (weights version {version})"
                finished.append(self._completion(i, "error", error=error))
                self._table[i].prompt_version = -1
                self._cache.clear(int(table.slot[i]))
            else:
                finished.append(self._completion(i, "stop" if stopped[j] else "length"))
            self._release(i)

    def _completion(self, index: int, reason: FinishReason, *, kept: bool = False, error: str = "") -> Completion:
        table, row = self._table, self._table[index]
        return Completion(
            request_id=row.request.request_id,
            segments=table.segments(index),
            finish_reason=reason,
            drafted=int(table.drafted[index]),
            accepted=int(table.accepted[index]),
            forward_passes=int(table.passes[index]),
            first_token=row.first_token,
            kept=kept,
            error=error,
        )
