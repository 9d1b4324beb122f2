"""Whatever happens, each prompt of each epoch is trained exactly once or ended with a reason."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pipelines.scheduling.all_at_once import AllAtOnce
from pipelines.scheduling.length_split import LengthSplit
from pipelines.scheduling.long_queue import QueueRules
from pipelines.scheduling.tail_batching import TailBatching
from pipelines.scheduling.timeouts import RowBudget, Timeouts
from tests.pipelines.scheduling.play import Conductor

STALENESS = 3
RESUME = QueueRules(resume=True, max_staleness=STALENESS)
RESTART = QueueRules(resume=False, max_staleness=0)
POLICIES = {
    "all": lambda: AllAtOnce(),
    "all, dynamic": lambda: AllAtOnce(dynamic_sampling=True, max_refills=2),
    "split": lambda: LengthSplit(QueueRules(long_rule="quantile", long_share=0.25)),
    "split, repeat": lambda: LengthSplit(QueueRules(long_rule="median"), oversample="repeat", ratio=1.5),
    "tail, resume": lambda: TailBatching(RESUME),
    "tail, restart": lambda: TailBatching(RESTART, overlaunch_prompts=1.5),
    "tail, samples": lambda: TailBatching(RESTART, overlaunch_samples=1.5),
    "tail, races": lambda: TailBatching(QueueRules(max_deferrals=3, max_staleness=STALENESS), overlaunch_prompts=1.6),
    "tail, prior, dynamic": lambda: TailBatching(
        QueueRules(long_rule="quantile", long_share=0.2, max_staleness=STALENESS),
        overlaunch_prompts=1.5,
        dynamic_sampling=True,
        max_refills=2,
    ),
}


class Laws(RuleBasedStateMachine):
    """A run of any schedule, with finishes, crashes, timeouts and deaths of the process in any order."""

    policies = POLICIES

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    @initialize(
        name=st.sampled_from(sorted(POLICIES)),
        data=st.integers(1, 14),
        prompts_per_step=st.integers(1, 5),
        epochs=st.integers(1, 3),
        predicts=st.booleans(),
        seed=st.integers(0, 99),
    )
    def start(self, name, data, prompts_per_step, epochs, predicts, seed):
        self.data, self.epochs = data, epochs
        self.timeouts = Timeouts(RowBudget(tokens=8), RowBudget(), max_resumes=2)
        self.resumes = Counter()
        self.conductor = Conductor(
            self.policies[name](),
            data=data,
            prompts_per_step=min(prompts_per_step, data),
            epochs=epochs,
            journal=Path(self.folder.name) / "journal",
            predict=(lambda key: 100.0 + 37 * key.prompt % 101) if predicts else None,
            seed=seed,
        )

    def pick(self, place):
        running = self.conductor.state.running()
        return running[place % len(running)]

    @precondition(lambda self: self.conductor.state is None and not self.conductor.over)
    @rule()
    def begin_a_round(self):
        self.conductor.begin()

    @precondition(lambda self: self.conductor.state is not None)
    @rule(place=st.integers(0, 50), flat=st.booleans())
    def a_sample_is_scored(self, place, flat):
        self.conductor.finish_sample(self.pick(place), (1.0, 1.0) if flat else (0.0, 1.0))

    @precondition(lambda self: self.conductor.state is not None)
    @rule(place=st.integers(0, 50))
    def a_sample_is_written(self, place):
        self.conductor.write_sample(self.pick(place))

    @precondition(lambda self: self.conductor.state is not None)
    @rule(place=st.integers(0, 50), give_up=st.booleans())
    def a_worker_dies(self, place, give_up):
        self.conductor.crash(self.pick(place), give_up=give_up)

    @precondition(lambda self: self.conductor.state is not None)
    @rule(place=st.integers(0, 50))
    def a_row_uses_up_its_budget(self, place):
        key = self.pick(place)
        assert self.timeouts.overdue("regular", 8, 0.0) == "tokens"
        if self.timeouts.action(self.resumes[key]) == "truncate":
            self.conductor.finish_sample(key)
            return
        self.resumes[key] += 1
        assert self.resumes[key] <= 2
        self.conductor.ledger.release(key, "timeout")
        self.conductor.ledger.lease(key, "long", self.conductor.ledger.attempts(key))

    @rule()
    def the_process_dies(self):
        self.conductor.kill_and_resume()
        self.resumes.clear()

    @invariant()
    def every_key_is_in_one_place(self):
        if not hasattr(self, "conductor"):
            return
        conductor = self.conductor
        conductor.ledger.check()
        counts = conductor.ledger.counts()
        assert counts.launched == (
            counts.queued + counts.leased + counts.ready + counts.trained + sum(counts.ended.values())
        )
        state = conductor.state
        running, kept = (state.running(), state.kept()) if state else ([], [])
        assert sorted(conductor.waiting) == sorted(conductor.ledger.keys("queued"))
        assert sorted(running) == sorted(conductor.ledger.keys("leased"))
        assert sorted(kept) == sorted(conductor.ledger.keys("ready"))
        assert all(len(batch) <= conductor.prompts_per_step for batch in conductor.batches)
        assert max(conductor.staleness, default=0) <= STALENESS

    def teardown(self):
        if hasattr(self, "conductor"):
            self.conductor.play()
            self.every_key_is_in_one_place()
            done = self.conductor.trained + self.conductor.ended
            originals = {key for key in done if key.duplicate == 0}
            assert set(done.values()) <= {1}
            assert len(originals) == self.epochs * self.data
            assert self.conductor.ledger.counts().launched == len(done)
            self.conductor.ledger.close()
        self.folder.cleanup()


Laws.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLaws = Laws.TestCase


class _ForgetsWhatItDefers(TailBatching):
    """Negative control: a queue that is in nobody's books, as in systems that lose prompts."""

    def should_stop(self, state):
        state.waiting.clear()
        return super().should_stop(state)


def test_the_laws_catch_a_schedule_that_loses_prompts():
    class Broken(Laws):
        policies = dict.fromkeys(POLICIES, lambda: _ForgetsWhatItDefers(RESUME, overlaunch_prompts=2.0))

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Broken,
            settings=settings(
                max_examples=50, deadline=None, database=None, phases=[Phase.generate], report_multiple_bugs=False
            ),
        )


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize(("data", "prompts_per_step", "epochs"), [(37, 8, 2), (8, 8, 3), (9, 8, 2), (1, 1, 1)])
def test_an_undisturbed_run_trains_every_prompt_once_per_epoch(name, data, prompts_per_step, epochs):
    conductor = Conductor(
        POLICIES[name](),
        data=data,
        prompts_per_step=prompts_per_step,
        epochs=epochs,
        predict=lambda key: float(key.prompt + 1),
    ).play(order=lambda key: (key.prompt * 7 % 11, key))
    originals = [key for key in conductor.trained if key.duplicate == 0]
    assert len(originals) == data * epochs
    assert set(conductor.trained.values()) == {1}
    if "repeat" not in name:
        assert conductor.step <= -(-data * epochs // prompts_per_step) + 1
