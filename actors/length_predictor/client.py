"""The conductor's side of the predictor: a deadline, a fallback, and a memory of what the predictor knew.

Nothing that happens to the predictor may reach training: it can be down, slow, replaced, or answer rubbish. Then the
mean length that this process has seen of each prompt decides, and prompts that it has not seen keep the order in which
they came. The client also keeps the predictor's last state and what was observed since. A replica that was replaced
gets both.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from actors.length_predictor.fusion import Ranking, combine_rankings
from actors.length_predictor.options import LengthPredictorOptions
from actors.length_predictor.rankers import HistoryRanker
from actors.length_predictor.records import FinishedGroup, Observation, Prediction, Query, Reply
from storage.errors import UserError

logger = logging.getLogger(__name__)

Reason = Literal["down", "slow", "rubbish", "restarted"]

_BATCH = 4096
_SLOW_CALL_S = 30.0  # observations and states may take longer than a prediction: nobody waits for them
_PAUSE_S = 1.0
_PRIOR_P90 = 3.6


@dataclass(frozen=True, slots=True)
class Answer:
    """Predictions and where they come from.

    Attributes:
        predictions: One per query, in order.
        fallback: Empty when the predictor answered, else why the history mean stands in for it.
    """

    predictions: tuple[Prediction, ...]
    fallback: Reason | Literal[""] = ""


class HistoryMean:
    """The fallback: moving mean of the lengths that each prompt had, in this process."""

    def __init__(self, options: LengthPredictorOptions) -> None:
        self._ranker = HistoryRanker(options.max_prompts)
        self._prior = float(options.prior_tokens)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from finished answers, each on its own: siblings of a group may never all arrive."""
        groups = [FinishedGroup(text=seen.text, lengths=(max(0, seen.length),)) for seen in observations]
        self._ranker.residuals.add(self._ranker.rank([Query(text=group.text) for group in groups]), groups)
        self._ranker.observe(groups)

    def predict(self, queries: Sequence[Query]) -> tuple[Prediction, ...]:
        """Rank by the mean; unknown prompts are in the middle. Confidence is 0: nobody measured it."""
        scores = self._ranker.rank(queries)
        fused = combine_rankings([Ranking(scores, self._ranker.quantiles(scores))], [self._ranker.prior])
        prior = self._prior * np.array([1.0, _PRIOR_P90, _PRIOR_P90])
        tokens = np.where(np.isfinite(fused.quantiles), fused.quantiles, prior)
        return tuple(
            Prediction(rank=rank, p50=p50, p90=p90, longest=longest, confidence=0.0)
            for rank, (p50, p90, longest) in zip(fused.rank.tolist(), tokens.tolist(), strict=True)
        )


class PredictorClient:
    """Calls the deployment by handle from an asyncio loop. Make one per conductor; not thread-safe."""

    def __init__(self, handle: Any, options: LengthPredictorOptions, state: bytes = b"") -> None:
        """Prepare; nothing is called yet.

        Args:
            handle: What ``serve_app.deploy`` returned.
            options: Deadline, backlog and the like.
            state: State of a checkpoint (of :meth:`state`), handed over by :meth:`start`; empty: nothing.
        """
        self._handle = handle
        self._options = options
        self._history = HistoryMean(options)
        self._state = state
        self._incarnation = ""
        self._backlog: deque[Observation] = deque()
        self._since: deque[Observation] = deque(maxlen=options.backlog)  # sent, but not in the kept state
        self._snapshot_due = 0.0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._lock = asyncio.Lock()  # a snapshot must not be taken while observations are on their way
        self._worker: asyncio.Task[None] | None = None
        self._failing: Reason | Literal[""] = ""
        self._fallbacks: Counter[str] = Counter()
        self._dropped = 0
        self._restores = 0

    async def start(self) -> None:
        """Hand the state over that the client was made with, waiting ``deadline_s`` at most; never raises."""
        self._ensure_worker()
        self._idle.clear()
        self._wake.set()
        if not await self.flush(self._options.deadline_s):
            logger.warning("the length predictor takes its time to start; the history mean is used until it answers")

    async def predict(self, queries: Sequence[Query]) -> Answer:
        """Predict, within ``deadline_s``; never raises but for its own cancellation. Ask once per batch."""
        if not queries:
            return Answer(())
        self._ensure_worker()
        try:
            reply = await self._call("predict", list(queries), timeout_s=self._options.deadline_s)
        except TimeoutError:
            return self._fall_back(queries, "slow", f"no answer within {self._options.deadline_s:g} s")
        except Exception as error:  # the boundary: whatever befalls the predictor stays there
            return self._fall_back(queries, "down", f"{type(error).__name__}: {_first_line(error)}")
        fault = _fault(reply, len(queries))
        if fault:
            return self._fall_back(queries, "rubbish", fault)
        if reply.incarnation != self._incarnation and (self._state or self._since):
            self._wake.set()
            return self._fall_back(queries, "restarted", "its replica was replaced and is being told what it knew")
        self._incarnation = reply.incarnation
        if self._failing:
            logger.warning("the length predictor answers again")
            self._failing = ""
        return Answer(reply.predictions)

    def observe(self, observations: Iterable[Observation]) -> None:
        """Queue finished answers for the predictor and return at once; beyond ``backlog`` the oldest are dropped.

        Call it from the loop.
        """
        batch = list(observations)
        self._history.observe(batch)
        self._backlog.extend(batch)
        while len(self._backlog) > self._options.backlog:
            self._backlog.popleft()
            self._dropped += 1
        self._ensure_worker()
        self._idle.clear()
        self._wake.set()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued was delivered; returns False when that takes longer than ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def state(self, timeout_s: float = 5.0) -> bytes:
        """Return the predictor's state for a checkpoint: a fresh one, or the last one kept if it does not answer."""
        await self.flush(timeout_s)
        try:
            async with asyncio.timeout(timeout_s), self._lock:
                await self._keep_state(timeout_s)
        except Exception as error:  # the boundary, as in predict
            logger.warning("the length predictor gives no state, the last one is saved: %s", _first_line(error))
        return self._state

    async def close(self) -> None:
        """Stop working in the background; what is still queued is dropped."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None

    def counters(self) -> dict[str, int]:
        """Return counts since the start: fallbacks in all and by reason, dropped observations, restored states."""
        by_reason = {f"fallbacks_{reason}": self._fallbacks[reason] for reason in get_args(Reason)}
        total = sum(self._fallbacks.values())
        return {"fallbacks": total, **by_reason, "dropped": self._dropped, "restores": self._restores}

    def _fall_back(self, queries: Sequence[Query], reason: Reason, detail: str) -> Answer:
        self._fallbacks[reason] += 1
        if self._failing != reason:
            logger.warning("length predictor %s (%s): the history mean decides instead", reason, detail)
            self._failing = reason
        return Answer(self._history.predict(queries), reason)

    def _ensure_worker(self) -> None:
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        """Deliver observations, keep the state, bring a new replica up to date; one thing at a time."""
        while True:
            self._wake.clear()
            try:
                async with self._lock:
                    await self._meet_replica()
                    while self._backlog:
                        await self._deliver()
                    if time.monotonic() >= self._snapshot_due and self._since:
                        await self._keep_state(_SLOW_CALL_S)
            except Exception as error:  # the boundary, as in predict
                logger.debug("length predictor: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if self._backlog:
                continue
            self._idle.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.state_interval_s):
                    await self._wake.wait()

    async def _meet_replica(self) -> None:
        """Tell a replica that is not the one known so far what its predecessor knew."""
        incarnation, _ = await self._call("health", timeout_s=_SLOW_CALL_S)
        if incarnation == self._incarnation:
            return
        if self._incarnation or self._state:
            await self._restore()
        lost = list(self._since)
        for start in range(0, len(lost), _BATCH):
            await self._call("observe", lost[start : start + _BATCH], timeout_s=_SLOW_CALL_S)
        self._incarnation = incarnation

    async def _restore(self) -> None:
        # Also without a state: what it was told before it was recognised as a new one is about to be told again.
        try:
            await self._call("restore", self._state, timeout_s=_SLOW_CALL_S)
        except UserError as error:
            logger.warning("%s", _first_line(error))
            self._state = b""
        else:
            self._restores += 1

    async def _deliver(self) -> None:
        """Send a batch, once: one that fails is told again only to a replica that never saw it."""
        batch = [self._backlog.popleft() for _ in range(min(_BATCH, len(self._backlog)))]
        self._since.extend(batch)
        incarnation = await self._call("observe", batch, timeout_s=_SLOW_CALL_S)
        if incarnation != self._incarnation:
            await self._meet_replica()

    async def _keep_state(self, timeout_s: float) -> None:
        incarnation, _, state = await self._call("snapshot", timeout_s=timeout_s)
        if incarnation != self._incarnation:
            self._wake.set()
            return
        self._state = state
        self._since.clear()
        self._snapshot_due = time.monotonic() + self._options.state_interval_s

    async def _call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        response = getattr(self._handle, method).remote(*arguments)
        try:
            async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 can swallow the cancellation of close()
                return await response
        except (TimeoutError, asyncio.CancelledError):
            response.cancel()
            raise


def _fault(reply: Any, count: int) -> str:
    """Say what is wrong with a reply to ``count`` queries; empty when nothing is."""
    if not isinstance(reply, Reply) or not isinstance(reply.predictions, tuple):
        return f"a {type(reply).__name__} instead of predictions"
    if len(reply.predictions) != count:
        return f"{len(reply.predictions)} predictions for {count} prompts"
    return next(filter(None, (_flaw(found) for found in reply.predictions)), "")


def _flaw(found: Any) -> str:
    """Say what is wrong with one prediction; empty when nothing is."""
    if not isinstance(found, Prediction):
        return f"a prediction is a {type(found).__name__}"
    for value in (found.rank, found.p50, found.p90, found.longest, found.confidence):
        if not isinstance(value, int | float) or not math.isfinite(value):
            return f"a prediction holds {value!r}"
    if not (0 <= found.rank <= 1 and 0 < found.p50 <= found.p90 and 0 <= found.confidence <= 1):
        return f"a prediction is out of range: {found}"
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
