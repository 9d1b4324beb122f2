"""SPEC-RL: whole old answers kept token by token with probability min(1, lenience * p / q), in one pass."""

from __future__ import annotations

import numpy as np
import pytest

from actors.rollout.engine import Drafts
from actors.rollout.sampling import acceptance_uniforms, position_keys, request_key, splitmix64
from actors.rollout.verification import leniently_kept_counts
from actors.weights import pack, policy_state
from storage.records import Segment

from .conftest import VOCABULARY, ScriptedDrafts, finish, logprobs_of, recomputed_logprobs, request, tokens_of

PROMPT = (5, 6, 7, 8)
SETTINGS = [{}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5}, {"temperature": 0.0}]


def old_answers(source, log_lenience):
    """Whole old answers, (tokens, log q) by request id; the rest of one until a token of it was not kept."""

    def propose(i, so_far, room):
        tokens, scores = source.get(i, ([], []))
        drafted, kept = drafts.heard[i]
        if drafted != kept or tokens[: len(so_far)] != so_far:
            return []
        return tokens[len(so_far) :], scores[len(so_far) :], log_lenience

    drafts = ScriptedDrafts(propose, first=lambda r: r.request_id in source)
    return drafts


def prefix_of(tokens, version=0):
    ids = np.array(tokens, np.int32)
    return (Segment(source="policy", version=version, token_ids=ids, logprobs=np.zeros(len(ids), np.float32)),)


def expected_kept(model, i, draft, scores, log_lenience, *, run_seed=3, prompt=PROMPT, **settings):
    """Tokens kept, by the rule as it is written down, from full forward passes without a cache."""
    if settings.get("temperature") == 0:
        settings = settings | {"temperature": 1e-4}
    policy = recomputed_logprobs(model, prompt, draft, **settings)
    keys = position_keys(np.array([request_key(run_seed, i)], np.uint64), np.arange(len(draft)))
    uniforms = acceptance_uniforms(keys)
    kept = 0
    while kept < len(draft) and uniforms[kept] <= min(1.0, np.exp(log_lenience + policy[kept] - scores[kept])):
        kept += 1
    return kept


@pytest.fixture
def drafted(engine_of, model_path):
    """Answers of an older model and their log-probabilities under it, by request id."""

    def write(n=8, max_tokens=20, seed=1, **settings):
        requests = [request(i, PROMPT, max_tokens=max_tokens, **settings) for i in range(n)]
        done = finish(engine_of(model_path("llama", seed), run_seed=99), requests)
        return {i: (tokens_of(c), logprobs_of(c)) for i, c in done.items()}

    return write


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("log_lenience", [-0.3, 0.5])
def test_the_kept_prefix_is_that_of_the_rule_and_plain_decoding_goes_on_from_it(
    settings, log_lenience, drafted, engine_of, reference_model
):
    # Drafts of the same policy with other noise are kept for a while; those of another one rarely.
    own, other = drafted(seed=0, **settings), drafted(seed=1, **settings)
    old = {i: (own if i % 4 else other)[i] for i in own}
    source = old_answers(old, log_lenience)
    engine = engine_of(drafts=source)
    done = finish(engine, [request(i, PROMPT, max_tokens=20, **settings) for i in old])
    plain, counts = engine_of(), []
    for i, (draft, scores) in old.items():
        # The last token of an answer of full length is drawn, as its draft is longer than the room.
        kept = expected_kept(reference_model("llama"), i, draft[:19], scores, log_lenience, **settings)
        again = finish(plain, [request(i, PROMPT, max_tokens=20, prefix=prefix_of(draft[:kept]), **settings)])[i]
        answer = tokens_of(done[i])
        assert answer == tokens_of(again)
        assert source.heard[i] == [19, kept] == [done[i].drafted, done[i].accepted]
        assert done[i].forward_passes == 20 - kept
        if settings.get("temperature") != 0:
            exact = recomputed_logprobs(reference_model("llama"), PROMPT, answer, **settings)
            np.testing.assert_allclose(logprobs_of(done[i]), exact, atol=1e-4)
        counts.append(kept)
    assert min(counts) < 19
    assert max(counts) > 0 or settings.get("temperature") == 0


def test_uniforms_are_fresh_for_each_position_and_request_and_apart_from_the_token_noise():
    keys = position_keys(np.repeat(np.arange(40, dtype=np.uint64), 500), np.tile(np.arange(500), 40))
    uniforms = acceptance_uniforms(keys)
    assert len(np.unique(uniforms)) == len(uniforms)
    assert ((uniforms > 0) & (uniforms < 1)).all()
    assert abs(uniforms.mean() - 0.5) < 0.01
    table = uniforms.reshape(40, 500)
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03
    for unsalted in (keys, splitmix64(keys)):
        assert np.abs(uniforms - (unsalted >> np.uint64(11)) * 2.0**-53).mean() > 0.3


def test_a_row_that_waits_for_its_first_draft_is_verified_whole_in_the_pass_behind_its_prefill(drafted, engine_of):
    old = drafted(n=1, max_tokens=30, seed=0)
    engine = engine_of(drafts=old_answers(old, 100.0))
    stats = []
    engine.add_observer(stats.append)
    done = finish(engine, [request(0, PROMPT, max_tokens=40)])[0]
    assert tokens_of(done)[:30] == old[0][0]
    assert [(s.prefill_tokens, s.drafted, s.emitted) for s in stats[:3]] == [(4, 0, 0), (0, 30, 31), (0, 0, 1)]
    # The last prompt token is read again for its logits; the accepted prefix is not.
    assert [s.tokens for s in stats[:3]] == [4, 31, 1]


def test_siblings_share_their_prompt_and_are_each_verified_with_noise_of_their_own(drafted, engine_of):
    answers = drafted(n=4, seed=0)
    old = dict.fromkeys((0, 1, 3), answers[0])
    alone = {}
    for i in range(5):
        alone |= finish(engine_of(drafts=old_answers(old, -0.1)), [request(i, PROMPT, max_tokens=20)])
    engine = engine_of(drafts=old_answers(old, -0.1))
    stats = []
    engine.add_observer(stats.append)
    together = finish(engine, [request(i, PROMPT, max_tokens=20, group=4) for i in range(5)])
    assert {i: tokens_of(c) for i, c in together.items()} == {i: tokens_of(c) for i, c in alone.items()}
    assert sum(s.prefill_tokens for s in stats) == len(PROMPT)
    assert len({c.accepted for i, c in together.items() if i in old}) > 1


@pytest.mark.parametrize("budget", [1, 3, 7, 16])
def test_drafts_above_the_bound_of_a_pass_are_verified_in_pieces_with_the_same_result(budget, drafted, engine_of):
    old = drafted(seed=0)
    del old[5]
    requests = [request(i, (*PROMPT[:3], i) if i == 5 else PROMPT, max_tokens=20, group=i // 4) for i in range(5)]
    requests += [request(5, (9, 9), max_tokens=20), request(6, PROMPT, max_tokens=20)]
    whole = finish(engine_of(drafts=old_answers(old, 1.0)), requests)
    engine = engine_of(drafts=old_answers(old, 1.0), prefill_tokens=budget)
    stats = []
    engine.add_observer(stats.append)
    pieces = finish(engine, requests)
    for i, completion in whole.items():
        assert tokens_of(pieces[i]) == tokens_of(completion)
        np.testing.assert_allclose(logprobs_of(pieces[i]), logprobs_of(completion), atol=1e-4)
        assert pieces[i].accepted == completion.accepted
    assert max(s.drafted + s.prefill_tokens for s in stats) <= budget


@pytest.mark.parametrize("position", [0, 4, 11])
def test_a_stop_id_that_is_kept_ends_the_answer(position, drafted, engine_of):
    old = drafted(n=1, seed=0)
    stop = old[0][0][position]
    first = old[0][0].index(stop)
    engine = engine_of(drafts=old_answers(old, 100.0))
    done = finish(engine, [request(0, PROMPT, max_tokens=30, stop_token_ids=(stop,))])[0]
    assert tokens_of(done) == old[0][0][: first + 1]
    assert (done.finish_reason, done.accepted, done.forward_passes) == ("stop", first + 1, 1)


def test_a_stop_string_that_a_kept_token_completes_ends_the_answer(drafted, engine_of):
    class Numbers:
        def decode(self, token_ids, skip_special_tokens=True):
            return "".join(f"<{i}>" for i in token_ids)

    old = drafted(n=1, seed=0)
    text = "".join(f"<{i}>" for i in old[0][0][8:10])
    engine = engine_of(drafts=old_answers(old, 100.0), tokenizer=Numbers())
    done = finish(engine, [request(0, PROMPT, max_tokens=30, stop_strings=(text,))])[0]
    assert tokens_of(done) == old[0][0][:10]
    assert (done.finish_reason, done.accepted) == ("stop", 10)


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_a_draft_that_is_longer_than_the_answer_may_be_fills_it(max_tokens, drafted, engine_of):
    old = drafted(n=1, seed=0)
    done = finish(engine_of(drafts=old_answers(old, 100.0)), [request(0, PROMPT, max_tokens=max_tokens)])[0]
    assert len(tokens_of(done)) == max_tokens
    assert tokens_of(done)[:-1] == old[0][0][: max_tokens - 1]
    assert (done.finish_reason, done.forward_passes) == ("length", 1)


def test_tokens_that_the_sampling_law_cuts_are_never_kept(engine_of):
    plain = finish(engine_of(), [request(i, PROMPT, max_tokens=6, top_k=3) for i in range(60)])
    possible = {tokens_of(c)[0] for c in plain.values()}
    assert len(possible) == 3
    impossible = next(t for t in range(VOCABULARY) if t not in possible)
    for lenience in (5.0, np.inf):
        source = old_answers({i: ([impossible] * 4, [-np.inf] * 4) for i in range(60)}, lenience)
        done = finish(engine_of(drafts=source), [request(i, PROMPT, max_tokens=6, top_k=3) for i in range(60)])
        assert {i: tokens_of(c) for i, c in done.items()} == {i: tokens_of(c) for i, c in plain.items()}


def test_the_rule_keeps_by_the_ratio_and_stops_at_the_first_rejection():
    p = [[0.2, 0.5, 0.1], [0.2, 0.5, 0.1], [0.2, 0.0, 0.1], [0.2, 0.5, 0.1], [0.2, 0.5, 0.1]]
    q = [[0.4, 0.5, 0.2], [0.4, 0.5, 0.2], [0.1, 0.0, 0.1], [0.4, 0.0, 0.2], [0.4, 0.5, np.nan]]
    with np.errstate(divide="ignore"):
        policy, drafter = np.log(p), np.log(q)
    uniforms = np.array([[0.49, 0.99, 0.51], [0.51, 0.1, 0.1], [0.9, 0.1, 0.1], [0.49, 0.99, 0.49], [0.1, 0.1, 0.1]])
    lengths = np.array([3, 3, 3, 2, 3])
    kept = leniently_kept_counts(policy, drafter, np.zeros(5), uniforms, lengths)
    assert kept.tolist() == [2, 0, 1, 2, 2]
    doubled = leniently_kept_counts(policy, drafter, np.full(5, np.log(2)), uniforms, lengths)
    assert doubled.tolist() == [3, 3, 1, 2, 2]


def test_exact_and_lenient_rows_do_not_disturb_each_other(drafted, engine_of):
    plain = finish(engine_of(), [request(i, PROMPT, max_tokens=20) for i in range(4, 8)])
    old = drafted(n=4, seed=0)
    lenient = old_answers(old, 0.5)

    def propose(i, so_far, room):
        if i < 4:
            return lenient._propose(i, so_far, room)
        right = tokens_of(plain[i])[len(so_far) : len(so_far) + 2]
        return [*right, 3]

    alone = finish(engine_of(drafts=old_answers(old, 0.5)), [request(i, PROMPT, max_tokens=20) for i in range(4)])
    engine = engine_of(drafts=ScriptedDrafts(propose, first=lambda r: r.request_id % 3 > 0))
    both = finish(engine, [request(i, PROMPT, max_tokens=20) for i in (4, 0, 5, 1, 6, 2, 7, 3)])
    # Row 0 and 3 draw their first token plainly here, so their drafts may end before they begin.
    for i, completion in (plain | {i: alone[i] for i in (1, 2)}).items():
        assert tokens_of(both[i]) == tokens_of(completion)
        np.testing.assert_allclose(logprobs_of(both[i]), logprobs_of(completion), atol=1e-4)


@pytest.mark.parametrize(("keep", "n", "steps"), [(False, 1, 7), (True, 3, 4)])
def test_a_row_that_is_aborted_between_pieces_of_its_draft_is_verified_on(keep, n, steps, drafted, engine_of):
    old = drafted(n=n, seed=0)
    whole = finish(engine_of(drafts=old_answers(old, 1.0)), [request(i, PROMPT, max_tokens=20) for i in range(n)])
    engine = engine_of(drafts=old_answers(old, 1.0), prefill_tokens=5)
    prefixes, done = dict.fromkeys(range(n), ()), {}
    for _ in range(40):
        engine.submit([request(i, PROMPT, max_tokens=20, prefix=p) for i, p in prefixes.items()])
        left = [c for _ in range(steps) for c in engine.step()] + engine.abort(keep_state=keep)
        done |= {c.request_id: c for c in left if c.finish_reason != "abort"}
        prefixes = {c.request_id: c.segments for c in left if c.finish_reason == "abort"}
        if not prefixes:
            break
    assert {i: tokens_of(c) for i, c in done.items()} == {i: tokens_of(c) for i, c in whole.items()}


@pytest.mark.parametrize("mode", ["reprefill", "keep_kv", "drain"])
def test_weights_that_change_between_pieces_of_a_draft_verify_what_is_left(mode, drafted, engine_of, reference_model):
    old = drafted(n=1, max_tokens=24, seed=0)
    engine = engine_of(drafts=old_answers(old, 100.0), prefill_tokens=8)
    engine.submit([request(0, PROMPT, max_tokens=30)])
    for _ in range(2):
        engine.step()
    engine.load_weights(*pack(policy_state(reference_model("llama", 2)), 2))
    engine.activate_weights(2, mode)
    done = finish(engine)[0]
    # Without a limit to lenience all of the draft is kept, under whatever weights; nothing is drawn between.
    assert tokens_of(done)[:24] == old[0][0]
    assert done.accepted == 24
    versions = [(s.version, len(s.token_ids)) for s in done.segments]
    assert versions == ([(0, 30)] if mode == "drain" else [(0, 8), (2, 22)])
    if mode == "reprefill":
        exact = recomputed_logprobs(reference_model("llama", 2), PROMPT, tokens_of(done))[8:]
        np.testing.assert_allclose(logprobs_of(done)[8:], exact, atol=1e-4)


def test_a_row_that_waits_for_its_share_of_a_pass_draws_nothing_when_it_is_prefilled_again(
    drafted, engine_of, reference_model
):
    old = drafted(n=2, max_tokens=24, seed=0)

    def rest(i, so_far, room):
        tokens, scores = old[i]
        return tokens[len(so_far) :], scores[len(so_far) :], 100.0

    engine = engine_of(drafts=ScriptedDrafts(rest), prefill_tokens=8)
    engine.submit([request(i, PROMPT, max_tokens=24) for i in range(2)])
    for _ in range(2):
        engine.step()
    engine.load_weights(*pack(policy_state(reference_model("llama")), 2))
    engine.activate_weights(2)
    done = finish(engine)
    for i, completion in done.items():
        # All but the first and the last token come from the draft.
        assert tokens_of(completion)[1:23] == old[i][0][1:23]
        assert completion.accepted == 22


def test_lenient_drafts_without_the_drafters_logprobs_switch_drafts_off(engine_of, caplog):
    class Forgetful(ScriptedDrafts):
        def propose(self, rows):
            drafts = super().propose(rows)
            return Drafts(drafts.tokens, drafts.lengths, drafts.lenience)

    plain = finish(engine_of(), [request(1, max_tokens=9)])[1]
    engine = engine_of(drafts=Forgetful(lambda i, so_far, room: ([3], [-1.0], 0.0)))
    engine.submit([request(1, max_tokens=9)])
    done = next(c for _ in range(9) for c in engine.step())
    assert tokens_of(done) == tokens_of(plain)
    assert "log-probabilities of shape (1, 1)" in engine.draft_failure
    assert [r.levelname for r in caplog.records] == ["WARNING"]
