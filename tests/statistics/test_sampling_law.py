"""What is sampled has the law that it should have; each test has a control that breaks the law and must be caught."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

from actors.rollout.sampling import Sampler, position_keys, processed_probabilities, request_key
from actors.rollout.verification import accepted_counts

ALARM = 1e-4
VOCABULARY = 24


def logits_of(context):
    """A toy policy: logits float[n, vocabulary] that depend on the last token of each context."""
    generator = torch.Generator().manual_seed(11)
    table = torch.randn(VOCABULARY, VOCABULARY, generator=generator) * 1.5
    return table[torch.as_tensor(context)]


def exact(context, temperature=1.0, top_p=1.0, top_k=0):
    one = np.ones(len(context), np.float32)
    return processed_probabilities(
        logits_of(context), one * np.float32(temperature), one * np.float32(top_p), (one * top_k).astype(np.int64)
    ).numpy()


def draw(context, keys, temperature=1.0, top_p=1.0, top_k=0):
    one = np.ones(len(keys), np.float32)
    tokens, _ = Sampler(VOCABULARY).sample(
        logits_of(context), keys, one * np.float32(temperature), one * np.float32(top_p), (one * top_k).astype(np.int64)
    )
    return tokens.numpy()


def p_value(counts, probabilities):
    """Chi-square p-value; cells that expect fewer than 5 are merged, an impossible token gives 0."""
    counts, probabilities = np.ravel(counts).astype(float), np.ravel(probabilities).astype(float)
    if counts[probabilities == 0].any():
        return 0.0
    expected = counts.sum() * probabilities / probabilities.sum()
    small = expected < 5
    seen = np.append(counts[~small], counts[small].sum())
    hoped = np.append(expected[~small], expected[small].sum())
    if hoped[-1] < 5:
        seen, hoped = np.append(seen[:-2], seen[-2:].sum()), np.append(hoped[:-2], hoped[-2:].sum())
    return float(stats.chisquare(seen, hoped).pvalue)


@cache
def request_keys(n, seed=0):
    keys = np.array([request_key(seed, i) for i in range(n)], np.uint64)
    keys.flags.writeable = False
    return keys


SETTINGS = [{}, {"temperature": 0.6}, {"top_k": 6}, {"top_p": 0.7}, {"temperature": 1.4, "top_k": 9, "top_p": 0.8}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_follow_the_processed_distribution_over_requests_and_over_positions(settings):
    n = 40_000
    context = np.full(n, 3)
    law = exact(context[:1], **settings)[0]
    over_requests = draw(context, position_keys(request_keys(n), np.zeros(n, np.int64)), **settings)
    over_positions = draw(context, position_keys(np.full(n, request_key(7, 1), np.uint64), np.arange(n)), **settings)
    for tokens in (over_requests, over_positions):
        assert p_value(np.bincount(tokens, minlength=VOCABULARY), law) > ALARM


def test_control_noise_of_half_the_scale_is_caught():
    """Gumbel noise of the wrong scale samples at another temperature."""
    n = 40_000
    context = np.full(n, 3)
    tokens = draw(context, position_keys(request_keys(n), np.zeros(n, np.int64)), temperature=0.9)
    assert p_value(np.bincount(tokens, minlength=VOCABULARY), exact(context[:1])[0]) < ALARM


def test_rare_tokens_of_a_large_vocabulary_come_as_often_as_they_should():
    vocabulary, n = 4096, 8_000
    logits = torch.zeros(1, vocabulary)
    logits[0, 0] = float(np.log(vocabulary * 9.0))
    sampler = Sampler(vocabulary)
    ones = np.ones(n, np.float32)
    keys = position_keys(request_keys(n), np.zeros(n, np.int64))
    tokens = sampler.sample(logits.expand(n, -1), keys, ones, ones, np.zeros(n, np.int64))[0].numpy()
    assert stats.binomtest(int((tokens > 0).sum()), n, 4095 / (4095 + 9 * 4096)).pvalue > ALARM
    assert stats.kstest(tokens[tokens > 0], stats.randint(1, vocabulary).cdf).pvalue > ALARM


@pytest.mark.parametrize("pair", ["positions", "requests", "seeds"])
def test_draws_at_different_keys_are_independent(pair):
    n = 40_000
    keys = request_keys(n)
    zeros = np.zeros(n, np.int64)
    first = position_keys(keys, zeros)
    second = {
        "positions": position_keys(keys, zeros + 1),
        "requests": position_keys(np.roll(keys, 1), zeros),
        "seeds": position_keys(request_keys(n, seed=1), zeros),
    }[pair]
    context = np.full(n, 3)
    law = exact(context[:1])[0]
    joint = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(joint, (draw(context, first), draw(context, second)), 1)
    assert p_value(joint, np.outer(law, law)) > ALARM
    same = draw(context, first)
    control = np.zeros_like(joint)
    np.add.at(control, (same, same), 1)
    assert p_value(control, np.outer(law, law)) < ALARM


def speculative_pairs(n, draft, verify):
    """First two tokens behind token 3 when ``draft`` (two tokens) is verified; int[n, 2], and the law of pairs."""
    keys = request_keys(n, seed=5)
    first = draw(np.full(n, 3), position_keys(keys, np.zeros(n, np.int64)))
    second = draw(np.full(n, draft[0]), position_keys(keys, np.ones(n, np.int64)))
    drawn = np.stack([first, second], axis=1)
    accepted = verify(drawn, np.tile(draft, (n, 1)))
    pairs = np.where(accepted[:, None] > 0, [draft[0], 0], drawn)
    pairs[accepted > 0, 1] = drawn[accepted > 0, 1]
    # A rejected draft leaves one token; the next comes from the next pass.
    again = draw(pairs[:, 0], position_keys(keys, np.ones(n, np.int64)))
    pairs[accepted == 0, 1] = again[accepted == 0]
    law = exact([3])[0][:, None] * exact(np.arange(VOCABULARY))
    return pairs, law


@pytest.mark.parametrize("token", [0, 5, 13])
def test_verified_drafts_leave_the_joint_law_of_two_tokens_alone(token):
    n = 40_000

    def exact_rule(drawn, drafts):
        return accepted_counts(drawn, drafts[:, :1], np.ones(n, np.int64))

    def always_accept(drawn, drafts):
        return (np.random.default_rng(0).random(n) < 0.3).astype(np.int64)

    for rule, holds in ((exact_rule, True), (always_accept, False)):
        pairs, law = speculative_pairs(n, [token], rule)
        joint = np.zeros_like(law)
        np.add.at(joint, (pairs[:, 0], pairs[:, 1]), 1)
        assert (p_value(joint, law) > ALARM) is holds
