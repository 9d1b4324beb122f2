"""Makes the policy objects that a configuration asks for; conductor and simulator both get theirs here."""

from __future__ import annotations

from pipelines.scheduling.all_at_once import AllAtOnce
from pipelines.scheduling.dispatch import Dispatcher, LeastLoaded, SkewAware
from pipelines.scheduling.latency_table import LatencyTable
from pipelines.scheduling.length_split import LengthSplit
from pipelines.scheduling.long_queue import QueueRules
from pipelines.scheduling.options import ScheduleOptions
from pipelines.scheduling.policy import SchedulePolicy
from pipelines.scheduling.tail_batching import TailBatching
from pipelines.scheduling.timeouts import RowBudget, Timeouts


def build_policy(
    options: ScheduleOptions,
    *,
    max_staleness: int = 0,
    lag: int = 0,
    dynamic_sampling: bool = False,
    max_refills: int = 0,
) -> SchedulePolicy:
    """Return the policy of ``options.batching``.

    Args:
        options: Section ``schedule``.
        max_staleness: Versions that a token may be old at the optimiser step.
        lag: Versions by which answers begin under older weights than the newest.
        dynamic_sampling: Drop groups whose rewards are all equal.
        max_refills: Most further waves that replace such groups.
    """
    rules = QueueRules(
        long_rule=options.rule,
        long_share=options.long_share,
        median_factor=options.median_factor,
        max_deferrals=options.max_deferrals,
        resume=options.resumes(max_staleness, lag),
        max_staleness=max_staleness,
    )
    if options.batching == "tail":
        return TailBatching(
            rules,
            overlaunch_prompts=options.overlaunch_prompts,
            overlaunch_samples=options.overlaunch_samples,
            dynamic_sampling=dynamic_sampling,
            max_refills=max_refills,
        )
    if options.batching == "length_split":
        return LengthSplit(
            rules,
            oversample=options.oversample,
            ratio=options.oversample_ratio,
            dynamic_sampling=dynamic_sampling,
            max_refills=max_refills,
        )
    return AllAtOnce(dynamic_sampling=dynamic_sampling, max_refills=max_refills, max_staleness=max_staleness)


def build_dispatcher(options: ScheduleOptions, latency: LatencyTable) -> Dispatcher:
    """Return the dispatcher of ``options.dispatch``; ``latency`` is the measured or assumed table of the engine."""
    return SkewAware(latency, tail_share=options.tail_share) if options.dispatch == "skew_aware" else LeastLoaded()


def build_timeouts(options: ScheduleOptions) -> Timeouts:
    """Return the limits of rows in both pools."""
    long = options.pools.long
    return Timeouts(
        RowBudget(tokens=options.timeouts.tokens, wall_s=options.timeouts.wall_s),
        RowBudget(tokens=long.tokens, wall_s=long.wall_s),
        max_resumes=options.timeouts.max_resumes,
    )
