"""A length predictor that is kept between two sessions of a run knows what the checkpoint knows, and no more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from actors.length_predictor.options import LengthPredictorOptions
from actors.length_predictor.records import Observation
from actors.length_predictor.serve_app import remove
from pipelines.length_forecasts import (
    COMPONENT,
    application_of,
    remove_predictor,
    start_predictor,
)

CONFIG: Any = SimpleNamespace(length_predictor=LengthPredictorOptions(deadline_s=20.0, state_interval_s=60.0))
SEEN = [Observation(text=f"p{i}", length=i + 1) for i in range(5)]


def checkpoint(folder: Any) -> Any:
    return SimpleNamespace(components=[COMPONENT], component=lambda _name: folder)


def test_a_kept_predictor_goes_back_to_the_checkpoint_and_one_that_is_gone_is_deployed_anew(
    ray_session: None, tmp_path: Any
) -> None:
    async def session(resume: Any, *, kept: bool) -> tuple[str, int, bytes]:
        """Start it, tell it something more, leave it; returns who answers, what it knew, and its state at the end."""
        client = await start_predictor(CONFIG, "kept", resume, kept=kept)
        who, known = await client._handle.health.remote()
        client.observe(SEEN)
        state = await client.state()
        await client.close()
        return who, known, state

    async def sessions() -> None:
        first, known, state = await session(None, kept=False)
        assert known == 0
        (tmp_path / "state.bin").write_bytes(state)
        for resume, knows in ((checkpoint(tmp_path), 5), (None, 0), (checkpoint(tmp_path), 5)):
            assert (await session(resume, kept=True))[:2] == (first, knows)
        await asyncio.to_thread(remove_predictor, "kept")
        another, known, _ = await session(checkpoint(tmp_path), kept=True)
        assert (another != first, known) == (True, 5)

    try:
        asyncio.run(sessions())
    finally:
        remove(application_of("kept"))
