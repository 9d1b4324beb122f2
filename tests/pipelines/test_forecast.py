"""A forecast says of recorded answers what can be worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.drafts.options import SpeculationOptions
from actors.rollout.draft_cost import PassCost
from pipelines.forecast import Forecast, forecast, predicted_speedup
from pipelines.replay import Recorded, Totals, replay
from storage.errors import UserError
from storage.history.archive import RolloutArchive
from storage.records import TRAIN_SPLIT, Group, GroupKey, Prompt, Sample, SamplingParams, Segment
from tests.actors.rollout.conftest import request

SAMPLING = SamplingParams(max_tokens=64)
LENGTH = 49
SAMPLES = 2
PROMPTS = 3


def group(epoch: int, prompt: int, answers: list[np.ndarray]) -> Group:
    key = GroupKey(TRAIN_SPLIT, epoch, prompt)
    samples = tuple(
        Sample(
            key=key,
            index=index,
            segments=(
                Segment(
                    source="policy",
                    version=epoch,
                    token_ids=tokens.astype(np.int32),
                    logprobs=np.full(len(tokens), -0.25, np.float32),
                ),
            ),
            text="",
            finish_reason="stop",
        )
        for index, tokens in enumerate(answers)
    )
    ids = np.arange(1000 + 20 * prompt, 1010 + 20 * prompt, dtype=np.int32)
    return Group(key=key, prompt=Prompt(index=prompt, token_ids=ids, text=""), samples=samples)


def written(directory: Path, epochs: list[list[list[np.ndarray]]]) -> RolloutArchive:
    """An archive of one step an epoch; ``epochs[epoch][prompt]`` are the answers."""
    archive = RolloutArchive(directory)
    for epoch, prompts in enumerate(epochs):
        groups = [group(epoch, prompt, answers) for prompt, answers in enumerate(prompts)]
        archive.append(epoch + 1, groups, {}, sampling=SAMPLING)
    return archive


def distinct(seed: int) -> list[list[np.ndarray]]:
    """Answers in which no token occurs twice."""
    rng = np.random.default_rng(seed)
    tokens = rng.permutation(PROMPTS * SAMPLES * LENGTH).reshape(PROMPTS, SAMPLES, LENGTH)
    return [list(tokens[prompt]) for prompt in range(PROMPTS)]


def line(found: Forecast, drafter: str, ratio: float | None = None):
    return next(d for d in found.drafters if d.drafter == drafter and (ratio is None or d.ratio == ratio))


def test_answers_that_repeat_word_for_word_give_the_passes_of_full_drafts(tmp_path: Path) -> None:
    answers = distinct(0)
    found = forecast(written(tmp_path, [answers, answers, answers]), SpeculationOptions(max_draft=16))
    # The first token comes with the prompt, then each pass accepts a whole draft and one token more.
    passes = 1 + -(-(LENGTH - 1) // 6)
    fixed = line(found, "fixed k=3 m=5")
    assert fixed.acceptance_length == pytest.approx(LENGTH / passes)
    assert fixed.acceptance == 1.0
    drafted = (LENGTH - 1) - (passes - 1)
    for ratio, speedup in fixed.speedups.items():
        assert speedup == pytest.approx(LENGTH / (passes + ratio * drafted))
    assert line(found, "oracle").acceptance_length == pytest.approx(LENGTH / (1 + -(-(LENGTH - 1) // 17)))
    assert found.oracle_share(0.01) == pytest.approx(1.0)
    assert line(found, "previous_epoch", 0.01).acceptance_length == pytest.approx(LENGTH / 4)
    assert found.best(0.3).speedups[0.3] > fixed.speedups[0.3]


def test_answers_that_never_repeat_gain_nothing_and_lose_nothing(tmp_path: Path) -> None:
    epochs = [[[a + 500 * epoch for a in prompt] for prompt in distinct(0)] for epoch in range(3)]
    found = forecast(written(tmp_path, epochs))
    for drafter in ("calibrated", "oracle", "aimd"):
        entry = line(found, drafter)
        assert entry.acceptance_length == pytest.approx(1.0, abs=0.05)
        assert min(entry.speedups.values()) > 0.97
    assert [e.repeated for e in found.epochs[1:]] == [0.0, 0.0]
    assert found.epochs[0].distinct == 1.0


def test_epochs_report_entropy_and_repetition(tmp_path: Path) -> None:
    first = distinct(0)
    second = [[np.concatenate([a[:25], a[25:] + 600]) for a in prompt] for prompt in first]
    found = forecast(written(tmp_path, [first, second]))
    assert [e.epoch for e in found.epochs] == [0, 1]
    assert [e.answers for e in found.epochs] == [6, 6]
    assert [e.tokens for e in found.epochs] == [6 * LENGTH] * 2
    assert found.epochs[0].entropy == pytest.approx(0.25)
    assert np.isnan(found.epochs[0].repeated)
    assert found.epochs[1].repeated == pytest.approx(22 / 46)
    assert found.epochs[0].acceptance_length == 1.0
    assert found.epochs[1].acceptance_length > 1.5


def test_the_table_has_a_line_for_each_drafter_and_a_column_for_the_measured_ratio(tmp_path: Path) -> None:
    answers = distinct(0)
    found = forecast(written(tmp_path, [answers, answers]), measured_ratio=0.05)
    rows = found.rows()
    assert rows[0][3:] == ["c = 0.01", "c = 0.03", "c = 0.1", "c = 0.3", "c = 0.05"]
    names = [row[0] for row in rows[1:]]
    assert names[:3] == ["calibrated", "hybrid", "previous_epoch"]
    assert {f"fixed k={k} m={m}" for k in (3, 4, 5) for m in (5, 10)} < set(names)
    assert {"aimd", "oracle"} < set(names)
    assert all(len(row) == len(rows[0]) and all(row) for row in rows)
    assert len(found.epoch_rows()) == 3


def test_a_run_without_rollouts_or_without_second_visits_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no rollouts"):
        forecast(RolloutArchive(tmp_path / "none"))
    with pytest.raises(UserError, match="visited twice"):
        forecast(written(tmp_path, [distinct(0)]))


def test_predicted_speedup_is_the_ratio_of_the_times_of_the_passes(tmp_path: Path) -> None:
    answers = distinct(0)
    archive = written(tmp_path, [answers, answers])
    cost = PassCost(fixed=1.0, row=0.0, token=0.0)
    options = SpeculationOptions(source="previous_epoch", max_draft=16, gate="always")
    second = predicted_speedup(archive, options, cost, max_rows=64, steps=[2])
    assert second == pytest.approx(LENGTH / 4)
    both = predicted_speedup(archive, options, cost, max_rows=64)
    assert both == pytest.approx(2 * LENGTH / (LENGTH + 4))
    with pytest.raises(UserError, match="lenient"):
        predicted_speedup(archive, options.model_copy(update={"verify": "lenient"}), cost, max_rows=4)
    with pytest.raises(UserError, match="steps asked for"):
        predicted_speedup(archive, options, cost, max_rows=4, steps=[9])


def test_a_replay_without_a_source_decodes_one_token_a_pass_in_the_slots_there_are() -> None:
    answers = [Recorded(request(i, (1, 2, 3), group=i // 2), np.arange(size)) for i, size in enumerate((3, 5, 2, 4))]
    totals = replay(answers, None, PassCost(fixed=1.0, row=0.5, token=0.25, ragged=8.0), max_rows=2)
    # Slots: 0 and 1 begin; 2 begins in pass 4, 3 in pass 6.
    assert totals.emitted == totals.row_passes == 14
    assert totals.passes == 9
    tokens = (14 - 4) + 2 * 3  # a row that begins draws behind its prompt, which its group's first row computes
    assert totals.seconds == pytest.approx(9 + 0.5 * 14 + 0.25 * tokens + 8 * 2)
    assert totals.speedup(0.1) == 1.0
    assert Totals().speedup(0.1) != Totals().speedup(0.1), "NaN where nothing was replayed"
