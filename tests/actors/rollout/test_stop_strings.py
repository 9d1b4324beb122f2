"""Stop strings end an answer with the token that completes them, however they are cut into tokens."""

from __future__ import annotations

import numpy as np
import pytest

from actors.rollout.stopping import StopStrings

from .conftest import VOCABULARY, ScriptedDrafts, finish, request, tokens_of

# Every token is a few letters, so that a text can be spelled in several ways and across tokens; 0 is special.
PIECES = ["", *"abcdefghijklmnopqrstuvwxyz", *(a + b for a in "abcde" for b in "vwxyz")]


class LetterTokenizer:
    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(PIECES[i % len(PIECES)] for i in token_ids)


def spell(tokens):
    return LetterTokenizer().decode(tokens)


@pytest.fixture(scope="module")
def whole(engine_of):
    return {i: tokens_of(finish(engine_of(max_length=128), [request(i, max_tokens=60)])[i]) for i in range(3)}


def first_prefix_holding(tokens, text):
    return next(n for n in range(1, len(tokens) + 1) if text in spell(tokens[:n]))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_the_answer_ends_with_the_token_that_completes_a_stop_string(length, drafts, whole, engine_of):
    oracle = ScriptedDrafts(lambda i, so_far, room: whole[i][len(so_far) : len(so_far) + 7])
    text = spell(whole[1][20:40])[3 : 3 + length]
    engine = engine_of(max_length=128, tokenizer=LetterTokenizer(), drafts=oracle if drafts else None)
    stops = ("notthere!", text)
    done = finish(engine, [request(i, max_tokens=60, stop_strings=stops if i == 1 else ()) for i in range(3)])
    assert tokens_of(done[1]) == whole[1][: first_prefix_holding(whole[1], text)]
    assert done[1].finish_reason == "stop"
    assert tokens_of(done[0]) == whole[0]
    assert done[0].finish_reason == "length"


def test_a_stop_string_is_seen_across_a_resumption_but_not_in_what_the_environment_said(whole, engine_of):
    cut = 25
    text = spell(whole[1][cut - 2 : cut + 2])
    expected = first_prefix_holding(whole[1], text)
    engine = engine_of(max_length=128, tokenizer=LetterTokenizer())
    stopping = {"max_tokens": 60, "stop_strings": (text,)}
    engine.submit([request(1, **stopping)])
    for _ in range(min(cut, expected - 1)):
        engine.step()
    partial = engine.abort(keep_state=True)[0]
    assert tokens_of(finish(engine, [request(1, prefix=partial.segments, **stopping)])[1]) == whole[1][:expected]
    watch = StopStrings(("bc",), spell)
    b, c, x = PIECES.index("b"), PIECES.index("c"), PIECES.index("x")
    answer = np.array([x, b, c, x, x], np.int32)
    assert watch.first_completion(answer, start=3, fresh=3) is None
    assert watch.first_completion(answer, start=2, fresh=2) is None
    assert watch.first_completion(answer, start=0, fresh=2) == 2


def test_tokens_without_text_may_stand_inside_a_stop_string():
    b, c = PIECES.index("b"), PIECES.index("c")
    watch = StopStrings(("bc",), spell)
    assert watch.first_completion(np.array([b, 0, 0, 0, c, b], np.int32), start=0, fresh=4) == 4
    assert len(PIECES) <= VOCABULARY
