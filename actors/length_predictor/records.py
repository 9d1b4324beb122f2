"""What is asked of the predictor, what it is told, and what it answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import xxhash

_NORMAL = NormalDist()
_P90 = _NORMAL.inv_cdf(0.9)


def identity(text: str) -> int:
    """Return the unsigned 64-bit hash that names a prompt by its text."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One prompt whose length is asked for.

    Attributes:
        text: The rendered prompt.
        group: Name of its running group of siblings, ``str(GroupKey)``; empty outside of a group. What siblings of
            the same group have shown so far is used.
    """

    text: str
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One finished answer.

    Attributes:
        text: The rendered prompt.
        length: Tokens of the answer. An answer that hit the token limit counts with that limit: so long it took.
        group: Name of its group of siblings; empty for an answer without siblings.
        group_size: Siblings that the group has in all.
    """

    text: str
    length: int
    group: str = ""
    group_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """All lengths that one group of siblings had, in the order in which they finished.

    Attributes:
        text: The rendered prompt.
        lengths: Tokens of each answer; at least one.
    """

    text: str
    lengths: tuple[int, ...]

    @property
    def log_mean(self) -> float:
        """Logarithm of the mean length; an empty answer counts as one token."""
        return math.log(max(1.0, sum(self.lengths) / len(self.lengths)))

    @property
    def log_longest(self) -> float:
        """Logarithm of the longest answer; what every ranker predicts, because a group waits for it."""
        return math.log(max(1, *self.lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is expected of one prompt.

    Attributes:
        rank: Place among the prompts asked for together, 0 (shortest) to 1 (longest); by the group's longest answer.
        p50: Median of the length of one answer, in tokens.
        p90: 90th percentile of the length of one answer, in tokens.
        longest: Median of the length of the group's longest answer, in tokens.
        confidence: 0 (a guess) to 1: recent rank correlation of the rankers that had an opinion, times how far they
            agree on this prompt.
    """

    rank: float
    p50: float
    p90: float
    longest: float
    confidence: float

    def remaining(self, written: int) -> float:
        """Return the median of the tokens still to come after ``written`` ones, at least 1.

        Takes the length as lognormal through ``p50`` and ``p90`` and conditions on its being above ``written``.
        """
        if written <= 0:
            return max(1.0, self.p50)
        sigma = max(1e-3, math.log(max(self.p90, self.p50) / self.p50) / _P90)
        # Upper tails: 1 - cdf loses all digits where an answer has outgrown its prediction.
        above = _NORMAL.cdf((math.log(self.p50) - math.log(written)) / sigma)
        if above < 1e-12:
            return 1.0
        return max(1.0, self.p50 * math.exp(-sigma * _NORMAL.inv_cdf(above / 2)) - written)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the deployment answers to ``predict``.

    Attributes:
        incarnation: Changes when the replica was replaced and has forgotten what it knew.
        predictions: One per query, in order.
    """

    incarnation: str
    predictions: tuple[Prediction, ...]
