"""Who keeps a run waiting is named in its log, before the deadline at which he is replaced."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from pipelines import watchdog as module
from pipelines.watchdog import Watchdog
from tests.pipelines.flows.world import died


class Worker:
    """A rollout worker that answers when the test says so."""

    def __init__(self) -> None:
        self.name = "rollout-0"
        self.actor = SimpleNamespace(health=SimpleNamespace(remote=self._health))
        self.answers = asyncio.Event()
        self.progress = time.time() + 3600
        self.dead = False

    async def _health(self) -> dict[str, float]:
        await self.answers.wait()
        if self.dead:
            raise died()
        return {"last_progress": self.progress}


class Board:
    def __init__(self) -> None:
        self.alarms: list[str] = []

    def alarm(self, text: str) -> None:
        self.alarms.append(text)

    def snapshot(self) -> Any:
        return SimpleNamespace(waits=())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Look all the time, and lose patience soon; collects who is killed."""
    killed: list[Any] = []
    monkeypatch.setattr(module, "_EVERY_S", 0.001)
    monkeypatch.setattr(module, "_SLOW_S", 0.02)
    monkeypatch.setattr(ray, "kill", killed.append)
    return killed


def watch(worker: Worker, board: Board, stall_s: float) -> Watchdog:
    flow = SimpleNamespace(busy_workers=lambda: {0}, outstanding=lambda _stage: 0)
    roles = SimpleNamespace(rollout=[worker], reward=[])
    config = SimpleNamespace(rollout=SimpleNamespace(stall_deadline_s=stall_s), reward=SimpleNamespace(timeout_s=10.0))
    return Watchdog(roles, flow, board, config)  # type: ignore[arg-type]


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def play(stall_s: float, script: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Run a watchdog over one worker until the script is over; returns what it logged."""

    async def act() -> None:
        worker, board = Worker(), Board()
        watching = asyncio.create_task(watch(worker, board, stall_s).run())
        await script(worker, board, lambda: [r.getMessage() for r in caplog.records if r.name == module.__name__])
        watching.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(act())
    return [record.getMessage() for record in caplog.records if record.name == module.__name__]


def test_a_worker_that_does_not_answer_is_named_once_and_again_when_it_does(
    quick: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def script(worker: Worker, board: Board, told: Any) -> None:
        await until(told)
        await asyncio.sleep(0.1)
        assert len(told()) == 1
        worker.answers.set()
        await until(lambda: len(told()) == 2)
        await asyncio.sleep(0.05)
        assert board.alarms == []

    silent, back = play(60.0, script, caplog)
    assert silent.startswith("rollout-0 has not answered for 0 s: ")
    assert "the network to it is slow" in silent
    assert back.startswith("rollout-0 answers again, after ")
    assert quick == []


def test_a_worker_that_is_silent_beyond_its_deadline_is_replaced(
    quick: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def script(worker: Worker, board: Board, told: Any) -> None:
        await until(lambda: quick)
        assert quick[0] is worker.actor
        assert "made no progress" in board.alarms[0]

    assert any("has not answered" in text for text in play(0.2, script, caplog))


def test_a_worker_that_dies_is_the_business_of_others(quick: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    async def script(worker: Worker, board: Board, told: Any) -> None:
        worker.dead = True
        worker.answers.set()
        await asyncio.sleep(0.1)
        assert board.alarms == []

    assert play(60.0, script, caplog) == []
