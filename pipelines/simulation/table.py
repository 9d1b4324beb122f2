"""Simulated schedules as a table; command and benchmark print the same one."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.simulation.cluster import ClusterModel
from pipelines.simulation.scenarios import CaseResult
from pipelines.simulation.simulator import Workload

COLUMNS = (
    "schedule",
    "rollout s",
    "speed-up",
    "step s",
    "speed-up",
    "utilisation",
    "slot bubble",
    "replica idle",
    "waste",
    "stale",
    "KS",
    "length",
)
DENOMINATORS = (
    "Seconds are virtual, per step; speed-ups compare seconds per trained group, of rollout and of whole steps.",
    "Utilisation: trained tokens at the rate of full slots, over replica-seconds of rollout. Slot bubble: slot-seconds "
    "without a row, over the most rows that each replica had at once. Replica idle: replica-seconds of rollout without "
    "a row.",
    "Waste: dropped over generated tokens. Stale: trained tokens that older weights wrote. KS and length: trained "
    "lengths against launched ones, largest distance and ratio of means.",
)


def table_rows(results: Sequence[CaseResult]) -> list[tuple[str, ...]]:
    """One row for each schedule, cells as in :data:`COLUMNS`; the first is what the others are compared with."""
    baseline = results[0]
    rows: list[tuple[str, ...]] = []
    for result in results:
        figures = result.summary
        rows.append(
            (
                result.case.name,
                f"{figures.rollout_s:.1f}",
                f"{result.speedup(baseline):.2f}x",
                f"{figures.step_s:.1f}",
                f"{result.step_speedup(baseline):.2f}x",
                f"{figures.utilisation:.1%}",
                f"{figures.slot_bubble:.0%}",
                f"{figures.replica_idle:.0%}",
                f"{figures.waste:.0%}",
                f"{figures.stale_share:.0%}",
                f"{figures.ks:.3f}",
                f"{figures.length_ratio:.3f}",
            )
        )
    return rows


def setting(cluster: ClusterModel, lengths: str, workload: Workload) -> str:
    """One line that says what was simulated."""
    return (
        f"{cluster.gpus} GPUs, {cluster.replicas} replicas of {cluster.slots} slots, {workload.prompts_per_step} "
        f"prompts of {workload.samples} answers a step, {workload.prompts:,} prompts in all; {lengths}. A pass takes "
        f"{1000 * cluster.t0_s:g} ms + {1000 * cluster.row_s:g} ms a row + {1e6 * cluster.context_s:g} ms per 1,000 "
        "tokens of context."
    )
