"""New weights take over between two steps, in three ways; every token carries the version that drew it."""

from __future__ import annotations

import numpy as np
import pytest

from actors.weights import WeightsError, pack, policy_state

from .conftest import finish, logprobs_of, recomputed_logprobs, request, tokens_of


def swap(engine, snapshots, version, mode="reprefill"):
    engine.load_weights(*snapshots[version])
    engine.activate_weights(version, mode)


def versions_of(completion):
    return [(s.version, len(s.token_ids)) for s in completion.segments]


def steps(engine, n):
    return [c for _ in range(n) for c in engine.step()]


@pytest.mark.parametrize("grouped", [False, True])
def test_after_reprefill_every_token_is_an_exact_draw_under_its_stamped_version(
    grouped, snapshots, reference_model, engine_of
):
    engine = engine_of()
    prompt = (5, 6, 7, 8, 9)
    group = 1 if grouped else None
    requests = [request(i, prompt, max_tokens=20, group=group, temperature=0.8) for i in range(3)]
    engine.submit(requests)
    steps(engine, 6)
    swap(engine, snapshots, 1)
    steps(engine, 5)
    swap(engine, snapshots, 2)
    assert engine.version == 2
    done = finish(engine)
    for completion in done.values():
        sizes = versions_of(completion)
        assert [v for v, _ in sizes] == [0, 1, 2]
        answer, logprobs, at = tokens_of(completion), logprobs_of(completion), 0
        for version, size in sizes:
            model = reference_model("llama", version)
            expected = recomputed_logprobs(model, prompt, answer[: at + size], temperature=0.8)[at:]
            np.testing.assert_allclose(logprobs[at : at + size], expected, atol=1e-4)
            at += size
    assert versions_of(done[0])[0] == (0, 6)


def test_a_reprefill_is_what_a_resumed_request_would_draw(snapshots, engine_of, model_path):
    engine = engine_of()
    engine.submit([request(1, max_tokens=25)])
    steps(engine, 8)
    swap(engine, snapshots, 1)
    swapped = finish(engine)[1]
    first = swapped.segments[:1]
    fresh = engine_of(model_path("llama", 1), version=1)
    resumed = finish(fresh, [request(1, max_tokens=25, prefix=first)])[1]
    assert tokens_of(resumed) == tokens_of(swapped)


def test_keep_kv_goes_on_with_old_state_and_reprefill_does_not(snapshots, engine_of):
    answers, fed = {}, {}
    for mode in ("reprefill", "keep_kv"):
        engine = engine_of()
        stats = []
        engine.add_observer(stats.append)
        engine.submit([request(1, max_tokens=30, temperature=0.0)])
        steps(engine, 10)
        swap(engine, snapshots, 1, mode)
        answers[mode] = tokens_of(finish(engine)[1])
        fed[mode] = sum(s.prefill_tokens for s in stats)
    assert fed == {"reprefill": 4 + 14, "keep_kv": 4}
    assert answers["reprefill"][:10] == answers["keep_kv"][:10]
    assert answers["reprefill"] != answers["keep_kv"]


def test_siblings_admitted_after_keep_kv_do_not_inherit_stale_prompts(snapshots, engine_of, model_path):
    engine = engine_of(max_rows=1)
    prompt = (5, 6, 7, 8)
    engine.submit([request(i, prompt, max_tokens=12, group=4) for i in range(2)])
    steps(engine, 4)
    swap(engine, snapshots, 1, "keep_kv")
    done = finish(engine)
    fresh = finish(engine_of(model_path("llama", 1)), [request(1, prompt, max_tokens=12)])
    assert tokens_of(done[1]) == tokens_of(fresh[1])


def test_drain_finishes_running_rows_under_their_weights_while_new_ones_use_the_new(snapshots, engine_of, model_path):
    engine = engine_of()
    old = [request(i, (5, 6 + i), max_tokens=12) for i in range(2)]
    new = [request(i, (5, 6 + i), max_tokens=12) for i in range(2, 6)]
    stats = []
    engine.add_observer(stats.append)
    engine.submit(old)
    steps(engine, 4)
    swap(engine, snapshots, 1, "drain")
    assert engine.draining == 2
    with pytest.raises(WeightsError, match="drain under version 0"):
        engine.load_weights(*snapshots[2])
    done = finish(engine, new)
    expected = finish(engine_of(), old) | finish(engine_of(model_path("llama", 1), version=1), new)
    for i, completion in expected.items():
        assert tokens_of(done[i]) == tokens_of(completion)
        assert versions_of(done[i]) == [(0 if i < 2 else 1, 12)]
    assert max(s.passes for s in stats) == 2
    assert engine.draining == 0
    swap(engine, snapshots, 2)
    assert versions_of(finish(engine, [request(9, max_tokens=3)])[9]) == [(2, 3)]


def test_loading_alone_changes_nothing(snapshots, engine_of):
    plain = tokens_of(finish(engine_of(), [request(1, max_tokens=15)])[1])
    engine = engine_of()
    engine.submit([request(1, max_tokens=15)])
    steps(engine, 5)
    engine.load_weights(*snapshots[1])
    steps(engine, 3)
    engine.load_weights(*snapshots[2])
    done = finish(engine)[1]
    assert tokens_of(done) == plain
    assert versions_of(done) == [(0, 15)]


def test_damaged_or_foreign_snapshots_are_refused_and_the_engine_goes_on(snapshots, engine_of, reference_model):
    engine = engine_of()
    manifest, buffer = snapshots[1]
    broken = buffer.copy()
    broken[1000] ^= 1
    with pytest.raises(WeightsError, match="xxh3-128"):
        engine.load_weights(manifest, broken)
    with pytest.raises(WeightsError, match="does not have"):
        engine.load_weights(*pack(policy_state(reference_model("gpt2")), 1))
    state = policy_state(reference_model("llama", 1))
    state.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(WeightsError, match=r"lacks 1 tensors.*up_proj"):
        engine.load_weights(*pack(state, 1))
    with pytest.raises(WeightsError, match="not loaded"):
        engine.activate_weights(1)
    assert versions_of(finish(engine, [request(1, max_tokens=4)])[1]) == [(0, 4)]
    swap(engine, snapshots, 1)
    with pytest.raises(WeightsError, match="not loaded"):
        engine.activate_weights(1)


def test_tied_weights_stay_tied_through_swaps(snapshots, engine_of, reference_model):
    assert "lm_head.weight" not in [t.name for t in snapshots[1][0].tensors]
    engine = engine_of()
    for version in (1, 2, 3):
        swap(engine, snapshots, version)
        done = finish(engine, [request(version, max_tokens=8)])[version]
        expected = recomputed_logprobs(reference_model("llama", version), (5, 6, 7, 8), tokens_of(done))
        np.testing.assert_allclose(logprobs_of(done), expected, atol=1e-4)
