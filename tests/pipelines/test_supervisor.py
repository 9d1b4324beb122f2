"""What takes a run to its end hears a stop also while it waits, and leaves nothing behind."""

from __future__ import annotations

import asyncio

import ray

from pipelines import supervisor
from pipelines.config import Config
from pipelines.roles import Role, Spares
from pipelines.supervisor import Supervisor
from storage.run_directory import RunDirectory


def test_stop_is_heard_while_a_run_waits_for_a_silent_node(tmp_path, monkeypatch):
    async def silent_for_ever():
        await asyncio.sleep(3600)

    monkeypatch.setattr(supervisor, "outlast_silent_nodes", silent_for_ever)
    directory = RunDirectory.create(tmp_path, "run")
    directory.config.write_text("{}")
    run = Supervisor(Config(), str(directory.path), "nowhere", "", None)
    removed, killed = [], []

    def remove(name):
        removed.append(name)
        raise RuntimeError("Serve has gone")

    monkeypatch.setattr(supervisor, "remove_predictor", remove)
    monkeypatch.setattr(ray, "kill", killed.append)
    run._spares = Spares({0: Role("rollout-0", "its actor")}, predictor=True)

    async def stopped_meanwhile():
        going = asyncio.create_task(run.run(None, None, train=True))
        await asyncio.sleep(0.2)
        assert not going.done()

        run.stop()
        return await asyncio.wait_for(going, timeout=10)

    outcome = asyncio.run(stopped_meanwhile())
    assert (outcome.state, outcome.message) == ("stopped", "")
    assert run.ended()
    assert (removed, killed) == (["run"], ["its actor"]), "what the session before had left"
