"""Lenient reuse with the residual draw: what is recorded of each law, and what stands for a rejected token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from actors.drafts.options import SpeculationOptions
from actors.drafts.pack import PastAnswer, PastPrompt, build_pack
from actors.rollout.draft_cost import PassCost
from actors.rollout.engine import Drafts
from actors.rollout.history_drafts import HistoryDrafts
from actors.rollout.sampling import Sampler, position_keys, request_key, residual_keys, residual_weights
from actors.rollout.top_table import TopTable
from actors.rollout.verification import LenientDrafts
from pipelines.bench.losslessness import Setting, processed_law
from storage.history.schema import prompt_hash
from storage.records import Segment, TopTokens

from .conftest import VOCABULARY, ScriptedDrafts, finish, logprobs_of, recomputed_logprobs, request, tokens_of
from .test_lenient_drafts import PROMPT, expected_kept, prefix_of

SETTINGS = [{}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5}]


class OldAnswers(ScriptedDrafts):
    """Whole old answers, verified leniently from their beginning; ``known`` cuts what is told of their laws."""

    def __init__(self, old, log_lenience, known=VOCABULARY):
        def propose(i, so_far, room):
            tokens, scores = self.old[i][:2]
            drafted, kept = self.heard[i]
            if drafted != kept or tokens[: len(so_far)] != so_far:
                return []
            return tokens[len(so_far) :], scores[len(so_far) :], log_lenience

        super().__init__(propose, first=lambda r: True)
        self.old = old
        self.known = known

    def propose(self, rows):
        drafts = super().propose(rows)
        tops = []
        for i, handle in enumerate(rows.handles.tolist()):
            top, begin = self.old[self.open_rows[handle].request_id][2], int(rows.length[i] - rows.prompt[i])
            part = top.part(begin, len(top.ids))
            tops.append(TopTokens(ids=part.ids[:, : self.known], logprobs=part.logprobs[:, : self.known]))
        return dataclasses.replace(drafts, tops=tops if self.known else None)


def top_of(completion):
    return TopTokens.join([s.top for s in completion.segments], [len(s.token_ids) for s in completion.segments])


def laws(model, answer, places, **settings):
    """The processed law at some places of an answer, float64[places, V], from one full pass without a cache."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*PROMPT, *answer]])).logits[0].double().numpy()
    return processed_law(logits[len(PROMPT) - 1 + np.array(places)], Setting("", **settings))


@pytest.fixture
def drafted(engine_of, model_path):
    """Answers of an older model, their log-probabilities and laws under it, by request id."""

    def write(n=8, max_tokens=20, seed=1, **settings):
        requests = [request(i, PROMPT, max_tokens=max_tokens, **settings) for i in range(n)]
        done = finish(engine_of(model_path("llama", seed), run_seed=99, top_tokens=VOCABULARY), requests)
        return {i: (tokens_of(c), logprobs_of(c), top_of(c)) for i, c in done.items()}

    return write


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_likeliest_tokens_of_each_law_are_recorded_for_drawn_and_for_kept_tokens(
    settings, drafted, engine_of, reference_model
):
    old = drafted(n=1, seed=0, **settings)
    engine = engine_of(drafts=OldAnswers(old, 0.5, known=0), top_tokens=4)
    done = finish(engine, [request(0, PROMPT, max_tokens=24, **settings)])[0]
    assert done.accepted > 5
    top, places = top_of(done), [0, done.accepted - 1, done.accepted, 23]
    assert top.ids.shape == (24, 4)
    assert (top.ids.dtype, top.logprobs.dtype) == (np.int32, np.float32)
    for place, law in zip(places, laws(reference_model("llama"), tokens_of(done), places, **settings), strict=True):
        likeliest = [int(t) for t in np.argsort(-law)[:4] if law[t] > 0]
        assert top.ids[place].tolist() == likeliest + [-1] * (4 - len(likeliest))
        with np.errstate(divide="ignore"):
            expected = np.log(law[likeliest])
        np.testing.assert_allclose(top.logprobs[place, : len(likeliest)], expected, atol=1e-4)
        assert np.isneginf(top.logprobs[place, len(likeliest) :]).all()


def test_nothing_is_recorded_unless_asked_for_and_greedy_rows_have_one_token(engine_of):
    plain = finish(engine_of(), [request(0, PROMPT)])[0]
    assert [s.top for s in plain.segments] == [None]
    done = finish(engine_of(top_tokens=3), [request(0, PROMPT), request(1, PROMPT, temperature=0.0)])
    assert tokens_of(done[0]) == tokens_of(plain)
    assert top_of(done[0]).ids.shape == (12, 3)
    greedy = top_of(done[1])
    assert greedy.ids.tolist() == [[t] for t in tokens_of(done[1])]
    assert (greedy.logprobs == 0).all()
    alone = finish(engine_of(top_tokens=3), [request(1, PROMPT, temperature=0.0)])[1]
    assert top_of(alone).ids.tolist() == greedy.ids.tolist()


def test_a_resumed_row_goes_on_with_what_was_recorded_before(engine_of):
    whole = finish(engine_of(top_tokens=4), [request(0, PROMPT, max_tokens=16)])[0]
    engine = engine_of(top_tokens=4)
    engine.submit([request(0, PROMPT, max_tokens=16)])
    for _ in range(6):
        engine.step()
    (stopped,) = engine.abort()
    again = finish(engine_of(top_tokens=4), [request(0, PROMPT, max_tokens=16, prefix=stopped.segments)])[0]
    assert tokens_of(again) == tokens_of(whole)
    assert len(again.segments) == 1
    np.testing.assert_array_equal(top_of(again).ids, top_of(whole).ids)
    np.testing.assert_allclose(top_of(again).logprobs, top_of(whole).logprobs, atol=1e-4)
    # A prefix of which nothing was recorded leaves a gap, and no more.
    bare = prefix_of(tokens_of(whole)[:6])
    gap = top_of(finish(engine_of(top_tokens=4), [request(0, PROMPT, max_tokens=16, prefix=bare)])[0])
    assert (gap.ids[:6] == -1).all()
    np.testing.assert_array_equal(gap.ids[6:], top_of(whole).ids[6:])


def test_the_table_takes_over_wider_and_narrower_records_and_forgets_the_row_before():
    table = TopTable(2, 3)
    table.put(np.array([1, 1]), np.array([0, 70]), np.full((2, 3), 9), np.zeros((2, 3), np.float32))
    ids = np.arange(10, dtype=np.int32).reshape(2, 5)
    wide = TopTokens(ids=ids, logprobs=-ids.astype(np.float32))
    zeros = np.zeros(2, np.float32)
    segments = [
        Segment(source="policy", version=0, token_ids=np.zeros(2, np.int32), logprobs=zeros, top=wide),
        Segment(source="environment", version=-1, token_ids=np.zeros(2, np.int32), logprobs=zeros),
        Segment(source="policy", version=0, token_ids=np.zeros(2, np.int32), logprobs=zeros, top=wide.part(0, 2)),
    ]
    table.open(1, segments)
    assert table.part(1, 0, 2).ids.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert table.part(1, 2, 4) is None
    table.put(np.array([1]), np.array([2]), np.array([[4]]), np.zeros((1, 1), np.float32))
    assert table.part(1, 2, 4).ids.tolist() == [[4], [-1]]
    assert table.part(0, 0, 70) is None
    assert table.nbytes >= 2 * 71 * 3 * 8


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_rejected_token_is_replaced_by_the_keyed_draw_from_the_residual(
    settings, drafted, engine_of, reference_model
):
    old = drafted(seed=1, **settings)
    source = OldAnswers(old, 0.0)
    stats = []
    engine = engine_of(drafts=source, max_rows=8)
    engine.add_observer(stats.append)
    done = finish(engine, [request(i, PROMPT, max_tokens=20, **settings) for i in old])
    model, sampler, moved = reference_model("llama"), Sampler(VOCABULARY), 0
    for i, (draft, scores, top) in old.items():
        kept = expected_kept(model, i, draft[:19], scores, 0.0, **settings)
        answer = tokens_of(done[i])
        assert answer[:kept] == draft[:kept]
        (p,) = laws(model, draft, [kept], **settings)
        known = top.ids[kept] >= 0
        q = np.zeros(VOCABULARY)
        q[top.ids[kept][known]] = np.exp(top.logprobs[kept][known])
        residual = np.maximum(0, p - q)
        key = position_keys(np.array([request_key(3, i)], np.uint64), np.array([kept]))
        race = residual / -sampler.exponentials(residual_keys(key))[0].numpy()
        assert answer[kept] == int(race.argmax())
        assert p[draft[kept]] < q[draft[kept]]
        plain = p / -sampler.exponentials(key)[0].numpy()
        moved += answer[kept] != int(plain.argmax())
        # The loss needs the probability under the policy, whatever law the token was drawn from.
        exact = recomputed_logprobs(model, PROMPT, answer, **settings)
        np.testing.assert_allclose(logprobs_of(done[i]), exact, atol=1e-4)
    assert moved > 2
    assert sum(s.residual_draws for s in stats) == len(old)
    assert sum(s.residual_tail for s in stats) == pytest.approx(0, abs=1e-4)


def test_without_knowledge_of_the_old_law_the_plain_draw_stands(drafted, engine_of):
    old = drafted(seed=1)
    requests = [request(i, PROMPT, max_tokens=20) for i in old]
    plain = finish(engine_of(drafts=OldAnswers(old, 0.0, known=0)), requests)
    # Nothing recorded at the place where the answer is rejected is the same as nothing at all.
    blind = {
        i: (t, s, TopTokens(ids=np.full_like(top.ids, -1), logprobs=np.full_like(top.logprobs, -np.inf)))
        for i, (t, s, top) in old.items()
    }
    done = finish(engine_of(drafts=OldAnswers(blind, 0.0)), requests)
    assert {i: tokens_of(c) for i, c in done.items()} == {i: tokens_of(c) for i, c in plain.items()}
    known = finish(engine_of(drafts=OldAnswers(old, 0.0)), requests)
    assert {i: tokens_of(c) for i, c in known.items()} != {i: tokens_of(c) for i, c in plain.items()}
    cold = [request(i, PROMPT, max_tokens=20, temperature=0.0) for i in old]
    greedy = finish(engine_of(drafts=OldAnswers(old, 0.0)), cold)
    undrafted = finish(engine_of(), cold)
    assert all(tokens_of(greedy[i]) == tokens_of(undrafted[i]) for i in old if not greedy[i].accepted)


def test_the_residual_is_the_policy_itself_where_nothing_is_left():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]], dtype=torch.float64)
    ids = torch.tensor([[0, 1, 2], [0, 1, 1], [2, -1, -1], [-1, -1, -1]])
    q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.6], [0.9, 0.7, 0.7], [0.9, 0.9, 0.9]], dtype=torch.float64)
    weights = residual_weights(p, ids, q.log())
    expected = [[0.5, 0.3, 0.2], [0.4, 0.0, 0.2], [0.5, 0.3, 0.0], [0.5, 0.3, 0.2]]
    np.testing.assert_allclose(weights.numpy(), expected, atol=1e-12)


def test_the_rejected_token_is_known_even_where_it_is_not_among_the_likeliest():
    ids = np.array([[4, 5], [6, 7]], np.int32)
    top = TopTokens(ids=ids, logprobs=np.log(np.array([[0.5, 0.2], [0.4, 0.3]], np.float32)))
    drafts = LenientDrafts(
        rows=np.arange(4),
        lenience=np.zeros(4),
        logprobs=np.log(np.array([[0.5, 0.1], [0.5, 0.1], [0.5, 0.1], [0.5, np.nan]], np.float32)),
        cut=np.zeros(4, np.bool_),
        tops=(top, top, None, top),
    )
    tokens = np.array([[4, 9], [4, 9], [4, 9], [4, 9]])
    found = drafts.residual_at(np.array([1, 0, 1, 1]), np.full(4, 2), tokens)
    # Row 2 knows nothing, and row 3 not how likely its own token was.
    assert found.places.tolist() == [0, 1]
    assert found.ids.tolist() == [[6, 7, 9], [4, 5, -1]]
    np.testing.assert_allclose(found.tail_mass, [0.2, 0.3], atol=1e-6)
    none = drafts.residual_at(np.full(4, 2), np.full(4, 2), tokens)
    assert none.places.tolist() == []


@pytest.mark.parametrize("budget", [3, 7])
def test_drafts_in_pieces_and_aborted_rows_end_in_the_same_tokens(budget, drafted, engine_of):
    old = drafted(n=3, seed=1) | {3: drafted(n=4, seed=0)[3]}
    requests = [request(i, PROMPT, max_tokens=20) for i in old]
    whole = finish(engine_of(drafts=OldAnswers(old, 0.2)), requests)
    pieces = finish(engine_of(drafts=OldAnswers(old, 0.2), prefill_tokens=budget), requests)
    assert {i: tokens_of(c) for i, c in pieces.items()} == {i: tokens_of(c) for i, c in whole.items()}
    engine = engine_of(drafts=OldAnswers(old, 0.2), prefill_tokens=budget)
    engine.submit(requests)
    done = {}
    for _ in range(3):
        done |= {c.request_id: c for _ in range(4) for c in engine.step()}
        stopped = engine.abort(keep_state=True)
        engine.submit([request(c.request_id, PROMPT, max_tokens=20, prefix=c.segments) for c in stopped])
    done |= finish(engine)
    assert {i: tokens_of(c) for i, c in done.items()} == {i: tokens_of(c) for i, c in whole.items()}


@pytest.mark.parametrize("fault", ["short", "ragged"])
def test_likeliest_tokens_that_do_not_fit_the_draft_switch_drafts_off(fault, drafted, engine_of, caplog):
    class Wrong(OldAnswers):
        def propose(self, rows):
            drafts: Drafts = super().propose(rows)
            top = drafts.tops[0]
            wrong = top.part(0, 2) if fault == "short" else TopTokens(ids=top.ids, logprobs=top.logprobs[:, :1])
            return dataclasses.replace(drafts, tops=[wrong])

    engine = engine_of(drafts=Wrong(drafted(n=1), 0.0))
    engine.submit([request(0, PROMPT, max_tokens=9)])
    done = next(c for _ in range(12) for c in engine.step())
    assert tokens_of(done) == tokens_of(finish(engine_of(), [request(0, PROMPT, max_tokens=9)])[0])
    assert "likeliest tokens of shape" in engine.draft_failure


def test_a_run_of_two_epochs_draws_from_residuals_and_says_how_much_of_the_law_it_knew(drafted, engine_of):
    old = drafted(seed=1, n=6)
    answers = [
        PastAnswer(token_ids=np.array(t, np.int32), logprobs=np.array(s, np.float32), sample=i, top=top)
        for i, (t, s, top) in old.items()
    ]
    narrow = [
        dataclasses.replace(a, top=TopTokens(ids=a.top.ids[:, :4], logprobs=a.top.logprobs[:, :4])) for a in answers
    ]
    prompt_ids = np.array(PROMPT, np.int32)
    tails = {}
    for name, past, residual in (("all", answers, True), ("four", narrow, True), ("off", answers, False)):
        options = SpeculationOptions(
            source="previous_epoch", verify="lenient", log_lenience=0.0, fresh_share=0.0, residual=residual
        )
        source = HistoryDrafts(options, cost=PassCost(1.0, 0.0, 1e-3))
        source.add_pack(build_pack([PastPrompt(prompt_ids=prompt_ids, answers=past)], generation=1, index=None))
        for i in old:
            source.register(i, prompt_hash(prompt_ids), i)
        engine = engine_of(drafts=source, max_rows=6)
        engine.add_observer(source.on_step)
        done = finish(engine, [request(i, PROMPT, max_tokens=20) for i in old])
        metrics = source.metrics()
        if not residual:
            assert "residual_draws" not in metrics
            continue
        assert metrics["residual_draws"] == 6
        tails[name] = metrics["residual_tail"] / 6
        if name == "all":
            direct = finish(engine_of(drafts=OldAnswers(old, 0.0)), [request(i, PROMPT, max_tokens=20) for i in old])
            assert {i: tokens_of(c) for i, c in done.items()} == {i: tokens_of(c) for i, c in direct.items()}
    assert tails["all"] < 1e-4 < 0.01 < tails["four"] < 1
