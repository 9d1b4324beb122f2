"""How often a run goes on by itself after a death, and from where."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
import ray

from pipelines.faults import RunLost, brief, survivable, user_error
from pipelines.learner_events import LearnerEvents
from pipelines.restarts import Restarts, restart_point
from storage.checkpoints import CheckpointStore
from storage.errors import UserError
from storage.run_directory import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run")


def save(directory: RunDirectory, step: int) -> Path:
    with CheckpointStore(directory.checkpoints).begin(step) as writer:
        (writer.component("model") / "weights").write_text(f"of step {step}")
        return writer.commit({"step": step}).path


def test_deaths_without_a_new_checkpoint_are_counted_and_a_new_one_begins_anew(directory: RunDirectory) -> None:
    allowed = [Restarts.of(directory, 2).allow(step, step) for step in (4, 4, 4, 6, 6, 6)]
    assert allowed == [True, True, False, True, True, False]


def test_an_older_checkpoint_is_no_progress(directory: RunDirectory) -> None:
    """The newer one was damaged."""
    assert [Restarts.of(directory, 2).allow(step, step) for step in (6, 4, 4)] == [True, True, False]


def test_a_run_without_restarts_never_goes_on_and_says_why(directory: RunDirectory) -> None:
    restarts = Restarts.of(directory, 0)
    assert not restarts.allow(0, 0)
    assert restarts.refusal() == "run.restarts=0"
    restarts = Restarts.of(directory, 1)
    assert not restarts.allow(0, 0)
    assert "2 deaths without a new checkpoint in between" in restarts.refusal()


def test_the_account_outlives_processes_until_somebody_looks_after_the_run(directory: RunDirectory) -> None:
    Restarts.of(directory, 3).allow(2, 2)
    assert Restarts.of(directory, 3).fruitless == 1
    Restarts.of(directory, 3).forgive()
    assert Restarts.of(directory, 3).fruitless == 0
    directory.restarts.write_text("{")
    assert Restarts.of(directory, 3).fruitless == 0


def test_times_and_lost_steps_are_counted_over_the_whole_run(directory: RunDirectory) -> None:
    Restarts.of(directory, 1).allow(4, 6)
    Restarts.of(directory, 1).allow(8, 8)
    Restarts.of(directory, 1).forgive()
    assert Restarts.of(directory, 1).metrics() == {"run/restarts": 2.0, "run/steps_lost": 2.0}
    restarts = Restarts.of(directory, 1)
    assert restarts.allow(8, 11)
    assert not restarts.allow(8, 12), "it ends here, and goes back nowhere"
    assert restarts.metrics() == {"run/restarts": 3.0, "run/steps_lost": 5.0}


def test_a_run_that_nothing_died_of_leaves_no_account(directory: RunDirectory) -> None:
    Restarts.of(directory, 3).forgive()
    assert not directory.restarts.exists()


def test_a_run_goes_on_from_the_newest_intact_checkpoint(directory: RunDirectory) -> None:
    save(directory, 2)
    (save(directory, 4) / "model" / "weights").write_text("of step X")
    point = restart_point(directory, 2)
    assert point is not None
    assert point.step == 2
    assert [c.step for c in CheckpointStore(directory.checkpoints).checkpoints()] == [2]


def test_a_run_without_a_checkpoint_begins_anew(directory: RunDirectory) -> None:
    directory.ledger.write_text("a line")
    directory.metrics.write_text("a line")
    (directory.rollouts / "train").mkdir(parents=True)
    directory.config.write_text("kept")
    assert restart_point(directory, 2) is None
    assert not directory.ledger.exists()
    assert not directory.metrics.exists()
    assert not directory.rollouts.exists()
    assert directory.config.exists()


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(directory: RunDirectory) -> None:
    directory.ledger.write_text("a line")
    (save(directory, 2) / "model" / "weights").write_text("of step X")
    with pytest.raises(UserError, match="no intact checkpoint to go on from"):
        restart_point(directory, 2)
    assert directory.ledger.exists()
    assert list(directory.checkpoints.glob("step_*"))


def test_only_deaths_send_a_run_back() -> None:
    bug = ray.exceptions.RayTaskError("f", "trace", ValueError("a bug"))
    mistake = ray.exceptions.RayTaskError("f", "trace", UserError("a mistake"))
    assert survivable(ray.exceptions.ActorDiedError())
    assert survivable(RunLost("the reward queue died"))
    assert survivable(bug), "of an actor, which may be made anew"
    assert not survivable(mistake)
    assert not survivable(UserError("a mistake"))
    assert not survivable(ValueError("a bug of ours"))
    assert brief(RunLost("the reward queue died")) == "the reward queue died"


class Learner:
    """A stream of events that ends as it is told."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[object] = asyncio.Queue()

    def __aiter__(self) -> Learner:
        return self

    async def __anext__(self) -> tuple[object, object]:
        event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        return event, None


def test_the_death_of_a_learner_is_noticed_while_nobody_waits_for_it() -> None:
    async def play() -> tuple[list[BaseException], object]:
        told: list[BaseException] = []
        learner = Learner()
        events = LearnerEvents(learner, told.append)
        learner.events.put_nowait("ready")
        header, _ = await events.next()
        learner.events.put_nowait(ray.exceptions.ActorDiedError())
        async with asyncio.timeout(5):
            while not told:
                await asyncio.sleep(0)
        with pytest.raises(RunLost, match="the learner died"):
            await events.next()
        return told, header

    told, header = asyncio.run(play())
    assert header == "ready"
    assert len(told) == 1
    assert isinstance(told[0], RunLost)


def test_what_the_learner_wants_mended_is_handed_on_as_it_is() -> None:
    async def play() -> None:
        learner = Learner()
        learner.events.put_nowait(ray.exceptions.RayTaskError("f", "trace", UserError("the disk is full")))
        with pytest.raises(ray.exceptions.RayTaskError):
            await LearnerEvents(learner, lambda _: None).next()

    asyncio.run(play())


def test_a_learner_that_is_let_go_tells_nobody() -> None:
    async def play() -> list[BaseException]:
        told: list[BaseException] = []
        learner = Learner()
        events = LearnerEvents(learner, told.append)
        await asyncio.sleep(0)
        events.close()
        learner.events.put_nowait(StopAsyncIteration())
        await asyncio.sleep(0.01)
        return told

    assert asyncio.run(play()) == []


@pytest.mark.parametrize("kind", [ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError])
def test_a_full_object_store_is_for_the_user_to_mend(kind: type[ray.exceptions.RayError]) -> None:
    error = ray.exceptions.RayTaskError("generate", "trace", kind())
    assert not survivable(error), "nothing is won by going back: it would be full again"
    fault = user_error(error)
    assert fault is not None
    assert "raise cluster.object_store_mb" in str(fault)
    assert ("the disk that it spills to" in str(fault)) == (kind is ray.exceptions.OutOfDiskError)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_in_any_process_is_for_the_user_to_mend(number: int) -> None:
    opened = OSError(number, os.strerror(number), "/tmp/slipstream-learners-1")
    for error, what in (
        (ray.exceptions.RayTaskError("run", "trace", opened), "/tmp/slipstream-learners-1"),
        (ray.exceptions.RayTaskError("run", "trace", OSError(number, os.strerror(number))), "a file of run"),
        (opened, "/tmp/slipstream-learners-1"),
    ):
        assert not survivable(error), "nothing is won by going back: it would be full again"
        assert str(user_error(error)).startswith(f"cannot write {what}: {os.strerror(number)}; ")
    other = OSError(errno.EIO, os.strerror(errno.EIO), "/tmp/x")
    assert user_error(ray.exceptions.RayTaskError("run", "trace", other)) is None


def test_an_actor_that_finds_no_room_when_it_is_made_is_for_the_user_to_mend() -> None:
    """Ray keeps the text of what a constructor raised, and nothing else."""
    trace = "Traceback (most recent call last):\n  File ...\nOSError: [Errno 28] No space left on device: '/tmp/here'"
    cause = ray.exceptions.RayTaskError("Actor.__init__", trace, OSError(28, "No space left on device"))
    error = ray.exceptions.ActorDiedError(cause=cause)
    assert error.actor_init_failed
    assert str(user_error(error)).startswith("cannot write /tmp/here: No space left on device; free space")
