"""Sending a run directory beside the training: one upload at a time, the newest state in the end, no step held up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines import mirroring as mirroring_module
from pipelines.mirroring import Mirroring
from storage.checkpoints import Checkpoint, CheckpointStore
from storage.files import StorageError
from storage.remote.address import Address
from storage.remote.held_run import HeldRun
from storage.remote.lease import LEASE, Lease, LeaseLost
from storage.remote.objects import Objects
from storage.remote.staging import create_staging, fill_staging
from tests.storage.remote.life import Life, assert_resumable
from tests.storage.remote.stores import Fault, FlakyObjects, file_address, move_to, unreachable


class Gate(FlakyObjects):
    """Uploads wait here until they are let through."""

    def __init__(self, address: Address) -> None:
        super().__init__(address, Fault(error=unreachable))
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()

    def upload(self, name: str, descriptor: int, start: int, size: int) -> None:
        self.waiting.set()
        assert self.open.wait(20)
        super().upload(name, descriptor, start, size)


class World:
    """A run with its files and somebody who is told of alarms."""

    def __init__(self, tmp_path: Path) -> None:
        self.address = file_address(tmp_path / "store")
        self.objects = Gate(self.address)
        self.run = HeldRun(
            self.address,
            self.objects,
            Lease.acquire(self.objects, settle_s=0.0),
            create_staging(self.address),
        )
        self.life = Life(self.run.path)
        self.alarms: list[str] = []

    async def open(self) -> Mirroring:
        return await Mirroring.open(self.run, self.alarms.append)


@pytest.fixture
def world(tmp_path, monkeypatch):
    move_to(monkeypatch, tmp_path / "machine")
    monkeypatch.setattr(mirroring_module, "_FIRST_PAUSE_S", 0.05)
    made = World(tmp_path)
    yield made
    made.life.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def sent_step(world: World, monkeypatch, tmp_path: Path) -> int:
    move_to(monkeypatch, tmp_path / "reader")
    directory = fill_staging(world.address, Objects(world.address), lambda text: None)
    newest = assert_resumable(directory, 0)
    return newest.step if newest else 0


def test_steps_do_not_wait_and_the_newest_state_is_sent_at_the_end(world, monkeypatch, tmp_path):
    async def scenario() -> None:
        mirroring = await world.open()
        world.objects.open.clear()
        world.life.train()
        mirroring.stepped(1)
        await until(world.objects.waiting.is_set)
        for step in (2, 3, 4):
            world.life.train()
            mirroring.stepped(step)  # returns at once
        assert mirroring.account.step == -1
        world.objects.open.set()
        await until(lambda: mirroring.account.step == 4)
        assert mirroring.metrics()["storage/lag_steps"] == 0
        assert mirroring.metrics()["storage/upload_mb"] > 0
        assert await mirroring.close(finished=False) == ""

    asyncio.run(scenario())
    assert sent_step(world, monkeypatch, tmp_path) == 4
    assert not world.alarms


def test_a_checkpoint_waits_for_an_upload_that_makes_progress(world):
    async def scenario() -> None:
        mirroring = await world.open()
        world.objects.open.clear()
        world.life.train()
        mirroring.stepped(1)
        await until(world.objects.waiting.is_set)
        saving = asyncio.create_task(mirroring.saved(1))
        await asyncio.sleep(0.5)
        assert not saving.done(), "at most one upload is under way"
        world.objects.open.set()
        await asyncio.wait_for(saving, 20)
        await mirroring.sent()
        assert mirroring.account.step == 1
        await mirroring.close(finished=False)

    asyncio.run(scenario())


def test_a_failing_store_holds_nobody_up_and_is_told_once_until_it_works_again(world, monkeypatch, tmp_path):
    async def scenario() -> None:
        mirroring = await world.open()
        world.objects.fault.at, world.objects.fault.lasts = 1, 10**6
        for step in range(1, 6):
            world.life.train()
            await asyncio.wait_for(mirroring.saved(step), 5)
            await asyncio.sleep(0.05)
        await until(lambda: mirroring.account.failures >= 2)
        with pytest.raises(StorageError, match="does not take what is sent now"):
            await mirroring.sent()
        assert mirroring.metrics()["storage/upload_failures"] >= 2
        assert "the run goes on: the store does not answer" in world.alarms[0]
        world.objects.fault.at = 0
        await until(lambda: mirroring.account.step == 5)
        assert "is sent again; nothing is missing" in world.alarms[-1]
        await mirroring.close(finished=True)

    asyncio.run(scenario())
    assert sent_step(world, monkeypatch, tmp_path) == 5


def test_the_end_of_a_run_says_where_the_only_copy_is_when_it_cannot_be_sent(world):
    async def scenario() -> str:
        mirroring = await world.open()
        world.life.train()
        mirroring.stepped(1)
        await until(lambda: mirroring.account.step == 1)
        world.objects.fault.at, world.objects.fault.lasts = world.objects.fault.count + 1, 10**6
        world.life.train()
        return await mirroring.close(finished=True, deadline_s=0.2)

    problem = asyncio.run(scenario())
    world.life.close()
    assert str(world.address) in problem
    assert f"the whole run is in {world.run.path} on " in problem
    assert "resuming it there sends it" in problem
    assert assert_resumable(world.run.path, 2), "it is not removed"
    world.objects.fault.at = 0
    assert fill_staging(world.address, world.objects, lambda text: pytest.fail(text)) == world.run.path
    world.run.send()
    assert world.objects.read("checkpoints/step_000002/CHECKPOINT.json") is not None


def test_all_sent_and_over_the_folder_goes_and_the_lease_is_given_up(world):
    async def scenario() -> str:
        mirroring = await world.open()
        world.life.train()
        mirroring.stepped(1)
        return await mirroring.close(finished=True)

    assert asyncio.run(scenario()) == ""
    assert not world.run.path.exists()
    assert world.objects.info(LEASE) is None
    assert not [name for name in world.objects.names() if name.startswith(".parts")]


def test_a_lost_lease_stops_the_run_at_its_next_step(world):
    async def scenario() -> None:
        mirroring = await world.open()
        world.life.train()
        mirroring.stepped(1)
        await until(lambda: mirroring.account.step == 1)
        Lease.acquire(world.objects, stale_s=0.0, settle_s=0.0)
        before = world.objects.read("INDEX.json")
        world.life.train()
        mirroring.stepped(2)
        await until(lambda: bool(world.alarms))
        with pytest.raises(LeaseLost, match="was taken over by process"):
            mirroring.stepped(3)
        with pytest.raises(LeaseLost):
            await mirroring.saved(3)
        assert "was taken over" in await mirroring.close(finished=True)
        assert world.objects.read("INDEX.json") == before, "nothing is written any more"
        assert world.run.path.exists()

    asyncio.run(scenario())


def test_a_status_is_sent_while_a_step_takes_long(world, monkeypatch):
    monkeypatch.setattr(mirroring_module, "REFRESH_S", 0.05)

    async def scenario() -> None:
        mirroring = await world.open()
        for number in range(3):
            world.run.status.write_text(f'{{"number": {number}}}')
            await until(lambda: world.objects.read("status.json") == f'{{"number": {number}}}'.encode())  # noqa: B023
        await mirroring.close(finished=False)

    asyncio.run(scenario())


def test_a_run_that_goes_on_elsewhere_keeps_the_model_that_roles_load(world):
    """With roles on other machines, a checkpoint is at the address before they are told to load it."""

    async def scenario() -> None:
        world.run.spread = True
        mirroring = await world.open()
        world.life.train()
        newest: Checkpoint | None = CheckpointStore(world.run.checkpoints).latest()
        assert newest is not None
        await mirroring.begin_at(newest)
        assert world.objects.read("checkpoints/step_000001/model/weights.bin") is not None
        world.life.train()  # prunes it
        await mirroring.saved(2)
        await mirroring.sent()
        assert world.objects.read("checkpoints/step_000001/model/weights.bin") is not None
        assert world.objects.read("checkpoints/step_000001/CHECKPOINT.json") is None
        await mirroring.close(finished=False)

    asyncio.run(scenario())
