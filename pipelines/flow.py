"""Moves samples from rollout workers through reward workers, and owns every payload on the way.

Streaming generators submitted from here make the conductor the owner of what workers yield, so a sample survives the
worker that wrote it. Headers are awaited, payloads never are. Each sample is a lease: it is issued again when its
worker dies, a result that arrives twice is dropped by its key, and a sample that is interrupted keeps its tokens until
it goes on, on whichever worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from actors.bundles import BundleHeader, Call, GroupEnvelope, Resumption, RewardEnvelope
from actors.channels import GET_DEADLINE_S
from pipelines.drafting import DraftRequests
from pipelines.faults import RunLost, brief, cause_of_death
from pipelines.fleet import Fleet
from pipelines.leases import Lease, SampleDone, SampleId, Stage
from pipelines.role_streams import pairs, run_pairs
from pipelines.roles import Roles
from pipelines.utilisation import EngineLoad
from storage.records import Assignment, GroupKey, SampleHeader

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
_INTERRUPT_DEADLINE_S = 60.0


class SampleFlow:
    """The path of samples; one per run.

    Attributes:
        events: What happened to samples, in order.
        loads: What the engine of each worker has done, by name.
        draft_metrics: What each worker's draft source counts, by name.
        generated: Tokens handed over since the start; dropped: those of them that will never be trained. At any time,
            generated = trained + dropped + held by leases.
        fleet: The workers.
        failure: What broke the flow.
        on_written: Called with (worker, key) whenever a sample has left its rollout worker, or died with it.
        deadline: Seconds that the score of an answer of a group may take; None: as configured.
        on_scored: Called with the header of each answer that was scored for the first time.
    """

    def __init__(self, roles: Roles, drafts: DraftRequests) -> None:
        """Use the actors of ``roles``; call :meth:`start` inside the event loop."""
        self._roles = roles
        self._drafts = drafts
        self.fleet = Fleet(roles, self._spawn)
        drafts.nodes = self.fleet.nodes
        self._leases: dict[SampleId, Lease] = {}
        self._indices: dict[GroupKey, set[int]] = {}
        self._in_hand: dict[int, dict[SampleId, int]] = {}
        self._rows: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Condition()
        self._calls = 0
        self._closed = False
        self.events: asyncio.Queue[SampleDone] = asyncio.Queue()
        self.loads: dict[str, EngineLoad] = {}
        self.draft_metrics: dict[str, Mapping[str, float]] = {}
        self.generated = 0
        self.dropped = 0
        self.failure: BaseException | None = None
        self.on_written: Callable[[int, GroupKey], None] = lambda _worker, _key: None
        self.deadline: Callable[[GroupKey], float | None] = lambda _key: None
        self.on_scored: Callable[[SampleHeader], None] = lambda _header: None

    def start(self) -> None:
        """Begin to read scored samples."""
        for index in range(len(self._roles.reward)):
            self._spawn(self._read_reward(index))

    def close(self) -> None:
        """Stop reading; what is in flight is forgotten."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    def dispatch(self, worker: int, assignments: Sequence[Assignment], *, row_limit: int = 0) -> None:
        """Have a rollout worker write the assigned samples; results arrive on ``events``.

        Samples that were interrupted go on behind their tokens.
        """
        self._calls += 1
        resumptions: list[Resumption] = []
        for assignment in assignments:
            for index in assignment.samples:
                lease = Lease(
                    assignment,
                    worker,
                    assignment.attempt,
                    call=self._calls,
                    begins=self.fleet.opening_versions.get(worker, 0),
                )
                known = self._leases.get((assignment.key, index))
                if known is not None:
                    lease.stays = known.stays
                    if known.ref is not None and known.header is not None:
                        lease.ref, lease.position, lease.header = known.ref, known.position, known.header
                        lease.base = known.header.tokens
                        resumptions.append(
                            Resumption(key=assignment.key, index=index, position=known.position, refs=[known.ref])
                        )
                self._leases[assignment.key, index] = lease
                self._indices.setdefault(assignment.key, set()).add(index)
                self._in_hand.setdefault(self._calls, {})[assignment.key, index] = lease.base
                self._rows[worker] += 1
        call = Call(
            number=self._calls,
            assignments=tuple(assignments),
            resumptions=tuple(resumptions),
            packs=tuple(self._drafts.packs(worker, assignments)),
            row_limit=row_limit,
            drafts=self._drafts.on,
            gate=self._roles.config.speculation.gate,
        )
        self._spawn(self._generate(worker, call))

    def outstanding(self, stage: Stage) -> int:
        """Number of samples in a stage."""
        return sum(lease.stage == stage for lease in self._leases.values())

    def busy_workers(self) -> set[int]:
        """Rollout workers that still have samples to write."""
        return {lease.worker for lease in self._leases.values() if lease.stage == "generating"}

    def rows(self, worker: int) -> int:
        """Samples that a worker was given and has not handed over, wanted or not."""
        return self._rows[worker]

    def current(self, event: SampleDone) -> Lease | None:
        """Return the sample of an event if it is still true; since then it may have been given up, or begun anew."""
        lease = self._leases.get((event.key, event.index))
        if lease is None or (event.header is not None and event.header is not lease.header):
            return None
        if event.interrupted:
            return lease if lease.waits else None
        return lease if lease.stage == ("failed" if event.header is None else "scored") else None

    def leases(self, key: GroupKey) -> dict[int, Lease]:
        """The samples of a group that were ever given out, by index, ascending."""
        return {index: self._leases[key, index] for index in sorted(self._indices.get(key, ()))}

    def group(self, key: GroupKey, indices: Iterable[int]) -> GroupEnvelope:
        """Return where some siblings of a group lie; raises ``KeyError`` when one is missing."""
        leases = [self._leases[key, index] for index in indices]
        refs = list(dict.fromkeys(lease.ref for lease in leases))
        places = tuple((refs.index(lease.ref), lease.position) for lease in leases)
        return GroupEnvelope(key=key, places=places, refs=refs)

    def headers(self, key: GroupKey) -> list[SampleHeader]:
        """Headers of the scored samples of a group, in index order."""
        leases = self.leases(key).values()
        return [lease.header for lease in leases if lease.header is not None and lease.stage == "scored"]

    def forget(self, keys: Collection[GroupKey]) -> None:
        """Drop all leases and references of some groups; whatever still arrives for them is ignored."""
        for key in keys:
            for index in self._indices.pop(key, ()):
                del self._leases[key, index]

    def drop(self, keys: Collection[GroupKey]) -> None:
        """Forget groups whose tokens will not be trained, and count those as dropped."""
        for key in keys:
            self.dropped += sum(lease.tokens for lease in self.leases(key).values())
        self.forget(keys)

    def cut(self, key: GroupKey, keep: Collection[int]) -> None:
        """Stop the samples of a group that are not in ``keep``: it has all that it needs. Waits for nothing."""
        doomed = {index: lease for index, lease in self.leases(key).items() if index not in keep}
        stopping: dict[int, dict[int, list[SampleId]]] = {}
        for index, lease in doomed.items():
            if lease.stage == "generating":
                stopping.setdefault(lease.worker, {}).setdefault(lease.call, []).append((key, index))
            self.dropped += lease.tokens
            self._indices[key].discard(index)
            del self._leases[key, index]
        for worker, calls in stopping.items():
            self._spawn(self._quietly_stop(worker, calls))

    def writing(self, keys: Iterable[GroupKey]) -> bool:
        """Whether some sample of these groups is being written."""
        return any(lease.stage == "generating" for key in keys for lease in self.leases(key).values())

    async def interrupt(self, keys: Collection[GroupKey]) -> None:
        """Stop what is being written of some groups, and return when their tokens are here.

        Samples that a worker does not hand over in time go on behind the tokens that they had before. Ask
        :meth:`writing` afterwards: what was being scored may have been lost, and be written again.
        """
        wanted: dict[int, dict[int, list[SampleId]]] = {}
        for key in keys:
            for index, lease in self.leases(key).items():
                if lease.stage == "generating":
                    lease.stopping = True
                    wanted.setdefault(lease.worker, {}).setdefault(lease.call, []).append((key, index))
        if not wanted:
            return
        stopped = [identity for calls in wanted.values() for ids in calls.values() for identity in ids]
        try:
            async with asyncio.timeout(_INTERRUPT_DEADLINE_S):
                await asyncio.gather(*(self._quietly_stop(worker, calls) for worker, calls in wanted.items()))
                async with self._stopped:
                    await self._stopped.wait_for(lambda: not any(self._stage(*i) == "generating" for i in stopped))
        except TimeoutError:
            late = [identity for identity in stopped if self._stage(*identity) == "generating"]
            log.warning("%d interrupted samples were not handed over in time", len(late))
            for identity in late:
                self._leases[identity].stage = "partial"

    async def abort(self) -> None:
        """Ask all rollout workers to stop what they write."""
        calls = [role.actor.abort.remote() for role in self._roles.rollout]
        await asyncio.gather(*calls, return_exceptions=True)

    def _spawn(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def fail(self, error: BaseException) -> None:
        """Have whoever waits for events raise ``error``: something broke that the flow cannot mend."""
        if not self._closed:
            self.failure = self.failure or error
            self.events.put_nowait(SampleDone(GroupKey("", 0, 0), -1, None, "the flow failed"))

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _generate(self, worker: int, call: Call) -> None:
        role = await self.fleet.rollout(worker)
        try:
            generate = role.actor.generate.options(num_returns="streaming", name=f"generate[{role.name}]")
            stream = generate.remote(replace(call, term=role.term))
            async for header, ref in pairs(stream):
                self.loads[header.worker] = EngineLoad(header.busy_s, header.passes, header.row_passes)
                if header.drafts:
                    self.draft_metrics[header.worker] = header.drafts
                self.fleet.delivered(f"rollout-{worker}")
                await self._written(worker, call.number, header, ref)
            if missing := len(self._in_hand[call.number]):
                raise RuntimeError(f"{role.name} has ended a call without {missing} of its samples")
        except ray.exceptions.RayError as error:
            if self._closed:
                return
            await self.fleet.replace_rollout(worker, role, error)
            await self._issue_again(worker, call, error)
        finally:
            for key, _ in self._in_hand.pop(call.number):
                self._rows[worker] -= 1
                if not self._closed:
                    self.on_written(worker, key)

    async def _written(self, worker: int, call: int, header: BundleHeader, ref: Any) -> None:
        """Take what a rollout worker hands over: complete samples go on to be scored, the others wait."""
        complete: list[SampleHeader] = []
        for position, unnumbered in enumerate(header.items):
            item = replace(unnumbered, call=call)
            base = self._in_hand[call].pop((item.key, item.index), None)
            if base is None:
                continue  # handed over twice
            self._rows[worker] -= 1
            self.generated += item.tokens - base
            lease = self._leases.get((item.key, item.index))
            if lease is None or lease.call != call:  # given up, or begun anew
                self.dropped += item.tokens - base
                self.on_written(worker, item.key)
                continue
            lease.ref, lease.position, lease.header = ref, position, item
            if item.finish_reason == "abort":
                lease.stage = "partial"
                if not lease.stopping:
                    lease.stays += 1
                    lease.waits = True
                    self.events.put_nowait(SampleDone(item.key, item.index, item, interrupted=True))
            else:
                lease.stage = "scoring"
                complete.append(item)
            self.on_written(worker, item.key)
        async with self._stopped:
            self._stopped.notify_all()
        if complete:
            await self._have_scored(replace(header, items=tuple(complete)), ref)

    async def _quietly_stop(self, worker: int, calls: Mapping[int, Sequence[SampleId]]) -> None:
        """Tell a worker to stop some samples; when it is dead, that is noticed elsewhere."""
        role = await self.fleet.rollout(worker)  # a call that waits for a successor reaches it before this
        try:
            await role.actor.stop.remote({number: list(ids) for number, ids in calls.items()})
        except ray.exceptions.RayError as error:
            log.debug("while stopping samples: %s", error)

    async def _read_reward(self, index: int) -> None:
        while True:
            role = self._roles.reward[index]
            try:
                async for header, ref in run_pairs(role, self._roles.reward_queue):
                    self.fleet.delivered(f"reward-{index}")
                    for position, item in enumerate(header.items):
                        self._scored(item, ref, position)
                return
            except ray.exceptions.RayError as error:
                if self._closed:
                    return
                cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
                if isinstance(cause, ray.exceptions.RayActorError):
                    # It lives, and the only actor that it calls does not: successors would fail in the same way.
                    raise RunLost(f"the reward queue died{cause_of_death(cause)}") from error
                self.fleet.replace_reward(index, error)
                self._spawn(self._score_again())  # not here: a full queue needs the successor's loop

    def _scored(self, item: SampleHeader, ref: Any, position: int) -> None:
        lease = self._leases.get((item.key, item.index))
        if lease is None or lease.stage != "scoring" or lease.call != item.call:
            return  # double, or of tokens that were given up since: the first result of this call counts
        if item.reward_status == "pending":
            self._write_again(item)
            return
        lease.stage, lease.ref, lease.position, lease.header = "scored", ref, position, item
        self.on_scored(item)
        self.events.put_nowait(SampleDone(item.key, item.index, item))

    def _write_again(self, lost: SampleHeader) -> None:
        """Have an answer written once more that was lost with a node before it was scored."""
        lease = self._leases[lost.key, lost.index]
        self.dropped += lease.tokens
        lease.ref = lease.header = None
        lease.attempt += 1
        if lease.attempt < MAX_ATTEMPTS:
            again = replace(lease.assignment, samples=(lost.index,), attempt=lease.attempt, resume={})
            self.dispatch(lease.worker, [again])
        else:
            lease.stage = "failed"
            self.events.put_nowait(SampleDone(lost.key, lost.index, None, "its answers were lost with their nodes"))

    async def _score_again(self) -> None:
        """Put everything that awaits a score once more: nobody knows what the dead worker had taken.

        Its last ``get`` may still swallow an envelope, so not before that has expired.
        """
        await asyncio.sleep(GET_DEADLINE_S + 0.5)
        by_ref: dict[Any, list[SampleHeader]] = {}
        for lease in self._leases.values():
            if lease.stage == "scoring" and lease.header is not None:
                by_ref.setdefault(lease.ref, []).append(lease.header)
        for ref, items in by_ref.items():
            header = BundleHeader(items=tuple(items), worker="", busy_s=0.0, version=-1)
            await self._have_scored(header, ref)

    async def _have_scored(self, header: BundleHeader, ref: Any) -> None:
        known = {key: self.deadline(key) for key in dict.fromkeys(item.key for item in header.items)}
        deadlines = {key: seconds for key, seconds in known.items() if seconds is not None}
        envelope = RewardEnvelope(header=header, refs=[ref], deadlines=deadlines)
        try:
            await self._roles.reward_queue.put_async(envelope)
        except ray.exceptions.RayActorError as error:  # not the rollout worker's death, which is mended elsewhere
            raise RunLost(f"the reward queue died{cause_of_death(error)}") from error

    async def _issue_again(self, worker: int, call: Call, error: BaseException) -> None:
        """Give out again what a dead worker had not handed over; what was to be stopped there keeps its old tokens."""
        again: list[Assignment] = []
        for assignment in call.assignments:
            missing = []
            for index in assignment.samples:
                lease = self._leases.get((assignment.key, index))
                if lease is None or lease.stage != "generating" or lease.call != call.number:
                    continue
                if lease.stopping:
                    lease.stage = "partial"
                else:
                    missing.append(index)
            if not missing:
                continue
            if assignment.attempt + 1 < MAX_ATTEMPTS:
                again.append(replace(assignment, samples=tuple(missing), attempt=assignment.attempt + 1))
                continue
            for index in missing:
                self._leases[assignment.key, index].stage = "failed"
                self.events.put_nowait(SampleDone(assignment.key, index, None, brief(error)))
        async with self._stopped:
            self._stopped.notify_all()
        if again:
            log.warning("issuing %d groups again on %s", len(again), self._roles.rollout[worker].name)
            self.dispatch(worker, again, row_limit=call.row_limit)

    def _stage(self, key: GroupKey, index: int) -> str:
        lease = self._leases.get((key, index))
        return lease.stage if lease else "forgotten"
