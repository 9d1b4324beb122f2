"""Prompts that resemble a prompt: whose answers may serve a prompt that has none of its own.

Similarity is the weighted Jaccard coefficient of the prompts' sets of tokens and token pairs: the weight of what they
share over the weight of what either has. An n-gram weighs its inverse document frequency, log((1 + N) / (1 + n)) + 1e-6
for n of N prompts, so that what a chat template puts into every prompt decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.history.index.compiled import Float32Array, Float64Array, Int64Array, UInt64Array
from storage.history.index.hashing import hash_ranges
from storage.history.index.suffix_automaton import join

_NGRAMS = (1, 2)

# Weight of what every prompt has: prompts that consist of nothing else still have a similarity.
_LEAST_WEIGHT = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class NearestPrompts:
    """Immutable inverted index from n-grams to prompts.

    Attributes:
        keys: uint64[prompts], in the order they were given.
        totals: float64[prompts], summed weight of each prompt's n-grams.
        grams: uint64[n-grams], hashed, ascending.
        weights: float64[n-grams].
        starts: int64[n-grams + 1], where the prompts of an n-gram lie in ``prompts``.
        prompts: int64[entries], places in ``keys``.
    """

    keys: UInt64Array
    totals: Float64Array
    grams: UInt64Array
    weights: Float64Array
    starts: Int64Array
    prompts: Int64Array

    @classmethod
    def build(cls, prompts: Mapping[int, npt.NDArray[Any]]) -> NearestPrompts:
        """Build the index of prompts, one-dimensional arrays of token ids by 64-bit key.

        Raises:
            UserError: As the automaton's ``build``; documents are numbered in the order of ``prompts``.
        """
        text, bounds = join(list(prompts.values()))
        owner, gram = _features(text, bounds)
        ranks = np.lexsort((owner, gram))
        owner, gram = owner[ranks], gram[ranks]
        grams, first = np.unique(gram, return_index=True)
        starts = np.append(first, len(gram)).astype(np.int64)
        counts = np.diff(starts)
        weights = np.log((1 + len(prompts)) / (1 + counts)) + _LEAST_WEIGHT
        return cls(
            keys=np.array(list(prompts), np.uint64),
            totals=np.bincount(owner, np.repeat(weights, counts), len(prompts)).astype(np.float64),
            grams=grams,
            weights=weights,
            starts=starts,
            prompts=owner,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def nearest(self, prompt: npt.NDArray[Any], k: int) -> tuple[UInt64Array, Float32Array]:
        """Return the ``k`` most similar prompts, best first, the later of equals first.

        Args:
            prompt: int[n], token ids; n-grams that no prompt has count as what the others lack.
            k: Most prompts to return.

        Returns:
            uint64[m] keys and float32[m] similarities in (0, 1], m at most ``k``: prompts that share nothing are
            left out.
        """
        _, gram = _features(*join([prompt]))
        places = np.searchsorted(self.grams, gram)
        known = places < len(self.grams)
        known[known] = self.grams[places[known]] == gram[known]
        places = places[known]
        unknown = (len(gram) - len(places)) * (np.log(1 + len(self.keys)) + _LEAST_WEIGHT)
        shared = np.zeros(len(self.keys))
        for place in places:
            shared[self.prompts[self.starts[place] : self.starts[place + 1]]] += self.weights[place]
        total = self.totals + self.weights[places].sum() + unknown - shared
        found = np.flatnonzero(shared)
        similarity = shared[found] / total[found]
        best = np.lexsort((-found, -similarity))[: max(k, 0)]
        return self.keys[found[best]], similarity[best].astype(np.float32)


def _features(text: npt.NDArray[np.int32], bounds: Int64Array) -> tuple[Int64Array, UInt64Array]:
    """Return the different n-grams of each document: its number and the hash, ascending by document."""
    sizes = np.diff(bounds)
    position = np.arange(len(text))
    document = np.repeat(np.arange(len(sizes)), sizes)
    end = np.repeat(bounds[1:], sizes)
    owners, hashes = [], []
    for size in _NGRAMS:
        fits = position + size <= end
        owners.append(document[fits])
        hashes.append(hash_ranges(text, position[fits], position[fits] + size))
    owner, gram = np.concatenate(owners), np.concatenate(hashes)
    ranks = np.lexsort((gram, owner))
    owner, gram = owner[ranks], gram[ranks]
    new = np.ones(len(gram), np.bool_)
    new[1:] = (owner[1:] != owner[:-1]) | (gram[1:] != gram[:-1])
    return owner[new], gram[new]
