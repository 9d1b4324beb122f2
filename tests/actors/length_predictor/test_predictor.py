from __future__ import annotations

import math
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.length_predictor.options import LengthPredictorOptions
from actors.length_predictor.predictor import LengthPredictor, dump_state, parse_state
from actors.length_predictor.quality import recall_of_longest, spearman
from actors.length_predictor.records import Observation, Prediction, Query
from storage.errors import UserError
from tests.actors.length_predictor.worlds import hidden_world, mute_world, observations, telling_world, visit


def test_before_anything_is_known_everybody_is_in_the_middle() -> None:
    predictor = LengthPredictor(LengthPredictorOptions(prior_tokens=100))
    predictions = predictor.predict([Query(text="a"), Query(text="b", group="g")])
    assert predictions == [Prediction(rank=0.5, p50=100.0, p90=360.0, longest=360.0, confidence=0.0)] * 2
    assert predictor.predict([]) == []
    assert all(math.isnan(figures.spearman) for figures in predictor.quality().values())


def test_prompts_that_were_never_seen_are_ranked_by_their_text() -> None:
    predictor = LengthPredictor()
    world = telling_world(640)
    seen = visit(predictor, world, 0)
    late = slice(320, 640)
    tokens = np.array([found.longest for found in seen.predictions])
    assert recall_of_longest(tokens[late], seen.longest[late]) >= 0.8
    assert predictor.quality()["output_length"].spearman > 0.9
    assert np.mean([found.confidence for found in seen.predictions[late]]) > 0.6


def test_history_learns_what_no_text_shows() -> None:
    predictor = LengthPredictor()
    world = hidden_world(384)
    visit(predictor, world, 0)
    assert predictor.quality()["fused"].spearman < 0.25
    second = visit(predictor, world, 1)
    predicted = np.array([found.longest for found in second.predictions])
    assert spearman(predicted, second.longest) > 0.8
    weights = predictor.weights()
    assert weights["history"] > 0.75
    assert weights["output_length"] < 0.45


def test_without_a_signal_nothing_is_found_and_confidence_says_so() -> None:
    predictor = LengthPredictor()
    world = mute_world(512)
    visit(predictor, world, 0)
    second = visit(predictor, world, 1)
    assert abs(predictor.quality()["fused"].spearman) < 0.12
    assert abs(predictor.quality()["history"].spearman) < 0.12
    assert predictor.quality()["fused"].recall20 < 0.35
    assert max(weight for name, weight in predictor.weights().items() if name != "group_probe") < 0.15
    late = second.predictions[256:]
    assert np.mean([found.confidence for found in late]) < 0.15
    # The same measurement on prompts that do tell something is far from these bounds.
    control = LengthPredictor()
    visit(control, telling_world(512), 0)
    assert control.quality()["fused"].spearman > 0.6


def test_quantiles_cover_the_share_of_answers_that_they_name() -> None:
    predictor = LengthPredictor()
    world = telling_world(512)
    visit(predictor, world, 0)
    second = visit(predictor, world, 1)
    p50, p90, longest = (
        np.array([getattr(found, name) for found in second.predictions]) for name in ("p50", "p90", "longest")
    )
    assert 0.4 < (second.lengths <= p50[:, None]).mean() < 0.6
    assert 0.84 < (second.lengths <= p90[:, None]).mean() < 0.96
    assert 0.35 < (second.longest <= longest).mean() < 0.65
    assert (p50 <= p90).all()


def test_figures_are_of_predictions_made_before_the_lengths_were_known() -> None:
    """Lengths that repeat within an epoch only look predictable to one who learns before it predicts."""
    predictor = LengthPredictor()
    rng = np.random.default_rng(0)
    texts = [f"{rng.integers(1 << 30):x}" for _ in range(400)]
    lengths = np.rint(rng.lognormal(5, 1, (400, 1))).astype(np.int64)
    predictor.observe(observations(texts, lengths, [""] * 400))
    fused, history = predictor.quality()["fused"], predictor.quality()["history"]
    assert history.groups == 0
    assert math.isnan(fused.spearman) or abs(fused.spearman) < 0.2


def test_a_few_known_prompts_among_new_ones_keep_their_place() -> None:
    """All that history knows of this batch are the three longest: they must not be spread over the whole order."""
    predictor = LengthPredictor()
    world = hidden_world(256)
    visit(predictor, world, 0)
    visit(predictor, world, 1)
    longest = [world.texts[i] for i in np.argsort(world.medians)[-3:]]
    found = predictor.predict(
        [Query(text=text) for text in [*longest, *(f"task 9{i}: count to 250" for i in range(40))]]
    )
    assert min(p.rank for p in found[:3]) > max(p.rank for p in found[3:])


def test_siblings_that_finished_move_their_running_group() -> None:
    predictor = LengthPredictor()
    world = hidden_world(256)
    visit(predictor, world, 0)
    fresh = [Query(text=f"unseen {i}", group=f"new/{i}") for i in range(4)]
    before = predictor.predict(fresh)
    predictor.observe([Observation(text=fresh[2].text, group=fresh[2].group, group_size=8, length=30_000)])
    after = predictor.predict(fresh)
    assert after[2].rank == max(found.rank for found in after)
    assert after[2].longest >= 30_000 > before[2].longest


def test_a_group_teaches_only_when_its_last_sibling_is_there() -> None:
    predictor = LengthPredictor()
    for _ in range(7):
        predictor.observe([Observation(text="a", group="g", group_size=8, length=50)])
    assert (predictor.answers, predictor.groups) == (7, 0)
    predictor.observe([Observation(text="a", group="g", group_size=8, length=90)])
    assert (predictor.answers, predictor.groups) == (8, 1)


@pytest.mark.parametrize("bad", [Observation(text="a", length=-1), Observation(text="a", length=3, group_size=0)])
def test_an_impossible_observation_is_refused_as_a_whole(bad: Observation) -> None:
    predictor = LengthPredictor()
    with pytest.raises(UserError, match="observation 1"):
        predictor.observe([Observation(text="a", length=5), bad])
    assert predictor.answers == 0


def test_saved_and_restored_it_goes_on_as_if_nothing_had_happened() -> None:
    world = telling_world(256)
    original = LengthPredictor()
    visit(original, world, 0)
    restored = LengthPredictor()
    restored.load_state(parse_state(dump_state(original.state())))
    assert restored.groups == original.groups == 256
    assert repr(restored.quality()) == repr(original.quality())
    for epoch in (1, 2):
        ours, theirs = visit(restored, world, epoch), visit(original, world, epoch)
        for name in ("rank", "p50", "p90", "longest", "confidence"):
            found = [[getattr(p, name) for p in seen.predictions] for seen in (ours, theirs)]
            np.testing.assert_allclose(found[0], found[1], rtol=1e-9)


def test_the_state_is_bounded_however_much_was_seen() -> None:
    predictor = LengthPredictor(LengthPredictorOptions(max_prompts=64, memory=32))
    rng = np.random.default_rng(0)

    def show(epoch: int) -> int:
        texts = [f"{epoch} {i}" for i in range(1100)]
        predictor.observe(observations(texts, rng.integers(1, 999, (1100, 4)), [f"{epoch}/{i}" for i in range(1100)]))
        return sum(array.nbytes for array in predictor.state().values())

    for epoch in range(5):
        show(epoch)
    assert show(5) == show(6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.pop("history/values"), "history|values"),
        (lambda s: s.update(counts=np.array([99, 0, 0])), "version 99"),
        (lambda s: s.update(embedding=np.array("minilm")), "embedding=minilm"),
        (lambda s: s.update({"output_length/moment": np.zeros(3)}), "features"),
        (lambda s: s.update({"semantic_similarity/vectors": np.zeros((2, 2))}), "shape"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change: object, reason: str) -> None:
    predictor = LengthPredictor()
    visit(predictor, telling_world(64), 0)
    state = predictor.state()
    change(state)  # type: ignore[operator]
    with pytest.raises(UserError, match=reason):
        predictor.load_state(state)
    assert predictor.groups == 64


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_a_damaged_file_of_state_is_a_user_error(junk: bytes, cut: int) -> None:
    whole = dump_state(LengthPredictor(LengthPredictorOptions(memory=16)).state())
    for data in (junk, whole[:cut], whole[:cut] + junk + whole[cut + len(junk) :]):
        with suppress(UserError):
            LengthPredictor().load_state(parse_state(data))


def test_remaining_length_is_conditional_on_what_is_written() -> None:
    found = Prediction(rank=0.5, p50=100.0, p90=300.0, longest=400.0, confidence=0.5)
    assert found.remaining(0) == 100.0
    assert found.remaining(100) > 50  # outlived its median: a long one, not one about to end
    assert found.remaining(300) > found.remaining(100)
    assert found.remaining(10**9) >= 1.0
    sure = Prediction(rank=0.5, p50=100.0, p90=100.0, longest=100.0, confidence=1.0)
    assert sure.remaining(90) == pytest.approx(10, abs=1)
    assert sure.remaining(5000) == 1.0


def test_remaining_length_is_the_median_of_a_lognormal_beyond_the_written_part() -> None:
    rng = np.random.default_rng(0)
    lengths = np.exp(np.log(100) + 0.7 * rng.standard_normal(400_000))
    found = Prediction(rank=0.5, p50=100.0, p90=float(100 * np.exp(0.7 * 1.2815515)), longest=0.0, confidence=0.0)
    for written in (20, 100, 250):
        beyond = lengths[lengths > written]
        assert found.remaining(written) == pytest.approx(np.median(beyond) - written, rel=0.03)


def test_the_core_and_the_client_load_neither_torch_nor_ray() -> None:
    script = (
        "import sys, actors.length_predictor.predictor, actors.length_predictor.client\n"
        "actors.length_predictor.predictor.LengthPredictor()\n"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
