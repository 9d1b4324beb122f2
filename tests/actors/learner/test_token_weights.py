"""Weights, masks and caps of single tokens against references written with ``math`` in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.learner.algorithms import DEFAULTS
from actors.learner.losses import answer_means, behaviour_weight, token_losses
from actors.learner.packing import Answer, collate
from actors.learner.token_weights import token_weights
from storage.records import GroupKey

# log pi_proximal - log behaviour of three answers, and how many of their first tokens have no gradient
RATIOS = [[0.3, -0.2, 0.1], [1.5, -1.4, 0.0, 0.1], [-0.9, -0.8]]
BEHAVIOUR = -2.0


def batch_of(ratios, prefixes=None, advantages=None, weights=None):
    answers = [
        Answer(
            key=GroupKey("train", 0, 0),
            index=i,
            token_ids=np.arange(len(row) + 1, dtype=np.int32),
            prompt_tokens=1,
            policy=np.ones(len(row), np.bool_),
            behaviour=np.full(len(row), BEHAVIOUR, np.float32),
            advantage=1.0 if advantages is None else advantages[i],
            trained=None if prefixes is None else np.arange(len(row)) >= prefixes[i],
            weights=None if weights is None else np.array(weights[i], np.float32),
        )
        for i, row in enumerate(ratios)
    ]
    batch = collate(answers, range(len(answers)))
    return batch, torch.tensor([BEHAVIOUR + r for row in ratios for r in row])


def weigh(batch, before, algorithm=DEFAULTS["decoupled_ppo"], *, support=None, cap=None):
    inside = torch.ones(len(before), dtype=torch.bool) if support is None else torch.tensor(support)
    return token_weights(batch, inside, before, algorithm, cap)


def test_plain_batch_has_no_weights_and_keeps_everything():
    got = weigh(*batch_of(RATIOS))
    assert got.values is None
    assert got.prefix is None
    assert got.kept.all()


@pytest.mark.parametrize("cap", [1e9, 1.05])
def test_prefix_weight_is_the_truncated_product_of_its_ratios(cap):
    batch, before = batch_of(RATIOS, prefixes=[1, 2, 0])
    got = weigh(batch, before, replace(DEFAULTS["decoupled_ppo"], prefix_cap=cap))
    expected = [min(math.exp(0.3), cap)] * 3 + [min(math.exp(1.5 - 1.4), cap)] * 4 + [1.0] * 2
    np.testing.assert_allclose(got.values, expected, rtol=1e-5)
    assert got.kept.tolist() == [False, True, True, False, False, True, True, True, True]
    assert got.scored.all()


def test_prefix_that_cannot_be_written_any_more_weighs_nothing():
    batch, before = batch_of(RATIOS, prefixes=[1, 2, 0])
    support = [False] + [True] * 8
    got = weigh(batch, before, support=support)
    assert got.values[:3].tolist() == [0, 0, 0]
    assert (got.values[3:] > 0).all()


@pytest.mark.parametrize(
    ("mode", "low", "high", "kept"),
    [
        ("geometric", 0.5, 2.0, [True, True, False]),  # means 0.067, 0.05, -0.85
        ("geometric", 0.5, 1.06, [False, True, False]),
        ("geometric", 0.4, 1.08, [True, True, True]),
        ("max", 0.5, 2.0, [True, False, False]),  # e^1.5 and e^-1.4 average out, one by one they do not
        ("max", 0.2, 5.0, [True, True, True]),
        ("max", 0.2, 4.0, [True, False, True]),
    ],
)
def test_sequence_mask_drops_whole_answers_by_their_ratios(mode, low, high, kept):
    algorithm = replace(DEFAULTS["decoupled_ppo"], mask=mode, mask_low=low, mask_high=high)
    got = weigh(*batch_of(RATIOS), algorithm)
    expected = [k for k, row in zip(kept, RATIOS, strict=True) for _ in row]
    assert got.kept.tolist() == expected
    assert got.counted.all()  # what was dropped can still be counted


def test_tokens_outside_the_support_do_not_decide_about_their_answer():
    algorithm = replace(DEFAULTS["decoupled_ppo"], mask="max", mask_low=0.5, mask_high=2.0)
    support = [True] * 3 + [False, False, True, True] + [True] * 2
    got = weigh(*batch_of(RATIOS), algorithm, support=support)
    assert got.kept.tolist() == [True] * 3 + [False, False, True, True] + [False] * 2


def test_logprob_that_is_not_a_number_is_masked_and_makes_no_weight_nan():
    batch, before = batch_of(RATIOS, prefixes=[1, 0, 0])
    before[0], before[4] = float("nan"), float("inf")
    algorithm = replace(DEFAULTS["decoupled_ppo"], mask="geometric", mask_low=0.1, mask_high=10)
    got = weigh(batch, before, algorithm, cap=1.1)
    assert torch.isfinite(got.values).all()
    assert got.kept.tolist() == [False, True, True, True, False, True, True, True, True]
    assert got.values[1] == 0  # its prefix is unknown


def test_decay_weights_travel_with_their_tokens():
    weights = [[0.5, 0.5, 0.5], [2.0, 1.0, 1.0, 1.0], [1.0, 1.0]]
    batch, before = batch_of(RATIOS, prefixes=[0, 1, 0], weights=weights)
    got = weigh(batch, before, replace(DEFAULTS["decoupled_ppo"], prefix_cap=3.0))
    np.testing.assert_allclose(got.values, [0.5] * 3 + [6.0, 3.0, 3.0, 3.0] + [1.0] * 2, rtol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "decoupled_ppo"])
def test_guards_cap_bounds_the_weight_that_the_loss_uses(name):
    """With a proximal anchor min(w, own cap, c); with a behaviour anchor u min(w, c), as r = u w."""
    batch, before = batch_of(RATIOS)
    got = weigh(batch, before, DEFAULTS[name], cap=1.2)
    used = [math.exp(r) for row in RATIOS for r in row]
    np.testing.assert_allclose(np.array(used) * got.values.numpy(), np.minimum(used, 1.2), rtol=1e-5)


def test_negative_advantages_may_have_a_tighter_cap():
    ratios = torch.tensor([1.0, 1.0, 0.2, -1.0])
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    algorithm = replace(DEFAULTS["tis"], behaviour_cap=2.0, behaviour_cap_negative=1.1)
    got = behaviour_weight(ratios, torch.zeros(4), advantages, algorithm)
    np.testing.assert_allclose(got, [2.0, 1.1, 1.1, math.exp(-1)], rtol=1e-6)
    same = behaviour_weight(ratios, torch.zeros(4), advantages, replace(algorithm, behaviour_cap_negative=None))
    np.testing.assert_allclose(same, [2.0, 2.0, math.exp(0.2), math.exp(-1)], rtol=1e-6)


def test_means_of_answers_leave_out_what_does_not_count():
    values = torch.tensor([1.0, 2.0, 6.0, 5.0])
    answers = torch.tensor([7, 3, 3, 9])
    counted = torch.tensor([True, True, False, False])
    assert answer_means(values, answers, counted).tolist() == [1.0, 2.0, 2.0, 0.0]


LOGPROBS = [[-0.5, -1.2, -2.0], [-0.1, -3.0], [-0.7]]
RECORDED = [[-0.6, -1.0, -2.1], [-0.4, -2.0], [-2.9]]
PROXIMAL = [[-0.4, -1.3, -1.5], [-0.2, -1.4], [-1.1]]
ADVANTAGES = [1.0, -0.5, 2.0]


def flat(rows, **kwargs):
    return torch.tensor([x for row in rows for x in row], **kwargs)


def losses_of(algorithm, logprobs, **kwargs):
    return token_losses(
        logprobs,
        behaviour=flat(RECORDED),
        advantages=flat([[a] * len(row) for a, row in zip(ADVANTAGES, LOGPROBS, strict=True)]),
        algorithm=algorithm,
        proximal=flat(PROXIMAL),
        answers=flat([[i] * len(row) for i, row in enumerate(LOGPROBS)]),
        **kwargs,
    )


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.3, 0.5)])
def test_gspo_against_its_formula(anchor, low, high):
    """Value, and gradient with respect to every logprob, of mean_i min(s_i A_i, clip(s_i) A_i)."""
    algorithm = replace(DEFAULTS["gspo"], anchor=anchor, clip_low=low, clip_high=high, behaviour_cap=5.0)
    logprobs = flat(LOGPROBS, requires_grad=True)
    losses = losses_of(algorithm, logprobs)
    total = sum(part.mean() for part in torch.split(losses, [3, 2, 1]))
    total.backward()
    expected, gradient = 0.0, []
    below = RECORDED if anchor == "behaviour" else PROXIMAL
    for now, old, mid, recorded, a in zip(LOGPROBS, below, PROXIMAL, RECORDED, ADVANTAGES, strict=True):
        n = len(now)
        s = math.exp(sum(x - y for x, y in zip(now, old, strict=True)) / n)
        w = 1.0
        if anchor == "proximal":
            w = min(math.exp(sum(x - y for x, y in zip(mid, recorded, strict=True)) / n), 5.0)
        clipped = min(max(s, 1 - low), 1 + high)
        expected -= w * min(s * a, clipped * a)
        gradient += [-w * s * a / n if s * a <= clipped * a else 0.0] * n
    assert total.item() == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(logprobs.grad, gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_cispo_against_its_formula(anchor):
    """Gradient -w clip(r) A on every token, bounded and never cut."""
    algorithm = replace(DEFAULTS["cispo"], anchor=anchor, clip_low=0.1, clip_high=0.3, behaviour_cap=2.0)
    logprobs = flat(LOGPROBS, requires_grad=True)
    losses = losses_of(algorithm, logprobs)
    losses.sum().backward()
    value, gradient = [], []
    for now, recorded, mid, a in zip(LOGPROBS, RECORDED, PROXIMAL, ADVANTAGES, strict=True):
        for x, b, p in zip(now, recorded, mid, strict=True):
            ratio = math.exp(x - (b if anchor == "behaviour" else p))
            weight = min(max(ratio, 0.9), 1.3) * (min(math.exp(p - b), 2.0) if anchor == "proximal" else 1.0)
            value.append(-weight * a * x)
            gradient.append(-weight * a)
    np.testing.assert_allclose(losses.detach(), value, rtol=1e-5)
    np.testing.assert_allclose(logprobs.grad, gradient, rtol=1e-5)
    assert (logprobs.grad != 0).all()


def test_token_left_out_of_gspo_leaves_the_mean_too():
    algorithm = replace(DEFAULTS["gspo"], clip_low=0.9, clip_high=9.0)
    counted = torch.tensor([True, True, False, True, True, True])
    whole, part = losses_of(algorithm, flat(LOGPROBS)), losses_of(algorithm, flat(LOGPROBS), counted=counted)
    s = math.exp((0.1 - 0.2) / 2)
    np.testing.assert_allclose(part[:2], [-s, -s], rtol=1e-5)
    assert abs(float(whole[0] - part[0])) > 1e-3
    np.testing.assert_array_equal(whole[3:], part[3:])
