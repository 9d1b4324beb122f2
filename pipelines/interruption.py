"""Waiting that ends when the run is asked to stop, and waiting for what does not matter any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Interrupted(Exception):
    """The run was asked to stop while it waited."""


async def unless_stopped(awaitable: Awaitable[T], stop: asyncio.Event) -> T:
    """Await something, or raise :class:`Interrupted` as soon as ``stop`` is set."""
    wanted = asyncio.ensure_future(awaitable)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({wanted, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise Interrupted
        return wanted.result()
    finally:
        stopped.cancel()
        if not wanted.done():
            wanted.cancel()


async def quietly(awaitable: Awaitable[Any]) -> None:
    """Await something whose failure changes nothing any more."""
    try:
        await awaitable
    except Exception as error:
        log.debug("while closing: %s", error)
