"""Numbers that a prompt's text shows at a glance: sizes, character classes, numbers, words and n-grams.

Everything is hashed with fixed functions: the same text has the same features in every process and version of Python.
Of a long prompt the head and the tail are read, where instructions and questions stand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

Float64Array = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

MAX_BYTES = 8192
_BYTES = 128
_WORDS = 256
_CLASSES = ("digit", "lower", "upper", "space", "line", "operator", "bracket", "punctuation", "other")
_NUMERIC = ("bytes", "words", "distinct", "numbers", "digits_of_largest", "largest", "sum_of_numbers", *_CLASSES)
FEATURES = 1 + len(_NUMERIC) + _BYTES + _WORDS
"""Columns of :func:`feature_matrix`: 1, the numeric features, counts by byte, counts by hashed word."""
UNPENALISED = 1 + len(_NUMERIC)
"""So many leading columns are few and dense and need next to no shrinkage."""

_NUMBER = re.compile(r"\d+")
_LONGEST_NUMBER = 15
_FIRST, _LAST = 2, 3  # control characters that mark the ends of a text in its n-grams
_BIGRAM, _TRIGRAM = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


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
        data, kept = _read(text)
        words = kept.split()
        numbers = [int(found[:_LONGEST_NUMBER]) for found in _NUMBER.findall(kept)]
        numeric = [
            len(text),
            len(words),
            len(np.unique(data)),
            len(numbers),
            max((len(str(number)) for number in numbers), default=0),
            max(numbers, default=0),
            sum(numbers),
            *np.bincount(_CLASS_OF[data], minlength=len(_CLASSES)),
        ]
        row[0] = 1.0
        row[1:UNPENALISED] = np.log1p(np.array(numeric, np.float64))
        row[UNPENALISED : UNPENALISED + _BYTES] = np.log1p(np.bincount(data & (_BYTES - 1), minlength=_BYTES))
        row[UNPENALISED + _BYTES :] = np.log1p(_word_counts(words, _WORDS))
    return matrix


def ngram_matrix(texts: Sequence[str], dimension: int) -> Float32Array:
    """Return float32[n, dimension]: log(1 + count) of hashed words and of character 2- and 3-grams.

    The ends of a text are characters of their own, so that its first and last letters are told from the others.
    """
    matrix = np.zeros((len(texts), dimension), np.float32)
    for row, text in zip(matrix, texts, strict=True):
        data, kept = _read(text)
        padded = np.concatenate([[_FIRST], data, [_LAST]]).astype(np.uint64)
        pairs = padded[:-1] * np.uint64(257) + padded[1:]
        counts = np.bincount(_buckets(pairs, _BIGRAM, dimension), minlength=dimension)
        triples = pairs[:-1] * np.uint64(257) + padded[2:]
        counts = counts + np.bincount(_buckets(triples, _TRIGRAM, dimension), minlength=dimension)
        row[:] = np.log1p(counts + _word_counts(kept.split(), dimension))
    return matrix


def _read(text: str) -> tuple[Bytes, str]:
    """Return the bytes that are looked at, and the same as text."""
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_BYTES:
        data = data[: MAX_BYTES // 2] + data[-MAX_BYTES // 2 :]
        return np.frombuffer(data, np.uint8), data.decode("utf-8", "replace")
    return np.frombuffer(data, np.uint8), text


def _word_counts(words: Sequence[str], dimension: int) -> Float64Array:
    places = [xxhash.xxh3_64_intdigest(word.encode("utf-8", "replace")) % dimension for word in words]
    return np.bincount(np.array(places, np.int64), minlength=dimension).astype(np.float64)


def _buckets(keys: npt.NDArray[np.uint64], multiplier: np.uint64, dimension: int) -> npt.NDArray[np.int64]:
    """Multiplicative hashing: the high bits of the product are well mixed, the low ones are not."""
    with np.errstate(over="ignore"):
        mixed = (keys * multiplier) >> np.uint64(32)
    return (mixed % np.uint64(dimension)).astype(np.int64)
