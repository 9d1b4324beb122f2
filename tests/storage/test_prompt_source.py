"""Order, end and position of the training prompts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import UserError
from storage.prompt_source import PromptSource
from storage.records import GroupKey, Prompt

SIZES = st.integers(1, 20)
SEEDS = st.integers(0, 2**31 - 1)


def prompts(count, first_token=0):
    return [Prompt(index=i, token_ids=np.array([first_token, i], np.int32), text=f"prompt {i}") for i in range(count)]


def source(count, *, seed=0, shuffle=True, epochs=None):
    return PromptSource(prompts(count), shuffle=shuffle, seed=seed, epochs=epochs)


def draw(from_source, count):
    drawn = [from_source.next() for _ in range(count)]
    return [item and item[0] for item in drawn]


@given(size=SIZES, seed=SEEDS, epochs=st.integers(1, 4), shuffle=st.booleans())
def test_each_epoch_draws_each_prompt_once_and_then_ends(size, seed, epochs, shuffle):
    drawing = source(size, seed=seed, epochs=epochs, shuffle=shuffle)
    keys = draw(drawing, size * epochs)
    for epoch in range(epochs):
        part = keys[epoch * size : (epoch + 1) * size]
        assert sorted(part) == [GroupKey("train", epoch, i) for i in range(size)]
    assert drawing.remaining == 0
    assert draw(drawing, 2) == [None, None]


@given(size=SIZES, seed=SEEDS, before=st.integers(0, 50), after=st.integers(1, 50))
def test_restored_source_draws_what_the_saved_one_draws(size, seed, before, after):
    saved = source(size, seed=seed)
    draw(saved, before)
    restored = source(size, seed=seed)
    restored.load_state(json.loads(json.dumps(saved.state())))
    assert (restored.epoch, restored.progress) == (saved.epoch, saved.progress) == (before // size, before / size)
    assert draw(restored, after) == draw(saved, after)
    assert restored.state() == saved.state()


def test_prompt_comes_with_the_key_that_names_it():
    key, prompt = source(5, seed=3).next()
    assert key == GroupKey("train", 0, prompt.index)
    assert prompt.text == f"prompt {prompt.index}"


def test_order_depends_on_seed_and_epoch_and_on_nothing_else():
    orders = {(seed, epoch): tuple(source(12, seed=seed).order(epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    late = source(12, seed=1)
    draw(late, 12)
    assert [key.prompt for key in draw(late, 12)] == list(orders[1, 1])


def test_all_orders_are_about_equally_likely():
    counts = {}
    for epoch in range(600):
        order = tuple(source(3, seed=7).order(epoch))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert sum((n - 100) ** 2 / 100 for n in counts.values()) < 25, "chi-square, 5 degrees of freedom: p = 1e-4"


def test_unshuffled_source_keeps_the_order_of_the_data():
    assert [key.prompt for key in draw(source(3, shuffle=False), 7)] == [0, 1, 2, 0, 1, 2, 0]


def test_position_counts_over_epochs():
    drawing = source(4, epochs=2)
    assert (drawing.epoch, drawing.progress, drawing.remaining) == (0, 0.0, 8)
    draw(drawing, 4)
    assert (drawing.epoch, drawing.progress, drawing.remaining) == (1, 1.0, 4), "epoch 0 has been drawn whole"
    draw(drawing, 1)
    assert (drawing.epoch, drawing.progress, drawing.remaining) == (1, 1.25, 3)
    assert source(4).remaining is None
    assert source(0).remaining == 0
    assert source(0).next() is None


def test_more_epochs_may_be_asked_for_when_resuming():
    first = source(4, epochs=1)
    draw(first, 4)
    longer = source(4, epochs=2)
    longer.load_state(first.state())
    assert longer.remaining == 4
    shorter = source(4, epochs=0)
    shorter.load_state(first.state())
    assert shorter.remaining == 0


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (lambda: source(5), r"data\.prompts\) changed since the checkpoint: 4 in the checkpoint, 5 now"),
        (lambda: source(4, seed=1), r"run\.seed"),
        (lambda: source(4, shuffle=False), r"data\.shuffle"),
        (lambda: PromptSource(prompts(4, first_token=9), shuffle=True, seed=0, epochs=None), r"data\.train"),
    ],
)
def test_state_of_other_data_is_refused(changed, expected):
    saved = source(4)
    draw(saved, 3)
    other = changed()
    with pytest.raises(UserError, match=expected):
        other.load_state(saved.state())
    assert other.progress == 0
