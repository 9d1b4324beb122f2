"""Nodes that Ray still counts on and that do not answer any more.

Ray calls a node dead half a minute after it fell silent. Until then it places actors there, and a run that was made
anew at once would lose them a second time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time

import ray

log = logging.getLogger(__name__)

_CONNECT_S = 2.0
_POLL_S = 0.5
_PATIENCE_S = 60.0


def silent_nodes() -> list[str]:
    """Return the addresses of nodes that Ray calls alive and whose port takes no connection."""
    silent = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        address = (node["NodeManagerAddress"], node["NodeManagerPort"])
        try:
            socket.create_connection(address, timeout=_CONNECT_S).close()
        except OSError:
            silent.append(f"{address[0]}:{address[1]}")
    return silent


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
