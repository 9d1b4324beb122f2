"""Expected gradients on a policy small enough to enumerate: 3 tokens, answers of length 3, all 27 of them.

Two policies are used. The *general* one has a free distribution after every prefix (13 x 3 logits). In the *factorised*
one a position's distribution does not depend on what came before.

Token-level weights pi / beta are exact in the places where the theory says so, and only there:
* on-policy data, any policy, any reward: the policy gradient;
* stale data, factorised policy, reward that adds up over positions: the policy gradient;
* stale data in general: the gradient of the usual surrogate E_beta[sum_t pi_t / beta_t A]. It differs from the policy
  gradient, because it neither reweights the prefix nor what follows. A test below pins that down too.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.learner.advantages import group_advantages
from actors.learner.algorithms import DEFAULTS
from actors.learner.losses import aggregate, denominator, token_losses
from actors.learner.options import OverlongOptions
from tests.actors.learner.batches import make_group

SEQUENCES = list(itertools.product(range(3), repeat=3))
IDS = torch.tensor(SEQUENCES)
UNCAPPED = {name: replace(DEFAULTS[name], behaviour_cap=1e9) for name in ("decoupled_ppo", "tis")}
BASELINE = 0.3


def contexts(factorised):
    """Row of the logits table that decides each token of each sequence, int64[27, 3]."""
    if factorised:
        return torch.arange(3).expand(27, 3)
    return torch.stack([torch.zeros(27, dtype=torch.long), 1 + IDS[:, 0], 4 + 3 * IDS[:, 0] + IDS[:, 1]], dim=1)


def token_logprobs(logits, factorised):
    return logits.log_softmax(-1)[contexts(factorised), IDS]


def logits_of(seed, factorised):
    return torch.randn(3 if factorised else 13, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def policy_gradient(logits, rewards, factorised):
    """Gradient of E_pi[R], by enumeration."""
    leaf = logits.clone().requires_grad_(True)
    (token_logprobs(leaf, factorised).sum(1).exp() * rewards).sum().backward()
    return leaf.grad


def expected_gradient(algorithm, logits, behaviour, rewards, factorised, *, ignore_behaviour=False):
    """Minus the gradient of E_beta[sum of token losses], through the learner's own loss functions."""
    leaf = logits.clone().requires_grad_(True)
    now = token_logprobs(leaf, factorised)
    recorded = token_logprobs(behaviour, factorised)
    losses = token_losses(
        now.flatten(),
        behaviour=(now.detach() if ignore_behaviour else recorded).flatten(),
        advantages=(rewards - BASELINE).repeat_interleave(3),
        algorithm=algorithm,
        answers=torch.arange(27).repeat_interleave(3),
    )
    drawn = recorded.sum(1).exp().repeat_interleave(3)
    total = aggregate(
        losses * drawn,
        answer_tokens=torch.full((81,), 3.0),
        kept=torch.ones(81, dtype=torch.bool),
        aggregation="token",
        denominator=denominator("token", tokens=3, answers=1, max_tokens=3),
    )
    total.backward()
    return -3 * leaf.grad


def additive_rewards(seed=1):
    values = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values[torch.arange(3), IDS].sum(1)


def any_rewards(seed=2):
    return torch.randn(27, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", sorted(DEFAULTS))
@pytest.mark.parametrize("factorised", [False, True])
def test_on_policy_gradient_is_exact_for_every_algorithm(name, factorised):
    logits = logits_of(0, factorised)
    got = expected_gradient(DEFAULTS[name], logits, logits, any_rewards(), factorised)
    assert close(got, policy_gradient(logits, any_rewards(), factorised)) < 1e-5


@pytest.mark.parametrize("name", sorted(UNCAPPED))
def test_behaviour_weights_remove_the_bias_of_stale_data(name):
    logits, behaviour = logits_of(0, True), logits_of(9, True)
    exact = policy_gradient(logits, additive_rewards(), True)
    assert close(expected_gradient(UNCAPPED[name], logits, behaviour, additive_rewards(), True), exact) < 1e-5


@pytest.mark.parametrize("name", sorted(UNCAPPED))
def test_ignoring_the_behaviour_policy_is_biased(name):
    """Negative control: recomputed logprobs instead of recorded ones."""
    logits, behaviour = logits_of(0, True), logits_of(9, True)
    exact = policy_gradient(logits, additive_rewards(), True)
    got = expected_gradient(UNCAPPED[name], logits, behaviour, additive_rewards(), True, ignore_behaviour=True)
    assert close(got, exact) > 0.3


def test_a_cap_that_binds_is_biased():
    """Negative control: truncation trades bias for variance, and the test sees it."""
    logits, behaviour = logits_of(0, True), logits_of(9, True)
    exact = policy_gradient(logits, additive_rewards(), True)
    capped = replace(DEFAULTS["tis"], behaviour_cap=1.5)
    assert close(expected_gradient(capped, logits, behaviour, additive_rewards(), True), exact) > 0.05


@pytest.mark.parametrize("name", sorted(UNCAPPED))
def test_stale_gradient_is_that_of_the_token_surrogate(name):
    logits, behaviour = logits_of(0, False), logits_of(9, False)
    leaf = logits.clone().requires_grad_(True)
    drawn = token_logprobs(behaviour, False)
    ratios = (token_logprobs(leaf, False) - drawn).exp().sum(1)
    (drawn.sum(1).exp() * ratios * (any_rewards() - BASELINE)).sum().backward()
    got = expected_gradient(UNCAPPED[name], logits, behaviour, any_rewards(), False)
    assert close(got, leaf.grad) < 1e-5
    # and the surrogate is not the policy gradient when positions depend on each other
    assert close(leaf.grad, policy_gradient(logits, any_rewards(), False)) > 0.1


def test_mixed_versions_inside_an_answer_are_corrected_token_by_token():
    """An answer interrupted after its first token: old weights wrote token 0, newer ones the rest."""
    logits, old, newer = logits_of(0, True), logits_of(9, True), logits_of(11, True)
    behaviour = torch.cat([old[:1], newer[1:]])
    exact = policy_gradient(logits, additive_rewards(), True)
    assert close(expected_gradient(UNCAPPED["tis"], logits, behaviour, additive_rewards(), True), exact) < 1e-5
    # control: one version for the whole answer is wrong
    leaf = logits.clone().requires_grad_(True)
    drawn = token_logprobs(behaviour, True)
    losses = token_losses(
        token_logprobs(leaf, True).flatten(),
        behaviour=token_logprobs(newer, True).flatten(),
        advantages=(additive_rewards() - BASELINE).repeat_interleave(3),
        algorithm=UNCAPPED["tis"],
    )
    (losses * drawn.sum(1).exp().repeat_interleave(3)).sum().backward()
    assert close(-leaf.grad[1:], exact[1:]) < 1e-5
    assert close(-leaf.grad[0], exact[0]) > 0.3


def test_group_mean_of_two_is_half_the_policy_gradient():
    """All 729 pairs: a baseline that contains the answer itself shrinks the gradient by (G - 1) / G, exactly."""
    logits = logits_of(0, False)
    rewards = any_rewards()
    exact = policy_gradient(logits, rewards, False)
    probabilities = token_logprobs(logits, False).sum(1).exp()
    weight = torch.zeros(27, dtype=torch.float64)
    for i, j in itertools.product(range(27), repeat=2):
        group = make_group(0, [SEQUENCES[i], SEQUENCES[j]], [float(rewards[i]), float(rewards[j])])
        values = group_advantages(group, "group_mean", overlong=OverlongOptions(), max_tokens=3).values
        both = probabilities[i] * probabilities[j]
        weight[i] += both * float(values[0]) / 2
        weight[j] += both * float(values[1]) / 2
    leaf = logits.clone().requires_grad_(True)
    (weight * token_logprobs(leaf, False).sum(1)).sum().backward()
    assert close(leaf.grad, exact / 2) < 1e-5
    assert close(leaf.grad, exact) == pytest.approx(0.5, abs=1e-4)


def test_dividing_by_each_answers_own_length_is_biased_against_long_answers():
    """Why Dr.GRPO divides by a constant: 'sequence' gives tokens of a long wrong answer less weight than short ones."""
    losses = torch.ones(12)
    lengths = torch.tensor([2.0] * 2 + [10.0] * 10)
    kept = torch.ones(12, dtype=torch.bool)
    weight = {}
    for kind in ("sequence", "constant", "token"):
        leaf = losses.clone().requires_grad_(True)
        below = denominator(kind, tokens=12, answers=2, max_tokens=10)
        aggregate(leaf, answer_tokens=lengths, kept=kept, aggregation=kind, denominator=below).backward()
        weight[kind] = leaf.grad.numpy()
    assert weight["sequence"][0] == pytest.approx(5 * weight["sequence"][-1])
    np.testing.assert_allclose(weight["constant"], 1 / 20)
    np.testing.assert_allclose(weight["token"], 1 / 12)
