"""Drafts from places in the history whose last tokens are similar, not equal: MinHash and locality-sensitive hashing.

The context of a place is the set of n-grams among the last ``SPAN`` tokens before it. MinHash (Broder, "On the
resemblance and containment of documents", 1997): under a random hash two sets have the same minimum with a probability
that equals their Jaccard similarity. ``BANDS`` bands of ``ROWS`` minima each are looked up as keys (Indyk and Motwani,
"Approximate nearest neighbors", 1998): sets of similarity s share one with probability 1 - (1 - s^ROWS)^BANDS, which is
0.66 for s = 0.5 and 0.98 for 0.7. What is found is compared in full, so a chance collision costs time and nothing else.

Verification accepts equal tokens only, and a place that is one token off is as similar as the right one. Therefore the
longest run of equal last tokens decides among the similar places, then similarity, then recency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.history.index.compiled import Int, Int32Array, Int64Array, UInt64Array, compiled, read_only
from storage.history.index.hashing import hash_range
from storage.history.index.suffix_automaton import join

SPAN = 12
NGRAM = 2
BANDS = 8
ROWS = 3
SIMILARITY = 0.5
"""Least Jaccard similarity of two contexts."""

# Latest places of a band that are compared.
_CANDIDATES = 6

# One hash function for each minimum: x -> factor * x + offset modulo 2**64, over n-grams that are hashed already.
_GENERATOR = np.random.Generator(np.random.PCG64(2128))
_FACTORS = _GENERATOR.integers(0, 1 << 63, BANDS * ROWS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_OFFSETS = _GENERATOR.integers(0, 1 << 63, BANDS * ROWS, dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class FuzzyIndex:
    """Immutable tables of bands over one text; about 70 bytes a token.

    Attributes:
        text: int32[tokens], all documents, oldest first.
        starts: int64[documents + 1], where each document starts.
        keys: uint32[bands, places], hashed minima of a band, ascending.
        places: int32[bands, places], the position in ``text`` behind the context of each key, ascending among equals.
    """

    text: Int32Array
    starts: Int64Array
    keys: npt.NDArray[np.uint32]
    places: Int32Array

    @classmethod
    def build(cls, documents: Sequence[npt.NDArray[Any]]) -> FuzzyIndex:
        """Build the tables of ``documents``, oldest first; raises as the automaton's ``build``."""
        text, starts = join(documents)
        sizes = np.diff(starts)
        places = np.arange(len(text))
        places = places[places - np.repeat(starts[:-1], sizes) >= NGRAM]
        begin = np.maximum(places - SPAN, np.repeat(starts[:-1], sizes)[places])
        keys = _band_keys(text, begin, places, _FACTORS, _OFFSETS)
        ranks = np.argsort(keys, axis=1, kind="stable")
        return cls(
            text=read_only(text),
            starts=read_only(starts),
            keys=read_only(np.take_along_axis(keys, ranks, axis=1)),
            places=read_only(places.astype(np.int32)[ranks]),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def draft(self, context: Int32Array, width: int) -> tuple[Int32Array, int]:
        """Return what followed the most fitting similar context.

        Args:
            context: int32[n], what a row has so far; its last ``SPAN`` tokens will do.
            width: Most tokens to draft.

        Returns:
            int32[k], at most ``width`` tokens, none without a similar context, and how many last tokens of both
            contexts are equal (0 is possible with a draft).
        """
        place, equal, _ = self.search(context)
        if place < 0:
            return np.zeros(0, np.int32), 0
        end = int(self.starts[np.searchsorted(self.starts, place, "right")])
        return self.text[place : min(place + max(width, 0), end)], equal

    def search(self, context: Int32Array) -> tuple[int, int, float]:
        """Return the position in ``text`` behind the most fitting context, its equal last tokens, and its similarity.

        Without a context of at least :data:`SIMILARITY` the position is -1.
        """
        tail = np.ascontiguousarray(context[-SPAN:], np.int32)
        if len(tail) < NGRAM:
            return -1, 0, 0.0
        ends = np.array([len(tail)])
        wanted = _band_keys(tail, np.zeros(1, np.int64), ends, _FACTORS, _OFFSETS)[:, 0]
        place, equal, similarity = _search(self.text, self.starts, self.keys, self.places, tail, wanted)
        return int(place), int(equal), float(similarity)


@compiled
def _band_keys(text: Int32Array, begin: Int64Array, end: Int64Array, factors: UInt64Array, offsets: UInt64Array) -> Any:
    """Return uint32[bands, n], the keys of the contexts ``text[begin:end]``, each of ``NGRAM`` tokens or more."""
    keys = np.empty((BANDS, len(begin)), np.uint32)
    grams = np.empty(max(len(text) - NGRAM + 1, 0), np.uint64)
    for i in range(len(grams)):
        grams[i] = hash_range(text, i, i + NGRAM)
    for i in range(len(begin)):
        for band in range(BANDS):
            key = np.uint64(0)
            for row in range(band * ROWS, band * ROWS + ROWS):
                least = np.uint64(0xFFFFFFFFFFFFFFFF)
                for gram in range(begin[i], end[i] - NGRAM + 1):
                    least = min(least, factors[row] * grams[gram] + offsets[row])
                key = (key ^ least) * np.uint64(0xFF51AFD7ED558CCD)
            keys[band, i] = np.uint32(key >> np.uint64(32))
    return keys


@compiled
def _search(
    text: Int32Array,
    starts: Int64Array,
    keys: npt.NDArray[np.uint32],
    places: Int32Array,
    context: Int32Array,
    wanted: npt.NDArray[np.uint32],
) -> tuple[Int, Int, float]:
    """Return position, equal last tokens and similarity of the most fitting place, or a position of -1."""
    best, best_equal, best_similarity = np.int64(-1), 0, 0.0
    own = _grams(context, 0, len(context))
    seen = np.empty(BANDS * _CANDIDATES, np.int64)
    compared = 0
    for band in range(BANDS):
        stop = np.searchsorted(keys[band], wanted[band], "right")
        for rank in range(stop - 1, max(stop - 1 - _CANDIDATES, -1), -1):
            if keys[band, rank] != wanted[band]:
                break
            place = np.int64(places[band, rank])
            if place in seen[:compared]:
                continue
            seen[compared] = place
            compared += 1
            begin = starts[np.searchsorted(starts, place, "right") - 1]
            similarity = _jaccard(own, _grams(text, max(begin, place - SPAN), place))
            if similarity < SIMILARITY:
                continue
            equal = 0
            while equal < min(len(context), place - begin) and text[place - 1 - equal] == context[-1 - equal]:
                equal += 1
            if (equal, similarity, place) > (best_equal, best_similarity, best) or best < 0:
                best, best_equal, best_similarity = place, equal, similarity
    return best, best_equal, best_similarity


@compiled
def _grams(text: Int32Array, begin: Int, end: Int) -> UInt64Array:
    """Return the different n-grams of ``text[begin:end]``, hashed and ascending."""
    grams = np.empty(max(end - begin - NGRAM + 1, 0), np.uint64)
    for i in range(len(grams)):
        grams[i] = hash_range(text, begin + i, begin + i + NGRAM)
    grams.sort()
    count = 0
    for i in range(len(grams)):
        if count == 0 or grams[i] != grams[count - 1]:
            grams[count] = grams[i]
            count += 1
    return grams[:count]


@compiled
def _jaccard(first: UInt64Array, second: UInt64Array) -> float:
    i = j = both = 0
    while i < len(first) and j < len(second):
        if first[i] == second[j]:
            both += 1
            i += 1
            j += 1
        elif first[i] < second[j]:
            i += 1
        else:
            j += 1
    return both / (len(first) + len(second) - both)
