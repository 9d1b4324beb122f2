"""The same questions answered slowly, straight from the texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


def arrays(texts: Sequence[Sequence[int]]) -> list[Int32Array]:
    return [np.array(text, np.int32) for text in texts]


def occurrences(texts: Sequence[Sequence[int]], context: Sequence[int]) -> list[tuple[int, int]]:
    """Return (document, end) of each place where ``context`` lies, in order."""
    size = len(context)
    return [
        (document, end)
        for document, text in enumerate(texts)
        for end in range(size, len(text) + 1)
        if list(text[end - size : end]) == list(context)
    ]


def weighted(texts: Sequence[Sequence[int]], weights: Sequence[float], context: Sequence[int]) -> float:
    return sum(weights[document] for document, _ in occurrences(texts, context))


def longest_suffix(texts: Sequence[Sequence[int]], row: Sequence[int]) -> int:
    """Return the length of the longest suffix of ``row`` that lies in a text."""
    return next(size for size in range(len(row), -1, -1) if size == 0 or occurrences(texts, row[len(row) - size :]))


def best_continuation(
    texts: Sequence[Sequence[int]], weights: Sequence[float], context: Sequence[int]
) -> tuple[int, float] | None:
    """Return token and weighted count of what followed most, the latest of equals; ``None`` if nothing did."""
    mass: dict[int, float] = {}
    latest: dict[int, tuple[int, int]] = {}
    for document, end in occurrences(texts, context):
        if end < len(texts[document]):
            token = texts[document][end]
            mass[token] = mass.get(token, 0.0) + weights[document]
            latest[token] = (document, end)
    if not mass:
        return None
    token = max(mass, key=lambda candidate: (mass[candidate], latest[candidate]))
    return token, mass[token]


def draft(
    texts: Sequence[Sequence[int]], weights: Sequence[float], row: Sequence[int], matched: int, limit: int
) -> list[tuple[int, float, float, int]]:
    """Return (token, count, ratio, match length) of each drafted token."""
    found = []
    row = list(row)
    while len(found) < limit:
        best = None
        while matched and best is None:
            context = row[len(row) - matched :]
            best = best_continuation(texts, weights, context)
            if best is None:
                matched -= 1
        if best is None:
            break
        count = weighted(texts, weights, context)
        found.append((best[0], count, best[1] / count, matched))
        row.append(best[0])
        matched += 1
    return found
