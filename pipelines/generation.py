"""Makes what runs generation: schedule, dispatch, predicted lengths, and the step or the streaming pipeline."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.length_predictor.client import PredictorClient
from actors.rollout.engine import SwapMode
from pipelines.config import Config
from pipelines.dispatching import Dispatching, assumed_latency
from pipelines.flow import SampleFlow
from pipelines.length_forecasts import LengthForecasts
from pipelines.rounds import RoundRunner
from pipelines.run_data import RunData
from pipelines.scheduling.admission import StreamAdmission
from pipelines.scheduling.build import build_dispatcher, build_policy
from pipelines.scheduling.policy import SchedulePolicy
from pipelines.streaming import StreamRunner
from storage.ledger import Ledger
from storage.prompt_source import PromptSource


def make_runner(
    config: Config,
    data: RunData,
    flow: SampleFlow,
    source: PromptSource,
    ledger: Ledger,
    predictor: PredictorClient | None,
    stop: asyncio.Event,
    state: dict[str, Any] | None,
) -> RoundRunner:
    """Make the runner of the configured pipeline; ``state`` is what a checkpoint holds of it."""
    stream = config.asynchrony.pipeline == "stream"
    bound = config.asynchrony.max_staleness
    filters = config.algorithm.filters_zero_variance
    policy: SchedulePolicy
    if stream:
        policy = StreamAdmission(
            max_staleness=bound,
            samples_per_prompt=config.rollout.samples_per_prompt,
            dynamic_sampling=filters,
        )
    else:
        policy = build_policy(
            config.schedule,
            max_staleness=bound,
            dynamic_sampling=filters,
            max_refills=config.algorithm.max_refills,
        )
    runner = (StreamRunner if stream else RoundRunner)(
        config=config,
        data=data,
        flow=flow,
        source=source,
        ledger=ledger,
        policy=policy,
        dispatching=Dispatching(flow, build_dispatcher(config.schedule, assumed_latency(config)), config, live=stream),
        forecasts=LengthForecasts(predictor),
        stop=stop,
    )
    if state is not None:
        runner.load_state(state)
    return runner


def swap_mode(config: Config) -> SwapMode:
    """Return what becomes of answers that are being written when new weights arrive."""
    asynchrony = config.asynchrony
    if asynchrony.partial == "off":
        return "drain"  # an answer is written by one version
    return asynchrony.on_interrupt
