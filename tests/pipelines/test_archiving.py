"""What waits for the archive survives the death of its role, and reaches its successor once and in order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from pipelines import archiving
from pipelines.archiving import MAX_FRUITLESS_RESTARTS, Archiving
from pipelines.role_streams import pairs
from storage.records import GroupKey
from tests.pipelines.flows.world import Stream, died


class Flow:
    """Remembers which groups were let go."""

    def __init__(self) -> None:
        self.forgotten: list[GroupKey] = []

    def group(self, key: GroupKey, indices: list[int]) -> Any:
        return SimpleNamespace(key=key)

    def forget(self, keys: Any) -> None:
        self.forgotten += keys


class Queue:
    """Holds one envelope until somebody makes room."""

    def __init__(self) -> None:
        self.items: list[tuple[str, int]] = []
        self.dead = False
        self.room = asyncio.Event()

    async def put_async(self, envelope: Any) -> None:
        while len(self.items) >= 2:
            await self.room.wait()
        if self.dead:
            raise died()
        self.items.append((envelope.split, envelope.step))


class Roles:
    """A history role that the test plays."""

    def __init__(self) -> None:
        self.replaced: list[int] = []
        self.located: list[int] = []
        self._begin()

    async def locate_history(self) -> None:
        self.located.append(len(self.replaced))

    def _begin(self) -> None:
        self.history: Any = SimpleNamespace(stream=Stream())
        self.history_queue = Queue()

    def replace_history(self, recorded: int) -> None:
        self.replaced.append(recorded)
        self._begin()


class Board:
    """Collects alarms."""

    def __init__(self) -> None:
        self.alarms: list[str] = []

    def alarm(self, text: str) -> None:
        self.alarms.append(text)

    def wait(self, *_: object) -> None: ...

    def arrived(self, *_: object) -> None: ...


def key(step: int) -> GroupKey:
    return GroupKey("train", 0, step)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(archiving, "run_pairs", lambda role, _queue: pairs(role.stream))
    return SimpleNamespace


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def send(made: Archiving, *steps: int) -> None:
    for step in steps:
        await made.add("train", step, (key(step),), {key(step): []}, {})


def test_what_is_not_acknowledged_is_sent_to_the_successor_in_order(parts: Any) -> None:
    async def play() -> None:
        roles, flow, board = Roles(), Flow(), Board()
        made = Archiving(roles, flow, board)  # type: ignore[arg-type]
        made.start(3)
        await send(made, 4, 5)
        await until(lambda: len(roles.history_queue.items) == 2)
        roles.history.stream.put(("train", 4, "", ""), None)
        await until(lambda: flow.forgotten == [key(4)])
        first = roles.history_queue
        blocked = asyncio.create_task(send(made, 6, 7))
        await until(lambda: made._sending is not None and not made._sending.done())
        roles.history.stream.finish(died())
        await until(lambda: roles.history_queue is not first and len(roles.history_queue.items) == 2)
        assert roles.replaced == [4], "the successor knows what was acknowledged"
        assert roles.located == [0, 1], "drafts for other nodes come from where the successor is"
        assert roles.history_queue.items == [("train", 5), ("train", 6)]
        for step in (5, 6):
            roles.history.stream.put(("train", step, "", ""), None)
            roles.history_queue.items.pop(0)
            roles.history_queue.room.set()
        await asyncio.wait_for(blocked, 5)
        await until(lambda: roles.history_queue.items == [("train", 7)])
        roles.history.stream.put(("train", 7, "", ""), None)
        await asyncio.wait_for(made.drain(), 5)
        assert flow.forgotten == [key(step) for step in (4, 5, 6, 7)]
        assert board.alarms == []
        made.close()

    asyncio.run(play())


def test_a_dead_queue_is_no_error_of_whoever_sends(parts: Any) -> None:
    async def play() -> None:
        roles, flow = Roles(), Flow()
        made = Archiving(roles, flow, Board())  # type: ignore[arg-type]
        made.start(0)
        roles.history_queue.dead = True
        await send(made, 1)
        await until(lambda: made._sending is not None and made._sending.done())
        roles.history.stream.finish(ray.exceptions.RayTaskError("run", "trace", died()))  # its reader fails as well
        await until(lambda: roles.history_queue.items == [("train", 1)])
        made.close()

    asyncio.run(play())


def test_too_many_deaths_without_a_written_step_cost_the_archive(parts: Any) -> None:
    async def play() -> None:
        roles, flow, board = Roles(), Flow(), Board()
        made = Archiving(roles, flow, board)  # type: ignore[arg-type]
        made.start(0)
        await send(made, 1)
        for _ in range(MAX_FRUITLESS_RESTARTS + 1):
            role = roles.history
            role.stream.finish(died())
            await until(lambda role=role: roles.history is not role)
        assert len(roles.replaced) == MAX_FRUITLESS_RESTARTS
        assert flow.forgotten == [key(1)]
        [alarm] = board.alarms
        assert alarm.startswith("the history role died, rollouts are no longer archived: ")
        await send(made, 2)
        assert flow.forgotten == [key(1), key(2)], "without a role, groups are let go at once"
        await asyncio.wait_for(made.drain(), 5)

    asyncio.run(play())


def test_history_that_is_no_longer_kept_is_told_once_and_the_archive_goes_on(parts: Any) -> None:
    async def play() -> None:
        roles, flow, board = Roles(), Flow(), Board()
        made = Archiving(roles, flow, board)  # type: ignore[arg-type]
        made.start(0)
        for step, failure in ((1, ""), (2, "the disk is full"), (3, "the disk is full")):
            await send(made, step)
            roles.history.stream.put(("train", step, failure, ""), None)
            await until(lambda step=step: key(step) in flow.forgotten)
            roles.history_queue.items.clear()
        assert board.alarms == ["answers are no longer kept for drafts: the disk is full"]
        await asyncio.wait_for(made.drain(), 5)
        made.close()

    asyncio.run(play())


def test_an_archive_without_room_is_told_once_and_once_more_when_it_has_room_again(parts: Any) -> None:
    async def play() -> None:
        roles, flow, board = Roles(), Flow(), Board()
        made = Archiving(roles, flow, board)  # type: ignore[arg-type]
        made.start(0)
        for step, lost in ((1, "no room for 1"), (2, "no room for 2"), (3, ""), (4, ""), (5, "no room for 5")):
            await send(made, step)
            roles.history.stream.put(("train", step, "", lost), None)
            await until(lambda step=step: key(step) in flow.forgotten)
            roles.history_queue.items.clear()
        assert board.alarms == [
            "the answers of step 1 are not archived: no room for 1",
            "answers are archived again, from step 3 on",
            "the answers of step 5 are not archived: no room for 5",
        ]
        made.close()

    asyncio.run(play())
