"""Makes what runs generation: schedule, dispatch, predicted lengths, and the step or the streaming pipeline."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.length_predictor.client import PredictorClient
from actors.rollout.engine import Handover, Swap
from pipelines.config import Config
from pipelines.dispatching import Dispatching, assumed_latency
from pipelines.flow import SampleFlow
from pipelines.length_forecasts import LengthForecasts
from pipelines.rounds import RoundRunner
from pipelines.run_data import RunData
from pipelines.scheduling.admission import StreamAdmission
from pipelines.scheduling.build import build_dispatcher, build_policy
from pipelines.scheduling.policy import SchedulePolicy
from pipelines.score_deadlines import ScoreDeadlines
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
    policy: SchedulePolicy
    if stream:
        policy = StreamAdmission(
            max_staleness=config.asynchrony.max_staleness,
            samples_per_prompt=config.rollout.samples_per_prompt,
            dynamic_sampling=config.algorithm.filters_zero_variance,
            max_refills=config.algorithm.max_refills,
            lag=config.asynchrony.lag,
        )
    else:
        policy = _rounds_policy(config)
    runner = (StreamRunner if stream else RoundRunner)(
        config=config,
        data=data,
        flow=flow,
        source=source,
        ledger=ledger,
        policy=policy,
        dispatching=Dispatching(flow, build_dispatcher(config.schedule, assumed_latency(config)), config, live=stream),
        forecasts=LengthForecasts(predictor),
        score_deadlines=ScoreDeadlines(flow, config),
        stop=stop,
    )
    if state is not None:
        runner.load_state(state)
    return runner


async def change_rules(runner: RoundRunner, config: Config) -> None:
    """Have a runner go on under the launching rules of ``config``, between two steps."""
    runner.config = config
    if isinstance(runner, StreamRunner):
        await runner.lower_bound(config.asynchrony.max_staleness)
    else:  # policies keep no state between rounds
        runner.policy = _rounds_policy(config)


def weight_swap(config: Config) -> Swap:
    """Return what becomes of answers that are being written when new weights arrive, and who begins new ones."""
    asynchrony = config.asynchrony
    if asynchrony.partial == "off":
        return Swap("drain")  # an answer is written by one version
    if asynchrony.partial == "split":
        return Swap(asynchrony.on_interrupt, Handover(kind="split", k_min=asynchrony.k_min))
    if asynchrony.interrupt_at == "boundary" and asynchrony.on_interrupt != "drain":
        return Swap(asynchrony.on_interrupt, Handover(kind="boundary", grace_tokens=asynchrony.grace_tokens))
    return Swap(asynchrony.on_interrupt)


def _rounds_policy(config: Config) -> SchedulePolicy:
    return build_policy(
        config.schedule,
        max_staleness=config.asynchrony.max_staleness,
        lag=config.asynchrony.lag,
        dynamic_sampling=config.algorithm.filters_zero_variance,
        max_refills=config.algorithm.max_refills,
    )
