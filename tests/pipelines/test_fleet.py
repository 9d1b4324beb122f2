"""Weights that died with their maker: no successor of a rollout worker could load them, so the run goes back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from pipelines.faults import RunLost
from pipelines.fleet import Fleet

MAKER = ray.exceptions.ActorUnavailableError("Socket closed", b"\1" * 16)
LOST = ray.exceptions.ObjectLostError("ab" * 28, None, "")
SLIP = ValueError("a fault of the worker's own")


class Roles:
    """One rollout worker that fails to load the published weights with ``error``."""

    def __init__(self, error: Exception) -> None:
        async def fail() -> None:
            raise error

        method = SimpleNamespace(remote=lambda *_: fail())
        self.actor = SimpleNamespace(set_weights=method)
        self.published = SimpleNamespace(manifest=SimpleNamespace(version=3), ref=None)
        self.replaced = 0
        self.rollout = [SimpleNamespace(name="rollout-0", actor=self.actor)]

    def replace_rollout(self, index: int) -> Any:
        self.replaced += 1
        self.rollout[index] = SimpleNamespace(name=f"rollout-0.{self.replaced}", actor=self.actor)
        return self.rollout[index]


def published(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Roles:
    monkeypatch.setattr(ray, "kill", lambda _actor: None)
    roles = Roles(error)
    try:
        asyncio.run(Fleet(roles, lambda _task: None).publish())  # type: ignore[arg-type]
    except RunLost as lost:
        assert not roles.replaced
        raise lost
    except RuntimeError:
        assert roles.replaced > 1
        raise
    return roles


@pytest.mark.parametrize("cause", [MAKER, LOST])
def test_weights_that_nobody_can_load_end_the_attempt_and_not_the_worker(
    cause: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunLost, match="the published weights were lost"):
        published(ray.exceptions.RayTaskError("set_weights", "", cause), monkeypatch)


@pytest.mark.parametrize("error", [MAKER, ray.exceptions.RayTaskError("set_weights", "", SLIP)])
def test_a_worker_that_fails_itself_is_replaced(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unavailable itself, or with a fault of its own, again and again: then it is the number that ends the run."""
    with pytest.raises(RuntimeError, match="times in a row without a result"):
        published(error, monkeypatch)
