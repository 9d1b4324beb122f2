"""Tokens that end a sentence, a line or a step are told by their own text, in many scripts."""

from __future__ import annotations

import pytest

from actors.rollout.boundaries import boundary_mask, ends_here

ENDS = [
    ".",
    " end.",
    "!",
    "?",
    "...",
    "…",
    "?!",
    "了。",
    "！",
    "か？",
    "｡",
    "؟",
    "۔",
    "है।",
    "॥",
    "።",
    "։",
    "។",
    "။",
    "\n",
    "\n\n",
    ".\n\n",
    "\r\n",
    "\n    ",
    ";",
    "；",
    "؛",
    '."',
    "。」",
    ".)",
    ".**",
    "! ",
]
MIDDLES = ["", " ", "a", "42", ",", ":", "、", "،", "-", ")", '"', "\ufffd"]
MIDDLES += [".com", "3.1", "?x", ";-", "\ndef", "。不", "।अ"]


@pytest.mark.parametrize("text", ENDS)
def test_a_token_that_ends_a_sentence_a_line_or_a_step_is_a_boundary(text):
    assert ends_here(text)


@pytest.mark.parametrize("text", MIDDLES)
def test_a_token_in_the_middle_is_none(text):
    assert not ends_here(text)


def test_the_mask_covers_the_models_vocabulary_and_asks_for_known_ids_only():
    texts = ["a", ".", "。", "\n"]
    asked = []

    def decode(ids):
        asked.extend(ids)
        return texts[ids[0]]

    assert boundary_mask(decode, 4, 6).tolist() == [False, True, True, True, False, False]
    assert asked == [0, 1, 2, 3]
    assert boundary_mask(decode, 4, 2).tolist() == [False, True]
