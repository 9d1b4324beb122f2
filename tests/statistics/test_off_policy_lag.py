"""A bandit chain trained on data that is 16 steps old: what correcting for the behaviour policy is worth.

Three positions, three tokens each, reward the mean of 1, 0.5 and 0. The start prefers the token of reward 0.5, so its
share of the data says more about the old policy than about what pays: without a correction the first 16 steps push the
good and the middling token up alike.
"""

import pytest
import torch

from actors.learner.algorithms import DEFAULTS
from actors.learner.losses import token_losses

REWARDS = torch.tensor([1.0, 0.5, 0.0])
START = torch.tensor([0.1, 0.6, 0.3])
POSITIONS, GROUPS, SIBLINGS, STEPS, LAG = 3, 32, 8, 28, 16


def final_reward(seed, *, lag, ignore_behaviour=False, name="decoupled_ppo"):
    """Exact expected reward after ``STEPS`` batches of two minibatches each."""
    generator = torch.Generator().manual_seed(seed)
    logits = START.log().repeat(POSITIONS, 1).requires_grad_(True)
    optimiser = torch.optim.SGD([logits], lr=2.0)
    published = []
    for _ in range(STEPS):
        published = [*published, logits.detach().log_softmax(-1)][-(lag + 1) :]
        tokens = torch.multinomial(published[0].exp(), GROUPS * SIBLINGS, replacement=True, generator=generator).T

        def score(table, chosen):
            return table[torch.arange(POSITIONS), chosen]

        rewards = REWARDS[tokens].mean(1).view(GROUPS, SIBLINGS)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        proximal = score(published[-1], tokens)
        behaviour = proximal if ignore_behaviour else score(published[0], tokens)
        for part in torch.arange(len(tokens)).chunk(2):
            losses = token_losses(
                score(logits.log_softmax(-1), tokens[part]).flatten(),
                behaviour=behaviour[part].flatten(),
                advantages=advantages[part].repeat_interleave(POSITIONS),
                algorithm=DEFAULTS[name],
                proximal=proximal[part].flatten(),
            )
            optimiser.zero_grad()
            (losses.sum() / len(part)).backward()
            optimiser.step()
    return float((logits.detach().softmax(-1) @ REWARDS).mean())


@pytest.mark.parametrize("name", ["decoupled_ppo", "tis"])
@pytest.mark.parametrize("seed", range(3))
def test_behaviour_weights_beat_ignoring_the_behaviour_policy(seed, name):
    corrected = final_reward(seed, lag=LAG, name=name)
    ignored = final_reward(seed, lag=LAG, name=name, ignore_behaviour=True)
    assert corrected > ignored + 0.2


def test_corrected_lag_costs_little_against_fresh_data():
    assert final_reward(0, lag=LAG) > final_reward(0, lag=0) - 0.03


def test_without_lag_there_is_nothing_to_correct():
    """Negative control: the advantage above comes from the lag, not from the two ways of writing the loss."""
    fresh, ignored = (final_reward(0, lag=0, ignore_behaviour=flag) for flag in (False, True))
    assert abs(fresh - ignored) < 1e-6
