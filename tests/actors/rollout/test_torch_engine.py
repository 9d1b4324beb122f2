"""Continuous batching: what a request gets depends on the request alone, and each leaves exactly once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from storage.records import Segment

from .conftest import VOCABULARY, finish, logprobs_of, recomputed_logprobs, request, tokens_of

PROMPTS = [(5, 6, 7), (9, 1, 4, 3, 8, 2), (17,), (20, 21, 22, 23), (30, 2), (3, 3, 3, 3, 3)]


def _mixed_requests():
    return [
        request(10, PROMPTS[0], max_tokens=14),
        request(11, PROMPTS[1], max_tokens=5, temperature=0.7),
        request(12, PROMPTS[2], max_tokens=22, top_k=5),
        request(13, PROMPTS[3], max_tokens=9, top_p=0.8),
        request(14, PROMPTS[4], max_tokens=17, temperature=0.0),
        request(15, PROMPTS[5], max_tokens=11, temperature=1.3, top_k=9, top_p=0.9),
    ]


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_a_request_gets_the_same_answer_whatever_the_batch(rows, engine_of):
    alone = {}
    for r in _mixed_requests():
        alone |= finish(engine_of(max_rows=1), [r])
    together = finish(engine_of(max_rows=rows), reversed(_mixed_requests()))
    for request_id, completion in alone.items():
        assert tokens_of(together[request_id]) == tokens_of(completion)
        np.testing.assert_allclose(logprobs_of(together[request_id]), logprobs_of(completion), atol=1e-4)


def test_rows_of_very_different_lengths_in_a_large_batch_do_not_disturb_each_other(engine_of):
    requests = [request(i, [(i + j) % 50 for j in range(1 + i * 3 % 61)], max_tokens=4) for i in range(40)]
    requests.sort(key=lambda r: len(r.prompt_ids))
    large = finish(engine_of(max_rows=40, max_length=100), requests)
    small = finish(engine_of(max_rows=3, max_length=100), requests)
    assert {i: tokens_of(c) for i, c in large.items()} == {i: tokens_of(c) for i, c in small.items()}


def test_another_run_seed_or_request_id_gives_another_answer(engine_of):
    first = tokens_of(finish(engine_of(run_seed=3), [request(1, max_tokens=20)])[1])
    assert tokens_of(finish(engine_of(run_seed=4), [request(1, max_tokens=20)])[1]) != first
    assert tokens_of(finish(engine_of(run_seed=3), [request(2, max_tokens=20)])[2]) != first
    assert tokens_of(finish(engine_of(run_seed=3), [request(1, max_tokens=20)])[1]) == first


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_engine_logprobs_are_those_of_a_full_forward_pass(kind, model_path, reference_model, engine_of):
    settings = [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.3, "top_k": 9, "top_p": 0.9}]
    requests = [request(i, PROMPTS[i], max_tokens=16, **s) for i, s in enumerate(settings)]
    done = finish(engine_of(model_path(kind), max_rows=3), requests)
    model = reference_model(kind)
    for i, s in enumerate(settings):
        expected = recomputed_logprobs(model, PROMPTS[i], tokens_of(done[i]), **s)
        np.testing.assert_allclose(logprobs_of(done[i]), expected, atol=1e-4)


def test_finished_rows_are_replaced_in_the_next_step_and_the_cache_grows(engine_of):
    engine = engine_of(max_rows=2, max_length=128)
    stats = []
    engine.add_observer(stats.append)
    finish(engine, [request(i, max_tokens=n) for i, n in enumerate([3, 100, 4, 90, 5])])
    busy = [s for s in stats if s.waiting]
    assert all(s.rows == 2 for s in busy)
    assert sum(s.emitted for s in stats) == 3 + 100 + 4 + 90 + 5


def test_requests_of_a_higher_priority_are_admitted_first_then_in_order(engine_of):
    engine = engine_of(max_rows=1)
    order = []
    engine.submit([request(1, max_tokens=1), request(2, max_tokens=1), request(3, max_tokens=1, priority=2.0)])
    while engine.waiting or engine.running:
        order += [c.request_id for c in engine.step()]
    assert order == [3, 1, 2]


def test_a_shared_prompt_is_computed_once_for_the_whole_group(engine_of):
    prompt = list(range(20, 40))
    requests = [request(i, prompt, max_tokens=6 + i, group=7) for i in range(6)]
    lonely = [request(i, prompt, max_tokens=6 + i) for i in range(6)]
    tokens = {}
    prefilled = {}
    for name, batch in (("group", requests), ("single", lonely)):
        engine = engine_of(max_rows=4)
        stats = []
        engine.add_observer(stats.append)
        tokens[name] = {i: tokens_of(c) for i, c in finish(engine, batch).items()}
        prefilled[name] = sum(s.prefill_tokens for s in stats)
    assert prefilled == {"group": 20, "single": 120}
    assert tokens["group"] == tokens["single"]


def test_a_group_keeps_its_prompt_while_siblings_wait_behind_another_request(engine_of):
    prompt = list(range(20, 40))
    engine = engine_of(max_rows=1)
    stats = []
    engine.add_observer(stats.append)
    engine.submit([request(0, prompt, max_tokens=3, group=7), request(1, prompt, max_tokens=3, group=7)])
    engine.step()
    engine.submit([request(2, (1, 2, 3), max_tokens=2, priority=1.0)])
    done = finish(engine)
    assert sum(s.prefill_tokens for s in stats) == 20 + 3
    assert tokens_of(done[1]) == tokens_of(finish(engine_of(), [request(1, prompt, max_tokens=3)])[1])


def test_long_prefills_are_spread_over_steps_and_change_nothing(engine_of):
    prompt = [int(t) for t in np.arange(50) % 40 + 3]
    requests = [request(i, prompt, max_tokens=8, group=1) for i in range(3)] + [request(9, PROMPTS[0], max_tokens=30)]
    engine = engine_of(prefill_tokens=16)
    stats = []
    engine.add_observer(stats.append)
    done = finish(engine, requests)
    assert max(s.prefill_tokens for s in stats) <= 16
    assert sum(s.prefill_tokens for s in stats) == 53
    whole = finish(engine_of(), requests)
    assert {i: tokens_of(c) for i, c in done.items()} == {i: tokens_of(c) for i, c in whole.items()}


def test_any_of_several_stop_ids_ends_the_answer_and_belongs_to_it(engine_of):
    free = tokens_of(finish(engine_of(), [request(1, max_tokens=30)])[1])
    for position in (0, 4, 11):
        stops = (int(free[position]), VOCABULARY + 5)
        expected = free[: free.index(stops[0]) + 1]
        done = finish(engine_of(), [request(1, max_tokens=30, stop_token_ids=stops), request(2, max_tokens=30)])
        assert tokens_of(done[1]) == expected
        assert done[1].finish_reason == "stop"
        assert done[2].finish_reason == "length"


def test_the_context_limit_ends_an_answer_with_length(engine_of):
    done = finish(
        engine_of(max_length=20), [request(1, PROMPTS[1], max_tokens=500), request(2, PROMPTS[2], max_tokens=3)]
    )
    assert len(tokens_of(done[1])) == 14
    assert done[1].finish_reason == "length"
    beyond = engine_of(max_length=10_000)
    assert beyond.max_length == 128


def test_impossible_requests_are_refused_by_name_and_nothing_is_queued(engine_of):
    engine = engine_of(max_length=16)
    bad = {
        "empty": request(77, ()),
        "leaves no room": request(77, range(16)),
        "token ids": request(77, (VOCABULARY,)),
        "sampling": request(77, max_tokens=0),
        "tokenizer": request(77, stop_strings=("x",)),
        "another prompt": request(77, (1, 2), group=5),
        "already": request(76),
    }
    for words, wrong in bad.items():
        with pytest.raises(ValueError, match=f"request 7[67].*{words}" if words != "already" else "request 76"):
            engine.submit([request(76, group=5), wrong])
        assert engine.waiting == 0
    engine.submit([request(1)])
    with pytest.raises(ValueError, match="request 1 is in the engine"):
        engine.submit([request(1)])


def test_a_prefix_is_continued_with_the_noise_of_its_position_and_returned_again(engine_of):
    whole = finish(engine_of(), [request(1, max_tokens=20)])[1]
    tokens, logprobs = tokens_of(whole), logprobs_of(whole)
    prefix = (
        Segment(
            source="policy",
            version=0,
            token_ids=np.array(tokens[:9], np.int32),
            logprobs=np.array(logprobs[:9], np.float32),
        ),
    )
    resumed = finish(engine_of(), [request(1, max_tokens=20, prefix=prefix)])[1]
    assert tokens_of(resumed) == tokens
    np.testing.assert_allclose(logprobs_of(resumed), logprobs, atol=1e-4)
    assert len(resumed.segments) == 1


def test_environment_tokens_in_a_prefix_stay_apart_from_the_policys(engine_of):
    prefix = (
        Segment(
            source="policy", version=0, token_ids=np.array([4, 5], np.int32), logprobs=np.array([-1, -2], np.float32)
        ),
        Segment(
            source="environment", version=-1, token_ids=np.array([8, 9], np.int32), logprobs=np.zeros(2, np.float32)
        ),
    )
    done = finish(engine_of(), [request(1, max_tokens=10, prefix=prefix)])[1]
    assert [(s.source, s.version, len(s.token_ids)) for s in done.segments] == [
        ("policy", 0, 2),
        ("environment", -1, 2),
        ("policy", 0, 6),
    ]
    assert tokens_of(done)[:4] == [4, 5, 8, 9]


def test_a_prefix_that_is_complete_leaves_at_once(engine_of):
    def prefix(*ids):
        segment = Segment(
            source="policy", version=0, token_ids=np.array(ids, np.int32), logprobs=np.zeros(len(ids), np.float32)
        )
        return (segment,)

    done = finish(
        engine_of(),
        [
            request(1, max_tokens=3, prefix=prefix(4, 5, 6)),
            request(2, max_tokens=9, prefix=prefix(4, 5), stop_token_ids=(5,)),
        ],
    )
    assert (done[1].finish_reason, done[2].finish_reason) == ("length", "stop")
    assert tokens_of(done[1]) == [4, 5, 6]


def test_a_row_with_non_finite_logits_ends_with_an_error_and_the_others_go_on(tmp_path, reference_model, engine_of):
    model = reference_model("qwen2")
    with torch.no_grad():
        model.get_input_embeddings().weight[60] = float("nan")
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.tie_word_embeddings is False
    engine = engine_of(tmp_path, max_rows=2)
    healthy = finish(engine_of(tmp_path, max_rows=2), [request(2, (4, 5, 6), max_tokens=3, top_k=3)])
    done = finish(
        engine,
        [
            request(1, (60, *[3] * 9), max_tokens=12),
            request(2, (4, 5, 6), max_tokens=3, top_k=3),
            request(3, (4, 60), max_tokens=5, temperature=0.0),
            request(4, (7, 8, 9), max_tokens=5, top_k=3),
        ],
    )
    assert done[1].finish_reason == done[3].finish_reason == "error"
    assert "not finite" in done[1].error
    assert tokens_of(done[1]) == []
    assert done[2].finish_reason == "length"
    assert tokens_of(done[2]) == tokens_of(healthy[2])
    # Its slot was used again by request 4, which must not see what the broken row left behind.
    assert done[4].finish_reason == "length"
    assert np.isfinite(logprobs_of(done[4])).all()


def test_idle_steps_do_nothing(engine_of):
    engine = engine_of()
    assert engine.step() == []
    assert (engine.running, engine.waiting, engine.parked, engine.version) == (0, 0, 0, 0)


def test_completions_say_when_the_first_token_came_and_in_how_many_passes(engine_of):
    done = finish(engine_of(), [request(1, max_tokens=7)])[1]
    assert done.forward_passes == 7
    assert done.first_token > 1e9
    assert (done.drafted, done.accepted, done.kept, done.error) == (0, 0, False, "")
