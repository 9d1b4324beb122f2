"""Numbers that a prompt's text shows at a glance: sizes, character classes, numbers, words and n-grams.

Everything is hashed with fixed functions: the same text has the same features in every process and version of Python.
Of a long prompt the head and the tail are read, where instructions and questions stand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Keys = npt.NDArray[np.uint64]

MAX_BYTES = 8192
_BYTES = 128
_WORDS = 256
_CLASSES = ("digit", "lower", "upper", "space", "line", "operator", "bracket", "punctuation", "other")
_NUMERIC = ("bytes", "words", "distinct", "numbers", "digits_of_largest", "largest", "sum_of_numbers", *_CLASSES)
FEATURES = 1 + len(_NUMERIC) + _BYTES + _WORDS
"""Columns of :func:`feature_matrix`: 1, the numeric features, counts by byte, counts by hashed word."""
UNPENALISED = 1 + len(_NUMERIC)
"""So many leading columns are few and dense and need next to no shrinkage."""

_NUMBER = re.compile(rb"[0-9]+")
_LONGEST_NUMBER = 15
_FIRST, _LAST = 2, 3  # control characters that mark the ends of a text in its n-grams
_SPACE = ord(" ")
# Odd 64-bit constants without structure, one a kind of n-gram; products wrap around.
_BIGRAM, _TRIGRAM, _WORD = (np.uint64(k) for k in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93))
_POWERS = np.cumprod(np.full(64, 0x100000001B3, np.uint64))


def _class_table() -> npt.NDArray[np.int64]:
    table = np.full(256, _CLASSES.index("other"), np.int64)
    members = {
        "digit": b"0123456789",
        "lower": bytes(range(ord("a"), ord("z") + 1)),
        "upper": bytes(range(ord("A"), ord("Z") + 1)),
        "space": b" \t\r",
        "line": b"\n",
        "operator": b"+-*/=<>^%|&~",
        "bracket": b"()[]{}",
        "punctuation": b".,;:!?'\"`",
    }
    for name, characters in members.items():
        table[list(characters)] = _CLASSES.index(name)
    return table


_CLASS_OF = _class_table()


def feature_matrix(texts: Sequence[str]) -> Float64Array:
    """Return float64[n, FEATURES]; counts enter as log(1 + count)."""
    matrix = np.zeros((len(texts), FEATURES))
    for row, text in zip(matrix, texts, strict=True):
        data = _read(text)
        counts = np.bincount(data, minlength=256)
        words = _word_keys(data)
        numbers = [found[:_LONGEST_NUMBER] for found in _NUMBER.findall(data.tobytes())]
        values = [int(number) for number in numbers]
        numeric = [
            len(text),
            len(words),
            np.count_nonzero(counts),
            len(numbers),
            max(map(len, numbers), default=0),
            max(values, default=0),
            sum(values),
            *np.bincount(_CLASS_OF, weights=counts, minlength=len(_CLASSES)),
        ]
        row[0] = 1.0
        row[1:UNPENALISED] = numeric
        row[UNPENALISED : UNPENALISED + _BYTES] = counts[:_BYTES] + counts[_BYTES:]
        row[UNPENALISED + _BYTES :] = _counts(words, _WORD, _WORDS)
    matrix[:, 1:] = np.log1p(matrix[:, 1:])
    return matrix


def ngram_matrix(texts: Sequence[str], dimension: int) -> Float32Array:
    """Return float32[n, dimension]: log(1 + count) of hashed words and of character 2- and 3-grams.

    The ends of a text are characters of their own, so that its first and last letters are told from the others.
    """
    matrix = np.zeros((len(texts), dimension), np.float32)
    for row, text in zip(matrix, texts, strict=True):
        data = _read(text)
        padded = np.empty(len(data) + 2, np.uint64)
        padded[0], padded[1:-1], padded[-1] = _FIRST, data, _LAST
        pairs = padded[:-1] * np.uint64(257) + padded[1:]
        triples = pairs[:-1] * np.uint64(257) + padded[2:]
        row[:] = _counts(pairs, _BIGRAM, dimension)
        row += _counts(triples, _TRIGRAM, dimension)
        row += _counts(_word_keys(data), _WORD, dimension)
    return np.log1p(matrix)


def _read(text: str) -> Bytes:
    """Return the bytes that are looked at."""
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_BYTES:
        data = data[: MAX_BYTES // 2] + data[-MAX_BYTES // 2 :]
    return np.frombuffer(data, np.uint8)


def _word_keys(data: Bytes) -> Keys:
    """Return uint64[words]: a number for each run of bytes above space; equal runs have equal numbers."""
    inside = data > _SPACE
    starts = np.flatnonzero(inside & ~np.concatenate([[False], inside[:-1]]))
    if not len(starts):
        return np.zeros(0, np.uint64)
    data, inside, starts = data[starts[0] :], inside[starts[0] :], starts - starts[0]
    places = np.arange(len(data)) - np.repeat(starts, np.diff(starts, append=len(data)))
    values = np.where(inside, data, 0).astype(np.uint64) * _POWERS[places & (len(_POWERS) - 1)]
    return np.asarray(np.add.reduceat(values, starts), np.uint64)


def _counts(keys: Keys, multiplier: np.uint64, dimension: int) -> npt.NDArray[np.int64]:
    """Count keys by bucket. Multiplicative hashing: the high bits of the product are well mixed, the low ones not."""
    buckets = ((keys * multiplier) >> np.uint64(32)) % np.uint64(dimension)
    return np.bincount(buckets.astype(np.int64), minlength=dimension)
