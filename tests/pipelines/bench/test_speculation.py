"""The benchmark of speculation: its options, its plans, its sums, and one small training run through all of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.bench import speculation
from pipelines.bench.harness import BENCHES
from pipelines.bench.rollout_loop import Rollout
from pipelines.bench.speculation_trials import Step, Trial, epochs_of, exact_trial, prompts_for_repeats, repeating
from storage.errors import UserError


def rollout(
    seconds: float, *, emitted: int = 100, row_passes: int = 100, drafted: int = 0, accepted: int = 0
) -> Rollout:
    return Rollout(
        groups=(),
        seconds=seconds,
        passes=10,
        row_passes=row_passes,
        emitted=emitted,
        drafted=drafted,
        accepted=accepted,
        steps=(),
    )


def step(epoch: int, off: float, history: float, differing: int = 0) -> Step:
    drafting = rollout(history, row_passes=25, drafted=100, accepted=75)
    return Step(
        epoch=epoch,
        rollouts={"off": rollout(off), "history": drafting},
        differing={"history": differing},
        answers=8,
        tokens=100,
        surprise=25.0,
        reward=0.5,
    )


def small(monkeypatch: pytest.MonkeyPatch) -> speculation.Sizes:
    sizes = speculation.Sizes(4, 8, 2, 2, 1.0, 24, 1, ("off", "history"), lenient=True)
    monkeypatch.setitem(speculation.SIZES, "tiny", sizes)
    return sizes


def test_every_registered_option_has_a_help_text_and_every_help_text_an_option() -> None:
    import importlib

    for name, bench in BENCHES.items():
        assert set(bench.options) == set(importlib.import_module(bench.module).OPTIONS), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "large"}, "model=large: must be one of tiny, smollm2"),
        ({"epochs": 1}, "epochs=1: must be at least 2"),
        ({"rows": -1}, "rows=-1: must be at least 1"),
        ({"samples": 1}, "samples=1: must be at least 2"),
        ({"temperature": -1.0}, "temperature=-1: must be above 0"),
        ({"threads": -1}, "threads=-1: must be 0 or more"),
        ({"prompts": 17}, "prompts=17: must be a multiple of the 4 prompts of a step"),
        ({"repeat_share": "0,2"}, "repeat_share=0,2: must be shares from 0 to 1"),
        ({"repeat_share": "half"}, "repeat_share=half"),
        ({"plot": "curve.png"}, "set repeat_share"),
        ({"repeat_share": "1", "plot": "missing/curve.png"}, "folder does not exist"),
    ],
)
def test_options_that_cannot_be_measured_are_named(options: dict[str, float | str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        speculation.run({**speculation.OPTIONS, **options})


def test_speedup_is_the_ratio_of_sums_over_the_epochs_asked_for() -> None:
    trial = Trial(steps=[step(0, 1.0, 2.0), step(1, 4.0, 1.0), step(2, 2.0, 2.0, differing=4)])
    assert trial.speedup("history", [1, 2]) == 2.0
    assert trial.cold_ratios("history") == [0.5]
    assert trial.acceptance("history", [1]) == 0.75
    assert math.isnan(trial.acceptance("off", [1]))
    assert trial.acceptance_length("history", [1]) == 4.0
    assert trial.differing_share("history") == 4 / 24
    assert trial.entropy(1) == 0.25
    assert math.isnan(trial.speedup("history", [5]))


def test_steps_of_repeats_hold_their_share_of_known_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = replace(small(monkeypatch), rows=8, prompts=prompts_for_repeats((0.0, 0.5, 1.0), 3, 16))
    world = speculation._world("tiny", sizes, epochs=1, seed=0, prompts=sizes.prompts)
    plan, turns = repeating(world, (0.0, 0.5, 1.0), 3)
    begin = len(plan) - len(turns)
    known = {prompt.index for batch in plan[:begin] for _, prompt in batch}
    assert turns == [0, 1, 2] * 3
    seen: set[int] = set()
    for batch, which in zip(plan[begin:], turns, strict=True):
        indices = {prompt.index for _, prompt in batch}
        assert len(indices) == len(batch) == 16
        assert len(indices & known) == (0, 8, 16)[which]
        assert not indices & seen  # nothing is met for a third time
        seen |= indices


def test_all_ways_of_drafting_write_the_same_answers_in_a_training_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = replace(small(monkeypatch), modes=speculation.EXACT)
    world = speculation._world("tiny", sizes, epochs=2, seed=0, prompts=8)
    trial = exact_trial(world, sizes.modes, epochs_of(world, 2), tmp_path)
    assert [s.epoch for s in trial.steps] == [0, 1]
    for mode in sizes.modes:
        assert trial.differing_share(mode) == 0
    done = trial.steps[1].rollouts
    assert {r.emitted for r in done.values()} == {trial.steps[1].tokens}
    assert done["off"].drafted == 0
    assert trial.index_mb["history"] > trial.index_mb["previous_epoch"] > 0


def test_a_small_run_reports_every_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small(monkeypatch)
    picture = tmp_path / "curve.png"
    monkeypatch.setattr(speculation, "_ROUNDS", 1)
    result = speculation.run({**speculation.OPTIONS, "epochs": 2, "repeat_share": "0,1", "plot": str(picture)})
    wanted = {
        "speedup_history",
        "speedup_lenient",
        "differing_share",
        "prediction_error",
        "oracle_share",
        "calibrated_over_best_rule",
        "index_mb",
        "model_mb",
        "speedup_repeat_0",
        "speedup_repeat_1",
    }
    assert wanted <= set(result.figures)
    assert "cold_ratio" not in result.figures  # one pair is no median
    assert all(math.isfinite(value) for value in result.figures.values())
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert [row[0] for row in result.rows] == ["history", "lenient, biased"]
