"""A role's loop is handed out in turns, and nobody who reads it can tell."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from actors import turns
from actors.turns import TurnOver, async_turn, turn
from pipelines.role_streams import run_pairs


class Payload:
    """Something whose end can be watched."""


def loop(pairs: int) -> Iterator[Any]:
    for number in range(pairs):
        yield number
        yield Payload()


def read(of: Any) -> tuple[list[int], bool]:
    """Read one turn; returns its headers and whether another one follows."""
    headers = []
    for header in of:
        payload = next(of)
        if isinstance(header, TurnOver):
            assert payload is None
            assert list(of) == []
            return headers, True
        assert isinstance(payload, Payload)
        headers.append(header)
    return headers, False


async def read_async(of: AsyncIterator[Any]) -> tuple[list[int], bool]:
    items = [item async for item in of]
    return read(iter(items))


async def each_of(items: Iterator[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


@pytest.mark.parametrize("awaits", [False, True])
@given(pairs=st.integers(0, 20), length=st.integers(1, 7))
def test_turns_hand_out_each_pair_once_and_in_order(awaits: bool, pairs: int, length: int) -> None:
    async def all_turns() -> tuple[list[int], list[int]]:
        whole: Any = each_of(loop(pairs)) if awaits else loop(pairs)
        headers, lengths, more = [], [], True
        while more:
            found, more = await read_async(async_turn(whole)) if awaits else read(turn(whole))
            headers += found
            lengths.append(len(found))
        return headers, lengths

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "PAIRS_A_TURN", length)
        headers, lengths = asyncio.run(all_turns())
    assert headers == list(range(pairs))
    assert all(found == length for found in lengths[:-1])
    assert lengths[-1] < length


def test_a_turn_keeps_no_payload() -> None:
    reader = turn(loop(2))
    next(reader)
    seen = weakref.ref(next(reader))
    gc.collect()
    assert seen() is None


class Role:
    """Yields five pairs in turns of two; breaks behind the fourth if it is told to."""

    def __init__(self) -> None:
        turns.PAIRS_A_TURN = 2
        self.calls = 0
        self._loop: Iterator[Any] | None = None

    def run(self, breaks: bool) -> Iterator[Any]:
        self.calls += 1
        self._loop = self._loop or self._work(breaks)
        yield from turn(self._loop)

    def counted(self) -> int:
        return self.calls

    def _work(self, breaks: bool) -> Iterator[Any]:
        for number in range(5):
            if breaks and number == 4:
                raise ValueError("broken")
            yield number
            yield f"payload {number}"


class Owner:
    """Reads as the conductor does."""

    async def go(self, actor: Any, breaks: bool) -> tuple[list[tuple[int, str]], str]:
        found: list[tuple[int, str]] = []
        try:
            async for header, payload in run_pairs(SimpleNamespace(actor=actor, name="role"), breaks):  # type: ignore[arg-type]
                found.append((header, await payload))
        except ray.exceptions.RayError as error:
            return found, type(error).__name__
        return found, ""


@pytest.mark.parametrize("breaks", [False, True])
def test_reader_of_a_role_calls_again_until_the_loop_has_ended(ray_session: None, breaks: bool) -> None:
    role: Any = ray.remote(num_cpus=0)(Role).remote()
    owner: Any = ray.remote(num_cpus=0)(Owner).remote()
    try:
        found, error = ray.get(owner.go.remote(role, breaks), timeout=60)
        calls = ray.get(role.counted.remote(), timeout=60)
    finally:
        ray.kill(role)
        ray.kill(owner)
    assert found == [(number, f"payload {number}") for number in range(4 if breaks else 5)]
    assert ("ValueError" in error) is breaks
    assert calls == 3
