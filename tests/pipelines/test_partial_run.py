"""Partial rollouts in whole runs: where answers change hands, who begins them, and the bound on staleness."""

from itertools import pairwise

import pytest

from actors.rollout.boundaries import ends_here
from storage.history.archive import RolloutArchive
from storage.models import load_tokenizer
from storage.records import GroupKey
from tests.recomputed import EVERY_VERSION, recompute
from tests.runs import small_run, steps_of, trained_keys

K_MIN = 12
COMMON = (
    "reward.functions=[{function: tests.reward_functions.varied}]",
    "data.prompts=16",
    "rollout.max_tokens=120",
    "algorithm.name=decoupled_ppo",
    "run.steps=0",
    "run.epochs=2",
    *EVERY_VERSION,
)
RUNS = {
    "boundary": (
        "asynchrony.pipeline=stream",
        "asynchrony.max_staleness=2",
        "asynchrony.partial=interrupt",
        "asynchrony.interrupt_at=boundary",
        "asynchrony.grace_tokens=4096",
    ),
    "split": (
        "asynchrony.pipeline=stream",
        "asynchrony.max_staleness=2",
        "asynchrony.partial=split",
        f"asynchrony.k_min={K_MIN}",
        "asynchrony.grad_tokens=current_only",
    ),
    "split-step": ("asynchrony.max_staleness=1", "asynchrony.partial=split", f"asynchrony.k_min={K_MIN}"),
}


# Boundaries themselves are the business of the engine's tests.
@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name == "boundary" else ()) for name in RUNS]
)
def run(request, ray_session, random_llama, tmp_path_factory):
    return small_run(random_llama, tmp_path_factory.mktemp("partial"), request.param, *COMMON, *RUNS[request.param])


@pytest.fixture(scope="module")
def answers(run):
    """For each step its answers, each as a list of (token, version)."""
    archive, steps = RolloutArchive(run / "rollouts"), {}
    for step in archive.steps():
        table = archive.read(step)
        steps[step] = []
        for tokens, segments in zip(table["tokens"].to_pylist(), table["segments"].to_pylist(), strict=True):
            versions = [part["version"] for part in segments for _ in range(part["count"])]
            steps[step].append(list(zip(tokens, versions, strict=True)))
    return steps


def changes(answer):
    """(index, version before, version after) wherever an answer changes hands."""
    versions = [version for _, version in answer]
    return [(i, a, b) for i, (a, b) in enumerate(pairwise(versions), 1) if a != b]


def test_every_prompt_is_trained_once_an_epoch_within_the_bound(run):
    keys = [GroupKey.parse(text) for text in trained_keys(run)]
    assert len(keys) == len(set(keys)) == 32
    assert {(k.epoch, k.prompt) for k in keys} == {(e, p) for e in range(2) for p in range(16)}
    bound = 1 if run.name == "split-step" else 2
    assert all(0 <= record["staleness/max"] <= bound for record in steps_of(run))


def test_answers_change_hands_behind_boundaries(run, answers, random_llama):
    """Only a third version takes over elsewhere, and then the version grows by more than one."""
    tokenizer, seen = load_tokenizer(str(random_llama)), 0
    for answer in (a for step in answers.values() for a in step):
        for index, before, after in changes(answer):
            assert after > before
            if after == before + 1:
                seen += 1
                assert ends_here(tokenizer.decode([answer[index - 1][0]]))
                assert run.name == "boundary" or index >= K_MIN
    assert seen > 5


def test_a_snapshot_that_lags_begins_the_answers_of_a_split(run, answers):
    if run.name == "split-step":
        assert all({a[0][1] for a in step} == {max(number - 2, 0)} for number, step in answers.items())
        assert [record["staleness/max"] for record in steps_of(run)] == [0] + [1] * 7
    elif run.name == "split":
        last = [a for number in list(answers)[-3:] for a in answers[number] if len(a) > 60]
        assert sum(len({version for _, version in a}) > 1 for a in last) > 0.8 * len(last) > 0


def test_tokens_carry_the_probability_of_their_version(run, random_llama):
    answers = recompute(run, random_llama)
    assert len(answers) == 2 * 16 * 4
    assert max(answer.error for answer in answers) < 1e-4
