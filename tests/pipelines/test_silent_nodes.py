"""A run that begins anew after the death of a node waits until Ray places nothing there."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from pipelines import silent_nodes
from pipelines.silent_nodes import outlast_silent_nodes


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two nodes that Ray calls alive, one of which does not listen; and one that it calls dead."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as closing:
        ports = [listening.getsockname()[1], closing.getsockname()[1]]
        closing.close()
        found = [{"Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port} for port in ports]
        found.append({"Alive": False, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": ports[1]})
        for node, name in zip(found, "abc", strict=True):
            node["NodeID"] = name
        monkeypatch.setattr(silent_nodes.ray, "nodes", lambda: found)
        yield found


def test_a_node_that_takes_no_connection_is_silent_unless_ray_knows_it(nodes: Any) -> None:
    assert silent_nodes.silent_nodes() == [f"127.0.0.1:{nodes[1]['NodeManagerPort']}"]
    assert silent_nodes.answering_nodes() == {"a"}
    nodes[1]["Alive"] = False
    assert silent_nodes.silent_nodes() == []
    assert silent_nodes.answering_nodes() == {"a"}


def test_waiting_ends_when_ray_has_noticed_and_is_told_once(nodes: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> float:
        began = time.monotonic()
        asyncio.get_running_loop().call_later(1.2, lambda: nodes[1].update(Alive=False))
        await outlast_silent_nodes(30.0)
        return time.monotonic() - began

    assert 1.0 < asyncio.run(main()) < 10.0
    assert sum("no answer" in record.message for record in caplog.records) == 1


def test_waiting_ends_by_itself_where_ray_never_notices(nodes: Any) -> None:
    began = time.monotonic()
    asyncio.run(outlast_silent_nodes(0.6))
    assert 0.6 <= time.monotonic() - began < 10.0
