"""Splits rollout workers between the long tail and the rest, by a model of how long each pool would take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from pipelines.scheduling.latency_table import LatencyTable

# Mean length of a row over the median length of the longest of its group: 8 log-normal siblings with a standard
# deviation of 0.58 in the logarithm (the simulator's length model) give 0.52.
MEAN_OF_LONGEST = 0.52
MIN_GAIN = 0.05


class Predicted(Protocol):
    """Anything with a number of rows and predicted tokens of the longest of them."""

    @property
    def rows(self) -> int: ...  # noqa: D102
    @property
    def tokens(self) -> float | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Workload:
    """What a pool has to do: ``rows`` of ``mean`` tokens each on average, the longest of ``longest`` tokens."""

    rows: int
    mean: float
    longest: float

    @classmethod
    def of(cls, work: Iterable[Predicted]) -> Workload:
        """Sum up work; pieces without a prediction count with the mean of the others."""
        items = list(work)
        rows = sum(item.rows for item in items)
        known = [(item.rows, item.tokens) for item in items if item.tokens is not None]
        weight = sum(row for row, _ in known)
        mean = MEAN_OF_LONGEST * sum(row * tokens for row, tokens in known) / weight if weight else 1.0
        longest = max((tokens for _, tokens in known), default=1.0)
        return cls(rows, mean, longest)


@dataclass(frozen=True, slots=True)
class Allocation:
    """How many workers the tail gets, how many rows each pool decodes at once per worker, and the modelled seconds.

    Without workers of its own (0) the tail shares all workers with the rest, ahead of it.
    """

    long_workers: int
    long_batch: int
    regular_batch: int
    makespan: float


def pool_seconds(load: Workload, workers: int, batch: int, latency: LatencyTable) -> float:
    """Modelled seconds that ``workers`` need, each decoding up to ``batch`` rows at once.

    A pass takes ``latency(rows)`` and moves every row one token. The pool shares its work out in so many passes over
    full batches; where rows have to queue, longest first takes up to a third more (4/3 of the optimum, R. L. Graham
    1969). A longest row that outlasts this goes on almost alone. StreamRL prints PTL(b) * mean * ceil(rows / (workers *
    b)), which has no term for the longest row although that one ends the pool.
    """
    if not load.rows:
        return 0.0
    filled = max(1, min(batch, -(-load.rows // workers)))
    shared = load.rows * load.mean / (workers * filled)
    slack = min(load.longest, shared) / 3 if load.rows > workers * filled else 0.0
    return latency(filled) * (shared + slack) + latency(1) * max(0.0, load.longest - shared - slack)


def dynamic_allocation(
    tail: Workload, regular: Workload, workers: int, slots: int, latency: LatencyTable
) -> Allocation:
    """Return the split of ``workers`` (at least 2) that ends first: the smaller maximum over both pools.

    All splits are tried, with the batch sizes ``slots`` and its halves down to 1, and no split at all: smaller batches
    pay only where a pass with fewer rows is faster. A split must save at least :data:`MIN_GAIN`, because predictions
    err. Of splits that end together, the one with the fewest workers for the tail and the largest batches is taken.

    Raises:
        ValueError: Fewer than two workers, or no slot.
    """
    if workers < 2 or slots < 1:
        raise ValueError(f"two pools need two workers and a slot each, got {workers} workers with {slots} slots")
    batches = [slots]
    while batches[-1] > 1:
        batches.append(batches[-1] // 2)
    together = Workload(
        tail.rows + regular.rows,
        (tail.rows * tail.mean + regular.rows * regular.mean) / max(1, tail.rows + regular.rows),
        max(tail.longest, regular.longest),
    )
    unsplit = pool_seconds(together, workers, slots, latency)
    best = Allocation(0, slots, slots, unsplit * (1 - MIN_GAIN))
    for long_workers in range(1, workers):
        long_time, long_batch = min((pool_seconds(tail, long_workers, b, latency), -b) for b in batches)
        rest, rest_batch = min((pool_seconds(regular, workers - long_workers, b, latency), -b) for b in batches)
        makespan = max(long_time, rest)
        if makespan < best.makespan * (1 - 1e-9):
            best = Allocation(long_workers, -long_batch, -rest_batch, makespan)
    return best if best.long_workers else replace(best, makespan=unsplit)
