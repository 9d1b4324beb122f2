"""Draft sources are compared through the run's own retrieval. Issue 3: their measured effect in the documents."""

from pathlib import Path

import numpy as np
import pytest

from actors.rollout.draft_cost import PassCost
from pipelines.bench.draft_sources import SEEN, UNSEEN, compare_sources, sources_table
from tests.pipelines.test_forecast import LENGTH, PROMPTS, SAMPLES, distinct, written

COST = PassCost(0.0, 0.97, 0.03)


def compared(tmp_path: Path, epochs: list) -> dict:
    archive = written(tmp_path / "rollouts", epochs)
    results = compare_sources(archive, COST, tmp_path / "sources", max_rows=8, fingerprint=1)
    assert [row[0] for row in sources_table(results).rows] == [*SEEN, *UNSEEN]
    return {result.name: result for result in results}


def test_every_index_finds_answers_that_repeat_and_new_prompts_are_counted_apart(tmp_path):
    answers = distinct(0)
    found = compared(tmp_path, [answers, answers, answers])
    for name in SEEN:
        assert found[name].totals.emitted == 2 * PROMPTS * SAMPLES * LENGTH
        assert found[name].totals.acceptance_length > 3
        assert found[name].speedup > 2
    for name in UNSEEN:
        assert found[name].totals.emitted == PROMPTS * SAMPLES * LENGTH
        assert found[name].totals.acceptance_length == pytest.approx(1.0, abs=0.1)


def test_only_siblings_help_where_answers_of_a_group_agree_and_no_epoch_repeats(tmp_path):
    def epoch(number: int) -> list[list[np.ndarray]]:
        return [[prompt[0] + 500 * number] * SAMPLES for prompt in distinct(0)]

    found = compared(tmp_path, [epoch(0), epoch(1)])
    for name, result in found.items():
        # Siblings run side by side, so the one behind cannot copy much; without them nothing can be copied at all.
        if name in ("automaton alone", "levels by frequency", "levels by recency", "fuzzy (MinHash)"):
            assert result.totals.accepted == 0
        assert result.speedup > 0.9
