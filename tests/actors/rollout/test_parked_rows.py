"""Aborted rows leave their partial answers, and can keep their key/value state until they come back."""

from __future__ import annotations

import pytest

from actors.weights import pack, policy_state

from .conftest import finish, request, tokens_of

PROMPT = tuple(range(10, 30))


def watched(engine):
    stats = []
    engine.add_observer(stats.append)
    return stats


def resubmit(completion, prompt=PROMPT, **more):
    return request(completion.request_id, prompt, prefix=completion.segments, **({"max_tokens": 20} | more))


@pytest.mark.parametrize("keep", [False, True])
def test_a_resumed_answer_equals_an_uninterrupted_one_and_kept_state_saves_the_prefill(keep, engine_of):
    requests = [request(i, (*PROMPT[:-1], i), max_tokens=20) for i in range(4)]
    whole = {i: tokens_of(c) for i, c in finish(engine_of(), requests).items()}
    engine = engine_of()
    stats = watched(engine)
    engine.submit(requests)
    for _ in range(7):
        engine.step()
    partial = {c.request_id: c for c in engine.abort(keep_state=keep)}
    assert engine.running == 0
    assert engine.parked == (4 if keep else 0)
    assert all(c.finish_reason == "abort" and c.kept is keep for c in partial.values())
    assert all(tokens_of(c) == whole[i][:7] for i, c in partial.items())
    before = sum(s.tokens for s in stats)
    done = finish(engine, [resubmit(partial[i], (*PROMPT[:-1], i)) for i in (2, 0, 3, 1)])
    assert {i: tokens_of(c) for i, c in done.items()} == whole
    # 13 tokens a row are left; with their state gone each row prefills its prompt and 7 tokens, of which it draws one.
    assert sum(s.tokens for s in stats) - before == 4 * (13 if keep else 13 + 26)
    assert engine.parked == 0


def test_tokens_put_behind_a_parked_answer_are_all_that_is_prefilled(engine_of):
    engine = engine_of()
    stats = watched(engine)
    engine.submit([request(1, PROMPT, max_tokens=30)])
    for _ in range(5):
        engine.step()
    partial = engine.abort(keep_state=True)[0]
    extended = [*tokens_of(partial), 3, 4, 5]
    before = sum(s.prefill_tokens for s in stats)
    again = request(1, (*PROMPT, *extended), max_tokens=6)
    done = finish(engine, [again])[1]
    assert sum(s.prefill_tokens for s in stats) - before == 1 + 3
    assert tokens_of(done) == tokens_of(finish(engine_of(), [again])[1])


def test_parked_rows_that_stand_in_the_way_of_running_ones_change_places_unharmed(engine_of):
    requests = [request(i, (*PROMPT[:-1], i), max_tokens=20) for i in range(1, 5)]
    whole = {i: tokens_of(c) for i, c in finish(engine_of(), requests).items()}
    engine = engine_of()
    stats = watched(engine)
    engine.submit(requests)
    for _ in range(6):
        engine.step()
    partial = {c.request_id: c for c in engine.abort([1, 3], keep_state=True)}
    for _ in range(3):
        engine.step()
    before = sum(s.prefill_tokens for s in stats)
    done = finish(engine, [resubmit(partial[i], (*PROMPT[:-1], i)) for i in (3, 1)])
    assert {i: tokens_of(c) for i, c in done.items()} == whole
    assert sum(s.prefill_tokens for s in stats) == before


def test_only_the_named_requests_are_aborted_and_waiting_ones_return_their_prefix(engine_of):
    engine = engine_of(max_rows=2)
    whole = tokens_of(finish(engine_of(), [request(2, max_tokens=9)])[2])
    engine.submit([request(i, max_tokens=9) for i in (1, 2, 3, 4)])
    engine.step()
    left = {c.request_id: c for c in engine.abort([1, 3, 99], keep_state=True)}
    assert sorted(left) == [1, 3]
    assert left[1].kept
    assert not left[3].kept
    assert tokens_of(left[3]) == []
    done = finish(engine)
    assert sorted(done) == [2, 4]
    assert tokens_of(done[2]) == whole


def test_parked_rows_make_room_for_others_the_least_important_first(engine_of):
    engine = engine_of(max_rows=3)
    stats = watched(engine)
    engine.submit([request(i, PROMPT, max_tokens=20, priority=float(i)) for i in (1, 2, 3)])
    for _ in range(4):
        engine.step()
    partial = {c.request_id: c for c in engine.abort(keep_state=True)}
    finish(engine, [request(9, max_tokens=30), request(10, max_tokens=30)])
    assert engine.parked == 1
    before = sum(s.prefill_tokens for s in stats)
    done = finish(engine, [resubmit(partial[3])])
    assert sum(s.prefill_tokens for s in stats) == before
    assert tokens_of(done[3]) == tokens_of(finish(engine_of(), [request(3, PROMPT, max_tokens=20)])[3])
    finish(engine, [resubmit(partial[1])])
    assert sum(s.prefill_tokens for s in stats) == before + len(PROMPT) + 4


def test_a_second_abort_without_keeping_frees_the_slots(engine_of):
    engine = engine_of()
    engine.submit([request(i, max_tokens=20) for i in range(3)])
    engine.step()
    engine.abort(keep_state=True)
    assert engine.parked == 3
    assert engine.abort([1]) == []
    assert engine.parked == 2
    assert engine.abort() == []
    assert engine.parked == 0


def test_parked_state_of_another_text_is_used_only_as_far_as_it_agrees(engine_of):
    engine = engine_of()
    engine.submit([request(1, PROMPT, max_tokens=20)])
    for _ in range(3):
        engine.step()
    engine.abort(keep_state=True)
    other = request(1, (*PROMPT[:8], 1, 2, 3), max_tokens=20)
    assert tokens_of(finish(engine, [other])[1]) == tokens_of(finish(engine_of(), [other])[1])


@pytest.mark.parametrize(("mode", "kept"), [("reprefill", 0), ("drain", 0), ("keep_kv", 2)])
def test_parked_state_survives_a_swap_of_weights_only_when_told_so(mode, kept, engine_of, reference_model):
    engine = engine_of()
    engine.submit([request(i, PROMPT, max_tokens=20) for i in range(2)])
    engine.step()
    engine.abort(keep_state=True)
    engine.load_weights(*pack(policy_state(reference_model("llama", 1)), 1))
    engine.activate_weights(1, mode)
    assert engine.parked == kept
