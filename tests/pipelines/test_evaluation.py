"""Evaluation statistics against brute force enumeration and simulated coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binomtest

from pipelines.evaluation import cluster_estimate, correct_at_least, evaluate, failure, pass_at_k, wilson_interval
from storage.records import GroupKey, SampleHeader, Timings


def header(prompt: int, value: float | None, index: int = 0, **changes) -> SampleHeader:
    fields = {
        "key": GroupKey("heldout", 0, prompt),
        "index": index,
        "attempt": 0,
        "tokens": 10,
        "oldest_version": 0,
        "newest_version": 0,
        "finish_reason": "stop",
        "drafted": 0,
        "accepted": 0,
        "forward_passes": 10,
        "reward": value,
        "reward_parts": {"exact": value, "style": 0.25},
        "reward_status": "ok",
        "timings": Timings(),
    }
    return SampleHeader(**(fields | changes))


def answers(table: dict[int, list[float | None]]) -> dict[GroupKey, list[SampleHeader]]:
    return {
        GroupKey("heldout", 0, prompt): [header(prompt, value, index) for index, value in enumerate(values)]
        for prompt, values in table.items()
    }


EXACT = correct_at_least("exact", 1.0)


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_equals_enumeration_of_all_subsets(samples):
    for correct in range(samples + 1):
        outcomes = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(outcomes, k))
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased_where_the_naive_formula_is_not():
    rate, samples, k = 0.3, 6, 3
    law = [math.comb(samples, c) * rate**c * (1 - rate) ** (samples - c) for c in range(samples + 1)]
    truth = 1 - (1 - rate) ** k
    ours = sum(p * pass_at_k(samples, c, k) for c, p in enumerate(law))
    naive = sum(p * (1 - (1 - c / samples) ** k) for c, p in enumerate(law))
    assert ours == pytest.approx(truth, abs=1e-12)
    assert abs(naive - truth) > 0.01  # the control: the plug-in estimate is biased


def test_pass_at_k_stays_finite_for_large_counts():
    value = pass_at_k(100_000, 7, 50_000)
    assert value == pytest.approx(1 - 0.5**7, abs=1e-3)


@pytest.mark.parametrize(("samples", "correct", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_refuses_impossible_counts(samples, correct, k):
    with pytest.raises(ValueError, match=r"pass@|correct"):
        pass_at_k(samples, correct, k)


def test_greedy_accuracy_is_the_share_of_correct_prompts_with_a_wilson_interval():
    table = {p: [1.0 if p < 13 else 0.0] for p in range(20)}
    result = evaluate(answers(table), {}, EXACT)
    reference = binomtest(13, 20).proportion_ci(method="wilson")
    assert result.greedy.value == 13 / 20
    assert (result.greedy.low, result.greedy.high) == pytest.approx((reference.low, reference.high), abs=1e-9)
    assert result.mean_at_k is None
    assert "eval/heldout/mean_at_k" not in result.metrics("eval/heldout")


def test_all_correct_still_has_an_interval_of_positive_width():
    result = evaluate(answers({p: [1.0] for p in range(30)}), {}, EXACT)
    assert result.greedy.value == result.greedy.high == 1.0
    assert 0.85 < result.greedy.low < 0.95


def test_mean_at_k_and_pass_at_k_match_hand_computed_values():
    table = {0: [1.0, 0.0, 0.0, 0.0], 1: [1.0, 1.0, 0.0, 0.0], 2: [0.0] * 4}
    result = evaluate({}, answers(table), EXACT, k=4)
    assert result.mean_at_k.value == pytest.approx((0.25 + 0.5 + 0) / 3)
    assert result.mean_at_k.stderr == pytest.approx(np.std([0.25, 0.5, 0], ddof=1) / math.sqrt(3))
    assert sorted(result.pass_at) == [1, 2, 4]
    assert result.pass_at[1].value == pytest.approx(result.mean_at_k.value)
    assert result.pass_at[2].value == pytest.approx((1 / 2 + 5 / 6 + 0) / 3)
    assert result.pass_at[4].value == pytest.approx(2 / 3)
    metrics = result.metrics("eval/x")
    assert metrics["eval/x/pass_at_k"] == metrics["eval/x/pass_at_4"] == pytest.approx(2 / 3)
    assert evaluate({}, answers(table), EXACT) == result  # k is found from the answers
    assert result.greedy is None
    assert "eval/x/accuracy" not in metrics


def test_failed_answers_leave_the_figures_and_are_counted():
    greedy = {
        GroupKey("heldout", 0, 0): [header(0, 1.0)],
        GroupKey("heldout", 0, 1): [header(1, 0.0)],
        GroupKey("heldout", 0, 2): [header(2, None, reward_status="error")],
        GroupKey("heldout", 0, 3): [header(3, None, reward_status="timeout")],
        GroupKey("heldout", 0, 4): [header(4, None, reward_status="pending")],
        GroupKey("heldout", 0, 5): [header(5, None, reward_status="error", finish_reason="error", tokens=999)],
        GroupKey("heldout", 0, 6): [header(6, None, reward_status="abstained")],
        GroupKey("heldout", 0, 7): [header(7, 1.0, reward_parts={"exact": None})],
    }
    result = evaluate(greedy, {}, EXACT)
    assert result.greedy.value == 0.5
    assert result.greedy.prompts == 2
    assert result.errors == {"reward_error": 1, "reward_timeout": 1, "unscored": 1, "generation": 1}
    assert result.error_share == 0.5
    assert result.abstained == 2
    assert result.length_mean == 10  # the answer that broke off does not count


def test_a_prompt_with_a_failed_sample_enters_only_the_entries_it_can_support():
    sampled = answers({0: [1.0, 0.0], 1: [0.0, 0.0]})
    sampled[GroupKey("heldout", 0, 1)][1] = header(1, None, 1, reward_status="error")
    result = evaluate({}, sampled, EXACT, k=2)
    assert result.pass_at[2].value == 1.0
    assert result.pass_at[2].prompts == 1
    assert result.pass_at[1].prompts == 2
    assert result.mean_at_k.value == pytest.approx(0.25)


def test_lengths_and_truncation_describe_greedy_answers():
    greedy = {
        GroupKey("heldout", 0, 0): [header(0, 1.0, tokens=4)],
        GroupKey("heldout", 0, 1): [header(1, 0.0, tokens=8, finish_reason="length")],
    }
    result = evaluate(greedy, answers({0: [0.0], 1: [1.0]}), EXACT, k=1)
    assert result.length_mean == 6
    assert result.truncated_share == 0.5
    assert result.reward_mean == 0.5
    assert result.prompts == 2
    assert result.answers == 4


def test_threshold_decides_correctness_and_reads_only_the_named_function():
    assert correct_at_least("exact", 0.5)(header(0, 0.5)) is True
    assert correct_at_least("exact", 0.5)(header(0, 0.49)) is False
    assert correct_at_least("style", 0.2)(header(0, 0.0)) is True
    assert correct_at_least("missing", 0.2)(header(0, 1.0)) is None


def test_surplus_answers_are_refused():
    with pytest.raises(ValueError, match="2 greedy answers"):
        evaluate(answers({0: [1.0, 0.0]}), {}, EXACT)
    with pytest.raises(ValueError, match="at most k=1"):
        evaluate({}, answers({0: [1.0, 0.0]}), EXACT, k=1)


def test_nothing_judged_gives_no_figure_rather_than_zero():
    result = evaluate({GroupKey("h", 0, 0): [header(0, None, reward_status="error")]}, {}, EXACT)
    assert result.greedy is None
    assert result.metrics("eval/h")["eval/h/error_share"] == 1.0
    assert "eval/h/accuracy" not in result.metrics("eval/h")
    assert failure(header(0, 1.0)) is None


def test_interval_over_prompts_covers_the_truth_and_an_interval_over_samples_does_not():
    rng = np.random.default_rng(0)
    prompts, k, covered, naive_covered, trials = 60, 16, 0, 0, 400
    for _ in range(trials):
        rates = rng.beta(0.5, 0.5, prompts)  # prompts are easy or hard: siblings agree
        means = rng.binomial(k, rates) / k
        estimate = cluster_estimate(list(means), prompts * k)
        covered += estimate.low <= 0.5 <= estimate.high
        low, high = wilson_interval(float(means.mean()), prompts * k)
        naive_covered += low <= 0.5 <= high
    assert covered / trials > 0.91
    assert naive_covered / trials < 0.7  # the control: treating siblings as independent is far too sure
