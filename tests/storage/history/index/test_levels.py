from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import UserError
from storage.history.index.levels import LevelIndex
from tests.storage.history.index.brute_force import arrays, occurrences

LEVELS = ((1, 1), (2, 3))
DOCUMENTS = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=12), st.integers(0, 3)), max_size=4)


def expected(documents, context, order, half_life):
    """Slow version: the most heated whole continuation of the longest known key, the latest of equals."""
    by_age = sorted(documents, key=lambda item: -item[1])
    texts = [text for text, _ in by_age]
    for key_length, draft_length in sorted(LEVELS, reverse=True):
        heat, latest = {}, {}
        if len(context) < key_length:
            continue
        for document, end in occurrences(texts, context[len(context) - key_length :]):
            run = tuple(texts[document][end : end + draft_length])
            if run:
                heat[run] = heat.get(run, 0.0) + 0.5 ** (by_age[document][1] / half_life)
                latest[run] = (document, end)
        if heat:
            rank = {"frequency": lambda r, h=heat, t=latest: (h[r], t[r]), "recency": lambda r, t=latest: t[r]}[order]
            return list(max(heat, key=rank)), key_length
    return [], 0


@settings(max_examples=150, deadline=None)
@given(DOCUMENTS, st.lists(st.integers(0, 2), max_size=5), st.sampled_from(("frequency", "recency")))
def test_drafts_are_those_of_brute_force(documents, context, order):
    texts, ages = arrays([text for text, _ in documents]), [age for _, age in documents]
    index = LevelIndex.build(texts, ages, order=order, half_life=1.0, levels=LEVELS)
    tokens, matched = index.draft(np.array(context, np.int32), 9)
    assert (tokens.tolist(), matched) == expected(documents, context, order, 1.0)


@pytest.mark.parametrize(("age", "winner"), [(2.9, 8), (3.1, 9)])
def test_heat_halves_with_each_half_life(age, winner):
    twice_long_ago, once_now = arrays([[1, 2, 3, 8]] * 2), arrays([[1, 2, 3, 9]])
    index = LevelIndex.build(twice_long_ago + once_now, [age, age, 0.0], half_life=3.0)
    assert index.draft(np.array([1, 2, 3], np.int32), 1)[0].tolist() == [winner]


def test_order_decides_between_the_frequent_and_the_latest_continuation():
    documents, ages = arrays([[1, 2, 3, 8], [1, 2, 3, 8], [1, 2, 3, 9]]), [0.0, 0.0, 0.0]
    context = np.array([1, 2, 3], np.int32)
    assert LevelIndex.build(documents, ages, order="frequency").draft(context, 5)[0].tolist() == [8]
    assert LevelIndex.build(documents, ages, order="recency").draft(context, 5)[0].tolist() == [9]


def test_longer_keys_come_first_and_stand_for_longer_drafts():
    index = LevelIndex.build(arrays([list(range(30)), [50, 3, 4, 5, 6, 90, 91]]), [1.0, 0.0])
    contexts = ([1, 2, 3, 4, 5], [9, 2, 3, 4, 5], [9, 9, 3, 4, 5])
    drafts = [index.draft(np.array(context, np.int32), 99) for context in contexts]
    assert [(d[0], len(d), matched) for d, matched in drafts] == [(6, 10, 5), (6, 7, 4), (6, 3, 3)]
    assert index.draft(np.array([1, 2, 3, 4, 5], np.int32), 2)[0].tolist() == [6, 7]
    assert index.draft(np.array([4, 5], np.int32), 5)[1] == 0


def test_it_survives_pickling_with_read_only_arrays():
    index = LevelIndex.build(arrays([[1, 2, 3, 4, 5]]), [0.0])
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(index, protocol=5, buffer_callback=buffers.append)
    loaded = pickle.loads(head, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert loaded.draft(np.array([1, 2, 3], np.int32), 5)[0].tolist() == [4, 5]
    assert loaded.nbytes == index.nbytes > 0


@pytest.mark.parametrize(
    ("ages", "options", "message"),
    [
        ([0.0], {}, "2 documents needs an age"),
        ([0.0, -1.0], {}, "0 or more"),
        ([0.0, 0.0], {"half_life": 0.0}, "speculation.heat_half_life"),
        ([0.0, 0.0], {"order": "random"}, "speculation.order must be frequency or recency"),
        ([0.0, 0.0], {"levels": ((3, 0),)}, "at least one token"),
    ],
)
def test_bad_settings_are_named(ages, options, message):
    with pytest.raises(UserError, match=message):
        LevelIndex.build(arrays([[1, 2, 3, 4], [1]]), ages, **options)
