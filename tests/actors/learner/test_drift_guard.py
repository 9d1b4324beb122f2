from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from actors.learner.algorithms import DEFAULTS
from actors.learner.drift_guard import cap_for_floor, describe, judge, token_ess

LOGS = st.lists(st.floats(-20, 20), min_size=1, max_size=60).map(lambda x: torch.tensor(x, dtype=torch.float32))


def share(weights):
    return weights.sum() ** 2 / (weights**2).sum() / len(weights)


@settings(deadline=None)
@given(LOGS)
def test_effective_sample_share_is_kishs_and_does_not_see_scale(logs):
    weights = np.exp(logs.numpy().astype(np.float64))
    assert token_ess(logs) == pytest.approx(share(weights), rel=1e-9)
    assert token_ess(logs + 3) == pytest.approx(token_ess(logs), rel=1e-4)
    assert 1 / len(weights) - 1e-9 <= token_ess(logs) <= 1 + 1e-9


def test_equal_weights_are_on_policy_and_one_heavy_token_is_worth_one():
    assert token_ess(torch.zeros(50)) == 1
    assert token_ess(torch.tensor([20.0] + [0.0] * 49)) == pytest.approx(1 / 50, rel=1e-6)
    assert token_ess(torch.zeros(0)) == 1


@settings(deadline=None)
@given(LOGS, st.floats(0.05, 0.95))
def test_cap_lifts_the_share_to_the_floor_and_not_further(logs, floor):
    weights = np.exp(logs.numpy().astype(np.float64))
    cap = cap_for_floor(logs, floor)
    assert share(np.minimum(weights, cap)) >= floor - 1e-6
    assume(share(weights) < floor)
    assert share(np.minimum(weights, cap * 1.01)) < floor + 1e-3


def test_guard_acts_below_the_floor_only():
    on_policy, drifted = torch.zeros(20), torch.tensor([5.0] + [0.0] * 19)
    for action in ("off", "skip", "clip"):
        algorithm = replace(DEFAULTS["tis"], guard=action, ess_floor=0.3)
        assert judge(on_policy, algorithm).cap is None
        assert not judge(on_policy, algorithm).skip
        verdict = judge(drifted, algorithm)
        assert verdict.skip == (action == "skip")
        assert (verdict.cap is not None) == (action == "clip")


def test_alarm_says_what_was_done_and_what_to_do():
    drifted = torch.tensor([5.0] + [0.0] * 19)
    for action, words in (("skip", "not trained on"), ("clip", "capped at")):
        algorithm = replace(DEFAULTS["tis"], guard=action)
        text = describe(judge(drifted, algorithm), algorithm, 7)
        assert text.startswith("step 7: ")
        assert words in text
        assert "ess_floor=0.3" in text
        assert "max_staleness" in text
