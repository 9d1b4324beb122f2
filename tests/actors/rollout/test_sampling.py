"""The processed distribution against hand computation, and the noise against an independent implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.rollout.sampling import Sampler, position_keys, processed_probabilities, request_key, splitmix64

F32, I64 = np.float32, np.int64


def processed(logits, temperature=1.0, top_p=1.0, top_k=0):
    logits = torch.tensor([logits], dtype=torch.float32)
    one = np.ones(1)
    result = processed_probabilities(
        logits, (one * temperature).astype(F32), (one * top_p).astype(F32), (one * top_k).astype(I64)
    )
    return result[0].tolist()


LOGITS = np.log([0.4, 0.3, 0.2, 0.1]).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 1e-6}, [1, 0, 0, 0]),
        # The nucleus is that of what top-k left: 4/7 < 0.6 needs the second token, 0.5 does not.
        ({"top_k": 2, "top_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0]),
        ({"temperature": 0.5, "top_p": 0.6}, [16 / 25, 9 / 25, 0, 0]),
    ],
)
def test_temperature_then_top_k_then_top_p_give_the_hand_computed_distribution(settings, expected):
    np.testing.assert_allclose(processed(LOGITS, **settings), expected, atol=1e-6)


def test_ties_at_a_cut_are_kept_together():
    assert processed([0.0, 0.0, 0.0, -9.0], top_k=2)[:3] == pytest.approx([1 / 3] * 3, abs=1e-4)
    assert processed([0.0, 0.0, 0.0, -9.0], top_p=0.5)[:3] == pytest.approx([1 / 3] * 3, abs=1e-4)


def test_a_nucleus_wider_than_the_first_candidates_is_found():
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    mass = np.array([0.9, 1.0, 0.3], F32)
    result = processed_probabilities(logits, np.ones(3, F32), mass, np.zeros(3, I64)).double().numpy()
    plain = torch.softmax(logits.double(), -1).numpy()
    for row, p, m in zip(result, plain, mass, strict=True):
        order = np.argsort(-p)
        count = int(np.searchsorted(np.cumsum(p[order]), m)) + 1 if m < 1 else 5000
        assert abs(np.count_nonzero(row) - count) <= 1
        kept = row > 0
        np.testing.assert_allclose(row[kept], p[kept] / p[kept].sum(), rtol=1e-4)


def _noise_in_python(key, token):
    """Minus log1p(-v) of one (key, token), in Python integers."""
    mask = 0xFFFFFFFF

    def half(x, a, s):
        x = (x * a) & mask
        return x ^ (x >> s)

    x = token
    x ^= x >> 16
    x = half(x, 0x7FEB352D, 15)
    x = half(x, 0x846CA68B, 16)
    x ^= key & mask
    x ^= x >> 16
    x = (x * 0x7FEB352D) & mask
    x ^= key >> 32
    x ^= x >> 15
    x = half(x, 0x846CA68B, 16)
    return -np.log1p(-((x & 0x7FFFFFFF) + 0.5) / 2**31)


def test_noise_is_the_documented_function_of_key_and_token():
    keys = position_keys(np.array([request_key(1, 2), request_key(1, 3)], np.uint64), np.array([0, 77]))
    noise = -Sampler(40).exponentials(keys).double().numpy()
    for row, key in zip(noise, keys.tolist(), strict=True):
        np.testing.assert_allclose(row, [_noise_in_python(key, t) for t in range(40)], rtol=1e-6)


def test_splitmix64_matches_published_outputs():
    # First outputs of the reference generator seeded with 1234567.
    state = np.uint64(1234567) + np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert splitmix64(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_row_draws_the_same_alone_and_among_others_with_other_settings():
    vocabulary, rows = 3000, 60
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocabulary, generator=generator) * 2
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**63, rows).astype(np.uint64)
    temperature = rng.choice([0.0, 0.7, 1.0, 1.5], rows).astype(F32)
    top_p = rng.choice([0.5, 0.9, 1.0], rows).astype(F32)
    top_k = rng.choice([0, 3, 100, 10_000], rows).astype(I64)
    sampler = Sampler(vocabulary)
    tokens, logprobs = sampler.sample(logits, keys, temperature, top_p, top_k)
    for i in range(rows):
        one = slice(i, i + 1)
        token, logprob = sampler.sample(logits[one], keys[one], temperature[one], top_p[one], top_k[one])
        assert int(token) == int(tokens[i])
        assert float(logprob) == pytest.approx(float(logprobs[i]), abs=1e-5)
        if temperature[i] == 0:
            assert int(token) == int(logits[i].argmax())
            assert float(logprob) == 0.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_a_logprob_that_is_not_and_others_do(bad, temperature):
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    ones = np.ones(3, F32)
    _, logprobs = Sampler(8).sample(
        logits, np.arange(3, dtype=np.uint64), ones * F32(temperature), ones, np.zeros(3, I64)
    )
    assert torch.isfinite(logprobs).tolist() == [True, False, True]


def test_small_perturbations_of_the_logits_flip_no_token():
    vocabulary, rows = 200, 4000
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    noisy = logits + torch.randn(rows, vocabulary, generator=generator) * 1e-5
    keys = position_keys(np.full(rows, request_key(0, 5), np.uint64), np.arange(rows))
    ones, zeros = np.ones(rows, F32), np.zeros(rows, I64)
    sampler = Sampler(vocabulary)
    flips = sampler.sample(logits, keys, ones, ones, zeros)[0] != sampler.sample(noisy, keys, ones, ones, zeros)[0]
    assert int(flips.sum()) <= 1


@pytest.mark.parametrize("vocabulary", [40, 100_000])
def test_scores_of_other_tokens_are_those_of_the_law_that_is_sampled_also_in_pieces(vocabulary):
    n = 12
    logits = torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(2)) * 3
    temperature = np.array([1, 0.7, 1, 0] * 3, np.float32)
    top_p, top_k = np.array([1, 0.8, 1] * 4, np.float32), np.array([0, 0, 5, 0, 0, 0] * 2)
    keys = position_keys(np.arange(n, dtype=np.uint64), np.arange(n))
    law = processed_probabilities(logits, temperature, top_p, top_k)
    wanted = torch.where(torch.arange(n) % 2 == 0, law.argmax(dim=1), law.argmin(dim=1)).numpy()
    sampler = Sampler(vocabulary)
    drawn = sampler.sample_and_score(logits, keys, temperature, top_p, top_k, wanted, 4)
    tokens, logprobs, scored = drawn[:3]
    plain = sampler.sample(logits, keys, temperature, top_p, top_k)
    assert torch.equal(tokens, plain[0])
    assert torch.equal(logprobs, plain[1])
    expected = law[torch.arange(n), torch.from_numpy(wanted)].log()
    greedy = torch.from_numpy(temperature == 0)
    point = torch.where(tokens == torch.from_numpy(wanted), 0.0, float("-inf"))
    torch.testing.assert_close(scored, torch.where(greedy, point, expected))
    assert torch.isinf(scored).any()
    assert torch.isfinite(scored).any()
    assert drawn.top_ids is not None
    for row in range(n):
        best = law[row].topk(4)
        ids = [int(i) if p > 0 else -1 for i, p in zip(best.indices, best.values, strict=True)]
        scores = best.values.log()
        if greedy[row]:
            ids, scores = [int(tokens[row]), -1, -1, -1], torch.tensor([0.0] + [float("-inf")] * 3)
        assert drawn.top_ids[row].tolist() == ids
        torch.testing.assert_close(drawn.top_logprobs[row], scores)
