"""A snapshot that lags begins each answer, the newest weights continue it behind a boundary."""

from __future__ import annotations

import pytest

from .conftest import finish, request, tokens_of
from .handovers import PROMPTS, TOKENIZER, largest_error, requests, split, splitting_point, steps, swap, versions_of


@pytest.fixture
def engine_with(engine_of):
    return lambda **options: engine_of(**({"tokenizer": TOKENIZER} | options))


@pytest.mark.parametrize("k_min", [1, 4, 12])
def test_split_hands_each_answer_over_at_its_first_boundary_behind_k_min(k_min, snapshots, model_of, engine_with):
    engine = engine_with()
    assert set(versions_of(finish(engine, requests(first=10))[10])) == {0}
    swap(engine, snapshots, 1, split(k_min))
    assert (engine.version, engine.opening_version) == (1, 0)
    done = finish(engine, requests())
    for i, completion in done.items():
        answer = tokens_of(completion)
        turn = splitting_point(answer, k_min)
        assert versions_of(completion) == [0] * turn + [1] * (len(answer) - turn)
        assert largest_error(completion, PROMPTS[i], model_of) < 1e-4
    assert sum(1 in versions_of(c) for c in done.values()) > 1


def test_split_renews_the_lagging_snapshot_with_every_version(snapshots, model_of, engine_with):
    engine = engine_with()
    for version in (1, 2, 3):
        swap(engine, snapshots, version, split(3))
        done = finish(engine, requests(first=10 * version))
        for i, completion in done.items():
            turn = splitting_point(tokens_of(completion), 3)
            assert versions_of(completion) == [version - 1] * turn + [version] * (40 - turn)
            assert largest_error(completion, PROMPTS[i % 10], model_of) < 1e-4
    assert engine.draining == 0


def test_a_version_that_was_skipped_leaves_no_snapshot_to_begin_with(snapshots, engine_with):
    engine = engine_with()
    swap(engine, snapshots, 2, split(3))
    assert engine.opening_version == 2
    assert set(versions_of(finish(engine, requests())[0])) == {2}
    swap(engine, snapshots, 3, split(3))
    assert engine.opening_version == 2


def test_answers_that_may_not_lag_are_the_newest_weights_alone(snapshots, engine_with):
    engine = engine_with(max_rows=8)
    swap(engine, snapshots, 1, split(3))
    done = finish(engine, [*requests(), *requests(first=10, may_lag=False)])
    assert all(versions_of(done[i])[0] == 0 and set(versions_of(done[10 + i])) == {1} for i in range(4))


def test_what_newer_weights_have_begun_the_lagging_snapshot_does_not_go_on_with(snapshots, engine_with):
    engine = engine_with()
    swap(engine, snapshots, 1, None)
    newer = finish(engine, requests(max_tokens=4))[0].segments
    engine = engine_with()
    older = finish(engine, requests(max_tokens=4))[0].segments
    swap(engine, snapshots, 1, split(60))
    continued = [request(10 + i, PROMPTS[0], max_tokens=12, prefix=prefix) for i, prefix in enumerate((older, newer))]
    done = finish(engine, continued)
    assert versions_of(done[10]) == [0] * 12
    assert versions_of(done[11]) == [1] * 12


def test_siblings_of_a_split_share_prompts_of_the_right_version(snapshots, model_of, engine_with):
    engine, stats = engine_with(max_rows=3), []
    engine.add_observer(stats.append)
    swap(engine, snapshots, 1, split(3))
    prompt = tuple(range(5, 25))
    done = finish(engine, [request(i, prompt, max_tokens=12 + i, group=7) for i in range(8)])
    for completion in done.values():
        turn = splitting_point(tokens_of(completion), 3)
        assert versions_of(completion)[:turn] == [0] * turn
        assert largest_error(completion, prompt, model_of) < 1e-4
    # Late siblings copy the prompt of the snapshot that lags, and rows that go over that of a sibling who has.
    behind = sum(versions_of(c).count(0) for c in done.values() if 1 in versions_of(c))
    assert sum(s.prefill_tokens for s in stats) < 5 * len(prompt) + behind


def test_state_parked_under_the_newest_weights_is_not_what_the_lagging_snapshot_begins_with(
    snapshots, model_of, engine_with
):
    engine, prompt = engine_with(), tuple(range(5, 25))
    swap(engine, snapshots, 1, split(3))
    engine.submit([request(1, prompt, max_tokens=40, may_lag=False)])
    steps(engine, 6)
    assert engine.abort(keep_state=True)[0].kept
    again = finish(engine, [request(1, prompt, max_tokens=40)])[1]
    assert versions_of(again)[:3] == [0, 0, 0]
    assert largest_error(again, prompt, model_of) < 1e-4
