"""Errors that Ray puts in the place of a payload, which nobody looks at, are raised all the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from pipelines.role_streams import pairs


class Role:
    """Yields pairs, and breaks behind a header."""

    def run(self, how: str) -> Iterator[Any]:
        yield "first"
        yield np.ones(200_000, np.uint8)
        yield "second"
        if how == "killed":
            time.sleep(2.0)  # the header is sent by another thread
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raised":
            raise ValueError("no room")
        yield None


class Owner:
    """Iterates as the conductor does."""

    async def go(self, role: Any, how: str) -> tuple[list[str], str]:
        headers: list[str] = []
        try:
            async for header, _ in pairs(role.run.options(num_returns="streaming").remote(how)):
                headers.append(header)
        except ray.exceptions.RayError as error:
            return headers, type(error).__name__
        return headers, ""


@pytest.mark.parametrize(("how", "raised"), [("", ""), ("raised", "ValueError"), ("killed", "ActorDiedError")])
def test_what_breaks_between_header_and_payload_is_no_end_of_the_stream(
    ray_session: None, how: str, raised: str
) -> None:
    role: Any = ray.remote(num_cpus=0)(Role).remote()
    owner: Any = ray.remote(num_cpus=0)(Owner).remote()
    try:
        headers, error = ray.get(owner.go.remote(role, how), timeout=60)
    finally:
        ray.kill(role)
        ray.kill(owner)
    assert headers == ["first", "second"]
    assert raised in error
    assert bool(raised) == bool(error)
