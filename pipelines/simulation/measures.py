"""What a simulated round and a simulated run took, with the denominators said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipelines.simulation.cluster import ClusterModel
from pipelines.simulation.replica import Span
from storage.records import GroupKey, RoundClass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One step of a simulated run; times in virtual seconds, tokens of answers only.

    Attributes:
        step: Optimiser step.
        round_class: Kind of its round.
        rollout_s: From the first launch to the last score that the step needed.
        train_s: Training.
        sync_s: Weight update.
        trained: Groups trained.
        launched: Groups that ran.
        generated: Tokens written in the round.
        trained_tokens: Tokens trained in the step, written now or earlier.
        stale_tokens: Those of them that older weights wrote.
        wasted: Tokens dropped in the round, written now or earlier.
        busy_s: Replica-seconds with at least one row.
        row_s: Row-seconds: the time of each row in a slot.
        slot_s: Slot-seconds: rollout time of each replica times the most rows that it had at once.
        preemptions: Rows that had to leave a full cache.
        spans: Stays of rows in slots, if recorded; empty otherwise.
        outcomes: What became of the launched groups, if recorded: trained, deferred or dropped.
    """

    step: int
    round_class: RoundClass
    rollout_s: float
    train_s: float
    sync_s: float
    trained: int
    launched: int
    generated: int
    trained_tokens: int
    stale_tokens: int
    wasted: int
    busy_s: float
    row_s: float
    slot_s: float
    preemptions: int
    spans: tuple[Span, ...] = ()
    outcomes: dict[GroupKey, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Virtual seconds of the whole step."""
        return self.rollout_s + self.train_s + self.sync_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A simulated run in figures.

    Attributes:
        steps: Steps in the run.
        groups: Groups trained.
        step_s: Seconds per step.
        rollout_s: Seconds of rollout per step.
        step_s_per_group: Seconds of steps per trained group: what two schedules are compared by.
        rollout_s_per_group: Seconds of rollout per trained group.
        utilisation: Trained tokens, times their share of a pass with all slots full, over replica-seconds of rollout:
            the part of the rollout that the same tokens would need at the saturated rate.
        slot_bubble: Share of slot-seconds without a row; a replica has as many slots as it had rows at once.
        replica_idle: Share of replica-seconds of rollout without any row.
        waste: Dropped tokens over generated tokens.
        stale_share: Share of trained tokens that older weights wrote.
        ks: Largest distance between the distributions of launched and trained lengths (first attempts of all groups
            that were launched, against trained answers).
        length_ratio: Mean trained length over mean launched length.
        goodput: Trained tokens per GPU-second of whole steps.
        preemptions: Rows preempted per step.
        long_rounds: Share of rounds that were long.
    """

    steps: int
    groups: int
    step_s: float
    rollout_s: float
    step_s_per_group: float
    rollout_s_per_group: float
    utilisation: float
    slot_bubble: float
    replica_idle: float
    waste: float
    stale_share: float
    ks: float
    length_ratio: float
    goodput: float
    preemptions: float
    long_rounds: float


def ks_distance(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> float:
    """Kolmogorov-Smirnov distance of two samples: the largest gap between their empirical distributions, 0 to 1."""
    if not len(first) or not len(second):
        return 0.0
    one, two = np.sort(first), np.sort(second)
    points = np.concatenate([one, two])
    shares = np.searchsorted(one, points, "right") / len(one) - np.searchsorted(two, points, "right") / len(two)
    return float(np.abs(shares).max())


def summarise(
    cluster: ClusterModel,
    rounds: Sequence[RoundRecord],
    launched: npt.NDArray[np.int64],
    trained: npt.NDArray[np.int64],
) -> RunSummary:
    """Sum up rounds.

    Args:
        cluster: The cluster that they ran on.
        rounds: At least one round.
        launched: Lengths of the first attempts of all groups that were launched, int64[n].
        trained: Lengths of all trained answers, int64[m].
    """
    steps = len(rounds)
    rollout = sum(record.rollout_s for record in rounds)
    total = sum(record.seconds for record in rounds)
    groups = sum(record.trained for record in rounds)
    generated = sum(record.generated for record in rounds)
    tokens = sum(record.trained_tokens for record in rounds)
    replica_s = cluster.replicas * rollout
    context = cluster.prompt_tokens + (float(trained.mean()) / 2 if len(trained) else 0.0)
    saturated = cluster.pass_seconds(cluster.slots, cluster.slots * context) / cluster.slots
    return RunSummary(
        steps=steps,
        groups=groups,
        step_s=total / steps,
        rollout_s=rollout / steps,
        step_s_per_group=total / max(1, groups),
        rollout_s_per_group=rollout / max(1, groups),
        utilisation=tokens * saturated / replica_s if replica_s else 0.0,
        slot_bubble=1.0 - sum(record.row_s for record in rounds) / max(1e-12, sum(record.slot_s for record in rounds)),
        replica_idle=1.0 - sum(record.busy_s for record in rounds) / replica_s if replica_s else 0.0,
        waste=sum(record.wasted for record in rounds) / max(1, generated),
        stale_share=sum(record.stale_tokens for record in rounds) / max(1, tokens),
        ks=ks_distance(launched, trained),
        length_ratio=float(trained.mean() / launched.mean()) if len(trained) and len(launched) else 1.0,
        goodput=tokens / (cluster.gpus * total) if total else 0.0,
        preemptions=sum(record.preemptions for record in rounds) / steps,
        long_rounds=sum(record.round_class == "long" for record in rounds) / steps,
    )
