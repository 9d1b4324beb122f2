"""The client against invented replicas: each way in which a predictor can fail."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest

from actors.length_predictor.client import PredictorClient
from actors.length_predictor.options import LengthPredictorOptions
from actors.length_predictor.predictor import LengthPredictor, dump_state, parse_state
from actors.length_predictor.records import Observation, Prediction, Query, Reply
from storage.errors import UserError

OPTIONS = LengthPredictorOptions(deadline_s=0.2, state_interval_s=0.05)
QUERIES = [Query(text="long"), Query(text="new"), Query(text="short")]
HISTORY = [Observation(text="long", length=900), Observation(text="short", length=9)]
FINE = Prediction(rank=0.5, p50=10.0, p90=20.0, longest=30.0, confidence=0.9)


class Response:
    """What a handle returns: awaitable, cancellable."""

    def __init__(self, result: Awaitable[Any]) -> None:
        self._result = result
        self.cancelled = False

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result.__await__()

    def cancel(self) -> None:
        self.cancelled = True


class Method:
    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> Response:
        return Response(self._function(*arguments))


class Replica:
    """A replica in this process; ``answer`` replaces what predict does, ``replace`` is its death and successor."""

    def __init__(self) -> None:
        self.core = LengthPredictor()
        self.incarnation = "first"
        self.answer: Callable[[list[Query]], Any] | None = None
        self.delay_s = 0.0
        self.down = False
        self.batches: list[int] = []

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self, f"_{name}"))

    def replace(self) -> None:
        self.core = LengthPredictor()
        self.incarnation = "second"

    async def _ready(self) -> None:
        await asyncio.sleep(self.delay_s)
        if self.down:
            raise RuntimeError("no replica\nwith a long trace")

    async def _predict(self, queries: list[Query]) -> Any:
        await self._ready()
        if self.answer is not None:
            return self.answer(queries)
        return Reply(incarnation=self.incarnation, predictions=tuple(self.core.predict(queries)))

    async def _observe(self, batch: list[Observation]) -> str:
        await self._ready()
        self.core.observe(batch)
        self.batches.append(len(batch))
        return self.incarnation

    async def _health(self) -> tuple[str, int]:
        await self._ready()
        return self.incarnation, self.core.answers

    async def _snapshot(self) -> tuple[str, int, bytes]:
        await self._ready()
        return self.incarnation, self.core.answers, dump_state(self.core.state())

    async def _restore(self, state: bytes) -> None:
        await self._ready()
        if state:
            self.core.load_state(parse_state(state))
        else:
            self.core.forget()


def run(story: Callable[[Replica, PredictorClient], Awaitable[None]], state: bytes = b"") -> None:
    async def main() -> None:
        replica = Replica()
        client = PredictorClient(replica, OPTIONS, state)
        try:
            await story(replica, client)
        finally:
            await client.close()

    asyncio.run(main())


def test_a_healthy_predictor_is_used_and_learns() -> None:
    async def story(replica: Replica, client: PredictorClient) -> None:
        client.observe(HISTORY)
        assert await client.flush(5)
        answer = await client.predict(QUERIES)
        assert answer.fallback == ""
        assert answer.predictions[0].rank > answer.predictions[2].rank
        assert replica.core.answers == 2
        assert client.counters()["fallbacks"] == 0

    run(story)


def spoil(field: str, value: Any) -> Callable[[list[Query]], Any]:
    values = {"rank": 0.5, "p50": 10.0, "p90": 20.0, "longest": 30.0, "confidence": 0.5, field: value}
    return lambda queries: Reply(incarnation="first", predictions=(FINE, Prediction(**values), FINE))


RUBBISH: dict[str, Callable[[list[Query]], Any]] = {
    "nothing": lambda _: None,
    "text": lambda _: "fine, thank you",
    "bare list": lambda queries: [FINE] * len(queries),
    "too few": lambda queries: Reply(incarnation="first", predictions=(FINE,) * (len(queries) - 1)),
    "too many": lambda queries: Reply(incarnation="first", predictions=(FINE,) * (len(queries) + 1)),
    "texts inside": lambda queries: Reply(incarnation="first", predictions=("0.5",) * len(queries)),  # type: ignore[arg-type]
    "nan": spoil("p50", math.nan),
    "infinite": spoil("longest", math.inf),
    "text as number": spoil("rank", "0.5"),
    "rank above one": spoil("rank", 1.5),
    "negative length": spoil("p50", -3.0),
    "p90 below p50": spoil("p90", 1.0),
}


@pytest.mark.parametrize("kind", RUBBISH)
def test_rubbish_is_replaced_by_the_history_mean(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def story(replica: Replica, client: PredictorClient) -> None:
        client.observe(HISTORY)
        replica.answer = RUBBISH[kind]
        answer = await client.predict(QUERIES)
        check_history(answer.predictions)
        assert answer.fallback == "rubbish"
        assert client.counters()["fallbacks_rubbish"] == client.counters()["fallbacks"] == 1

    run(story)
    assert "rubbish" in caplog.text


def test_a_dead_predictor_is_replaced_by_the_history_mean_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def story(replica: Replica, client: PredictorClient) -> None:
        client.observe(HISTORY)
        replica.down = True
        for _ in range(3):
            answer = await client.predict(QUERIES)
            check_history(answer.predictions)
            assert answer.fallback == "down"
        assert client.counters()["fallbacks_down"] == 3
        replica.down = False
        assert (await client.predict(QUERIES)).fallback in ("", "restarted")

    run(story)
    assert caplog.text.count("length predictor down") == 1
    assert "no replica" in caplog.text
    assert "long trace" not in caplog.text


def test_a_slow_predictor_costs_the_deadline_and_no_more() -> None:
    async def story(replica: Replica, client: PredictorClient) -> None:
        client.observe(HISTORY)
        assert await client.flush(5)
        replica.delay_s = 60.0
        answer = await asyncio.wait_for(client.predict(QUERIES), 30)
        assert answer.fallback == "slow"
        check_history(answer.predictions)

    run(story)


def test_a_handle_that_raises_at_once_is_no_matter() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionError("the application was deleted")

    async def main() -> None:
        client = PredictorClient(Broken(), OPTIONS)
        client.observe(HISTORY)
        assert (await client.predict(QUERIES)).fallback == "down"
        assert await client.state(timeout_s=0.1) == b""
        assert not await client.flush(0.05)
        await client.close()

    asyncio.run(main())


def test_without_history_the_fallback_keeps_the_order_of_arrival() -> None:
    async def story(replica: Replica, client: PredictorClient) -> None:
        replica.down = True
        answer = await client.predict(QUERIES)
        assert [found.rank for found in answer.predictions] == [0.5] * 3
        assert all(found.p50 == OPTIONS.prior_tokens and found.confidence == 0 for found in answer.predictions)

    run(story)


def test_the_backlog_is_bounded_and_drops_the_oldest() -> None:
    async def main() -> None:
        replica = Replica()
        client = PredictorClient(replica, LengthPredictorOptions(backlog=5))
        client.observe([Observation(text=f"p{i}", length=i + 1) for i in range(12)])
        assert client.counters()["dropped"] == 7
        assert await client.flush(5)
        assert replica.core.answers == 5
        await client.close()

    asyncio.run(main())


def test_observing_never_waits_and_goes_on_after_an_outage() -> None:
    async def story(replica: Replica, client: PredictorClient) -> None:
        replica.down = True
        client.observe(HISTORY)
        await asyncio.sleep(0.05)
        assert replica.core.answers == 0
        replica.down = False
        client.observe(HISTORY)
        assert await client.flush(10)
        assert replica.core.answers == 4

    run(story)


def test_a_replaced_replica_is_told_the_state_and_what_came_after_it() -> None:
    async def story(replica: Replica, client: PredictorClient) -> None:
        client.observe(HISTORY)
        assert await client.flush(5)
        assert await client.state()  # the state holds the first two answers, the next one only the client remembers
        client.observe([Observation(text="late", length=50)])
        assert await client.flush(5)
        replica.replace()
        first = await client.predict(QUERIES)
        assert first.fallback == "restarted"
        check_history(first.predictions)
        for _ in range(100):
            await asyncio.sleep(0.02)
            if not (await client.predict(QUERIES)).fallback:
                break
        assert replica.core.answers == 3
        assert client.counters()["restores"] == 1

    run(story)


def test_a_replica_replaced_before_any_state_was_kept_is_rebuilt_by_observations() -> None:
    async def main() -> None:
        replica = Replica()
        client = PredictorClient(replica, LengthPredictorOptions(state_interval_s=3600))
        client._snapshot_due = math.inf
        client.observe(HISTORY)
        assert await client.flush(5)
        replica.replace()
        client.observe([Observation(text="late", length=50)])
        assert await client.flush(5)
        assert replica.core.answers == 3
        await client.close()

    asyncio.run(main())


def test_the_state_of_a_checkpoint_is_handed_over_at_the_start() -> None:
    known = LengthPredictor()
    known.observe(HISTORY)

    async def story(replica: Replica, client: PredictorClient) -> None:
        await client.start()
        answer = await client.predict(QUERIES)
        assert answer.fallback == ""
        assert answer.predictions[0].rank > answer.predictions[2].rank
        assert replica.core.answers == 2

    run(story, dump_state(known.state()))


def test_a_state_that_cannot_be_used_is_dropped_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async def story(replica: Replica, client: PredictorClient) -> None:
        await client.start()
        assert (await client.predict(QUERIES)).fallback == ""
        client.observe(HISTORY)
        assert await client.flush(5)
        assert replica.core.answers == 2

    with pytest.raises(UserError):
        parse_state(b"junk")
    run(story, b"junk")
    assert "damaged" in caplog.text


def check_history(predictions: tuple[Prediction, ...]) -> None:
    """The order that the mean lengths of HISTORY give: long, then the unknown one, then short."""
    long, new, short = predictions
    assert long.rank > new.rank > short.rank
    assert long.p50 > short.p50
    assert {found.confidence for found in predictions} == {0.0}
