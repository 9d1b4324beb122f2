"""Moves samples from rollout workers through reward workers, and owns every payload on the way.

Streaming generators submitted from here make the conductor the owner of what workers yield, so a sample survives the
worker that wrote it. Headers are awaited, payloads never are. Each sample is a lease: it is issued again when its
worker dies, and a result that arrives twice is dropped by its key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray

from actors.bundles import BundleHeader, GroupEnvelope, RewardEnvelope
from actors.channels import GET_DEADLINE_S
from pipelines.faults import brief, user_error
from pipelines.roles import Role, Roles
from storage.records import Assignment, GroupKey, SampleHeader

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
MAX_FRUITLESS_RESTARTS = 4
_WEIGHTS_DEADLINE_S = 300.0

SampleId = tuple[GroupKey, int]


@dataclass(slots=True)
class _Lease:
    """One sample under way."""

    assignment: Assignment
    worker: int
    attempt: int
    stage: Literal["generating", "scoring", "scored", "failed"] = "generating"
    ref: Any = None
    position: int = 0
    header: SampleHeader | None = None


@dataclass(frozen=True, slots=True)
class SampleDone:
    """A sample left the flow, scored; or it is given up after too many crashes, and ``header`` is None."""

    key: GroupKey
    index: int
    header: SampleHeader | None
    error: str = ""


class SampleFlow:
    """The path of samples; one per run."""

    def __init__(self, roles: Roles) -> None:
        """Use the actors of ``roles``; call :meth:`start` inside the event loop."""
        self._roles = roles
        self._leases: dict[SampleId, _Lease] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._restarting: dict[str, asyncio.Lock] = {}
        self._closed = False
        self.events: asyncio.Queue[SampleDone] = asyncio.Queue()
        self.busy_s: dict[str, float] = {}
        self.crashes = 0
        self._fruitless: dict[str, int] = {}
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin to read scored samples."""
        for index in range(len(self._roles.reward)):
            self._spawn(self._read_reward(index))

    def close(self) -> None:
        """Stop reading; what is in flight is forgotten."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    def dispatch(self, worker: int, assignments: Sequence[Assignment]) -> None:
        """Have a rollout worker write the assigned samples; results arrive on ``events``."""
        for assignment in assignments:
            for index in assignment.samples:
                self._leases[assignment.key, index] = _Lease(assignment, worker, assignment.attempt)
        self._spawn(self._generate(worker, tuple(assignments)))

    def outstanding(self, stage: Literal["generating", "scoring"]) -> int:
        """Number of samples in a stage."""
        return sum(lease.stage == stage for lease in self._leases.values())

    def busy_workers(self) -> set[int]:
        """Rollout workers that still have samples to write."""
        return {lease.worker for lease in self._leases.values() if lease.stage == "generating"}

    def group(self, key: GroupKey, size: int) -> GroupEnvelope:
        """Return where the samples of a complete group lie; raises ``KeyError`` when one is missing."""
        leases = [self._leases[key, index] for index in range(size)]
        refs = list(dict.fromkeys(lease.ref for lease in leases))
        places = tuple((refs.index(lease.ref), lease.position) for lease in leases)
        return GroupEnvelope(key=key, places=places, refs=refs)

    def headers(self, key: GroupKey, size: int) -> list[SampleHeader]:
        """Headers of the scored samples of a group, in index order; given-up samples are left out."""
        leases = [self._leases[key, index] for index in range(size)]
        return [lease.header for lease in leases if lease.header is not None and lease.stage == "scored"]

    def forget(self, keys: Sequence[GroupKey]) -> None:
        """Drop all leases and references of some groups; whatever still arrives for them is ignored."""
        doomed = set(keys)
        for identity in [i for i in self._leases if i[0] in doomed]:
            del self._leases[identity]

    async def publish(self) -> list[dict[str, float]]:
        """Give all rollout workers the published weights and wait for their acknowledgements.

        A worker that fails or misses the deadline is replaced; its successor starts from the same snapshot.
        """

        async def one(index: int) -> dict[str, float]:
            role = self._roles.rollout[index]
            try:
                return await self._set_weights(role)
            except (ray.exceptions.RayError, TimeoutError) as error:
                await self._replace_rollout(index, role, error)
                return {}

        return list(await asyncio.gather(*(one(i) for i in range(len(self._roles.rollout)))))

    async def abort(self) -> None:
        """Ask all rollout workers to stop what they write."""
        calls = [role.actor.abort.remote() for role in self._roles.rollout]
        await asyncio.gather(*calls, return_exceptions=True)

    def _spawn(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._closed:
            self.failure = error  # the conductor's loop raises it
            self.events.put_nowait(SampleDone(GroupKey("", 0, 0), -1, None, "the flow failed"))

    async def _generate(self, worker: int, assignments: tuple[Assignment, ...]) -> None:
        role = self._roles.rollout[worker]
        try:
            stream = role.actor.generate.options(num_returns="streaming", name=f"generate[{role.name}]").remote(
                list(assignments)
            )
            async for header, ref in pairs(stream):
                self.busy_s[header.worker] = header.busy_s
                self._fruitless.pop(f"rollout-{worker}", None)
                await self._to_reward(header, ref)
        except ray.exceptions.RayError as error:
            if self._closed:
                return
            await self._replace_rollout(worker, role, error)
            self._issue_again(worker, assignments, error)

    async def _to_reward(self, header: BundleHeader, ref: Any) -> None:
        fresh = False
        for position, item in enumerate(header.items):
            lease = self._leases.get((item.key, item.index))
            if lease is not None and lease.stage == "generating":
                lease.stage, lease.ref, lease.position = "scoring", ref, position
                lease.header = item
                fresh = True
        if fresh:
            await self._roles.reward_queue.put_async(RewardEnvelope(header=header, refs=[ref]))

    async def _read_reward(self, index: int) -> None:
        while True:
            role = self._roles.reward[index]
            try:
                stream = run_stream(role, self._roles.reward_queue)
                async for header, ref in pairs(stream):
                    self._fruitless.pop(f"reward-{index}", None)
                    for position, item in enumerate(header.items):
                        self._scored(item, ref, position)
                return
            except ray.exceptions.RayError as error:
                if self._closed:
                    return
                self._count_crash(f"reward-{index}", role, error)
                self._roles.replace_reward(index)
                # the dead worker's last get may still swallow an envelope: put again when it has expired
                await asyncio.sleep(GET_DEADLINE_S + 0.5)
                await self._score_again()

    def _scored(self, item: SampleHeader, ref: Any, position: int) -> None:
        lease = self._leases.get((item.key, item.index))
        if lease is None or lease.stage != "scoring":
            return  # late or double: the first result counts
        lease.stage, lease.ref, lease.position, lease.header = "scored", ref, position, item
        self.events.put_nowait(SampleDone(item.key, item.index, item))

    async def _score_again(self) -> None:
        """Put everything that awaits a score once more: nobody knows what the dead worker had taken."""
        by_ref: dict[Any, list[SampleHeader]] = {}
        for lease in self._leases.values():
            if lease.stage == "scoring" and lease.header is not None:
                by_ref.setdefault(lease.ref, []).append(lease.header)
        for ref, items in by_ref.items():
            header = BundleHeader(items=tuple(items), worker="", busy_s=0.0, version=-1)
            await self._roles.reward_queue.put_async(RewardEnvelope(header=header, refs=[ref]))

    def _issue_again(self, worker: int, assignments: Sequence[Assignment], error: BaseException) -> None:
        again: list[Assignment] = []
        for assignment in assignments:
            missing = [i for i in assignment.samples if self._stage(assignment.key, i) == "generating"]
            if not missing:
                continue
            if assignment.attempt + 1 < MAX_ATTEMPTS:
                again.append(replace(assignment, samples=tuple(missing), attempt=assignment.attempt + 1))
                continue
            for index in missing:
                self._leases[assignment.key, index].stage = "failed"
                self.events.put_nowait(SampleDone(assignment.key, index, None, brief(error)))
        if again:
            log.warning("issuing %d groups again on %s", len(again), self._roles.rollout[worker].name)
            self.dispatch(worker, again)

    def _stage(self, key: GroupKey, index: int) -> str:
        lease = self._leases.get((key, index))
        return lease.stage if lease else "forgotten"

    async def _replace_rollout(self, index: int, dead: Role, error: BaseException) -> None:
        lock = self._restarting.setdefault(f"rollout-{index}", asyncio.Lock())
        async with lock:
            if self._roles.rollout[index] is not dead:
                return  # somebody else noticed first
            while True:
                self._count_crash(f"rollout-{index}", dead, error)
                ray.kill(dead.actor)
                dead = self._roles.replace_rollout(index)
                if self._roles.published is None:
                    return
                try:
                    await self._set_weights(dead)
                    return
                except (ray.exceptions.RayError, TimeoutError) as again:
                    error = again  # the successor died as well: the count decides when to give up

    def _count_crash(self, slot: str, role: Role, error: BaseException) -> None:
        """Take note of a death; raises what the user must mend, or when successors die in turn without any result."""
        fault = user_error(error)
        if fault is not None:
            raise fault  # a successor would fail in the same way
        self.crashes += 1
        self._fruitless[slot] = self._fruitless.get(slot, 0) + 1
        if self._fruitless[slot] > MAX_FRUITLESS_RESTARTS:
            count = self._fruitless[slot]
            raise RuntimeError(
                f"{role.name} died {count} times in a row without a result; the last time: {brief(error)}"
            ) from error
        log.warning("%s died (%s); starting another one", role.name, brief(error))

    async def _set_weights(self, role: Role) -> dict[str, float]:
        published = self._roles.published
        assert published is not None
        call = role.actor.set_weights.remote(published.manifest, [published.ref])
        acknowledged: dict[str, float] = await asyncio.wait_for(call, _WEIGHTS_DEADLINE_S)
        return acknowledged


def run_stream(role: Role, queue: Any) -> Any:
    """Start a role's loop over ``queue``; the caller owns what it yields."""
    return role.actor.run.options(num_returns="streaming", name=f"run[{role.name}]").remote(queue)


async def pairs(stream: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Iterate a streaming generator of (header, payload): headers as values, payloads as references."""
    iterator = stream.__aiter__()
    while True:
        try:
            header = await (await iterator.__anext__())
        except StopAsyncIteration:
            return
        yield header, await iterator.__anext__()
