"""Predicted lengths for schedules: asks the predictor once per batch of prompts, tells it every length it sees."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from actors.length_predictor.client import PredictorClient
from actors.length_predictor.records import Observation, Query
from pipelines.config import Config
from pipelines.scheduling.forecasts import ForecastBook
from storage.checkpoints import Checkpoint, CheckpointWriter
from storage.records import GroupKey, Prompt, SampleHeader

log = logging.getLogger(__name__)

COMPONENT = "length_predictor"
_KEPT_S = 10.0
_STATE_FILE = "state.bin"


class LengthForecasts:
    """The book of predictions and the client that fills it; without a client the book stays silent."""

    def __init__(self, client: PredictorClient | None) -> None:
        """Fill the book from ``client``."""
        self._client = client
        self._book = ForecastBook()
        self._asked: set[GroupKey] = set()

    @property
    def book(self) -> ForecastBook | None:
        """What policies look predictions up in; None where nothing is predicted."""
        return None if self._client is None else self._book

    async def predict(self, prompts: Mapping[GroupKey, Prompt]) -> None:
        """Have the lengths of new groups predicted; a predictor that is down or slow leaves the fallback's order."""
        fresh = {key: prompt for key, prompt in prompts.items() if key not in self._asked}
        if self._client is None or not fresh:
            return
        answer = await self._client.predict([Query(text=p.text, group=str(key)) for key, p in fresh.items()])
        self._asked.update(fresh)
        self._book.add(dict(zip(fresh, answer.predictions, strict=True)))

    def observe(self, prompt: Prompt, headers: Iterable[SampleHeader], size: int) -> None:
        """Tell the predictor the lengths of finished samples of one group."""
        if self._client is not None:
            self._client.observe(
                Observation(text=prompt.text, length=header.tokens, group=str(header.key), group_size=size)
                for header in headers
            )

    def forget(self, keys: Sequence[GroupKey]) -> None:
        """Drop what was predicted for settled groups."""
        self._book.forget(keys)
        self._asked.difference_update(keys)

    def metrics(self) -> dict[str, float]:
        """How often the predictor could not answer, and how often it was restored."""
        if self._client is None:
            return {}
        counters = self._client.counters()
        return {f"predictor/{name}": float(counters[name]) for name in ("fallbacks", "dropped", "restores")}

    async def predictor_state(self) -> bytes:
        """The predictor's own state for a checkpoint; empty without a predictor."""
        return b"" if self._client is None else await self._client.state()

    def state(self) -> dict[str, Any]:
        """The book as JSON values."""
        return self._book.state() if self._client is not None else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken."""
        if state:
            self._book.load_state(state)

    @property
    def active(self) -> bool:
        """True when there is a predictor."""
        return self._client is not None

    async def close(self) -> None:
        """Stop talking to the predictor."""
        if self._client is not None:
            await self._client.close()


async def start_predictor(
    config: Config, run: str, resume: Checkpoint | None, *, kept: bool = False
) -> PredictorClient:
    """Deploy the predictor on Ray Serve and hand it what a checkpoint knows; Serve is imported only here.

    One that was ``kept`` is told to forget the rest, if it still answers, and need not start anew.
    """
    from actors.length_predictor.serve_app import deploy, find

    state = b""
    if resume is not None and COMPONENT in resume.components:
        state = (resume.component(COMPONENT) / _STATE_FILE).read_bytes()
    handle = None
    if kept:
        try:
            handle = await asyncio.to_thread(find, application_of(run))
            await asyncio.wait_for(handle.restore.remote(state), _KEPT_S)
        except Exception as error:  # the boundary, as in the client: then another one takes its place
            log.warning("the length predictor cannot be used again: %s", error)
            handle = None
    if handle is None:
        handle = await asyncio.to_thread(deploy, config.length_predictor, name=application_of(run))
    client = PredictorClient(handle, config.length_predictor, state)
    await client.start()
    return client


async def save_predictor(forecasts: LengthForecasts, writer: CheckpointWriter) -> None:
    """Add what the predictor knows to a checkpoint."""
    if known := await forecasts.predictor_state():
        (writer.component(COMPONENT) / _STATE_FILE).write_bytes(known)


def remove_predictor(run: str) -> None:
    """Take the predictor of a run down, if there is one; Serve stays, it ends with a local Ray or serves others."""
    from actors.length_predictor.serve_app import remove

    remove(application_of(run), keep_serve=True)


def application_of(run: str) -> str:
    """Return the name of the Serve application of a run's predictor."""
    return f"length-predictor-{run}"
