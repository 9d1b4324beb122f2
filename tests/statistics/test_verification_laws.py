"""What drafts do to the law of the tokens: enumerated, and tested on the engine; each with controls that must fail."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from actors.rollout.verification import leniently_kept_counts
from pipelines.bench.losslessness import (
    OPTIONS,
    SETTINGS,
    VOCABULARY,
    Adversary,
    AnswerLaw,
    OldAnswers,
    answer_law,
    cell_p,
    enumeration_errors,
    random_policy,
    residual_bias,
    run,
    write_answers,
)
from pipelines.bench.verification_laws import (
    chi_square_p,
    enumerated_law,
    exact_rule_error,
    holm,
    lenient_law,
    lenient_rule_error,
    random_law,
    residual_redraw,
    residual_rule_error,
    total_variation,
)


def always_accept(drawn, drafts, lengths):
    return lengths


def accept_on_any_later_match(drawn, drafts, lengths):
    return (drawn[:, : drafts.shape[1]] == drafts).sum(axis=1)


@pytest.mark.parametrize("vocabulary", [8, 16, 32])
def test_enumerated_over_all_outcomes_the_exact_rule_leaves_the_law_of_three_tokens_alone(vocabulary):
    law = random_law(vocabulary, seed=4, cut=vocabulary // 3)
    likely, never = int(law.first.argmax()), int(law.first.argmin())
    assert law.first[never] == 0
    path = (likely, int(law.next[likely].argmax()))
    for draft in (path, (never, likely), (likely, never), (2, 2)):
        assert exact_rule_error(law, draft) < 1e-12
    for wrong in (always_accept, accept_on_any_later_match):
        assert exact_rule_error(law, path, wrong) > 1e-4


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    vocabulary=st.integers(8, 14),
    seed=st.integers(0, 10_000),
    draft=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    log_lenience=st.floats(-3, 3),
)
def test_both_rules_have_their_stated_law_whatever_policy_draft_and_lenience(vocabulary, seed, draft, log_lenience):
    policy, drafter = random_law(vocabulary, seed, cut=seed % 5), random_law(vocabulary, seed + 1, cut=seed % 3)
    assert exact_rule_error(policy, draft) < 1e-12
    assert lenient_rule_error(policy, drafter, log_lenience) < 1e-12


@pytest.mark.parametrize("vocabulary", [8, 32])
def test_the_lenient_law_is_not_the_policys_unless_the_drafter_is_the_policy(vocabulary):
    policy, drafter = random_law(vocabulary, 1), random_law(vocabulary, 2)
    distance = total_variation(policy.first, drafter.first)
    biases = [total_variation(lenient_law(policy, drafter, c).first, policy.first) for c in (0.0, 0.5, 1.0, 20.0)]
    assert biases[0] > 0.1 * distance
    assert biases == sorted(biases)
    assert biases[-1] == pytest.approx(distance)
    same = lenient_law(policy, policy, 0.0)
    np.testing.assert_allclose(same.joint, policy.joint, atol=1e-12)
    # At the first position the law is min(q, l p) and the rest of the mass spread as p.
    kept = np.minimum(drafter.first, policy.first)
    np.testing.assert_allclose(
        lenient_law(policy, drafter, 0.0).first, kept + (1 - kept.sum()) * policy.first, atol=1e-12
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p, q, c, u, n: leniently_kept_counts(p, q, c + 0.01, u, n),
        lambda p, q, c, u, n: leniently_kept_counts(q, p, c, u, n),
        lambda p, q, c, u, n: leniently_kept_counts(p, q, c, np.maximum(1 - u, 1e-300), n),
        lambda p, q, c, u, n: n,
    ],
)
def test_control_another_rule_does_not_have_the_stated_lenient_law(wrong):
    assert lenient_rule_error(random_law(8, 1), random_law(8, 2), 0.0, wrong) > 1e-4


@pytest.mark.parametrize("vocabulary", [8, 16, 32])
def test_with_the_residual_of_all_of_q_an_independent_draft_leaves_the_policys_law(vocabulary):
    for cuts in ((0, 0), (vocabulary // 4, 0), (0, vocabulary // 4), (vocabulary // 2, vocabulary // 2)):
        policy, drafter = (random_law(vocabulary, seed, cut=cut) for seed, cut in zip((1, 2), cuts, strict=True))
        assert residual_rule_error(policy, drafter, vocabulary) < 1e-12
        # Controls: SPEC-RL's draw from the policy, the residual of another q, and any lenience move the law.
        wrong = [
            enumerated_law(policy, drafter, 0.0),
            enumerated_law(policy, drafter, 0.0, redraw=lambda p, q, x: residual_redraw(vocabulary)(q, p, x)),
            enumerated_law(policy, drafter, 0.3, redraw=residual_redraw(vocabulary)),
        ]
        assert all(np.abs(law - policy.joint).max() > 1e-3 for law in wrong)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(vocabulary=st.integers(8, 24), seed=st.integers(0, 10_000), known=st.integers(0, 24))
def test_what_is_not_known_of_q_moves_the_law_by_no_more_than_its_mass(vocabulary, seed, known):
    policy, drafter = random_law(vocabulary, seed, cut=seed % 4), random_law(vocabulary, seed + 1)
    moved, bound = residual_bias(policy, drafter, min(known, vocabulary))
    assert moved <= bound + 1e-12
    if known >= vocabulary:
        assert moved < 1e-12


def test_the_law_comes_nearer_as_more_of_q_is_known_and_is_always_nearer_than_without_the_residual():
    policy, drafter = random_law(24, 5), random_law(24, 6)
    without = total_variation(enumerated_law(policy, drafter, 0.0).sum(axis=1), policy.first)
    moved = [residual_bias(policy, drafter, known)[0] for known in (1, 2, 4, 8, 16, 24)]
    assert moved == sorted(moved, reverse=True)
    assert without >= moved[0] > 0.01
    assert moved[-1] < 1e-12


def test_the_chi_square_test_is_that_of_scipy_and_rejects_as_often_as_it_says():
    rng = np.random.default_rng(1)
    law = rng.dirichlet(np.full(20, 3.0))
    counts = rng.multinomial(5000, law)
    assert chi_square_p(counts, law) == pytest.approx(stats.chisquare(counts, 5000 * law).pvalue)
    values = [chi_square_p(rng.multinomial(400, law), law) for _ in range(1000)]
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    assert chi_square_p([3, 97], [0, 1]) == 0


def test_holm_multiplies_the_smallest_by_their_number_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03, 0.9]) == pytest.approx([0.04, 0.09, 0.09, 0.9])
    assert holm([0.5, 0.6]) == [1.0, 1.0]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return random_policy(tmp_path_factory.mktemp("policy"), seed=0)


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_with_adversarial_drafts_the_engine_writes_the_law_of_the_policy(number, policy):
    setting = SETTINGS[number]
    law = answer_law(policy, setting)
    source = Adversary(law, seed=3)
    answers = write_answers(policy, setting, source, samples=2500, seed=number)
    plain = write_answers(policy, setting, None, samples=2500, seed=number)
    assert (answers != plain).any(axis=1).mean() < 1e-3
    values = [cell_p(answers, positions, expected) for positions, expected in law.cells().values()]
    assert min(holm(values)) > 1e-4
    # The same test must tell this law from the one of other sampling parameters.
    other = answer_law(policy, SETTINGS[number - 1])
    assert cell_p(answers, (0, 1), other.pair.joint) < 1e-6


def test_with_residuals_the_engine_writes_the_law_of_the_policy_from_answers_of_an_older_one(policy, tmp_path):
    law, old = answer_law(policy, SETTINGS[0]), answer_law(random_policy(tmp_path, seed=1), SETTINGS[0])

    def values(known):
        source = OldAnswers(old, 0.0, 11, known=known)
        answers = write_answers(policy, SETTINGS[0], source, samples=3000, seed=3)
        return [cell_p(answers, positions, expected) for positions, expected in law.cells().values()]

    assert min(holm(values(VOCABULARY))) > 1e-4
    # Controls: no residual, and one that knows too little.
    assert min(values(0)) < 1e-6
    assert min(values(3)) < 1e-6


def test_an_adversary_drafts_rightly_and_wrongly_and_is_heard(policy):
    law = answer_law(policy, SETTINGS[0])
    heard = []

    class Counting(Adversary):
        def observe(self, handles, drafted, accepted):
            heard.extend(zip(drafted.tolist(), accepted.tolist(), strict=True))

    write_answers(policy, SETTINGS[0], Counting(law, seed=0), samples=400, seed=1)
    assert {(3, 0), (3, 1), (2, 2), (1, 0)} <= set(heard)


def test_the_law_of_answers_is_a_law_and_its_cells_are_its_margins(policy):
    law = answer_law(policy, SETTINGS[1])
    assert isinstance(law, AnswerLaw)
    for table in law.tables:
        np.testing.assert_allclose(table.sum(axis=-1), 1)
    assert (law.tables[0] == 0).any()
    cells = {name: expected for name, (_, expected) in law.cells().items()}
    np.testing.assert_allclose(cells["tokens 1, 2"].sum(axis=0), cells["token 2"])
    np.testing.assert_allclose(cells["tokens 2, 3"].sum(axis=0), cells["token 3"])


def test_the_benchmark_reports_a_worst_p_that_holds_and_controls_that_are_caught():
    result = run({**OPTIONS, "samples": 2000, "seed": 5})
    assert result.figures["worst_p"] > 1e-3
    assert result.figures["control_p"] < 1e-6
    assert result.figures["stated_law_p"] > 1e-3
    assert result.figures["residual_p"] > 1e-3
    assert result.figures["enumeration_error"] < 1e-12
    assert max(enumeration_errors(7).values()) < 1e-12
