"""A simulated group of answers: what it will be, what of it is written, and under which weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from pipelines.scheduling.policy import WaitingGroup
from pipelines.simulation.lengths import Int64Array, LengthModel
from pipelines.simulation.replica import Row
from storage.records import GroupKey


@dataclass(slots=True)
class SimulatedGroup:
    """Answers of one prompt, over all rounds in which they are written.

    Attributes:
        key: Ledger key.
        needed: Samples that the learner gets.
        attempt: Times that it began anew.
        lengths: int64[launched], tokens that each answer will have; empty before the first launch.
        written: Tokens of each answer so far.
        scored: Samples with a score, in the order of their scores.
        segments: For each sample (version, tokens) in the order in which they were written.
    """

    key: GroupKey
    needed: int
    attempt: int = 0
    lengths: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    written: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    segments: list[list[tuple[int, int]]] = field(default_factory=list)

    def begin(self, lengths: LengthModel, sample_ratio: float) -> None:
        """Draw the answers of the present attempt."""
        launched = math.ceil(sample_ratio * self.needed - 1e-9)
        self.lengths = lengths.draw(self.key, self.attempt, launched)
        self.written = [0] * launched
        self.scored = []
        self.segments = [[] for _ in range(launched)]

    def drop(self) -> int:
        """Forget what is written, for another attempt; returns the tokens that are lost."""
        lost = sum(self.written)
        self.attempt += 1
        self.lengths = np.zeros(0, np.int64)
        self.written, self.scored, self.segments = [], [], []
        return lost

    def missing(self) -> list[int]:
        """Samples that are not written to their end."""
        return [index for index, length in enumerate(self.lengths) if self.written[index] < length]

    def add_tokens(self, row: Row, version: int) -> int:
        """Take in what a row has written under ``version``; returns the number of new tokens."""
        new = row.written - self.written[row.index]
        if new:
            self.written[row.index] = row.written
            self.segments[row.index].append((version, new))
        return new

    def waiting(self, deferrals: int) -> WaitingGroup:
        """The record that policies see while the group waits."""
        missing = self.missing()
        versions = [segments[0][0] for segments in self.segments if segments]
        return WaitingGroup(
            deferrals=deferrals,
            oldest_version=min(versions, default=None),
            tokens=sum(self.written),
            longest=max((self.written[index] for index in missing), default=0),
            missing=len(missing) if len(self.lengths) else self.needed,
        )

    def trained_samples(self) -> list[int]:
        """The first ``needed`` samples to be scored."""
        return self.scored[: self.needed]
