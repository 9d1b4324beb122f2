"""64-bit hashes of runs of tokens."""

from __future__ import annotations

import numpy as np

from storage.history.index.compiled import Int32Array, Int64Array, UInt64Array, compiled

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_HALF = np.uint64(33)


@compiled
def hash_range(text: Int32Array, start: int, stop: int) -> np.uint64:
    """Hash ``text[start:stop]``: a polynomial in an odd factor modulo 2**64, its high bits folded into the low ones."""
    value = np.uint64(stop - start)
    for position in range(start, stop):
        value = value * _FACTOR + np.uint64(text[position] + 1)
    value = (value ^ (value >> _HALF)) * _MIX
    return value ^ (value >> _HALF)


@compiled
def hash_ranges(text: Int32Array, start: Int64Array, stop: Int64Array) -> UInt64Array:
    """Return uint64[n], the hash of each ``text[start:stop]``."""
    hashes = np.empty(len(start), np.uint64)
    for i in range(len(start)):
        hashes[i] = hash_range(text, start[i], stop[i])
    return hashes
