"""Reward functions that fail: a failure is counted and left out; a run that gets no score at all says so and ends."""

import json
import re

import numpy as np
import pytest

from actors.learner.advantages import STD_EPSILON
from actors.learner.algorithms import resolve_algorithm
from pipelines.launch import train
from pipelines.monitoring import read_records
from storage.checkpoints import CheckpointStore
from storage.history.archive import RolloutArchive
from tests.reward_functions import kind_of
from tests.runs import small_config, small_run, steps_of, trained_keys

QUIET = ("evaluation.before=false", "evaluation.after=false")
MESSAGES = {
    "raises": "RuntimeError: no verdict today",
    "too_many": "returned 2 values",
    "nan": "returned nan; expected a finite number",
    "hangs": r"no result within 0\.5 s.*reward\.timeout_s",
    "dies": "the process .*7",
}

JUDGE = """
from pathlib import Path

BROKEN = Path(__file__).with_name("broken")
CALLS = Path(__file__).with_name("calls")

def judge(completions, **columns):
    with CALLS.open("a") as file:
        file.write(".")
    calls = CALLS.stat().st_size
    if BROKEN.exists() and calls > 16:  # the answers of the first step
        raise RuntimeError("the judge has gone home")
    if calls > 64:  # a second try of step 2, and step 3
        return [None]
    return [float(len(completions[0]))]
"""


@pytest.fixture(scope="module")
def misbehaving(ray_session, random_llama, tmp_path_factory):
    return small_run(
        random_llama,
        tmp_path_factory.mktemp("runs"),
        "misbehaving",
        *QUIET,
        "run.steps=2",
        "reward.functions=[{function: tests.reward_functions.misbehaves}]",
        "reward.timeout_s=0.5",
    )


def test_every_kind_of_failure_is_recorded_and_none_is_a_reward_of_0(misbehaving):
    seen = set()
    for _, table in RolloutArchive(misbehaving / "rollouts").iterate():
        for row in table.to_pylist():
            kind = kind_of(row["text"])
            seen.add(kind)
            if kind == "fine":
                assert (row["reward_status"], row["error"]) == ("ok", "")
                assert row["reward"] == 1 + len(row["text"])
            else:
                assert row["reward_status"] == ("timeout" if kind == "hangs" else "error")
                assert re.search(MESSAGES[kind], row["error"]), row["error"]
                assert row["reward"] is None
                assert row["advantage"] == 0
    assert seen == {"fine", *MESSAGES}


def test_failed_answers_stay_out_of_the_baseline_of_their_siblings(misbehaving):
    kind = resolve_algorithm(small_config(misbehaving, misbehaving, "x").algorithm).advantage
    compared = 0
    for _, table in RolloutArchive(misbehaving / "rollouts").iterate():
        rewards = np.array(table["reward"].to_numpy(zero_copy_only=False), float).reshape(-1, 4)  # NaN: failed
        advantages = table["advantage"].to_numpy().reshape(-1, 4)
        for r, a in zip(rewards, advantages, strict=True):
            known = ~np.isnan(r)
            if known.all() or known.sum() < 2 or np.ptp(r[known]) == 0:
                continue
            scale = r[known].std() + STD_EPSILON if kind == "group_std" else 1.0
            np.testing.assert_allclose(a[known], (r[known] - r[known].mean()) / scale, rtol=1e-4)
            zeroed = np.where(known, r, 0.0)  # what a failure that counts as 0 would have given
            assert not np.allclose(
                a[known], ((zeroed - zeroed.mean()) / (zeroed.std() + STD_EPSILON))[known], rtol=0.02
            )
            compared += 1
    assert compared


def test_share_of_failures_is_reported_and_raises_an_alarm(misbehaving):
    archive = RolloutArchive(misbehaving / "rollouts")
    alarms = json.loads((misbehaving / "status.json").read_text())["alarms"]
    for record in steps_of(misbehaving):
        failed = sum(status != "ok" for status in archive.read(record["step"])["reward_status"].to_pylist())
        assert record["reward/error_share"] == failed / 16
        assert record["faults/crashes"] == 0, "reward functions die in processes of their own"
        assert any(
            alarm.startswith(f"step {record['step']}: {failed / 16:.1%} of the scores failed or timed out")
            for alarm in alarms
        )


def test_run_stops_when_every_score_of_a_step_fails_and_goes_on_once_that_is_mended(
    ray_session, random_llama, tmp_path, capfd
):
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE)
    (tmp_path / "broken").touch()
    overrides = (*QUIET, "run.steps=4", f"reward.functions=[{{function: '{judge}:judge'}}]")
    config = small_config(random_llama, tmp_path, "judged", *overrides)
    run = tmp_path / "judged"
    assert train(config, name="judged") == 2
    error = capfd.readouterr().err
    assert re.search(r"error: step 2: none of the 16 answers got a score.* the judge has gone home \(judge\.py", error)
    assert f"resume with: slipstream train --resume {run}" in error
    assert "Traceback" not in error
    kept = CheckpointStore(run / "checkpoints").latest()
    assert kept is not None
    assert (kept.step, kept.meta["version"]) == (1, 1), "the step without scores made no version and cost no prompt"
    assert len(trained_keys(run)) == 4

    (tmp_path / "broken").unlink()
    assert train(config, name="judged", resume=run) == 0
    keys = trained_keys(run)
    assert len(keys) == len(set(keys)) == 16
    assert [record["step"] for record in steps_of(run)] == [1, 2, 3, 4]
    assert [record["reward/error_share"] for record in steps_of(run)] == [0, 0, 0, 0]
    alarms = json.loads((run / "status.json").read_text())["alarms"]
    assert alarms == ["step 4: no answer has a reward, all reward functions abstained"], "and none for healthy steps"


def test_evaluation_without_a_single_score_stops_the_run_before_it_trains(ray_session, random_llama, tmp_path, capfd):
    functions = "reward.functions=[{function: tests.reward_functions.raises}]"
    config = small_config(random_llama, tmp_path, "unjudged", functions)
    assert train(config, name="unjudged") == 2
    error = capfd.readouterr().err
    assert "evaluation after step 0: none of the 6 answers got a score" in error
    assert "no verdict today" in error
    assert not [record for record in read_records(tmp_path / "unjudged" / "metrics.jsonl") if "reward/mean" in record]


def test_function_that_only_fails_to_load_in_the_workers_is_a_user_error(ray_session, random_llama, tmp_path, capfd):
    """Its module is imported by the check before the run, and not again."""
    once = tmp_path / "once.py"
    once.write_text(
        "from pathlib import Path\n"
        "USED = Path(__file__).with_suffix('.used')\n"
        "if USED.exists():\n    raise ImportError('its licence allows one process')\n"
        "USED.touch()\n"
        "def judge(completions, **columns):\n    return [1.0]\n"
    )
    config = small_config(random_llama, tmp_path, "once", *QUIET, f"reward.functions=[{{function: '{once}:judge'}}]")
    assert train(config, name="once") == 2
    error = capfd.readouterr().err
    assert "its licence allows one process" in error
    assert "Traceback" not in error
    assert CheckpointStore(tmp_path / "once" / "checkpoints").latest().step == 0
