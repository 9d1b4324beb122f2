"""Tells everybody who looks what a training step was: monitors, status, gauges, and alarms for what went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.bundles import LearnerHeader
from pipelines.config import Config
from pipelines.flow import SampleFlow
from pipelines.monitoring import MonitorGroup
from pipelines.pacing import pacing_metrics
from pipelines.ray_metrics import RunMetrics
from pipelines.roles import Roles
from pipelines.round_books import RoundResult
from pipelines.rounds import RoundRunner
from pipelines.speculation_metrics import bias_metrics, speculation_metrics
from pipelines.status import StatusBoard
from pipelines.step_metrics import StepClock, step_metrics
from pipelines.utilisation import EngineLoad, gained, utilisation_metrics
from storage.ledger import Ledger


@dataclass(slots=True)
class StepReporter:
    """Keeps the counters of the last step, to say what the next one added.

    Attributes:
        flow, roles, ledger: What is measured.
        monitors, board, gauges: Who is told.
        began: When the step began that runs now, on the clock ``time.perf_counter``; whoever does something that is no
            part of a step moves it on.
    """

    flow: SampleFlow
    roles: Roles
    ledger: Ledger
    monitors: MonitorGroup
    board: StatusBoard
    gauges: RunMetrics
    began: float = 0.0
    _loads: dict[str, EngineLoad] = field(default_factory=dict)
    _drafts: dict[str, Mapping[str, float]] = field(default_factory=dict)

    def skip(self) -> None:
        """Leave what engines did so far out of the next step: it was an evaluation."""
        self._loads = dict(self.flow.loads)

    def begin(self) -> None:
        """Start to count the drafts of a step."""
        self._drafts = dict(self.flow.draft_metrics)

    def engine_loads(self) -> dict[str, EngineLoad]:
        """What each engine did since the last call; of a stream, also what it wrote while the learner worked."""
        loads = gained(self._loads, self.flow.loads)
        self._loads = dict(self.flow.loads)
        return loads

    async def report(
        self,
        step: int,
        result: RoundResult,
        clock: StepClock,
        loads: Mapping[str, EngineLoad],
        header: LearnerHeader,
        *,
        rounds: RoundRunner,
        config: Config,
        version: int,
        epoch: float,
        extra: Mapping[str, float],
    ) -> None:
        """Report optimiser step ``step`` (from 1), which started from ``version``, with some ``extra`` metrics."""
        trained = [h for headers in result.headers.values() for h in headers]
        metrics = step_metrics(
            result,
            clock,
            header.metrics,
            self.ledger.counts(),
            version=version,
            learner_version=header.version,
            correct_at=config.evaluation.correct_at,
        )
        metrics |= speculation_metrics(self._drafts, self.flow.draft_metrics)
        metrics |= bias_metrics(result.headers.values())
        metrics |= utilisation_metrics(
            loads, trained, workers=config.rollout.workers, slots=config.rollout.max_rows, step_s=clock.step
        )
        metrics |= await pacing_metrics(self.roles.rollout, config)
        metrics |= {**rounds.forecasts.metrics(), **rounds.score_deadlines.metrics()}
        metrics |= {**extra, "progress/epoch": epoch, "faults/crashes": float(self.flow.fleet.crashes)}
        self.monitors.log(step, metrics)
        self.board.finish_step(step, metrics, epoch=epoch)
        tokens = sum(sample.tokens for sample in trained)
        self.gauges.step(step, metrics, generated=result.generated_tokens, trained=tokens)
        for text in header.alarms:
            self.board.alarm(f"step {step}: {text}")
        share, limit = metrics["reward/error_share"], config.reward.error_alarm
        if share > limit:
            self.board.alarm(
                f"step {step}: {share:.1%} of the scores failed or timed out (reward.error_alarm is {limit:.1%}); the "
                f"first: {rounds.progress.first_error}"
            )
        elif math.isnan(metrics["reward/mean"]) and result.scored:
            self.board.alarm(f"step {step}: no answer has a reward, all reward functions abstained")
        for message in self.monitors.failures:
            self.board.alarm(message)
