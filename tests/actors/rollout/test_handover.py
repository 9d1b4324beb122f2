"""Rows that go over to new weights at a boundary: where, under which weights each token is drawn, and nobody waits."""

from __future__ import annotations

import numpy as np
import pytest

from actors.rollout.engine import Swap
from actors.rollout.engine_loop import EngineLoop
from actors.rollout.options import PacingOptions
from actors.rollout.paced import PacedEngine
from actors.rollout.packed_model import PackedModel
from storage.tiny_model import character_tokenizer

from .conftest import ScriptedDrafts, finish, logprobs_of, recomputed_logprobs, request, tokens_of
from .handovers import (
    LETTERS,
    PROMPTS,
    TOKENIZER,
    ascending,
    boundary,
    is_mark,
    largest_error,
    requests,
    split,
    steps,
    swap,
    turning_point,
    versions_of,
)

WRITTEN = 6


@pytest.fixture
def engine_with(engine_of):
    return lambda **options: engine_of(**({"tokenizer": TOKENIZER} | options))


def handed_over(engine, snapshots, handover, mode="reprefill", late=()):
    """Write ``WRITTEN`` tokens of four answers under version 0, then hand over to version 1."""
    engine.submit(requests())
    steps(engine, WRITTEN)
    swap(engine, snapshots, 1, handover, mode)
    return finish(engine, late)


@pytest.mark.parametrize("grace", [0, 2, 60])
def test_a_row_goes_over_behind_its_next_boundary_or_its_grace(grace, snapshots, model_of, engine_with):
    done = handed_over(engine_with(), snapshots, boundary(grace))
    turns = []
    for i, completion in done.items():
        answer = tokens_of(completion)
        turn = turning_point(answer, WRITTEN, grace)
        assert versions_of(completion) == [0] * turn + [1] * (len(answer) - turn)
        assert largest_error(completion, PROMPTS[i], model_of) < 1e-4
        turns.append(turn)
    if grace:
        assert len(set(turns)) > 1
        assert max(turns) <= WRITTEN + grace


def test_stamps_of_another_version_do_not_explain_the_logprobs(snapshots, model_of, engine_with):
    done = handed_over(engine_with(), snapshots, boundary(60))
    assert all(largest_error(c, PROMPTS[i], model_of, shift=1) > 0.1 for i, c in done.items())


def test_until_it_goes_over_a_row_is_written_as_if_there_were_no_new_weights(snapshots, engine_with):
    plain = finish(engine_with(), requests())
    done = handed_over(engine_with(), snapshots, boundary(60))
    for i, completion in done.items():
        turn = versions_of(completion).index(1)
        assert tokens_of(completion)[:turn] == tokens_of(plain[i])[:turn]
        assert tokens_of(completion) != tokens_of(plain[i])


def test_new_rows_are_written_by_the_new_weights_from_their_first_token(snapshots, model_of, engine_with):
    engine = engine_with(max_rows=8)
    done = handed_over(engine, snapshots, boundary(60), late=requests(first=10))
    assert engine.opening_version == 1
    for i in range(10, 14):
        assert set(versions_of(done[i])) == {1}
        assert largest_error(done[i], PROMPTS[i - 10], model_of) < 1e-4


def test_a_row_that_has_written_nothing_goes_over_at_once(snapshots, engine_with):
    engine = engine_with(prefill_tokens=3)
    engine.submit(requests())
    engine.step()
    swap(engine, snapshots, 1, boundary(60))
    done = finish(engine)
    assert sorted(versions_of(c)[0] for c in done.values()) == [0, 1, 1, 1]


def test_a_row_that_rests_at_a_boundary_goes_over_at_once(snapshots, engine_with):
    plain = tokens_of(finish(engine_with(), requests()[:1])[0])
    written = next(i for i, token in enumerate(plain) if is_mark(token)) + 1
    assert not all(map(is_mark, plain[written : written + 3]))
    engine = engine_with()
    engine.submit(requests()[:1])
    steps(engine, written)
    swap(engine, snapshots, 1, boundary(60))
    assert versions_of(finish(engine)[0]) == [0] * written + [1] * (40 - written)


def test_kept_state_needs_no_prefill_and_shows_from_the_place_on(snapshots, model_of, engine_with):
    engine, stats = engine_with(), []
    engine.add_observer(stats.append)
    done = handed_over(engine, snapshots, boundary(60), "keep_kv")
    assert sum(s.prefill_tokens for s in stats) == sum(map(len, PROMPTS))
    for i, completion in done.items():
        answer = tokens_of(completion)
        turn = turning_point(answer, WRITTEN, 60)
        assert versions_of(completion) == [0] * turn + [1] * (len(answer) - turn)
        old, new = (recomputed_logprobs(model_of(v), PROMPTS[i], answer) for v in (0, 1))
        np.testing.assert_allclose(logprobs_of(completion)[:turn], old[:turn], atol=1e-4)
        assert np.abs(np.array(logprobs_of(completion)) - new)[turn:].max() > 1e-2


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("handover", [boundary(5), boundary(60), split(9)])
def test_drafts_that_cross_the_place_are_cut_there(right, handover, snapshots, model_of, engine_with):
    """Drafts of the old weights' own answer, so that they would be accepted far beyond the place."""
    plain = {i: tokens_of(c) for i, c in finish(engine_with(), requests()).items()}
    expected = handed_over(engine_with(), snapshots, handover)
    rng = np.random.default_rng(0)
    drafting = False

    def propose(i, so_far, room):
        draft = plain[i][len(so_far) : len(so_far) + 12]
        return (draft if right else [*draft[: int(rng.integers(0, 3))], 3, 4]) if drafting else []

    drafts = ScriptedDrafts(propose)
    engine = engine_with(drafts=drafts)
    engine.submit(requests())
    steps(engine, WRITTEN)
    swap(engine, snapshots, 1, handover)
    drafting = True
    done = finish(engine)
    for i, completion in expected.items():
        assert tokens_of(done[i]) == tokens_of(completion)
        assert versions_of(done[i]) == versions_of(completion)
        assert largest_error(done[i], PROMPTS[i], model_of) < 1e-4
    if right:
        under_old = sum(versions_of(c).count(0) - WRITTEN for c in done.values())
        assert under_old / 2 < sum(c.accepted for c in done.values())


@pytest.mark.parametrize("temperature", [1.0, 0.8, 0.6])
def test_what_old_weights_would_write_behind_the_place_ends_no_row(temperature, snapshots, engine_with):
    """The draft ends with the boundary, and the draw behind it is a stop token that is not emitted."""
    plain = tokens_of(finish(engine_with(), requests(temperature=temperature)[:1])[0])
    mark = next(i for i in range(2, 39) if is_mark(plain[i]) and plain[i + 1] not in plain[: i + 1])
    written = mark - 1
    assert not is_mark(plain[written - 1])
    drafting = False
    drafts = ScriptedDrafts(lambda i, so_far, room: plain[len(so_far) : mark + 1] if drafting else [])
    engine = engine_with(drafts=drafts)
    engine.submit(requests(temperature=temperature, stop_token_ids=(plain[mark + 1],))[:1])
    steps(engine, written)
    swap(engine, snapshots, 1, boundary(60))
    drafting = True
    done = finish(engine)[0]
    drawn = versions_of(done)
    assert tokens_of(done)[: mark + 1] == plain[: mark + 1]
    assert drawn == [0] * (mark + 1) + [1] * (len(drawn) - mark - 1)
    assert len(drawn) > mark + 1


def test_what_old_weights_cannot_compute_behind_the_place_fails_no_row(snapshots, model_of, engine_with):
    plain = tokens_of(finish(engine_with(), requests()[:1])[0])
    mark = next(i for i in range(2, 39) if is_mark(plain[i]) and plain[i] not in plain[:i])
    assert not is_mark(plain[mark - 2])
    drafting = False
    drafts = ScriptedDrafts(lambda i, so_far, room: plain[len(so_far) : mark + 1] if drafting else [])
    engine = engine_with(drafts=drafts)
    engine.submit(requests()[:1])
    steps(engine, mark - 1)
    swap(engine, snapshots, 1, boundary(60))
    forward = engine._old.forward

    def broken(plan, cache, token_ids, index):
        logits = forward(plan, cache, token_ids, index).clone()
        logits[token_ids[index] == plain[mark]] = float("nan")
        return logits

    engine._old.forward = broken
    drafting = True
    done = finish(engine)[0]
    assert done.finish_reason == "length"
    assert versions_of(done) == [0] * (mark + 1) + [1] * (39 - mark)
    assert largest_error(done, PROMPTS[0], model_of) < 1e-4


def test_a_lenient_draft_goes_on_under_the_new_weights(snapshots, model_of, engine_with):
    """A lenience without bound keeps every draft token, whoever would have drawn it."""
    answer = [10] * 9 + [TOKENIZER.convert_tokens_to_ids("।")] + [20] * 8

    def propose(i, so_far, room):
        draft = answer[len(so_far) :][:room]
        return draft, [-1e9] * len(draft), 0.0

    drafts = ScriptedDrafts(propose, first=lambda r: True)
    engine = engine_with(drafts=drafts, prefill_tokens=4)
    engine.submit(requests()[:1])
    steps(engine, 2)
    swap(engine, snapshots, 1, boundary(60))
    done = finish(engine)[0]
    assert tokens_of(done)[:18] == answer
    assert versions_of(done) == [0] * 10 + [1] * 30
    assert drafts.heard[0] == [18, 18]
    assert largest_error(done, PROMPTS[0], model_of) < 1e-4


@pytest.mark.parametrize("end", ["stop_token", "stop_string", "length"])
def test_a_row_that_ends_in_its_grace_ends_under_the_old_weights(end, snapshots, engine_with):
    letters = character_tokenizer(LETTERS + "àáâãäåæç")
    plain = tokens_of(finish(engine_with(tokenizer=letters), requests()[:1])[0])
    at = next(i for i in range(WRITTEN + 1, 40) if plain[i] not in plain[:i] and plain[i] > 2)
    options = {
        "stop_token": {"stop_token_ids": (plain[at],)},
        "stop_string": {"stop_strings": (letters.decode(plain[at : at + 1]),)},
        "length": {"max_tokens": at + 1},
    }[end]
    engine = engine_with(tokenizer=letters)
    engine.submit([request(0, PROMPTS[0], **({"max_tokens": 40} | options))])
    steps(engine, WRITTEN)
    swap(engine, snapshots, 1, boundary(60))
    done = finish(engine)[0]
    assert tokens_of(done) == plain[: at + 1]
    assert set(versions_of(done)) == {0}
    assert done.finish_reason == ("length" if end == "length" else "stop")


@pytest.mark.parametrize("keep", [False, True])
def test_rows_stopped_in_their_grace_go_on_under_the_new_weights(keep, snapshots, model_of, engine_with):
    engine = engine_with(tokenizer=character_tokenizer(LETTERS))
    engine.submit(requests())
    steps(engine, WRITTEN)
    swap(engine, snapshots, 1, boundary(60))
    steps(engine, 2)
    partial = engine.abort(keep_state=keep)
    assert engine.parked == 0
    assert all(set(versions_of(c)) == {0} and len(tokens_of(c)) == WRITTEN + 2 and not c.kept for c in partial)
    again = [request(c.request_id, PROMPTS[c.request_id], max_tokens=20, prefix=c.segments) for c in partial]
    for i, completion in finish(engine, again).items():
        assert versions_of(completion) == [0] * (WRITTEN + 2) + [1] * (20 - WRITTEN - 2)
        assert largest_error(completion, PROMPTS[i], model_of) < 1e-4


@pytest.mark.parametrize("handover", [boundary(60), split(6)])
@pytest.mark.parametrize("mode", ["reprefill", "keep_kv"])
def test_three_versions_in_quick_succession_make_nobody_wait(
    handover, mode, snapshots, model_of, engine_with, monkeypatch
):
    twins = []
    twin = PackedModel.twin
    monkeypatch.setattr(PackedModel, "twin", lambda self: twins.append(1) or twin(self))
    engine = engine_with(max_rows=16)
    engine.submit(requests())
    for version in (1, 2, 3):
        steps(engine, 3)
        assert engine.draining == 0
        swap(engine, snapshots, version, handover, mode)
        engine.submit(requests(first=10 * version))
    done = finish(engine)
    assert len(done) == 16
    for i, completion in done.items():
        assert ascending(completion)
        assert len(tokens_of(completion)) == 40
        assert versions_of(completion)[0] == max(i // 10 - (handover.kind == "split"), 0)
        if mode == "reprefill":
            assert largest_error(completion, PROMPTS[i % 10], model_of) < 1e-4
    assert len(twins) == 1


def test_rows_of_the_oldest_snapshot_go_over_to_the_newest(snapshots, engine_with):
    engine = engine_with(tokenizer=character_tokenizer(LETTERS))
    engine.submit(requests())
    steps(engine, 4)
    swap(engine, snapshots, 1, boundary(60))
    steps(engine, 3)
    swap(engine, snapshots, 2, boundary(60))
    assert all(versions_of(c) == [0] * 7 + [2] * 33 for c in finish(engine).values())


@pytest.mark.parametrize("after", ["reprefill", "keep_kv", "drain"])
def test_a_swap_without_handover_ends_a_grace(after, snapshots, model_of, engine_with):
    engine = engine_with(tokenizer=character_tokenizer(LETTERS))
    engine.submit(requests()[:2])
    steps(engine, 4)
    swap(engine, snapshots, 1, boundary(60))
    engine.submit(requests(first=10)[:2])
    steps(engine, 3)
    swap(engine, snapshots, 2, None, after)
    done = finish(engine)
    for i in (0, 1):
        assert versions_of(done[i]) == [0] * 7 + [2] * 33
    expected = [1] * 40 if after == "drain" else [1] * 3 + [2] * 37
    assert all(versions_of(done[10 + i]) == expected for i in (0, 1))
    if after != "keep_kv":
        assert max(largest_error(c, PROMPTS[i % 10], model_of) for i, c in done.items()) < 1e-4


def test_a_grace_without_handover_leaves_is_written_in_two_passes_a_step(snapshots, engine_with):
    engine, stats = engine_with(max_rows=8), []
    engine.add_observer(stats.append)
    done = handed_over(engine, snapshots, boundary(60), late=requests(first=10))
    last_old = max(versions_of(done[i]).count(0) for i in range(4))
    assert [s.passes for s in stats[WRITTEN:last_old]] == [2] * (last_old - WRITTEN)
    assert all(s.passes == 1 for s in stats[last_old:])


def test_a_handover_needs_a_tokenizer_and_an_end(snapshots, engine_of, engine_with):
    engine = engine_of()
    engine.load_weights(*snapshots[1])
    with pytest.raises(ValueError, match="tokenizer"):
        engine.activate_weights(1, "reprefill", boundary(3))
    assert engine.version == 0
    engine = engine_with()
    engine.load_weights(*snapshots[1])
    with pytest.raises(ValueError, match="drain"):
        engine.activate_weights(1, "drain", boundary(3))
    engine.activate_weights(1, "drain")


def test_paced_engines_and_their_loops_pass_handovers_on(snapshots, engine_with):
    expected = handed_over(engine_with(), snapshots, boundary(60))
    paced = PacedEngine(engine_with(), PacingOptions(profile="middle", t0_ms=0.1))
    done = handed_over(paced, snapshots, boundary(60))
    assert {i: versions_of(c) for i, c in done.items()} == {i: versions_of(c) for i, c in expected.items()}
    loop = EngineLoop(paced)
    loop.swap_weights(*snapshots[2], Swap("reprefill", split(3)))
    stats = loop.stats()
    loop.close()
    assert (stats.version, stats.opening_version, stats.draining) == (2, 1, 0)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_order_of_calls_every_token_is_a_draw_of_its_version(seed, snapshots, model_of, engine_with):
    rng = np.random.default_rng(seed)
    drafts = ScriptedDrafts(
        lambda i, so_far, room: rng.integers(3, 61, int(rng.integers(0, 5))).tolist(),
        first=lambda r: r.request_id % 4 == 0,
    )
    engine = engine_with(max_rows=5, drafts=drafts, prefill_tokens=7)
    kind = (boundary, split)[seed % 2]
    made, done, inside, asked = {}, {}, set(), 0

    def leave(completions):
        for c in completions:
            inside.discard(c.request_id)
            if c.finish_reason == "abort":
                made[c.request_id] = made[c.request_id][0], c.segments
            else:
                done[c.request_id] = c

    def submit(ids):
        engine.submit(
            [request(i, made[i][0], max_tokens=25, prefix=made[i][1], group=i // 3) for i in ids if i not in inside]
        )
        inside.update(ids)

    for turn in range(24):
        if turn % 3 == 0:
            made |= {asked + i: ((5 + asked, 6, 7, 8), ()) for i in range(3)}
            submit(range(asked, asked + 3))
            asked += 3
        if turn in (6, 13, 17):
            swap(engine, snapshots, engine.version + 1, kind(int(rng.integers(1, 9))))
        if rng.random() < 0.3:
            leave(engine.abort([i for i in inside if rng.random() < 0.4], keep_state=bool(rng.random() < 0.5)))
            submit([i for i in made if i not in inside and i not in done])
        leave(steps(engine, int(rng.integers(1, 4))))
    submit([i for i in made if i not in inside and i not in done])
    done |= finish(engine)
    assert sorted(done) == sorted(made)
    for i, completion in done.items():
        assert len(tokens_of(completion)) == 25
        assert ascending(completion)
        assert largest_error(completion, made[i][0], model_of) < 1e-4
    assert sum(len(set(versions_of(c))) > 1 for c in done.values()) > 2
