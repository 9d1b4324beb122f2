"""How the configuration says that new weights take over, and what a lagging snapshot leaves of the staleness bound."""

import pytest

from actors.rollout.engine import Handover, Swap
from pipelines.config import Config
from pipelines.generation import weight_swap
from pipelines.scheduling.admission import StreamAdmission
from pipelines.scheduling.policy import RoundState

BOUNDARY = Handover(kind="boundary", grace_tokens=9)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Swap("drain")),
        ({"partial": "interrupt"}, Swap("reprefill")),
        ({"partial": "interrupt", "on_interrupt": "keep_kv"}, Swap("keep_kv")),
        ({"partial": "interrupt", "interrupt_at": "boundary", "grace_tokens": 9}, Swap("reprefill", BOUNDARY)),
        (
            {"partial": "interrupt", "interrupt_at": "boundary", "grace_tokens": 9, "on_interrupt": "keep_kv"},
            Swap("keep_kv", BOUNDARY),
        ),
        ({"partial": "interrupt", "interrupt_at": "boundary", "on_interrupt": "drain"}, Swap("drain")),
        ({"partial": "split", "k_min": 5}, Swap("reprefill", Handover(kind="split", k_min=5))),
        (
            {"partial": "split", "k_min": 5, "on_interrupt": "keep_kv"},
            Swap("keep_kv", Handover(kind="split", k_min=5)),
        ),
    ],
)
def test_options_say_how_new_weights_take_over(options, expected):
    config = Config(asynchrony={"pipeline": "stream", "max_staleness": 2} | options)
    assert weight_swap(config) == expected
    # What the estimate of memory counts is what the engine does with this.
    assert config.asynchrony.holds_two_versions == (expected.mode == "drain" or expected.handover is not None)


@pytest.mark.parametrize(("lag", "expected"), [(0, 12), (1, 8)])
def test_answers_that_begin_a_version_late_leave_less_room_for_groups_under_way(lag, expected):
    admission = StreamAdmission(max_staleness=2, samples_per_prompt=4, lag=lag)
    admission.free_rows = 1000
    assert admission.plan(RoundState(step=0, prompts_per_step=4, available=None)).fresh == expected
