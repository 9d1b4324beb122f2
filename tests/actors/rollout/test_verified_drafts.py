"""Drafts change how many passes an answer takes and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from actors.rollout.engine import Drafts
from actors.rollout.verification import accepted_counts
from actors.weights import pack, policy_state

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


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_a_draft_before_the_first_token_saves_the_pass_of_that_token(name, engine_of):
    plain = finish(engine_of(), REQUESTS[name]())
    answers = {i: tokens_of(c) for i, c in plain.items()}
    drafts = oracle(answers)
    drafts._first = lambda r: True
    engine = engine_of(drafts=drafts)
    stats = []
    engine.add_observer(stats.append)
    drafted = finish(engine, REQUESTS[name]())
    assert {i: tokens_of(c) for i, c in drafted.items()} == answers
    assert stats[0].emitted == 0
    # Seven tokens a pass, as all drafts of six are right.
    assert all(c.forward_passes <= -(-len(answers[i]) // 7) for i, c in drafted.items())
    assert sorted(request_id for _, request_id in drafts.opened) == sorted(answers)
    assert not drafts.open_rows


def test_a_row_that_asks_before_its_first_token_does_not_hold_up_its_siblings(engine_of):
    requests = [request(i, (5, 6, 9, 9), max_tokens=12, group=1) for i in range(4)]
    plain = finish(engine_of(), requests)
    drafts = oracle({i: tokens_of(c) for i, c in plain.items()})
    drafts._first = lambda r: r.request_id in (0, 2)
    engine = engine_of(drafts=drafts)
    stats = []
    engine.add_observer(stats.append)
    done = finish(engine, requests)
    assert {i: tokens_of(c) for i, c in done.items()} == {i: tokens_of(c) for i, c in plain.items()}
    assert stats[0].rows == stats[0].emitted == 2
    assert sum(s.prefill_tokens for s in stats) == 4


@pytest.mark.parametrize("mode", ["reprefill", "keep_kv", "drain"])
def test_weights_that_change_in_the_middle_leave_the_answers_of_plain_decoding(mode, engine_of, reference_model):
    snapshot = pack(policy_state(reference_model("llama", 1)), 1)

    def swap(engine):
        engine.load_weights(*snapshot)
        engine.activate_weights(1, mode)

    requests = [request(i, (5 + i, 6), max_tokens=30) for i in range(3)]
    guide = {i: tokens_of(c) for i, c in finish(engine_of(), requests).items()}
    drafts = adversary(guide, seed=2)
    drafts._first = lambda r: r.request_id > 0
    engine = engine_of(drafts=drafts)
    engine.submit(requests)
    for _ in range(4):
        engine.step()
    swap(engine)
    done = finish(engine)
    assert sum(c.accepted for c in done.values()) > 10
    for r in requests:
        answer = done[r.request_id]
        sizes = [(s.version, len(s.token_ids)) for s in answer.segments]
        if mode == "drain":
            assert sizes == [(0, 30)]
            assert tokens_of(answer) == guide[r.request_id]
            continue
        # Plain decoding that is given the new weights at the same token.
        plain = engine_of()
        plain.submit([r])
        for _ in range(sizes[0][1]):
            plain.step()
        swap(plain)
        assert [v for v, _ in sizes] == [0, 1]
        assert tokens_of(answer) == tokens_of(finish(plain)[r.request_id])


@pytest.mark.parametrize("method", ["open", "close", "propose", "observe"])
def test_a_source_that_raises_is_not_asked_again_and_the_answers_stay_what_they_are(method, engine_of, caplog):
    requests = [request(i, (5 + i % 2, 6), max_tokens=8 + 3 * i, group=i % 2) for i in range(6)]
    plain = finish(engine_of(), requests)
    drafts = oracle({i: tokens_of(c) for i, c in plain.items()}, reach=2)
    drafts._first = lambda r: True
    calls = []
    original = getattr(drafts, method)

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError("the index is gone")
        return original(*args)

    setattr(drafts, method, failing)
    engine = engine_of(drafts=drafts)
    engine.submit(requests)
    done = {}
    while engine.running or engine.waiting:
        done |= {c.request_id: c for c in engine.step()}
    assert {i: tokens_of(c) for i, c in done.items()} == {i: tokens_of(c) for i, c in plain.items()}
    assert engine.draft_failure == "OSError: the index is gone"
    assert len(calls) == 3
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "drafts are off for the rest of this engine's life: OSError: the index is gone"
    ]


@pytest.mark.parametrize("shape", [(1, 3), (3, 3), (2,)])
def test_drafts_of_the_wrong_shape_are_refused_whole(shape, engine_of):
    class Shapeless(ScriptedDrafts):
        def propose(self, rows):
            return Drafts(np.full(shape, 3, np.int32), np.full(shape[0], 2))

    requests = [request(i, (5 + i, 6), max_tokens=6) for i in range(2)]
    engine = engine_of(drafts=Shapeless(None))
    engine.submit(requests)
    done = {c.request_id: tokens_of(c) for _ in range(6) for c in engine.step()}
    assert done == {i: tokens_of(c) for i, c in finish(engine_of(), requests).items()}
    assert str(shape) in engine.draft_failure


def test_one_long_draft_among_short_ones_changes_no_answer(engine_of):
    requests = [request(i, [(i * j) % 50 for j in range(1, 3 + i % 7)], max_tokens=100) for i in range(20)]
    plain = finish(engine_of(max_rows=20, max_length=128), requests)
    answers = {i: tokens_of(c) for i, c in plain.items()}
    drafts = ScriptedDrafts(
        lambda i, so_far, room: answers[i][len(so_far) : len(so_far) + {3: 60, 4: 11}.get(i, i % 3)]
    )
    done = finish(engine_of(max_rows=20, max_length=128, drafts=drafts), requests)
    assert {i: tokens_of(c) for i, c in done.items()} == answers
    # The first token, then 61 and the rest.
    assert done[3].forward_passes == 3


@pytest.mark.parametrize("budget", [1, 4, 9])
def test_exact_drafts_are_cut_to_what_prefill_leaves_of_a_pass(budget, engine_of):
    requests = [request(i, (5 + i, 6, 7), max_tokens=14) for i in range(6)]
    plain = finish(engine_of(), requests)
    drafts = oracle({i: tokens_of(c) for i, c in plain.items()})
    engine = engine_of(drafts=drafts, prefill_tokens=budget)
    stats = []
    engine.add_observer(stats.append)
    done = finish(engine, requests)
    assert {i: tokens_of(c) for i, c in done.items()} == {i: tokens_of(c) for i, c in plain.items()}
    assert max(s.drafted + s.prefill_tokens for s in stats) == budget
