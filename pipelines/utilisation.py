"""How well the rollout workers were used in a step, from their counters. Pure; each figure names its denominator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from storage.records import SampleHeader

_TAIL_FROM = 0.8


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Counters of one rollout worker since it started.

    Attributes:
        busy_s: Seconds inside engine steps.
        passes: Engine steps.
        row_passes: Rows that emitted tokens, summed over steps.
    """

    busy_s: float = 0.0
    passes: int = 0
    row_passes: int = 0

    def since(self, before: EngineLoad | None) -> EngineLoad:
        """What was added since ``before``; a worker that was replaced counts from 0 again."""
        if before is None or before.passes > self.passes:
            return self
        return EngineLoad(self.busy_s - before.busy_s, self.passes - before.passes, self.row_passes - before.row_passes)


def gained(before: Mapping[str, EngineLoad], after: Mapping[str, EngineLoad]) -> dict[str, EngineLoad]:
    """What each worker did between two moments, by name."""
    return {name: load.since(before.get(name)) for name, load in after.items()}


def utilisation_metrics(
    loads: Mapping[str, EngineLoad], headers: Sequence[SampleHeader], *, workers: int, slots: int, step_s: float
) -> dict[str, float]:
    """Return the metrics of a step.

    Args:
        loads: What each worker did in it.
        headers: Headers of the trained samples.
        workers: Rollout workers.
        slots: Rows that a worker can decode at once.
        step_s: Duration of the step.
    """
    busy = [load.busy_s for load in loads.values()]
    passes = sum(load.passes for load in loads.values())
    metrics = {"rollout/utilisation": sum(busy) / max(1e-9, workers * step_s)}
    if passes:
        metrics["rollout/slot_bubble"] = 1.0 - sum(load.row_passes for load in loads.values()) / (slots * passes)
        metrics["rollout/replica_idle"] = 1.0 - sum(busy) / max(1e-9, workers * max(busy))
    ends = np.sort([h.timings.finished for h in headers if h.timings.finished])
    if len(ends):
        metrics["rollout/tail_s"] = float(ends[-1] - ends[min(len(ends) - 1, int(_TAIL_FROM * len(ends)))])
    return metrics
