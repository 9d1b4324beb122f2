"""Drafts in a whole run (REQUIREMENTS: HistoSpec, SPEC-RL): the same tokens sooner, and a run that survives without."""

import json

import numpy as np
import pytest

from pipelines.launch import train
from storage.history.archive import RolloutArchive
from storage.history.store import HistoryStore
from tests.runs import small_config, small_run, steps_of, trained_keys

STEPS = "run.steps=6"


def answers(run, step):
    """Tokens of every answer of a step, by (prompt, sample)."""
    table = RolloutArchive(run / "rollouts").read(step)
    places = zip(table["prompt"].to_pylist(), table["sample_idx"].to_pylist(), strict=True)
    return dict(zip(places, table["tokens"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def plain(ray_session, random_llama, tmp_path_factory):
    return small_run(random_llama, tmp_path_factory.mktemp("plain"), "plain", STEPS)


@pytest.fixture(scope="module")
def drafting(ray_session, random_llama, tmp_path_factory):
    parent = tmp_path_factory.mktemp("drafting")
    return small_run(
        random_llama,
        parent,
        "drafting",
        STEPS,
        "speculation.source=history",
        "speculation.gate=always",
        "speculation.draft_length=fixed",
        "speculation.match_length=1",
    )


def test_drafts_change_no_token(plain, drafting):
    same = total = 0
    for step in range(1, 7):
        expected, found = answers(plain, step), answers(drafting, step)
        assert expected.keys() == found.keys()
        same += sum(expected[place] == found[place] for place in expected)
        total += len(expected)
    # Batch shapes move logits by rounding, and a near-tie may then fall the other way.
    assert same >= 0.95 * total


def test_drafts_come_from_the_second_visit_on_and_are_counted(drafting):
    records = steps_of(drafting)
    drafted = [sum(v for k, v in r.items() if k.startswith("speculation/drafted/")) for r in records]
    assert sum(drafted[2:]) > 0
    assert all(r["rollout/tokens_per_pass"] >= 1 for r in records)
    assert any(r.get("speculation/drafted/prompt", 0) > 0 for r in records[2:])


def test_history_holds_every_trained_answer(drafting):
    with HistoryStore(drafting / "history", None) as store:
        assert store.verify() == ()
        stats = store.stats()
        assert stats.answers == 6 * 16
        assert stats.prompts == 8


@pytest.mark.slow
def test_resumed_run_forgets_the_history_after_its_checkpoint(ray_session, random_llama, tmp_path):
    run = small_run(random_llama, tmp_path, "cut", "run.steps=2", "speculation.source=history")
    with HistoryStore(run / "history", None) as store:
        assert store.stats().answers == 2 * 16
    # Rows of a step that no checkpoint knows: as a run leaves them that was killed in mid-step.
    later = small_run(random_llama, tmp_path, "later", "run.steps=4", "speculation.source=history")
    checkpoints = sorted((later / "checkpoints").glob("step_*"))
    assert [c.name for c in checkpoints] == ["step_000004"]
    config = small_config(random_llama, tmp_path, "cut", "run.steps=4", "speculation.source=history")
    assert train(config, name="cut", resume=run) == 0
    with HistoryStore(run / "history", None) as store:
        assert store.stats().answers == 4 * 16
    assert len(trained_keys(run)) == len(set(trained_keys(run))) == 16


def test_lenient_reuse_is_measured(ray_session, random_llama, tmp_path):
    run = small_run(
        random_llama,
        tmp_path,
        "lenient",
        STEPS,
        "speculation.source=previous_epoch",
        "speculation.verify=lenient",
        "speculation.fresh_share=0.25",
    )
    records = steps_of(run)
    assert all("speculation/reused_share" not in r for r in records[:2])
    shares = [r.get("speculation/reused_share", 0.0) for r in records[2:]]
    assert 0.4 < np.mean(shares) < 0.95  # three quarters, drawn slot by slot
    assert any("speculation/bias_length" in r for r in records[2:])
    assert max(r.get("speculation/reused_tokens_share", 0) for r in records[2:]) > 0.2


@pytest.mark.slow
def test_residuals_are_drawn_from_laws_that_the_history_kept(ray_session, random_llama, tmp_path):
    run = small_run(
        random_llama,
        tmp_path,
        "residual",
        STEPS,
        "speculation.source=previous_epoch",
        "speculation.verify=lenient",
        "speculation.log_lenience=0",
        "speculation.fresh_share=0.25",
        "speculation.residual=true",
        "speculation.residual_top_k=8",
        # Where the weights do not move, every token is kept.
        "reward.functions=[{function: tests.reward_functions.varied}]",
        "learner.learning_rate=0.003",
    )
    records = steps_of(run)
    assert all("speculation/residual_draws" not in r for r in records[:2])
    assert sum(r.get("speculation/residual_draws", 0) for r in records[2:]) > 0
    assert all(0 <= r.get("speculation/residual_tail_mass", 0) < 1 for r in records)
    with HistoryStore(run / "history", None) as store:
        assert store.verify() == ()
        stored = [a for _, ids in store.prompts() for visit in store.visits(ids, 9) for a in visit]
    assert len(stored) == 6 * 16
    assert all(a.top is not None and a.top.ids.shape == (len(a.tokens), 8) for a in stored)
    drawn = [a.top.ids == a.tokens[:, None] for a in stored]
    # What was drawn has the probability that its law says, and is among the likeliest as often as these add up to.
    for answer, there in zip(stored, drawn, strict=True):
        np.testing.assert_allclose(answer.top.logprobs[there], answer.logprobs[there.any(axis=1)], atol=1e-5)
    mass = np.concatenate([np.exp(a.top.logprobs).sum(axis=1) for a in stored])
    found = np.concatenate([there.any(axis=1) for there in drawn])
    assert abs(found.mean() - mass.mean()) < 5 * np.sqrt(mass.mean() / len(mass))


def test_status_names_no_alarm(drafting):
    assert json.loads((drafting / "status.json").read_text())["alarms"] == []
