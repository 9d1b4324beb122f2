import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from actors.learner import logprobs as module
from actors.learner.logprobs import Scorer, truncate_logits
from actors.learner.packing import collate, plan_microbatches
from tests.actors.learner.batches import VOCABULARY, reference_distribution, reference_logprobs
from tests.actors.learner.test_packing import answer


@pytest.fixture(scope="module")
def model(model_path):
    return LlamaForCausalLM.from_pretrained(model_path).eval()


def random_answers(seed=0, count=9):
    rng = np.random.default_rng(seed)
    result = []
    for index in range(count):
        prompt, length = int(rng.integers(1, 8)), int(rng.integers(1, 25))
        tokens = rng.integers(0, VOCABULARY, prompt + length)
        result.append(answer(tokens, prompt, [True] * length, [0] * length, index=index))
    return result


def scored(scorer, answers, budget):
    """Logprobs and entropies of every answer, by answer, whatever the micro-batches."""
    out = {}
    for rows in plan_microbatches([len(a.token_ids) for a in answers], budget):
        batch = collate(answers, rows)
        with torch.no_grad():
            scores = scorer(batch)
        for i in rows:
            out[i] = tuple(column[batch.answers == i].numpy() for column in scores)
    return out


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"temperature": 1.7}])
def test_padded_rows_equal_single_answers(model, sampling):
    answers = random_answers()
    got = scored(Scorer(model, **({"temperature": 1.0} | sampling)), answers, 80)
    for i, a in enumerate(answers):
        table = reference_distribution(model, a.token_ids, **sampling)[a.prompt_tokens - 1 : -1]
        expected = table[np.arange(len(table)), a.token_ids[a.prompt_tokens :]]
        np.testing.assert_allclose(got[i][0], expected, atol=1e-5)
        np.testing.assert_allclose(got[i][1], -(np.exp(table) * table).sum(1), atol=1e-5)
        assert got[i][2].all()


@pytest.mark.parametrize("sampling", [{"top_k": 4}, {"top_p": 0.7}, {"top_k": 6, "top_p": 0.8, "temperature": 1.5}])
def test_truncated_sampling_has_ratio_one_under_equal_weights(model, sampling):
    """The engine's renormalised logprobs and the learner's are the same numbers."""
    rng = np.random.default_rng(3)
    answers, behaviours = [], []
    for index in range(6):
        prompt, tokens = [1, 5, 2], []
        for _ in range(12):
            row = reference_distribution(model, prompt + tokens, **sampling)[-1]
            tokens.append(int(rng.choice(VOCABULARY, p=np.exp(row) / np.exp(row).sum())))
        behaviours.append(reference_logprobs(model, prompt, tokens, **sampling))
        answers.append(answer(prompt + tokens, 3, [True] * 12, behaviours[-1], index=index))
    scorer = Scorer(model, **({"temperature": 1.0} | sampling))
    got = scored(scorer, answers, 60)
    for i, behaviour in enumerate(behaviours):
        assert got[i][2].all()
        np.testing.assert_allclose(np.exp(got[i][0] - behaviour), 1.0, atol=1e-4)
    # control: without the same truncation the ratio is the kept mass, visibly below 1
    plain = scored(Scorer(model, temperature=sampling.get("temperature", 1.0)), answers, 60)
    ratios = np.exp(np.concatenate([plain[i][0] - behaviour for i, behaviour in enumerate(behaviours)]))
    assert ratios.mean() < 0.97


def test_token_outside_the_support_is_reported_and_has_no_gradient(model):
    row = reference_distribution(model, [1, 5])[-1]
    best, worst = int(row.argmax()), int(row.argmin())
    batch = collate([answer([1, 5, best], 2, [True], [0]), answer([1, 5, worst], 2, [True], [0])], [0, 1])
    scores = Scorer(model, temperature=1.0, top_k=2)(batch)
    assert scores.in_support.tolist() == [True, False]
    assert scores.logprobs[1] == 0
    gradients = torch.autograd.grad(scores.logprobs[1], list(model.parameters()), allow_unused=True)
    assert all(g is None or (g == 0).all() for g in gradients)


def test_truncation_rule_by_hand():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    cases = [
        ((0, 0.5), 1),
        ((0, 0.51), 2),
        ((0, 0.8001), 3),
        ((3, 1.0), 3),
        ((3, 0.5), 1),
        ((9, 1.0), 4),
        ((0, 1e-6), 1),
    ]
    for (top_k, top_p), kept in cases:
        assert int(torch.isfinite(truncate_logits(logits, top_k=top_k, top_p=top_p)).sum()) == kept, (top_k, top_p)


def test_chunks_of_the_head_change_neither_values_nor_gradients(model, monkeypatch):
    answers = random_answers(seed=5)
    batch = collate(answers, range(len(answers)))

    def run():
        model.zero_grad()
        scores = Scorer(model, temperature=0.9)(batch)
        (scores.logprobs * torch.linspace(-1, 1, len(batch.targets))).sum().backward()
        return scores, torch.cat([p.grad.flatten().clone() for p in model.parameters()])

    whole, gradient = run()
    monkeypatch.setattr(module, "_CHUNK_LOGITS", VOCABULARY * 7)
    parts, chunked = run()
    model.zero_grad()
    torch.testing.assert_close(parts.logprobs, whole.logprobs, atol=1e-6, rtol=0)
    torch.testing.assert_close(parts.entropy, whole.entropy, atol=1e-6, rtol=0)
    torch.testing.assert_close(chunked, gradient, atol=1e-5, rtol=1e-5)


def test_head_that_is_not_linear_is_found_out(model_path):
    """Models that cap or scale their logits behind the head go through their own forward pass."""

    class Capped(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = torch.tanh(out.logits)
            return out

    capped = Capped.from_pretrained(model_path).eval()
    answers = random_answers(seed=2, count=4)
    got = scored(Scorer(capped, temperature=1.0), answers, 100)
    for i, a in enumerate(answers):
        expected = reference_logprobs(capped, a.token_ids[: a.prompt_tokens], a.token_ids[a.prompt_tokens :])
        np.testing.assert_allclose(got[i][0], expected, atol=1e-5)


def test_low_precision_body_keeps_the_head_in_fp32(model):
    answers = random_answers(seed=4, count=4)
    exact = scored(Scorer(model, temperature=1.0), answers, 200)
    low = scored(Scorer(model, temperature=1.0, autocast=torch.bfloat16), answers, 200)
    for i in exact:
        assert low[i][0].dtype == np.float32
        assert np.abs(low[i][0] - exact[i][0]).max() < 0.5
        assert np.abs(low[i][0] - exact[i][0]).max() > 0
