"""Who holds a slot, who waits for one, and what a slot's key/value state is good for.

Running rows keep to neighbouring low slots. An aborted row can be parked: it keeps its slot until a request with the
same id comes back or the slot is needed. A prompt that siblings share is computed once: it is copied from a sibling
that has it, or from a snapshot that the last one to leave has left behind.
Rows marked ``old`` are written under the weights before the active ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actors.rollout.drafting import Drafting
from actors.rollout.engine import Completion, Request, Swap
from actors.rollout.handovers import begins_old, opening_version
from actors.rollout.row_table import MIXED, NOT_COMPUTED, RowTable
from actors.rollout.sampling import request_key
from actors.rollout.slot_cache import SlotCache, Snapshot
from actors.rollout.stopping import StopStrings
from storage.records import FinishReason, Int32Array

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class PromptGroup:
    """Requests that share a prompt: running rows, how many wait, perhaps a copy of its state and who computed that."""

    prompt_ids: Int32Array
    rows: set[int] = field(default_factory=set)
    waiting: int = 0
    snapshot: Snapshot | None = None
    snapshot_version: int = NOT_COMPUTED


class RowPool:
    """Rows of one engine: waiting, running and parked.

    Attributes:
        table: State of running and parked rows.
        cache: Their key/value state.
        version: Version of the active weights.
        opening: Version of the weights that new rows begin under.
        active: int64[running], indices of running rows in ascending order of slot.
        parked: Index of each parked row by request id.
        row_limit: Most running rows at which another one is admitted; 0: as many as there are slots.
    """

    def __init__(
        self,
        rows: int,
        max_length: int,
        *,
        run_seed: int,
        version: int,
        decode: Callable[[Sequence[int]], str] | None,
        drafting: Drafting,
        top_tokens: int = 0,
    ) -> None:
        self.table = RowTable(rows, top_tokens)
        self.cache = SlotCache(rows, max_length)
        self.version = version
        self.opening = version
        self.active: Int64Array = np.zeros(0, np.int64)
        self.parked: dict[int, int] = {}
        self.row_limit = 0
        self._rows = rows
        self._max_length = max_length
        self._run_seed = run_seed
        self._decode = decode
        self._drafting = drafting
        self._running: dict[int, int] = {}
        self._queue: list[tuple[float, int, Request]] = []
        self._queued: set[int] = set()
        self._submitted = 0
        self._groups: dict[int, PromptGroup] = {}
        self._swap = Swap()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def draining(self) -> int:
        """Rows that the weights before the active ones write to their end."""
        return int(self.table.old[self.active].sum()) if self._swap.mode == "drain" else 0

    @property
    def needs_old(self) -> bool:
        """True while the weights before the active ones write rows, or are going to."""
        return self.opening != self.version or bool(self.table.old[self.active].any())

    def enqueue(self, requests: Sequence[Request], vocabulary: int) -> None:
        """Queue requests, all or none; raises ``ValueError`` that names the one that cannot run."""
        fresh: set[int] = set()
        prompts: dict[int, Int32Array] = {}
        for request in requests:
            self._check(request, vocabulary)
            name = f"request {request.request_id}"
            if any(request.request_id in ids for ids in (fresh, self._queued, self._running)):
                raise ValueError(f"{name} is in the engine already")
            fresh.add(request.request_id)
            if request.group is not None:
                known = self._groups.get(request.group)
                prompt = known.prompt_ids if known else prompts.setdefault(request.group, request.prompt_ids)
                if not np.array_equal(prompt, request.prompt_ids):
                    raise ValueError(f"{name} has another prompt than the rest of group {request.group}")
        for request in requests:
            heapq.heappush(self._queue, (-request.priority, self._submitted, request))
            self._submitted += 1
            self._queued.add(request.request_id)
            if request.group is not None:
                self._groups.setdefault(request.group, PromptGroup(request.prompt_ids)).waiting += 1

    def admit(self) -> list[Completion]:
        """Give slots to waiting requests, highest priority first; return those whose prefix is complete already."""
        finished: list[Completion] = []
        opened: list[int] = []
        while self._queue:
            request = self._queue[0][2]
            reason = self._ended_already(request)
            if reason is None and self.row_limit and len(self.active) + len(opened) >= self.row_limit:
                break
            if reason is None and request.request_id not in self.parked:
                full = len(self.active) + len(opened) + len(self.parked) >= self._rows
                if full and not self._evict():
                    break
            heapq.heappop(self._queue)
            if reason is None:
                opened.append(self._open(request))
            else:
                finished.append(_unstarted(request, reason))
            self._dequeued(request)
        if opened:
            self.active = np.concatenate([self.active, np.array(opened, np.int64)])
            self._sort()
        return finished

    def abort(self, request_ids: Sequence[int] | None, *, keep_state: bool) -> list[Completion]:
        """Take out some requests (all when None), waiting or running, and give or keep the slots of parked ones."""
        wanted = None if request_ids is None else set(request_ids)
        done: list[Completion] = []
        for request_id, index in list(self._running.items()):
            if wanted is None or request_id in wanted:
                keep = keep_state and bool(self.table.cached[index] >= self.table.prompt[index])
                keep = keep and not self.table.old[index]
                done.append(self.completion(index, "abort", kept=keep))
                self._leave(index)
                if keep:
                    self.parked[request_id] = index
                else:
                    self.table.rows[index] = None
        staying: list[tuple[float, int, Request]] = []
        for entry in self._queue:
            if wanted is None or entry[2].request_id in wanted:
                done.append(_unstarted(entry[2], "abort"))
                self._dequeued(entry[2])
            else:
                staying.append(entry)
        heapq.heapify(staying)
        self._queue = staying
        if not keep_state:
            self.unpark(wanted)
        return done

    def unpark(self, request_ids: set[int] | None = None) -> None:
        """Free the slots of some parked rows (all when None)."""
        for request_id in list(self.parked):
            if request_ids is None or request_id in request_ids:
                self.table.rows[self.parked.pop(request_id)] = None

    def release(self, index: int) -> None:
        """Take a running row out and free its slot."""
        self._leave(index)
        self.table.rows[index] = None

    def discard_state(self, index: int) -> None:
        """Forget a running row's key/value state and wipe its slot."""
        self.table.cached[index] = 0
        self.table[index].prompt_version = NOT_COMPUTED
        self.cache.clear(int(self.table.slot[index]))

    def change_version(self, version: int, swap: Swap, staying: Int64Array) -> None:
        """Go over to other weights between two steps; rows that stay go on under those that are active now.

        Args:
            version: The new version.
            swap: How it takes over.
            staying: int64[n], running rows that stay (see :func:`actors.rollout.handovers.staying`).
        """
        self.opening, self.version, self._swap = opening_version(self.version, version, swap), version, swap
        for group in self._groups.values():
            if group.snapshot_version != self.opening:
                group.snapshot = None
        self.hand_over(np.setdiff1d(self.active, staying))
        self.table.old[staying] = True
        if swap.mode != "keep_kv":
            self.unpark()

    def hand_over(self, rows: Int64Array) -> None:
        """Let rows go on under the active weights: with the state that they have, or after another prefill."""
        table = self.table
        table.old[rows] = False
        for index in rows.tolist():
            row = table[index]
            if self._swap.mode == "keep_kv":
                if row.prompt_version == NOT_COMPUTED and table.cached[index]:
                    row.prompt_version = MIXED
                continue
            self._keep_prompt(index)
            table.cached[index], row.prompt_version = 0, NOT_COMPUTED

    def has_prompt(self, index: int, version: int) -> bool:
        """True when a row's slot holds its whole prompt as ``version`` computes it."""
        table = self.table
        return bool(table.cached[index] >= table.prompt[index]) and table[index].prompt_version == version

    def copy_prompt(self, index: int, version: int) -> bool:
        """Fill a row's slot with its group's prompt, if that is to be had as ``version`` computes it."""
        table = self.table
        request = table[index].request
        if request.group is None:
            return False
        group = self._groups[request.group]
        source = next((i for i in group.rows if i != index and self.has_prompt(i, version)), None)
        slot, prompt = int(table.slot[index]), int(table.prompt[index])
        if source is not None:
            self.cache.copy(int(table.slot[source]), [slot], prompt)
        elif group.snapshot is not None and version == group.snapshot_version:
            self.cache.restore(group.snapshot, slot)
        else:
            return False
        # With nothing behind the prompt, its last token is fed again for its logits.
        table.cached[index] = min(prompt, int(table.length[index]) - 1)
        table[index].prompt_version = version
        return True

    def compact(self) -> None:
        """Move running rows to the lowest slots unless they are neighbours, so that they are one view of the cache."""
        table, active = self.table, self.active
        count = len(active)
        if int(table.slot[active[-1]]) - int(table.slot[active[0]]) + 1 == count:
            return
        parked = {int(table.slot[i]): i for i in self.parked.values()}
        running = set(table.slot[active].tolist())
        holes = iter([s for s in range(count) if s not in running])
        for index in active[table.slot[active] >= count].tolist():
            source, target = int(table.slot[index]), next(holes)
            other = parked.get(target)
            if other is None:
                self.cache.copy(source, [target], int(table.cached[index]))
            else:
                self.cache.swap(source, target, int(max(table.cached[index], table.cached[other])))
                table.slot[other] = source
            table.slot[index] = target
        self._sort()

    def completion(self, index: int, reason: FinishReason, *, kept: bool = False, error: str = "") -> Completion:
        """Say how a running row ended."""
        table, row = self.table, self.table[index]
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

    def _check(self, request: Request, vocabulary: int) -> None:
        name, sampling = f"request {request.request_id}", request.sampling
        if not len(request.prompt_ids):
            raise ValueError(f"{name}: the prompt is empty")
        if len(request.prompt_ids) >= self._max_length:
            raise ValueError(
                f"{name}: a prompt of {len(request.prompt_ids)} tokens leaves no room in {self._max_length} tokens"
            )
        ids = np.concatenate([request.prompt_ids, *(s.token_ids for s in request.prefix)])
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise ValueError(f"{name}: token ids must lie in 0..{vocabulary - 1}")
        if sampling.max_tokens < 1 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise ValueError(f"{name}: impossible sampling parameters {sampling}")
        if sampling.stop_strings and (self._decode is None or not all(sampling.stop_strings)):
            raise ValueError(f"{name}: stop strings must not be empty, and need an engine with a tokenizer")

    def _ended_already(self, request: Request) -> FinishReason | None:
        length = sum(len(s.token_ids) for s in request.prefix)
        if not length:
            return None
        last = request.prefix[-1]
        written = len(last.token_ids) if last.source == "policy" else 0
        if written and int(last.token_ids[-1]) in request.sampling.stop_token_ids:
            return "stop"
        if length >= request.sampling.max_tokens or len(request.prompt_ids) + length >= self._max_length:
            return "length"
        return None

    def _open(self, request: Request) -> int:
        """Open a row for a request, over its parked state where there is some."""
        table, sampling = self.table, request.sampling
        index = self.parked.pop(request.request_id, -1)
        before, prompt_version = np.zeros(0, np.int32), NOT_COMPUTED
        if index >= 0:
            slot, prompt_version = int(table.slot[index]), table[index].prompt_version
            before = table.tokens[index, : table.cached[index]].copy()
        else:
            index = table.free_index()
            taken = {int(table.slot[i]) for i, row in enumerate(table.rows) if row is not None}
            slot = next(s for s in range(self._rows) if s not in taken)
        stops = None
        if sampling.stop_strings and self._decode is not None:
            stops = StopStrings(sampling.stop_strings, self._decode)
        table.open(
            index,
            request,
            key=request_key(self._run_seed, request.request_id),
            limit=min(len(request.prompt_ids) + sampling.max_tokens, self._max_length),
            slot=slot,
            stops=stops,
        )
        handover = self._swap.handover
        if self.opening != self.version and handover is not None and begins_old(table, index, self.opening, handover):
            table.old[index], before = True, before[:0]  # parked state is the active weights'
        # What the request shares with the parked tokens is computed; at least its last token is fed again.
        shared = min(len(before), int(table.length[index]) - 1)
        if shared:
            same = before[:shared] == table.tokens[index, :shared]
            table.cached[index] = shared if same.all() else int(same.argmin())
            whole = table.cached[index] >= table.prompt[index] or prompt_version != self.version
            table[index].prompt_version = prompt_version if whole else NOT_COMPUTED
        self._running[request.request_id] = index
        if request.group is not None:
            self._groups[request.group].rows.add(index)
        table.held[index] = self._drafting.open(index, request)
        return index

    def _evict(self) -> bool:
        """Free the parked row that is worth least; False when there is none."""

        def worth(request_id: int) -> tuple[bool, float, int]:
            index = self.parked[request_id]
            return request_id in self._queued, self.table[index].request.priority, int(self.table.cached[index])

        if not self.parked:
            return False
        self.unpark({min(self.parked, key=worth)})
        return True

    def _leave(self, index: int) -> None:
        """Take a row out of the running ones; it keeps its slot for now."""
        request = self.table[index].request
        self._drafting.close(index)
        self.active = self.active[self.active != index]
        del self._running[request.request_id]
        if request.group is None:
            return
        self._groups[request.group].rows.discard(index)
        self._keep_prompt(index)
        self._forget_if_empty(request.group)

    def _keep_prompt(self, index: int) -> None:
        """Copy the prompt's state of a row that is about to lose it, where siblings wait that can begin with it."""
        request = self.table[index].request
        if request.group is None:
            return
        group = self._groups[request.group]
        if group.waiting and group.snapshot is None and self.has_prompt(index, self.opening):
            group.snapshot = self.cache.snapshot(int(self.table.slot[index]), int(self.table.prompt[index]))
            group.snapshot_version = self.opening

    def _dequeued(self, request: Request) -> None:
        self._queued.discard(request.request_id)
        if request.group is not None:
            self._groups[request.group].waiting -= 1
            self._forget_if_empty(request.group)

    def _forget_if_empty(self, name: int) -> None:
        group = self._groups[name]
        if not group.waiting and not group.rows:
            del self._groups[name]
        elif not group.waiting:
            # Rows that were just given a slot still need it in the coming pass, hence not sooner than the next change.
            group.snapshot = group.snapshot if any(self.table.cached[i] == 0 for i in group.rows) else None

    def _sort(self) -> None:
        self.active = self.active[np.argsort(self.table.slot[self.active])]


def _unstarted(request: Request, reason: FinishReason) -> Completion:
    return Completion(request_id=request.request_id, segments=request.prefix, finish_reason=reason)
