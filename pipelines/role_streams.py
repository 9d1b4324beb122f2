"""Reading what actors yield: pairs of a header, which is fetched, and a payload, which stays a reference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.experimental.locations import get_local_object_locations

from actors.turns import TurnOver
from pipelines.forgotten_answers import ForgottenAnswers

if TYPE_CHECKING:
    from pipelines.roles import Role

_LARGEST_ERROR_BYTES = 1 << 16
_LOOK_S = 10.0

_yielded = ForgottenAnswers()
"""One for the process: so is Ray's store of small answers."""


async def run_pairs(role: Role, queue: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Run a role's loop over ``queue``, turn by turn, and iterate as :func:`pairs` does; the caller owns what comes."""
    turn = role.actor.run.options(num_returns="streaming", name=f"run[{role.name}]")
    over = False
    while not over:
        over = True
        async for header, payload in pairs(turn.remote(queue)):
            if isinstance(header, TurnOver):
                over = False
            else:
                yield header, payload


async def pairs(stream: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Iterate a streaming generator of (header, payload): headers as values, payloads as references.

    Raises what ended the role, also where Ray puts that in the place of a payload, which nobody looks at: no room in
    the object store and on the disk below it, or a death between the two.
    """
    iterator = stream.__aiter__()
    payload: Any = None
    while True:
        try:
            header = await (await iterator.__anext__())
        except StopAsyncIteration:
            await _raise_hidden(payload)
            return
        payload = await iterator.__anext__()
        _yielded.note(payload)
        yield header, payload


async def _raise_hidden(payload: Any) -> None:
    """Raise the error that the last item of a stream is; an answer is not fetched, if its size tells that it is one."""
    if isinstance(payload, ray.ObjectRef):
        known = get_local_object_locations([payload]).get(payload, {})
        if (known.get("object_size") or 0) <= _LARGEST_ERROR_BYTES:
            with suppress(TimeoutError):
                await asyncio.wait_for(_resolved(payload), _LOOK_S)


async def _resolved(reference: Any) -> None:
    await reference
