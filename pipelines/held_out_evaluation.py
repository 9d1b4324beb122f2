"""Evaluates the policy between two steps, with the roles that training uses, and tells everybody what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipelines.archiving import Archiving
from pipelines.evaluation import evaluate
from pipelines.flow import SampleFlow
from pipelines.interruption import Interrupted
from pipelines.monitoring import MonitorGroup
from pipelines.roles import Roles
from pipelines.rounds import RoundRunner
from pipelines.run_data import SAMPLED_SUFFIX
from pipelines.step_metrics import is_correct
from pipelines.step_reporting import StepReporter
from pipelines.waits import Waits
from storage.errors import UserError


@dataclass(slots=True, kw_only=True)
class HeldOutEvaluation:
    """The evaluations of one session, on all sets of ``roles.data``; one a step, since it would come out the same."""

    roles: Roles
    flow: SampleFlow
    archiving: Archiving
    monitors: MonitorGroup
    reporter: StepReporter
    waits: Waits
    _last: tuple[int, Mapping[str, float]] | None = field(default=None, init=False)

    async def run(self, rounds: RoundRunner, step: int) -> Mapping[str, float]:
        """Evaluate after ``step`` steps and return the metrics; empty without a held-out set.

        Raises:
            Interrupted: The run is asked to stop.
            UserError: The user has to mend something, for instance a reward function.
        """
        data, options = self.roles.data, self.roles.config.evaluation
        if not data.evaluation:
            return {}
        if self._last is not None and self._last[0] == step:
            return self._last[1]  # same weights, same keys
        self.waits.enter("evaluating")
        began = time.perf_counter()
        self.waits.board.wait("evaluate", "rollout and reward workers")
        try:
            found = await rounds.evaluate(step)
        except (Interrupted, UserError):
            await self.flow.abort()
            raise
        finally:
            self.waits.board.arrived("evaluate")
        metrics: dict[str, float] = {}
        for name in data.evaluation:
            outcome = evaluate(
                found[name],
                found.get(name + SAMPLED_SUFFIX, {}),
                lambda header: is_correct(header, options.correct_at),
                k=options.samples,
            )
            metrics |= outcome.metrics(f"eval/{name}")
        seconds = time.perf_counter() - began
        metrics["time/evaluate_s"] = seconds
        self.monitors.log(step, metrics)
        self.waits.board.finish_evaluation(step, metrics, seconds)
        for split, groups in found.items():
            size = options.samples if split.endswith(SAMPLED_SUFFIX) else 1
            complete = {key: headers for key, headers in groups.items() if len(headers) == size}
            self.flow.forget([key for key in groups if key not in complete])
            await self.archiving.add(split, step, tuple(complete), complete, {})
        self.reporter.began += time.perf_counter() - began
        self.reporter.skip()
        self._last = (step, metrics)
        return metrics
