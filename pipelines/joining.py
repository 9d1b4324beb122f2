"""Joins a Ray cluster that is there already, or says in one line why that cannot be."""

from __future__ import annotations

import re
import socket
from typing import Any

import ray

from pipelines.quiet_ray import init_quietly
from storage.errors import UserError

START_HEAD = "`ray get-auth-token --generate > /dev/null`, then `RAY_AUTH_MODE=token ray start --head`"
"""How to start a cluster by hand, so that only who has the token may use it."""

_HOST_AND_PORT = re.compile(r"(?:ray://)?(?P<host>.+):(?P<port>\d{1,5})")
_PROBE_S = 10.0
_MOST_CHARS = 400


def join(address: str, origin: str, advice: str) -> Any:
    """Join the cluster at ``address``; returns what ``ray.init`` does.

    Args:
        address: ``host:port`` of its head, or ``auto`` for the one on this machine.
        origin: Where the address was set, for messages: ``RAY_ADDRESS=10.0.0.1:6379``.
        advice: What to do when it cannot be joined.

    Raises:
        UserError: Nothing answers there, it refuses this process, or it runs another version of Ray or Python.
    """
    found = _HOST_AND_PORT.fullmatch(address)
    if found:  # Ray itself would try for minutes before it says so
        try:
            socket.create_connection((found["host"], int(found["port"])), timeout=_PROBE_S).close()
        except (OSError, OverflowError) as error:
            raise UserError(f"{origin}: nothing answers there ({error}); {advice}") from error
    try:
        return init_quietly(address=address)
    except (OSError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        raise UserError(f"{origin} cannot be joined: {_explained(error)}; {advice}") from error


def _explained(error: BaseException) -> str:
    """Say in one line what Ray says in several; a difference of versions is all of its lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if not lines[0].startswith("Version mismatch"):
        return lines[0][:_MOST_CHARS]
    return f"{' '.join(lines)[:_MOST_CHARS]} (install the same versions in both places)"
