"""Which schedules are compared, and the comparison: every one trains the same prompts on the same cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipelines.scheduling.build import build_dispatcher, build_policy
from pipelines.scheduling.latency_table import LatencyTable
from pipelines.scheduling.options import ScheduleOptions
from pipelines.simulation.cluster import ClusterModel
from pipelines.simulation.lengths import LengthModel, LogNormalLengths
from pipelines.simulation.measures import RoundRecord, RunSummary
from pipelines.simulation.simulator import Simulation, Workload
from storage.errors import UserError

_CONTEXT_OF_TABLE = 1500


@dataclass(frozen=True, slots=True)
class Case:
    """A schedule to simulate: its name in tables, the section ``schedule``, and ``asynchrony.max_staleness``."""

    name: str
    options: ScheduleOptions
    max_staleness: int = 0


@dataclass(frozen=True, slots=True)
class CaseResult:
    """A simulated schedule: its figures and its rounds."""

    case: Case
    summary: RunSummary
    rounds: tuple[RoundRecord, ...]

    def speedup(self, baseline: CaseResult) -> float:
        """Ratio of the seconds of rollout per trained group."""
        return baseline.summary.rollout_s_per_group / self.summary.rollout_s_per_group

    def step_speedup(self, baseline: CaseResult) -> float:
        """Ratio of the seconds of whole steps per trained group."""
        return baseline.summary.step_s_per_group / self.summary.step_s_per_group


def standard_cases(overlaunch: float = 1.25, *, predictor: bool = True) -> list[Case]:
    """The schedules of the field, the synchronous one first; those that need a predictor only with one.

    Raises ``UserError`` for an over-launch outside of [1, 4].
    """
    if not 1 <= overlaunch <= 4:
        raise UserError(f"groups are launched 1 to 4 times as many as trained, not {overlaunch:g}: change --overlaunch")
    tail = ScheduleOptions(batching="tail", overlaunch_prompts=overlaunch)
    span = max(1, tail.deferral_span)
    cases = [
        Case("all at once", ScheduleOptions()),
        Case("tail batching, resume", tail, span),
        Case("tail batching, restart", tail.model_copy(update={"deferred": "restart"})),
        Case(
            "RollPacker (samples raced too, restart)",
            tail.model_copy(update={"deferred": "restart", "overlaunch_samples": overlaunch}),
        ),
        Case(
            "resume in the next races",
            tail.model_copy(update={"deferred": "resume", "max_deferrals": 100}),
            span,
        ),
    ]
    if predictor:
        cases += [
            Case("length split", ScheduleOptions(batching="length_split")),
            Case("tail batching, resume, predictor as prior", tail.model_copy(update={"long_rule": "quantile"}), span),
            Case("all at once, skew-aware", ScheduleOptions(dispatch="skew_aware")),
            Case(
                "tail batching, resume, skew-aware dispatch", tail.model_copy(update={"dispatch": "skew_aware"}), span
            ),
        ]
    return cases


def simulate_case(
    case: Case, cluster: ClusterModel, lengths: LengthModel, workload: Workload, *, record: bool = False
) -> CaseResult:
    """Simulate one schedule until all prompts of ``workload`` are trained."""
    table = LatencyTable(
        {rows: cluster.pass_seconds(rows, rows * _CONTEXT_OF_TABLE) for rows in (1, max(2, cluster.slots))}
    )
    simulation = Simulation(
        cluster,
        lengths,
        build_policy(case.options, max_staleness=case.max_staleness),
        build_dispatcher(case.options, table),
        replace(workload, long_rows=case.options.long_rows, second_batching=case.options.second_batching),
    )
    summary = simulation.run(record=record)
    simulation.ledger.check()
    return CaseResult(case, summary, tuple(simulation.rounds))


def long_share_sweep(
    cluster: ClusterModel, lengths: LogNormalLengths, workload: Workload, cases: Sequence[Case], shares: Sequence[float]
) -> dict[str, list[float]]:
    """Utilisation of each case for each share of long answers (above four medians), by case name.

    The median stays; the spread grows until ``share`` of the answers (before the cap) are that long.
    """
    return {
        case.name: [
            simulate_case(
                case, cluster, LogNormalLengths.with_long_share(share, base=lengths), workload
            ).summary.utilisation
            for share in shares
        ]
        for case in cases
    }
