"""The numbers of a step, worked out by hand."""

import pytest

from pipelines.round_books import RoundResult
from pipelines.step_metrics import StepClock, accuracy, is_correct, step_metrics
from storage.ledger import LedgerCounts
from storage.records import GroupKey, SampleHeader, Timings


def header(prompt, index, *, tokens=10, reward=1.0, exact=1.0, finished=100.0, rewarded=100.5, **changes):
    fields = {
        "key": GroupKey("train", 0, prompt),
        "index": index,
        "attempt": 0,
        "tokens": tokens,
        "oldest_version": 3,
        "newest_version": 3,
        "finish_reason": "stop",
        "drafted": 0,
        "accepted": 0,
        "forward_passes": tokens,
        "reward": reward,
        "reward_parts": {"exact": exact, "other": 0.25},
        "reward_status": "ok",
        "timings": Timings(dispatched=90.0, finished=finished, rewarded=rewarded),
    }
    return SampleHeader(**{**fields, **changes})


def metrics_of(headers, *, launched_tokens=None, errors=0, scored=None, filtered=None, **clock):
    groups = {}
    for h in headers:
        groups.setdefault(h.key, []).append(h)
    result = RoundResult(
        keys=tuple(groups),
        headers=groups,
        filtered=filtered or {},
        started=90.0,
        ended=101.0,
        generated_tokens=launched_tokens or sum(h.tokens for h in headers),
        dropped_tokens=max(0, (launched_tokens or 0) - sum(h.tokens for h in headers)),
        errors=errors,
        scored=scored or len(headers),
    )
    times = {"step": 10.0, "generate": 6.0, "learn": 2.0, "publish": 0.5, "pause": 0.1, **clock}
    counts = LedgerCounts(launched=5, queued=1, leased=0, ready=0, trained=3, ended={"zero_variance": 1})
    return step_metrics(
        result, StepClock(**times), {"grad_norm": 0.5}, counts, version=3, learner_version=4, correct_at=1.0
    )


def test_the_parts_of_a_step_add_up():
    metrics = metrics_of([header(0, 0), header(0, 1, rewarded=101.0)])
    assert metrics["time/reward_s"] == pytest.approx(1.0)  # from the last answer to the last score
    assert metrics["time/other_s"] == pytest.approx(10 - 6 - 1 - 2)
    assert metrics["time/overhead_share"] == pytest.approx(0.1)


def test_goodput_counts_trained_tokens_over_the_whole_step_and_waste_the_rest():
    metrics = metrics_of([header(0, 0, tokens=30), header(0, 1, tokens=10)], launched_tokens=50)
    assert metrics["goodput/tokens_per_s"] == pytest.approx(4.0)
    assert metrics["rollout/tokens_per_s"] == pytest.approx(50 / 6)
    assert metrics["waste/tokens"] == 10
    assert metrics["waste/share"] == pytest.approx(0.2)


def test_failed_scores_are_not_zeros():
    failed = header(0, 2, reward=None, exact=None, reward_status="error")
    metrics = metrics_of([header(0, 0), header(0, 1, reward=0.0, exact=0.0), failed], errors=1)
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["accuracy/train"] == pytest.approx(0.5)
    assert metrics["reward/error_share"] == pytest.approx(1 / 3)
    assert metrics["reward/part/exact"] == pytest.approx(0.5)


def test_staleness_is_counted_from_the_oldest_token():
    metrics = metrics_of([header(0, 0, oldest_version=1), header(0, 1, oldest_version=3)])
    assert metrics["staleness/max"] == 2
    assert metrics["staleness/mean"] == 1


def test_groups_that_teach_nothing_are_counted():
    flat = [header(0, 0), header(0, 1)]
    mixed = [header(1, 0, reward=0.0), header(1, 1, reward=1.0)]
    assert metrics_of(flat + mixed)["reward/zero_variance_share"] == 0.5


def test_ended_groups_are_reported_by_reason():
    assert metrics_of([header(0, 0), header(0, 1)])["ledger/ended/zero_variance"] == 1


def test_acceptance_length_is_tokens_per_forward_pass():
    metrics = metrics_of([header(0, 0, tokens=30, forward_passes=10, drafted=40, accepted=20)])
    assert metrics["rollout/tokens_per_pass"] == pytest.approx(3)
    assert metrics["rollout/acceptance"] == pytest.approx(0.5)


def test_only_the_first_reward_function_decides_what_is_correct():
    assert is_correct(header(0, 0, exact=1.0), 1.0) is True
    assert is_correct(header(0, 0, exact=0.99), 1.0) is False
    assert is_correct(header(0, 0, exact=None), 1.0) is None
    assert accuracy([header(0, 0), header(0, 1, exact=None)], 1.0) == 1.0
    assert accuracy([], 1.0) == 0.0
