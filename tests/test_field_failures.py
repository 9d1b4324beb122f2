"""35 failures that users of other asynchronous systems reported, and the tests that play them here (issue 5).

Numbers are those of the list that the project started from; sources are issues and pull requests of the named
projects. Where a failure cannot happen for want of the mechanism, that is said instead.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

FLOWS = "pipelines/flows/test_schedules.py::test_each_group_is_trained_once_or_ended_and_nothing_leaks"
CUT = "pipelines/flows/test_schedules.py::test_run_that_is_stopped_anywhere_goes_on_from_its_last_safe_point"
BARREN = "pipelines/flows/test_schedules.py::test_groups_that_teach_nothing_end_and_no_step_waits_for_ever"
INTERLEAVINGS = "actors/rollout/test_handover.py::test_whatever_the_order_of_calls_every_token_is_a_draw_of_its_version"
ADMISSION = "pipelines/scheduling/test_admission.py::test_no_group_gets_too_old_in_whatever_order_groups_finish"
STAMPS = "pipelines/test_stream_run.py::test_tokens_of_a_stream_carry_the_probability_of_their_version"
SYNCHRONOUS = "pipelines/test_stream_run.py::test_stream_without_staleness_is_the_synchronous_run"

# number: (source, what went wrong there, tests here or why it cannot happen here)
FAILURES: dict[int, tuple[str, str, tuple[str, ...] | str]] = {
    1: ("AReaL#1388", "staleness explodes after a resume", (CUT, ADMISSION)),
    2: (
        "AReaL#1588",
        "rollouts resume before weights are restored",
        ("actors/learner/test_publishing.py::test_resume_announces_what_the_engines_had_and_goes_on_bit_for_bit", CUT),
    ),
    3: (
        "SkyRL#1173",
        "one stuck generator holds a batch up for ever",
        (
            "faults/test_hung_processes.py::test_hung_rollout_worker_is_replaced_and_loses_no_group",
            "pipelines/test_schedule_run.py::test_answers_that_outstay_are_interrupted_and_end_as_truncated",
        ),
    ),
    4: ("SkyRL#1802", "deadlock after many groups of zero variance", (BARREN,)),
    5: (
        "SkyRL#1315",
        "clipping is never active: old and current logprobs are the same",
        ("actors/learner/test_off_policy_step.py::test_each_setting_changes_the_gradient",),
    ),
    6: (
        "SkyRL#2246, NeMo-RL#4018",
        "stale key/value state after a change of weights",
        (
            INTERLEAVINGS,
            "actors/rollout/test_weight_swaps.py::test_siblings_admitted_after_keep_kv_do_not_inherit_stale_prompts",
        ),
    ),
    7: ("verl#4449", "staleness 0 is still off policy", (SYNCHRONOUS,)),
    8: (
        "verl#7010",
        "weights cannot change while the producer waits for room",
        (
            "pipelines/flows/test_schedules.py::test_evaluation_of_a_stream_waits_for_the_newest_weights_everywhere",
            FLOWS,
        ),
    ),
    9: (
        "verl#7611",
        "cancelled work at a change of weights kills the rollouts",
        (
            "actors/rollout/test_stopped_calls.py::test_samples_that_are_stopped_while_their_call_begins_come_back_at_once",
            INTERLEAVINGS,
        ),
    ),
    10: ("verl#3895", "hang at the start: who is first decides", (FLOWS,)),
    11: (
        "verl#7990",
        "deadlock under many outstanding requests",
        ("actors/rollout/test_engine_loop.py::test_callers_on_many_threads_all_get_their_answers",),
    ),
    12: (
        "verl#4199",
        "a checkpoint loses what is in flight",
        (CUT, "pipelines/test_stream_run.py::test_cut_stream_resumes_without_losing_or_repeating_a_group"),
    ),
    13: (
        "verl#6240, TRL#4159",
        "ratios differ from 1: raw against processed logprobs",
        (
            "actors/learner/test_engine_agreement.py::test_equal_weights_give_ratio_one",
            "actors/learner/test_engine_agreement.py::test_stale_logprobs_of_another_temperature_are_seen",
            "actors/learner/test_logprobs.py::test_truncated_sampling_has_ratio_one_under_equal_weights",
        ),
    ),
    14: ("slime#2238", "completed groups that are too many are dropped", (FLOWS,)),
    15: (
        "slime#2092",
        "answers mix versions although they must not",
        (
            "pipelines/test_stream_run.py::test_answers_of_a_stream_are_of_one_version_unless_they_may_be_interrupted",
            "actors/rollout/test_weight_swaps.py::test_drain_finishes_running_rows_under_their_weights_while_new_ones_use_the_new",
        ),
    ),
    16: (
        "slime#2402",
        "an aborted sample reaches training",
        (
            "actors/reward/test_worker.py::test_answer_that_was_never_finished_is_an_error_and_not_scored",
            "actors/learner/test_advantages.py::test_aborted_answer_is_not_judged",
        ),
    ),
    17: (
        "slime#2176",
        "a slow judge blocks what is stopped",
        ("pipelines/flows/test_schedules.py::test_reward_worker_that_dies_behind_a_full_queue_stops_nothing",),
    ),
    18: (
        "prime-rl#3050",
        "whoever ends first leaves the other one waiting",
        ("faults/test_signals.py::test_sigterm_saves_and_the_run_goes_on_where_it_stopped",),
    ),
    19: (
        "prime-rl#1901",
        "staleness is off by one",
        (
            "actors/learner/test_learner.py::test_staleness_is_counted_per_token",
            "pipelines/test_step_metrics.py::test_staleness_is_counted_from_the_oldest_token",
            ADMISSION,
        ),
    ),
    20: (
        "TRL#6796",
        "a collective call hides that a worker died",
        (
            "actors/learner/test_train_group.py::test_killed_rank_ends_the_group_with_its_number_and_weights_outlive_it",
            FLOWS,
        ),
    ),
    21: ("TRL#5656, torchforge#557", "staleness 0 admits nothing and hangs", (SYNCHRONOUS, BARREN)),
    22: (
        "TRL#7176",
        "one failed answer takes its worker or group along",
        (
            "actors/rollout/test_torch_engine.py::test_a_row_with_non_finite_logits_ends_with_an_error_and_the_others_go_on",
            "actors/reward/test_pool.py::test_process_that_dies_costs_only_the_sample_in_hand",
        ),
    ),
    23: ("TRL#5911, OpenRLHF#1322, NeMo-RL#3599", "a resume repeats or skips prompts", (CUT,)),
    24: (
        "NeMo-RL#2180",
        "NaN logprobs from a model that is half updated",
        (
            "actors/rollout/test_engine_loop.py::test_weights_change_between_steps_and_bad_ones_are_refused",
            "actors/learner/test_off_policy_step.py::test_broken_logprobs_are_counted_and_alarmed",
        ),
    ),
    25: (
        "tinker-cookbook#822",
        "slow prompts starve; weights without a cap diverge",
        (
            ADMISSION,
            "pipelines/scheduling/test_admission.py::test_groups_with_a_last_chance_go_first_whatever_the_order",
            "actors/learner/test_losses.py::test_single_update_gradient_is_truncated_importance_sampling",
        ),
    ),
    26: (
        "open-instruct#1454",
        "a health check waits behind the weights",
        "a worker answers `health` and `set_weights` on several threads of a concurrency group of their own, and one "
        "that does not answer in time is replaced (faults/test_hung_processes.py)",
    ),
    27: (
        "miles#1829",
        "recomputed logprobs are used as behaviour logprobs of stale data",
        (
            "actors/learner/test_off_policy_step.py::test_policy_before_the_batch_is_scored_once_for_all_minibatches",
            STAMPS,
        ),
    ),
    28: (
        "labs-molt#124",
        "answers across a change of weights carry the wrong version",
        (STAMPS, INTERLEAVINGS, "pipelines/test_schedule_run.py::test_recomputing_sees_a_wrong_stamp"),
    ),
    29: (
        "verl-omni#433",
        "a dead engine counts as success",
        (
            "faults/test_killed_processes.py::test_killed_worker_loses_no_group",
            "actors/rollout/test_engine_loop.py::test_a_broken_engine_tells_every_waiting_caller_and_refuses_new_work",
        ),
    ),
    30: (
        "UniRL#94",
        "asynchrony is no faster",
        "a measurement, not a test: `slipstream bench asynchrony` at three ratios of generation to training",
    ),
    31: (
        "UniRL#310",
        "compared arms are the same bit for bit: no gradient at all",
        (
            "actors/learner/test_off_policy_step.py::test_each_setting_changes_the_gradient",
            "pipelines/bench/test_accuracy.py",
        ),
    ),
    32: (
        "marin#8955",
        "without correction answers drift until all are cut off",
        ("actors/learner/test_learner.py::test_truncation_is_read_from_the_record",),
    ),
    33: (
        "ray#9134",
        "references are kept and the object store grows",
        (FLOWS, "actors/test_weights.py::test_handed_over_snapshot_arrives_as_an_array_and_is_kept_by_nobody"),
    ),
    34: (
        "OpenRLHF",
        "the holder of a lock dies",
        "no actor holds a lock for another one: the conductor decides alone, and what it gives out are leases that end "
        "with their worker (pipelines/flows/test_schedules.py)",
    ),
    35: ("verl, PipelineRL", "a full queue drops the oldest and biases training", (FLOWS,)),
}

CASES = [(number, place) for number, entry in FAILURES.items() if isinstance(entry[2], tuple) for place in entry[2]]


def test_each_of_the_failures_has_an_answer():
    assert sorted(FAILURES) == list(range(1, 36))
    assert all(answer for _, _, answer in FAILURES.values())


@pytest.mark.parametrize(("number", "place"), CASES)
def test_the_named_tests_exist(number, place):
    path, _, name = place.partition("::")
    text = (TESTS / path).read_text(encoding="utf-8")
    assert re.search(rf"def {name}\(" if name else r"def test_", text), f"failure {number}"
