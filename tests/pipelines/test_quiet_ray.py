"""What Ray says of dead processes goes to the log and not between the lines of a run."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray

from pipelines.quiet_ray import init_quietly


@ray.remote(num_cpus=0)
class Victim:
    def pid(self) -> int:
        return os.getpid()


def kill_one() -> None:
    victim: Any = Victim.remote()
    os.kill(ray.get(victim.pid.remote()), signal.SIGKILL)


def comes(look: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_death_is_told_by_the_log_and_not_on_the_terminal(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    worker = ray._private.worker
    assert "print_to_stdstream(" in inspect.getsource(worker.listen_error_messages), "Ray prints in another way"
    monkeypatch.setattr(worker, "print_to_stdstream", None)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    init_quietly(address="a")
    with caplog.at_level(logging.INFO, "pipelines.quiet_ray"):
        kill_one()
        assert comes(lambda: "A worker died" in caplog.text)
    assert "(raylet)" not in capfd.readouterr().out
