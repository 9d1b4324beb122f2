"""Each objective against a reference written token by token with ``math``."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.learner.algorithms import DEFAULTS
from actors.learner.losses import aggregate, clipping, denominator, kl_penalty, token_losses

LOGPROBS = [-0.5, -1.2, -2.0, -0.1, -3.0, -0.7]
BEHAVIOUR = [-0.6, -2.0, -1.0, -0.1, -1.0, -2.9]
PROXIMAL = [-0.4, -1.3, -1.5, -0.2, -1.4, -1.1]
REFERENCE = [-0.9, -1.0, -2.5, -0.3, -2.0, -0.7]
ADVANTAGES = [1.0, 1.0, -0.5, -0.5, -2.0, -2.0]
LENGTHS = [2, 2, 2, 2, 2, 2]


def t(values, **kwargs):
    return torch.tensor(values, dtype=torch.float32, **kwargs)


def clipped(ratio, advantage, low, high, dual=None):
    value = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        value = max(value, dual * advantage)
    return value


def losses(algorithm, **kwargs):
    return token_losses(t(LOGPROBS), behaviour=t(BEHAVIOUR), advantages=t(ADVANTAGES), algorithm=algorithm, **kwargs)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_behaviour_anchored_losses(name, dual):
    algorithm = replace(DEFAULTS[name], dual_clip=dual)
    high = 0.28 if name == "dapo" else 0.2
    expected = [
        -clipped(math.exp(p - b), a, 0.2, high, dual) for p, b, a in zip(LOGPROBS, BEHAVIOUR, ADVANTAGES, strict=True)
    ]
    np.testing.assert_allclose(losses(algorithm).numpy(), expected, rtol=1e-5)
    # the proximal policy has no say in them
    np.testing.assert_array_equal(losses(algorithm, proximal=t(PROXIMAL)).numpy(), losses(algorithm).numpy())


def test_dual_clip_binds_in_the_example():
    assert math.exp(LOGPROBS[5] - BEHAVIOUR[5]) > 3
    assert losses(DEFAULTS["grpo"])[5] > 17
    assert losses(replace(DEFAULTS["grpo"], dual_clip=3.0))[5] == 6


@pytest.mark.parametrize(("name", "cap"), [("decoupled_ppo", 5.0), ("tis", 2.0), ("decoupled_ppo", 1.5)])
def test_proximally_anchored_losses(name, cap):
    algorithm = replace(DEFAULTS[name], behaviour_cap=cap)
    expected = [
        -min(math.exp(x - b), cap) * clipped(math.exp(p - x), a, 0.2, 0.2)
        for p, x, b, a in zip(LOGPROBS, PROXIMAL, BEHAVIOUR, ADVANTAGES, strict=True)
    ]
    np.testing.assert_allclose(losses(algorithm, proximal=t(PROXIMAL)).numpy(), expected, rtol=1e-5)


def test_default_caps_are_those_of_the_papers_and_bind():
    weight = math.exp(PROXIMAL[5] - BEHAVIOUR[5])
    assert 5 < weight < 7
    ratio = math.exp(LOGPROBS[5] - PROXIMAL[5])
    for name, cap in [("decoupled_ppo", 5.0), ("tis", 2.0)]:
        got = losses(DEFAULTS[name], proximal=t(PROXIMAL))[5]
        assert float(got) == pytest.approx(cap * ratio * 2.0, rel=1e-5)


@pytest.mark.parametrize("name", ["decoupled_ppo", "tis"])
def test_single_update_gradient_is_truncated_importance_sampling(name):
    """With pi_prox = pi the clip is inert and d loss / d log pi = -min(pi / beta, cap) A."""
    algorithm = DEFAULTS[name]
    logprobs = t(LOGPROBS, requires_grad=True)
    token_losses(logprobs, behaviour=t(BEHAVIOUR), advantages=t(ADVANTAGES), algorithm=algorithm).sum().backward()
    expected = [
        -min(math.exp(p - b), algorithm.behaviour_cap) * a
        for p, b, a in zip(LOGPROBS, BEHAVIOUR, ADVANTAGES, strict=True)
    ]
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, rtol=1e-5)


def test_clip_cuts_exactly_the_gradients_that_it_reports():
    algorithm = replace(DEFAULTS["dapo"], dual_clip=3.0)
    logprobs = t(LOGPROBS, requires_grad=True)
    token_losses(logprobs, behaviour=t(BEHAVIOUR), advantages=t(ADVANTAGES), algorithm=algorithm).sum().backward()
    cut = clipping((logprobs.detach() - t(BEHAVIOUR)).exp(), t(ADVANTAGES), algorithm)
    assert cut.high.tolist() == [False, True, False, False, False, False]
    assert cut.low.tolist() == [False, False, True, False, True, False]
    assert cut.dual.tolist() == [False, False, False, False, False, True]
    assert ((logprobs.grad == 0) == (cut.low | cut.high | cut.dual)).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_term(estimator):
    def k(p, r):
        d = r - p
        return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[estimator]

    expected = [k(p, r) for p, r in zip(LOGPROBS, REFERENCE, strict=True)]
    np.testing.assert_allclose(kl_penalty(t(LOGPROBS), t(REFERENCE), estimator).numpy(), expected, rtol=1e-5, atol=1e-7)
    algorithm = replace(DEFAULTS["grpo"], kl_coefficient=0.3, kl_estimator=estimator)
    got = losses(algorithm, reference=t(REFERENCE)) - losses(DEFAULTS["grpo"])
    np.testing.assert_allclose(got.numpy(), [0.3 * e for e in expected], rtol=1e-4, atol=1e-6)


def test_huge_log_ratios_stay_finite():
    for name, algorithm in DEFAULTS.items():
        logprobs = t([-0.1, -300.0], requires_grad=True)
        loss = token_losses(
            logprobs,
            behaviour=t([-300.0, -0.1]),
            advantages=t([-1.0, 1.0]),
            algorithm=algorithm,
            answers=torch.tensor([0, 1]),
        )
        loss.sum().backward()
        assert torch.isfinite(loss).all(), name
        assert torch.isfinite(logprobs.grad).all(), name


def test_aggregations_by_hand():
    values = t([1.0, 2.0, 3.0, 10.0])  # an answer of three tokens and an answer of one
    counts = t([3.0, 3.0, 3.0, 1.0])
    kept = torch.ones(4, dtype=torch.bool)

    def total(aggregation, kept=kept):
        below = denominator(aggregation, tokens=4, answers=2, max_tokens=8)
        return float(aggregate(values, answer_tokens=counts, kept=kept, aggregation=aggregation, denominator=below))

    assert total("token") == pytest.approx(16 / 4)
    assert total("sequence") == pytest.approx((2 + 10) / 2)
    assert total("constant") == pytest.approx(16 / 16)
    # a rejected token is missing from the sum and still counts below the line
    rejected = torch.tensor([True, False, True, True])
    assert total("token", rejected) == pytest.approx(14 / 4)
    assert total("sequence", rejected) == pytest.approx((4 / 3 + 10) / 2)


def test_nothing_kept_still_has_a_gradient_of_zero():
    logprobs = t([-1.0], requires_grad=True)
    loss = aggregate(logprobs, answer_tokens=t([1.0]), kept=torch.tensor([False]), aggregation="token", denominator=1.0)
    loss.backward()
    assert loss.item() == 0
    assert logprobs.grad.item() == 0


def test_empty_batch_has_a_denominator():
    assert denominator("token", tokens=0, answers=0, max_tokens=8) == 1.0
