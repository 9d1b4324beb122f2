"""Benchmarks of schedules and of asynchrony (REQUIREMENTS: figures of issues 4 and 5): what they make of their runs."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from pipelines.bench import asynchrony, scheduling
from pipelines.bench.asynchrony import Comparison, pace, shared_figures
from pipelines.bench.paced_runs import COLUMNS, LONG_TAILED, PacedRun, row, speedup, validity, write_prompts
from pipelines.bench.scheduling import tail_figures
from pipelines.bench.training import TrainingRun
from pipelines.config_loader import load, write_config
from storage.datasets import load_rows
from storage.errors import UserError

STEP = {
    "time/step_s": 4.0,
    "time/generate_s": 3.0,
    "time/learn_s": 0.5,
    "time/pause_s": 0.02,
    "staleness/max": 0,
    "waste/tokens": 0,
    "rollout/tokens": 100,
    "rollout/pacing_overrun_share": 0.01,
}


@dataclass(frozen=True, slots=True)
class Run(PacedRun):
    answers: tuple[int, ...] = field(default=(10, 20, 30, 100))

    def lengths(self):
        return np.array(self.answers)


def run_of(*steps, name="a", skip=0, directory=Path("nowhere"), answers=(10, 20, 30, 100)):
    records = [
        {**STEP, "step": number, "ledger/trained": 16 * number, **changes} for number, changes in enumerate(steps, 1)
    ]
    training = TrainingRun(directory=directory, began=0.0, seconds=99.0, records=records, peak=None)
    return Run(name, training, skip, answers)


def lasting(*seconds, **more):
    return run_of(*({"time/step_s": value} for value in seconds), **more)


def with_bound(directory, bound):
    directory.mkdir()
    settings = [f"asynchrony.max_staleness={bound}", "asynchrony.pipeline=stream", "algorithm.name=decoupled_ppo"]
    write_config(load(settings).config, directory / "config.yaml")
    return directory


def test_steps_that_do_not_count_leave_neither_seconds_nor_prompts():
    assert lasting(100.0, 4.0, 4.0, skip=1).seconds_per_prompt == pytest.approx(8 / 32)
    assert lasting(100.0, 4.0, 4.0).seconds_per_prompt == pytest.approx(108 / 48)


def test_speedup_is_the_median_over_pairs_of_equally_many_prompts():
    baselines = [lasting(4.0, 4.0), lasting(6.0, 6.0), lasting(9.0, 9.0)]
    others = [lasting(2.0, 2.0), lasting(2.0, 2.0), lasting(1.0, 1.0)]
    assert speedup(baselines, others) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="trained 16 prompts"):
        speedup([lasting(4.0, 4.0)], [lasting(4.0)])


def test_row_divides_the_time_of_a_step_into_generation_learning_and_rest():
    cells = dict(zip(COLUMNS, row(lasting(4.0, 4.0), lasting(8.0, 8.0)), strict=True))
    assert cells["speed-up"] == "2.00x"
    assert (cells["generate"], cells["learn"], cells["rest"]) == ("75%", "12%", "12%")


def test_a_pace_that_was_not_kept_is_called_invalid_and_by_name():
    kept, slow = run_of({}), run_of({"rollout/pacing_overrun_share": 0.06}, name="slow")
    assert "INVALID" not in validity([kept])[1]
    share, text = validity([kept, slow])
    assert share == 0.06
    assert "INVALID" in text
    assert "slow" in text


def test_steps_with_tokens_older_than_configured_are_counted(tmp_path):
    steps = [{"staleness/max": age} for age in (0, 1, 2, 3)]
    assert run_of(*steps, directory=with_bound(tmp_path / "one", 1)).violations == 2
    assert run_of(*steps, directory=with_bound(tmp_path / "three", 3)).violations == 0


def test_waste_and_distance_of_lengths_of_tail_batching_are_measured(tmp_path):
    directory = with_bound(tmp_path / "run", 5)
    baseline = run_of({}, {})
    same = run_of({}, {}, directory=directory)
    short = run_of({}, {"waste/tokens": 20}, directory=directory, answers=(10, 20, 30, 30))
    assert tail_figures([baseline], [same])["ks"] == 0
    assert tail_figures([baseline], [same])["waste"] == 0
    found = tail_figures([baseline, baseline], [same, short])
    assert found["ks"] == pytest.approx(0.25)
    assert found["waste"] == pytest.approx(0.1)


def test_pace_makes_generation_as_long_as_asked_but_no_shorter_than_a_cpu_can():
    calibration = run_of({}, {}, {})  # 3 s of generation at 60 ms, half a second of learning
    assert pace(calibration, 60.0, 3.0) == pytest.approx(30.0)
    assert pace(calibration, 60.0, 1.0) == pytest.approx(10.0)
    assert pace(calibration, 60.0, 1 / 3) == 8.0


def test_worst_and_even_ratio_are_the_smallest_of_their_kind(tmp_path):
    baseline = lasting(4.0, 4.0, directory=with_bound(tmp_path / "run", 1))
    slower, faster = lasting(5.0, 5.0, directory=baseline.run.directory), lasting(2.0, 2.0)
    even = Comparison(20.0, baseline, {"1to1_stale1": faster, "1to1_stale2": lasting(1.0, 1.0)})
    uneven = Comparison(60.0, baseline, {"3to1_stale1": slower})
    found = shared_figures([baseline, slower], even.figures() | uneven.figures())
    assert found["speedup_1to1"] == pytest.approx(2.0)
    assert found["worst"] == pytest.approx(0.8)
    assert found["pause_share"] == pytest.approx(0.005)
    assert found["staleness_violations"] == 0


def test_streams_that_trained_shorter_answers_say_so():
    baseline, same = lasting(4.0, 4.0), lasting(2.0, 2.0)
    shorter = lasting(2.0, 2.0, answers=(10, 20, 30, 60))
    assert Comparison(20.0, baseline, {"same": same}).length_ratio() == 1
    assert Comparison(20.0, baseline, {"same": same, "shorter": shorter}).length_ratio() == pytest.approx(120 / 160)


def demonstrated(task, count):
    rng = np.random.default_rng(0)
    return [len(task.demonstrate(row, rng)) + 1 for row in task.generate(count=count, seed=1) for _ in range(8)]


def test_prompts_are_written_as_many_as_asked_for_and_all_different(tmp_path):
    settings = write_prompts(tmp_path, LONG_TAILED, 240)
    rows = load_rows(settings[0].removeprefix("data.train="), count=999, seed=0, prompt_column="prompt")
    assert settings[1] == "data.prompts=240"
    assert len(rows) == len({row["prompt"] for row in rows}) == 240
    assert {"answer", "solution"} <= set(rows[0])


def test_long_tailed_answers_have_the_tail_and_the_cap_that_the_figures_are_for():
    p50, p90 = np.quantile(demonstrated(LONG_TAILED, 240), (0.5, 0.9))
    assert p90 / p50 >= 4
    assert 256 / p50 >= 12


def test_short_answers_fit_their_limit():
    assert max(demonstrated(asynchrony._SHORT_TASK, asynchrony._SHORT_PROMPTS)) <= 64


@pytest.mark.parametrize(
    ("bench", "options"),
    [
        (scheduling, {"regime": "short"}),
        (scheduling, {"pairs": 0}),
        (scheduling, {"epochs": 1}),
        (asynchrony, {"part": "all"}),
        (asynchrony, {"steps": 3}),
    ],
)
def test_options_that_cannot_be_run_are_refused_before_anything_starts(bench, options):
    with pytest.raises(UserError, match=f"option.*{next(iter(options))}"):
        bench.run({**bench.OPTIONS, **options})
