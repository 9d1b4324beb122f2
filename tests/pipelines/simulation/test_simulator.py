"""Whole simulated runs: books, orderings that the papers report, and the law of what is trained."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest

from pipelines.scheduling.options import ScheduleOptions
from pipelines.simulation.cluster import ClusterModel
from pipelines.simulation.lengths import LogNormalLengths
from pipelines.simulation.published import FIGURE_11, compare_with_figure_11
from pipelines.simulation.scenarios import Case, long_share_sweep, simulate_case, standard_cases
from pipelines.simulation.simulator import Workload
from storage.errors import UserError

SMALL = ClusterModel(gpus=8)
WORK = Workload(prompts_per_step=32, prompts=32 * 15)


def tail(**fields):
    return ScheduleOptions.model_validate({"batching": "tail", **fields})


@cache
def figures(name, correlation=0.7):
    case = next(case for case in standard_cases() if case.name == name)
    return simulate_case(case, SMALL, LogNormalLengths(correlation=correlation), WORK)


@pytest.mark.parametrize("name", [case.name for case in standard_cases()])
def test_every_schedule_trains_every_prompt_and_its_tokens_add_up(name):
    result = figures(name)
    assert result.summary.groups == WORK.prompts
    assert 15 <= result.summary.steps <= 16
    trained = sum(record.trained_tokens for record in result.rounds)
    generated = sum(record.generated for record in result.rounds)
    wasted = sum(record.wasted for record in result.rounds)
    assert generated == trained + wasted
    for record in result.rounds:
        assert 0 <= record.row_s <= record.slot_s * (1 + 1e-9)
        assert record.busy_s <= record.rollout_s * SMALL.replicas * (1 + 1e-9)


def test_resuming_wastes_nothing_and_leaves_the_law_of_lengths_alone():
    summary = figures("tail batching, resume").summary
    assert summary.waste == 0
    assert summary.ks == 0
    assert summary.length_ratio == 1
    assert 0.1 < summary.stale_share < 0.6


def test_racing_samples_trains_short_answers_and_restarting_wastes():
    """The negative control of the test above: the distances do see a bias where there is one."""
    racing = figures("RollPacker (samples raced too, restart)").summary
    assert racing.ks > 0.05
    assert racing.length_ratio < 0.95
    assert racing.stale_share == 0
    assert figures("tail batching, restart").summary.waste > 0.15


def test_schedules_stand_in_the_published_order():
    def seconds(name):
        return figures(name).summary.rollout_s_per_group

    assert seconds("tail batching, resume") < seconds("tail batching, restart") < seconds("all at once")
    assert seconds("RollPacker (samples raced too, restart)") < seconds("tail batching, restart")
    assert seconds("length split") < seconds("all at once")
    assert seconds("tail batching, resume") < 0.6 * seconds("all at once")


def test_a_better_predictor_splits_better():
    case = Case("length split", ScheduleOptions(batching="length_split"))
    seconds = [
        simulate_case(
            case, SMALL, LogNormalLengths(correlation=correlation), Workload(prompts_per_step=32, prompts=32 * 40)
        ).summary.rollout_s_per_group
        for correlation in (0.0, 1.0)
    ]
    assert seconds[1] < 0.95 * seconds[0]


def test_short_and_long_rounds_keep_their_ratio():
    assert figures("tail batching, resume").summary.long_rounds == pytest.approx(0.2, abs=0.07)


@pytest.mark.slow
def test_the_orderings_of_figure_11_hold():
    cluster = ClusterModel(gpus=16)
    found = {(c.cap, c.prompts, c.samples): c.simulated for c in compare_with_figure_11(cluster)}
    for cap in (8_192, 16_384, 32_768):
        assert found[cap, 1.25, 1.25] > found[cap, 1.25, 1.0] > found[cap, 1.125, 1.0]
        assert found[cap, 1.25, 1.25] > found[cap, 1.0, 1.25]
        assert found[cap, 1.0, 1.5] > found[cap, 1.0, 1.25]
    assert found[8_192, 1.5, 1.0] > found[8_192, 1.25, 1.0]
    assert found[16_384, 1.5, 1.0] > found[16_384, 1.25, 1.0]
    assert found[32_768, 1.5, 1.0] < found[32_768, 1.25, 1.0]
    assert len(found) == 3 * (len(FIGURE_11) - 1)


def test_a_larger_overlaunch_pays_at_a_short_cap_and_not_at_a_long_one():
    """Figure 11, over-launch of prompts alone: 1.5 beats 1.25 at 8k and loses at 32k."""
    cluster, work = ClusterModel(gpus=8), Workload(prompts_per_step=64, prompts=64 * 30)

    def seconds(cap, overlaunch):
        case = Case("", tail(overlaunch_prompts=overlaunch, deferred="restart"))
        return simulate_case(case, cluster, LogNormalLengths(cap=cap), work).summary.rollout_s_per_group

    assert seconds(8_192, 1.5) < seconds(8_192, 1.25)
    assert seconds(32_768, 1.5) > seconds(32_768, 1.25)


def test_skew_aware_dispatch_pays_when_rows_outnumber_slots():
    cluster = ClusterModel(gpus=4, slots=8, grading=())
    lengths = LogNormalLengths(correlation=0.7, cap=12 * 1160)
    work = Workload(prompts_per_step=64, prompts=64 * 5)
    even, skewed = (
        simulate_case(Case("", ScheduleOptions(dispatch=dispatch)), cluster, lengths, work).summary
        for dispatch in ("least_loaded", "skew_aware")
    )
    assert even.rollout_s_per_group > 1.15 * skewed.rollout_s_per_group
    assert skewed.utilisation > even.utilisation


def test_constant_lengths_leave_nothing_to_schedule():
    lengths = LogNormalLengths(p50=500.0, p90=500.0)
    cluster = ClusterModel(gpus=8, grading=())
    results = [simulate_case(case, cluster, lengths, WORK) for case in standard_cases()[:2]]
    assert results[1].speedup(results[0]) == pytest.approx(1.0, abs=0.15)
    assert results[0].summary.slot_bubble < 0.05


def test_a_small_cache_preempts_and_takes_longer():
    lengths, work = LogNormalLengths(), Workload(prompts_per_step=32, prompts=64)
    roomy, tight = (
        simulate_case(standard_cases()[0], ClusterModel(gpus=8, kv_tokens=kv), lengths, work).summary
        for kv in (900_000, 20_000)
    )
    assert roomy.preemptions == 0
    assert tight.preemptions > 0
    assert tight.rollout_s > roomy.rollout_s
    assert tight.groups == roomy.groups


def test_second_batching_and_limits_of_long_rounds_change_no_book():
    lengths = LogNormalLengths(correlation=0.7)
    options = tail(second_batching=True, long_rows=16, deferred="resume")
    summary = simulate_case(Case("", options, max_staleness=4), SMALL, lengths, WORK).summary
    assert summary.groups == WORK.prompts
    assert summary.ks == 0
    assert summary.waste == 0


def test_the_same_seed_gives_the_same_run():
    case = standard_cases()[1]
    first, again = (simulate_case(case, SMALL, LogNormalLengths(), WORK).summary for _ in range(2))
    assert first == again


def test_utilisation_of_the_synchronous_schedule_falls_as_answers_grow_apart():
    cases = standard_cases(predictor=False)[:2]
    work = Workload(prompts_per_step=32, prompts=32 * 5)
    curves = long_share_sweep(SMALL, LogNormalLengths(cap=10**6), work, cases, (0.001, 0.02, 0.1))
    together, tailed = curves["all at once"], curves["tail batching, resume"]
    assert together[0] > together[1] > together[2]
    assert all(better > worse for better, worse in zip(tailed, together, strict=True))


def test_an_overlaunch_below_one_is_a_user_error():
    with pytest.raises(UserError, match="change --overlaunch"):
        standard_cases(0.8)


def test_the_simulator_knows_no_clock_no_ray_and_no_torch():
    script = (
        "import sys, pkgutil, importlib, pathlib\n"
        "import pipelines.simulation, pipelines.scheduling\n"
        "for package in (pipelines.simulation, pipelines.scheduling):\n"
        "    for module in pkgutil.iter_modules(package.__path__):\n"
        "        loaded = importlib.import_module(f'{package.__name__}.{module.name}')\n"
        "        text = pathlib.Path(loaded.__file__).read_text()\n"
        "        assert 'import time' not in text and 'datetime' not in text, module.name\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
