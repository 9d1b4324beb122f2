"""A draft pack holds what is known of its prompts, and says so when it is asked to hold nonsense."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from actors.drafts import pack as pack_module
from actors.drafts.pack import PastAnswer, PastPrompt, build_pack
from storage.errors import UserError
from storage.history.schema import prompt_hash
from storage.records import SamplingParams


def answer(tokens: list[int], sample: int = 0, **facts: object) -> PastAnswer:
    logprobs = -np.arange(len(tokens), dtype=np.float32)
    return PastAnswer(token_ids=np.array(tokens, np.int32), logprobs=logprobs, sample=sample, **facts)  # type: ignore[arg-type]


def prompt(first: int) -> np.ndarray:
    return np.arange(first, first + 8, dtype=np.int32)


def test_the_latest_complete_answer_of_each_slot_is_the_previous_one() -> None:
    prompts = [
        PastPrompt(
            prompt_ids=prompt(first),
            answers=[
                answer([first, 1], 0, visit=1),
                answer([first, 2], 0, visit=0, oldest_version=7, top_k=5),
                answer([first, 3], 1, visit=2),
            ],
        )
        for first in (50, 10, 30)
    ]
    previous = build_pack(prompts, generation=1).previous
    assert len(previous.keys) == 6
    for first in (10, 30, 50):
        key = prompt_hash(prompt(first))
        at = previous.find(key, 0)
        assert previous.tokens[previous.starts[at] : previous.starts[at + 1]].tolist() == [first, 2]
        assert previous.oldest[at] == 7
        assert previous.same_law(at, SamplingParams(max_tokens=1, top_k=5))
        assert not previous.same_law(at, SamplingParams(max_tokens=1))
        assert previous.find(key, 2) == -1
    assert previous.find(prompt_hash(prompt(70)), 0) == -1


def test_younger_answers_weigh_more() -> None:
    entry = PastPrompt(
        prompt_ids=prompt(10),
        answers=[answer([1, 2, 8], 0, visit=1), answer([1, 2, 8], 1, visit=1), answer([1, 2, 9], 0), answer([3], 1)],
    )
    for recency, expected in ((0.9, 8), (0.3, 9)):
        automata = build_pack([entry], generation=1, recency=recency).automata
        which, state, matched = automata.find([prompt_hash(prompt(10))]), np.zeros(1, np.int32), np.zeros(1, np.int32)
        tokens = np.array([[1, 2]], np.int32)
        zero = np.zeros(1, np.int64)
        automata.advance_rows(which, state, matched, tokens, zero, zero, zero + 2)
        out = (
            np.zeros((1, 1), np.int32),
            *(np.zeros((1, 1), np.float32) for _ in range(2)),
            np.zeros((1, 1), np.int32),
        )
        automata.draft_rows(which, state, matched, zero + 1, *out, zero.copy())
        assert out[0][0, 0] == expected


def test_a_pack_survives_pickling_with_its_buffers_out_of_band() -> None:
    pack = build_pack([PastPrompt(prompt_ids=prompt(10), answers=[answer([1, 2, 3])])], generation=4)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(pack, protocol=5, buffer_callback=buffers.append)
    back = pickle.loads(stream, buffers=buffers)
    assert back.generation == 4
    assert back.holds(prompt_hash(prompt(10)), prompt(10))
    assert back.nbytes == pack.nbytes
    assert len(stream) < 4000
    assert np.shares_memory(back.previous.tokens, pack.previous.tokens)


def test_of_two_prompts_with_one_hash_the_first_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_module, "prompt_hash", lambda ids: 42)
    entries = [PastPrompt(prompt_ids=prompt(first), answers=[answer([first])]) for first in (10, 30)]
    pack = build_pack(entries, generation=1)
    assert pack.holds(42, prompt(10))
    assert not pack.holds(42, prompt(30))
    assert pack.previous.tokens.tolist() == [10]


def test_nonsense_is_named() -> None:
    entry = PastPrompt(prompt_ids=prompt(10), answers=[answer([1, 2])])
    with pytest.raises(UserError, match="twice"):
        build_pack([entry, entry], generation=1)
    torn = PastAnswer(token_ids=np.array([1, 2], np.int32), logprobs=np.zeros(1, np.float32), sample=3)
    with pytest.raises(UserError, match="slot 3 has 2 tokens and 1 logprobs"):
        build_pack([PastPrompt(prompt_ids=prompt(10), answers=[torn])], generation=1)
    with pytest.raises(UserError, match="outside"):
        build_pack([PastPrompt(prompt_ids=prompt(10), answers=[answer([1, 1 << 21])])], generation=1)
