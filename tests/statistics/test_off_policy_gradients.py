"""Expected gradients of the off-policy corrections on a policy that can be enumerated: 3 tokens, answers of length 3.

Each test goes through the learner's own functions, in the order in which a step calls them.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.learner.algorithms import DEFAULTS
from actors.learner.losses import token_losses
from actors.learner.packing import Answer, collate
from actors.learner.token_weights import token_weights
from storage.records import GroupKey

SEQUENCES = list(itertools.product(range(3), repeat=3))
IDS = torch.tensor(SEQUENCES)
ROWS = torch.stack([torch.zeros(27, dtype=torch.long), 1 + IDS[:, 0], 4 + 3 * IDS[:, 0] + IDS[:, 1]], dim=1)
EVERYWHERE = torch.ones(81, dtype=torch.bool)
EXACT = replace(DEFAULTS["decoupled_ppo"], behaviour_cap=1e9, prefix_cap=1e9)


def logits_of(seed):
    return torch.randn(13, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scores(logits):
    """Logprob of each token of each sequence, float64[27, 3]."""
    return logits.log_softmax(-1)[ROWS, IDS]


REWARDS = torch.randn(27, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def exact_part(logits, positions):
    """E_pi[R sum over ``positions`` of grad log pi], by enumeration: that part of the policy gradient."""
    leaf = logits.clone().requires_grad_(True)
    table = scores(leaf)
    (table.detach().sum(1).exp() * REWARDS * table[:, positions].sum(1)).sum().backward()
    return leaf.grad


def micro_batch(recorded, prefix):
    """All 27 answers; the first ``prefix`` tokens of each have no gradient."""
    trained = np.arange(3) >= prefix
    answers = [
        Answer(
            key=GroupKey("train", 0, i),
            index=0,
            token_ids=np.array([0, *sequence], np.int32),
            prompt_tokens=1,
            policy=np.ones(3, np.bool_),
            behaviour=recorded[i].numpy().astype(np.float32),
            advantage=float(REWARDS[i]),
            trained=trained,
        )
        for i, sequence in enumerate(SEQUENCES)
    ]
    return collate(answers, range(27))


def expected_gradient(logits, behaviour, prefix, algorithm, *, weigh=True):
    """Minus the gradient of E_behaviour[loss], where token t of each answer is drawn from ``behaviour[t]``."""
    recorded = torch.stack([scores(b)[:, t] for t, b in enumerate(behaviour)], 1)
    batch = micro_batch(recorded, prefix)
    leaf = logits.clone().requires_grad_(True)
    now = scores(leaf).flatten()
    weights = token_weights(batch, EVERYWHERE, now.detach(), algorithm)
    losses = token_losses(
        now,
        behaviour=batch.behaviour,
        advantages=batch.advantages,
        algorithm=algorithm,
        answers=batch.answers,
        counted=weights.counted,
    )
    if weigh and weights.values is not None:
        losses = losses * weights.values
    drawn = recorded.sum(1).exp().repeat_interleave(3)
    (torch.where(weights.kept, losses, torch.zeros_like(losses)) * drawn).sum().backward()
    return -leaf.grad


def error(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("prefix", [1, 2])
def test_prefix_weight_makes_the_suffix_part_of_the_gradient_exact(prefix):
    """An older policy wrote the beginning, the current one the rest; any reward, any dependence between positions."""
    logits, old = logits_of(0), logits_of(9)
    behaviour = [old if t < prefix else logits for t in range(3)]
    exact = exact_part(logits, list(range(prefix, 3)))
    assert error(expected_gradient(logits, behaviour, prefix, EXACT), exact) < 1e-5
    # negative control: the gradient on the suffix alone, its prefix not weighted
    assert error(expected_gradient(logits, behaviour, prefix, EXACT, weigh=False), exact) > 0.2


def test_a_prefix_cap_that_binds_is_biased():
    logits, old = logits_of(0), logits_of(9)
    behaviour = [old, old, logits]
    exact = exact_part(logits, [2])
    assert error(expected_gradient(logits, behaviour, 2, replace(EXACT, prefix_cap=1.1)), exact) > 0.02


def test_leaving_the_prefix_out_is_not_the_whole_policy_gradient():
    """Why current_only is labelled biased: the part of the tokens before the boundary is missing."""
    logits = logits_of(0)
    got = expected_gradient(logits, [logits] * 3, 1, EXACT)
    assert error(got, exact_part(logits, [1, 2])) < 1e-5
    assert error(got, exact_part(logits, [0, 1, 2])) > 0.1


@pytest.mark.parametrize("name", ["gspo", "cispo"])
@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_on_policy_both_anchors_give_the_policy_gradient(name, anchor):
    logits = logits_of(0)
    algorithm = replace(DEFAULTS[name], anchor=anchor, behaviour_cap=1e9 if anchor == "proximal" else None)
    assert error(expected_gradient(logits, [logits] * 3, 0, algorithm), exact_part(logits, [0, 1, 2])) < 1e-5


def test_cispo_is_the_importance_weighted_surrogate_while_its_bound_is_loose():
    """Stale data: E_beta[sum_t (pi_t / beta_t) A grad log pi_t]; ignoring beta is something else."""
    logits, old = logits_of(0), logits_of(9)
    leaf = logits.clone().requires_grad_(True)
    drawn = scores(old)
    ((drawn.sum(1).exp() * REWARDS)[:, None] * (scores(leaf) - drawn).exp()).sum().backward()
    loose = replace(DEFAULTS["cispo"], clip_high=1e9)
    assert error(expected_gradient(logits, [old] * 3, 0, loose), leaf.grad) < 1e-5
    assert (
        error(expected_gradient(logits, [old] * 3, 0, replace(loose, clip_low=1e-6, clip_high=1e-6)), leaf.grad) > 0.2
    )
