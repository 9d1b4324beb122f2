"""Built-in procedural tasks: problems with a worked answer, made from a seed without any download.

``running_sums`` is what the tiny model learns. A prompt asks for a number of laps around a ring of stations::

    Bc1d0e2=

The answer walks the ring and notes after each station the running sum modulo 10; before each lap it notes how many
laps are left (``A`` is one, ``B`` is two, ...)::

    Bc1d1e3Ac4d4e6=6

(first lap: 1, 1, 3; last lap: 4, 4, 6; answer 6). Labels make the look-up a matter of content rather than of position,
and the countdown makes the end of the walk a matter of reading. Stations and laps follow clipped lognormal laws, so
that the lengths of answers have a long tail; whoever answers may walk once more after a ``?``, so that the lengths of
answers to one prompt differ too. A mistake anywhere spoils the rest: longer answers are wrong more often.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from storage.errors import UserError

_TRIES_PER_ROW = 200


class Task(Protocol):
    """A generator of problems with answers."""

    @property
    def alphabet(self) -> str:
        """Every character that prompts and answers are made of."""

    def generate(self, *, count: int, seed: int, exclude: frozenset[str] = frozenset()) -> Iterator[dict[str, Any]]:
        """Yield ``count`` rows with different prompts; raises ``UserError`` when there are not so many.

        Args:
            count: Number of rows.
            seed: Seed of the rows; a longer set with the same seed starts with the shorter one.
            exclude: Prompts that must not occur.
        """

    def demonstrate(self, row: dict[str, Any], rng: np.random.Generator) -> str:
        """Return an answer as an imperfect writer would give it, for a supervised warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSums:
    """The task that the module describes.

    Rows have the columns ``prompt``, ``answer`` (the final sum), ``solution`` (one flawless walk, without the final
    ``=`` and answer: what the reward function ``partial_credit`` compares with), ``stations`` and ``laps``.

    Attributes:
        median_stations: Median of the lognormal law of stations.
        sigma_stations: Standard deviation of its logarithm.
        max_stations: Most stations; the fewest are 2.
        median_laps: Median of the lognormal law of laps.
        sigma_laps: Standard deviation of its logarithm.
        max_laps: Most laps, at most 26; the fewest is 1.
        max_walk: Longest walk; where it would be longer, laps are cut. Unit: characters.
        max_answer: Longest demonstration; no further walk is begun that would not fit. Unit: characters.
        max_term: Largest number at a station; the smallest is 0.
        labels: Names of stations, in their order; a ring takes consecutive ones.
        recheck: Chance that a demonstration walks once more, after each walk.
        max_walks: Most walks of a demonstration.
        hard_term: The number that the demonstrator often gets wrong.
        slip: Chance that they take it for one less, each time.
    """

    median_stations: float = 2.6
    sigma_stations: float = 0.4
    max_stations: int = 6
    median_laps: float = 2.0
    sigma_laps: float = 1.2
    max_laps: int = 12
    max_walk: int = 150
    max_answer: int = 250
    max_term: int = 3
    labels: str = string.ascii_lowercase[:8]
    recheck: float = 0.2
    max_walks: int = 3
    hard_term: int = 2
    slip: float = 0.6

    @property
    def alphabet(self) -> str:
        """Digits, labels, lap counters, and the marks ``=`` and ``?``."""
        return string.digits + self.labels + string.ascii_uppercase[: self.max_laps] + "=?"

    def generate(self, *, count: int, seed: int, exclude: frozenset[str] = frozenset()) -> Iterator[dict[str, Any]]:
        """Yield rows; see :class:`Task`."""
        seen = set(exclude)
        for index in range(count):
            rng = np.random.default_rng([seed, index])
            for _ in range(_TRIES_PER_ROW):
                row = self.draw(rng)
                if row["prompt"] not in seen:
                    break
            else:
                raise UserError(
                    f"builtin:running_sums has no {count:,} different prompts beside the {len(exclude):,} excluded "
                    "ones: ask for fewer (data.prompts, evaluation.prompts)"
                )
            seen.add(row["prompt"])
            yield row

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Return one random row."""
        stations = _lognormal(rng, self.median_stations, self.sigma_stations, 2, self.max_stations)
        laps = _lognormal(rng, self.median_laps, self.sigma_laps, 1, self.max_laps)
        laps = max(1, min(laps, self.max_walk // (2 * stations + 1)))
        start = int(rng.integers(0, len(self.labels) - stations + 1))
        labels = self.labels[start : start + stations]
        terms = [int(term) for term in rng.integers(0, self.max_term + 1, stations)]
        ring = "".join(f"{label}{term}" for label, term in zip(labels, terms, strict=True))
        walk, total = _walk(labels, [terms] * laps)
        return {
            "prompt": f"{_counter(laps)}{ring}=",
            "answer": str(total),
            "solution": walk,
            "stations": stations,
            "laps": laps,
        }

    def demonstrate(self, row: dict[str, Any], rng: np.random.Generator) -> str:
        """Return an answer of a writer who knows the way but more often than not misreads the hard term.

        A model that learns from such writers can do the task and has the bad habit too: its greedy answers are wrong
        where the hard term occurs, its samples are now and then right. That is what reinforcement learning mends.
        """
        ring, laps = row["prompt"][1:-1], row["laps"]
        labels, terms = ring[::2], [int(term) for term in ring[1::2]]
        walks: list[str] = []
        length = 0
        while True:
            seen = [[self._read(term, rng) for term in terms] for _ in range(laps)]
            walk, total = _walk(labels, seen)
            walks.append(walk)
            length += len(walk) + 1
            again = rng.random() < self.recheck and len(walks) < self.max_walks
            if not again or length + len(walk) + 2 > self.max_answer:
                return "?".join(walks) + f"={total}"

    def has_hard_term(self, row: dict[str, Any]) -> bool:
        """Return True when the prompt holds the number that demonstrations get wrong."""
        return str(self.hard_term) in row["prompt"]

    def _read(self, term: int, rng: np.random.Generator) -> int:
        return term - 1 if term == self.hard_term and rng.random() < self.slip else term


def _walk(labels: str, laps: list[list[int]]) -> tuple[str, int]:
    """Return the walk over ``laps``, each a list of the terms as they are read, and its final sum."""
    total, parts = 0, []
    for done, terms in enumerate(laps):
        parts.append(_counter(len(laps) - done))
        for label, term in zip(labels, terms, strict=True):
            total = (total + term) % 10
            parts.append(f"{label}{total}")
    return "".join(parts), total


def _counter(laps: int) -> str:
    return string.ascii_uppercase[laps - 1]


def _lognormal(rng: np.random.Generator, median: float, sigma: float, low: int, high: int) -> int:
    return min(max(round(median * math.exp(sigma * rng.standard_normal())), low), high)


TASKS: dict[str, Task] = {"running_sums": RunningSums()}
"""Built-in tasks by name."""
