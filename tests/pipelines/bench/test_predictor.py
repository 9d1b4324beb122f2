from __future__ import annotations

import numpy as np
import pytest

from actors.length_predictor.predictor import LengthPredictor
from pipelines.bench.predictor import OPTIONS, expected_longest, learn, run
from storage.errors import UserError
from storage.tasks import RunningSums


def test_the_oracle_knows_the_law_of_the_task() -> None:
    task = RunningSums()
    rng = np.random.default_rng(0)
    rows = {len(row["solution"]): row for row in task.generate(count=300, seed=0)}
    sizes = sorted(rows)
    for walk in (sizes[0], sizes[len(sizes) // 2], *[size for size in sizes if 83 <= size <= 123][:1], sizes[-1]):
        drawn = [max(len(task.demonstrate(rows[walk], rng)) + 1 for _ in range(8)) for _ in range(800)]
        error = 4 * np.std(drawn) / np.sqrt(len(drawn)) + 1e-9
        assert expected_longest(task, rows[walk], 8) == pytest.approx(np.mean(drawn), abs=error)


def test_after_one_pass_the_predictor_comes_close_to_the_oracle() -> None:
    first, second = learn(LengthPredictor(), prompts=256, batch=64, samples=8, seed=0)
    assert second.ours > first.ours
    assert second.ours >= 0.85 * second.oracle
    assert 0.6 < second.oracle < 1.0


def test_all_figures_are_there_without_http() -> None:
    result = run({**OPTIONS, "prompts": 128, "batch": 64, "seeds": 1, "http_seconds": 0.0})
    assert {"recall20_of_oracle", "recall20_oracle", "ms_per_prompt"} <= set(result.figures)
    assert all(np.isfinite(value) for value in result.figures.values())
    assert all(len(row) == len(result.columns) for row in result.rows)


@pytest.mark.parametrize("bad", [{"batch": 4096}, {"prompts": 0}, {"rate": 0.0}, {"http_seconds": -1.0}])
def test_options_that_cannot_work_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match="option"):
        run({**OPTIONS, **bad})
