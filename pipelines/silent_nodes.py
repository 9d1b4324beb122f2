"""Nodes that Ray still counts on and that do not answer any more.

Ray calls a node dead half a minute after it fell silent. Until then it places actors there, and a run that was made
anew at once would lose them a second time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any

import ray

log = logging.getLogger(__name__)

_CONNECT_S = 2.0
_POLL_S = 0.5
_PATIENCE_S = 60.0


def silent_nodes() -> list[str]:
    """Return the addresses of nodes that Ray calls alive and whose port takes no connection."""
    return [f"{host}:{port}" for host, port in map(_address, _alive()) if not _answers(host, port)]


def answering_nodes() -> set[str]:
    """Return Ray's ids of the other ones: of those that Ray calls alive, and that answer."""
    return {node["NodeID"] for node in _alive() if _answers(*_address(node))}


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _address(node: dict[str, Any]) -> tuple[str, int]:
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


async def outlast_silent_nodes(patience_s: float = _PATIENCE_S) -> None:
    """Return when Ray counts on no node that is silent, or after a while. Unit: seconds."""
    began, told = time.monotonic(), False
    while silent := await asyncio.to_thread(silent_nodes):
        if not told:
            log.warning("%s: no answer; waiting until Ray places nothing there", ", ".join(silent))
            told = True
        if time.monotonic() - began > patience_s:
            return
        await asyncio.sleep(_POLL_S)
