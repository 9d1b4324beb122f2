from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.history.index.fuzzy import NGRAM, SIMILARITY, SPAN, FuzzyIndex
from tests.storage.history.index.brute_force import arrays

TEXTS = st.lists(st.lists(st.integers(0, 6), max_size=20), max_size=3)


def grams(tokens):
    return {tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)}


def jaccard(a, b):
    return len(grams(a) & grams(b)) / len(grams(a) | grams(b))


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 6), max_size=16))
def test_what_it_finds_is_as_similar_as_it_says_and_lies_in_one_document(texts, context):
    index = FuzzyIndex.build(arrays(texts))
    place, equal, similarity = index.search(np.array(context, np.int32))
    if place < 0:
        return
    document = int(np.searchsorted(index.starts, place, "right")) - 1
    end = place - int(index.starts[document])
    before, tail = texts[document][max(end - SPAN, 0) : end], context[-SPAN:]
    assert similarity == pytest.approx(jaccard(before, tail))
    assert similarity >= SIMILARITY
    common = [a == b for a, b in zip(texts[document][:end][::-1], tail[::-1], strict=False)]
    assert equal == (common.index(False) if False in common else len(common))
    tokens, matched = index.draft(np.array(context, np.int32), 3)
    assert (tokens.tolist(), matched) == (texts[document][end : end + 3], equal)
    assert len(tokens) > 0


def test_a_changed_token_does_not_hide_the_place():
    rng = np.random.default_rng(2)
    text = rng.integers(0, 1000, 400).astype(np.int32)
    index = FuzzyIndex.build([text, rng.integers(0, 1000, 400).astype(np.int32)])
    found = 0
    for end in range(20, 380, 10):
        context = text[end - SPAN : end].copy()
        context[4] = 2000
        tokens, matched = index.draft(context, 4)
        found += tokens.tolist() == text[end : end + 4].tolist() and matched == 7
    assert found >= 34  # Similarity is 9 of 13, which a band reveals with a probability of 0.97.


def test_equal_last_tokens_decide_and_then_the_latest_place():
    base = list(range(100, 112))
    index = FuzzyIndex.build(arrays([[*base, 1, 1], [*base, 2, 2], [*base[:-1], 77, 3, 3]]))
    assert index.draft(np.array(base, np.int32), 1)[0].tolist() == [2]


def test_contexts_too_short_or_unlike_anything_draft_nothing():
    index = FuzzyIndex.build(arrays([list(range(50))]))
    for context in ([], [3], [900, 901, 902, 903, 904]):
        tokens, matched = index.draft(np.array(context, np.int32), 5)
        assert (tokens.size, matched) == (0, 0)
    assert FuzzyIndex.build([]).draft(np.array([1, 2, 3], np.int32), 5)[0].size == 0


def test_it_survives_pickling_with_read_only_arrays_and_stays_small():
    text = np.arange(1000, dtype=np.int32)
    index = FuzzyIndex.build([text])
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(index, protocol=5, buffer_callback=buffers.append)
    loaded = pickle.loads(head, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert loaded.draft(text[:30], 3)[0].tolist() == [30, 31, 32]
    assert index.nbytes <= 80 * len(text)
