"""Drafts change how many passes an answer takes and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from actors.rollout.verification import accepted_counts

from .conftest import VOCABULARY, ScriptedDrafts, finish, logprobs_of, request, tokens_of


def oracle(answers, reach=6):
    return ScriptedDrafts(lambda i, so_far, room: answers[i][len(so_far) : len(so_far) + reach])


def wrong(answers):
    return ScriptedDrafts(
        lambda i, so_far, room: (
            [(answers[i][len(so_far)] + 1) % VOCABULARY] * 4 if len(so_far) < len(answers[i]) else []
        )
    )


def adversary(answers, seed=0):
    """Right for a random while, then wrong, with random and excessive lengths and ids that do not exist."""
    rng = np.random.default_rng(seed)

    def propose(i, so_far, room):
        right = answers[i][len(so_far) : len(so_far) + int(rng.integers(0, 5))]
        tail = rng.integers(0, VOCABULARY, int(rng.integers(0, 6))).tolist()
        extra = [VOCABULARY + 3, 2] if rng.random() < 0.1 else []
        return right + tail + extra + ([7] * 200 if rng.random() < 0.1 else [])

    return ScriptedDrafts(propose)


REQUESTS = {
    "plain": lambda: [request(i, (5 + i, 6, 7), max_tokens=12 + 5 * i) for i in range(6)],
    "cut": lambda: [
        request(i, (5 + i, 6), max_tokens=25, temperature=1.2, top_k=(0, 4)[i % 2], top_p=(0.7, 1.0)[i % 3 > 0])
        for i in range(6)
    ],
    "greedy": lambda: [request(i, (5 + i, 6), max_tokens=15, temperature=0.0) for i in range(4)],
    "stops": lambda: [
        request(i, (5 + i, 6), max_tokens=40, stop_token_ids=tuple(range(8 * i, 8 * i + 6))) for i in range(6)
    ],
    "context": lambda: [request(i, (5 + i, 6), max_tokens=500) for i in range(3)],
    "groups": lambda: [request(i, (5 + i // 3, 6, 9, 9), max_tokens=18, group=i // 3) for i in range(6)],
}


@pytest.mark.parametrize("source", [oracle, wrong, adversary])
@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_answers_are_those_of_plain_decoding(name, source, engine_of):
    plain = finish(engine_of(max_rows=4), REQUESTS[name]())
    answers = {i: tokens_of(c) for i, c in plain.items()}
    drafts = source(answers)
    engine = engine_of(max_rows=4, drafts=drafts)
    stats = []
    engine.add_observer(stats.append)
    drafted = finish(engine, REQUESTS[name]())
    for i, completion in plain.items():
        assert tokens_of(drafted[i]) == answers[i]
        assert drafted[i].finish_reason == completion.finish_reason
        np.testing.assert_allclose(logprobs_of(drafted[i]), logprobs_of(completion), atol=1e-4)
        assert [drafted[i].drafted, drafted[i].accepted] == drafts.heard[i]
        # Each pass emits one token of its own, unless an accepted draft token ends the answer.
        own = len(answers[i]) - drafted[i].accepted
        assert drafted[i].forward_passes - own in ((0, 1) if completion.finish_reason == "stop" else (0,))
    assert sum(s.accepted for s in stats) == sum(c.accepted for c in drafted.values())
    assert sum(s.emitted for s in stats) == sum(map(len, answers.values()))
    if source is oracle:
        assert sum(c.forward_passes for c in drafted.values()) < 0.4 * sum(map(len, answers.values()))
    if source is wrong:
        assert all(c.accepted == 0 and c.drafted > 0 for c in drafted.values() if c.forward_passes > 2)


def test_drafts_survive_aborts_and_resumption_without_state(engine_of):
    answer = tokens_of(finish(engine_of(), [request(1, max_tokens=40)])[1])
    engine = engine_of(drafts=adversary({1: answer}, seed=5))
    pieces = ()
    for _ in range(30):
        engine.submit([request(1, max_tokens=40, prefix=pieces)])
        left = engine.step() + engine.step() + engine.abort(keep_state=len(pieces) % 2 == 0)
        assert len(left) == 1
        pieces = left[0].segments
        if left[0].finish_reason != "abort":
            break
    assert tokens_of(left[0]) == answer
    assert left[0].finish_reason == "length"


def test_drafts_are_never_longer_than_the_room_that_is_left(engine_of):
    rooms = []

    def propose(i, so_far, room):
        rooms.append((len(so_far), room))
        return [3] * 50

    done = finish(engine_of(max_rows=1, drafts=ScriptedDrafts(propose)), [request(1, max_tokens=10)])[1]
    assert len(tokens_of(done)) == 10
    assert all(room == 10 - so_far - 1 for so_far, room in rooms)


def test_acceptance_counts_leading_matches_only():
    drawn = np.array([[1, 2, 3, 9], [1, 2, 3, 4], [7, 2, 3, 4], [5, 6, 0, 0]])
    drafts = np.array([[1, 2, 8, 0], [1, 2, 3, 0], [1, 2, 3, 0], [5, 6, 0, 0]])
    assert accepted_counts(drawn, drafts, np.array([3, 3, 3, 1])).tolist() == [2, 3, 0, 1]
