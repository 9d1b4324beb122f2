"""What drivers may ask of a run, without Ray: knobs and their bounds, and what happens between two steps."""

import asyncio
import logging

import pytest

from pipelines.config_loader import load
from pipelines.controls import Controls, RecentMetrics
from pipelines.interruption import Interrupted
from pipelines.knobs import KNOBS, Knobs
from storage.errors import UserError


def config(*overrides):
    return load(["run.steps=4", *overrides]).config


class Session:
    """Stands in for a session between two steps; writes down what is done to it, in order."""

    def __init__(self, controls, step=0, stop_at_rest=False):
        self.controls, self.step, self.stop_at_rest = controls, step, stop_at_rest
        self.done = []

    async def adopt(self, changed):
        self.done.append(("adopt", tuple(sorted(changed))))

    async def save_now(self):
        self.done.append("save")
        return f"step_{self.step}"

    async def evaluate_now(self):
        self.done.append("evaluate")
        return {"eval/heldout/accuracy": 0.5}

    async def rest(self, news):
        self.done.append("rest")
        if self.stop_at_rest:
            raise Interrupted
        await asyncio.wait_for(news.wait(), 5)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("learner.learning_rate", 0, "must be number > 0 and <= 1"),
        ("learner.learning_rate", "fast", "got 'fast'"),
        ("learner.learning_rate", float("nan"), "must be number > 0 and <= 1"),
        ("learner.learning_rte", 0.1, "did you mean learner.learning_rate?"),
        ("evaluation.every", -1, "must be integer >= 0"),
        ("evaluation.every", 2.5, "must be integer >= 0"),
        ("run.steps", 5, "cannot change while it goes on; what can be set: speculation.source"),
        ("speculation.source", "off", "was started with speculation.source=off"),
        ("schedule.overlaunch_prompts", 1.5, "belongs to schedule.batching=tail"),
        ("asynchrony.max_staleness", 1, "an integer from 0 to 0: it may only be lowered"),
    ],
)
def test_a_knob_refuses_what_it_does_not_take_in_one_line(name, value, told):
    knobs = Knobs(config(), {})
    with pytest.raises(UserError) as error:
        knobs.set(name, value)
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert knobs.pending == frozenset()


def test_a_misspelt_choice_names_the_nearest_one():
    knobs = Knobs(config("speculation.source=history"), {})
    with pytest.raises(UserError, match=r"one of: auto, acceptance, always \(did you mean always\?\)"):
        knobs.set("speculation.gate", "alwyas")
    with pytest.raises(UserError, match="must be off or history, which the run was started with"):
        knobs.set("speculation.source", "hybrid")


def test_staleness_is_lowered_and_raised_again_up_to_what_was_configured():
    knobs = Knobs(config("asynchrony.pipeline=stream", "asynchrony.max_staleness=3"), {})
    for value in (1, 3, "2"):
        knobs.set("asynchrony.max_staleness", value)
        assert knobs.coming.asynchrony.max_staleness == int(value)
    with pytest.raises(UserError, match="from 0 to 3"):
        knobs.set("asynchrony.max_staleness", "4")


def test_a_change_that_contradicts_the_rest_of_the_configuration_is_refused_with_the_reason():
    tail = ("schedule.batching=tail", "schedule.deferred=resume", "asynchrony.max_staleness=4", "data.prompts=64")
    knobs = Knobs(config(*tail), {})
    with pytest.raises(UserError, match=r"schedule\.deferred=resume trains tokens of earlier versions"):
        knobs.set("asynchrony.max_staleness", 0)


def test_drafts_that_reuse_leniently_can_be_switched_off_and_come_back_as_configured():
    knobs = Knobs(config("speculation.source=hybrid", "speculation.verify=lenient"), {})
    knobs.set("speculation.source", "off")
    knobs.apply()
    assert (knobs.config.speculation.source, knobs.config.speculation.verify) == ("off", "exact")
    assert (knobs.wiring.speculation.source, knobs.wiring.speculation.verify) == ("hybrid", "lenient")
    knobs.set("speculation.source", "hybrid")
    knobs.apply()
    assert knobs.config == config("speculation.source=hybrid", "speculation.verify=lenient")


def test_a_resumed_run_keeps_knobs_unless_the_command_line_says_otherwise():
    knobs = Knobs(config(), {})
    knobs.set("learner.learning_rate", 0.25)
    knobs.set("evaluation.every", 7)
    saved = knobs.saved()
    assert set(saved) == {"learner.learning_rate", "evaluation.every"}
    again = Knobs(config("evaluation.every=3"), saved)
    assert again.config.learner.learning_rate == 0.25
    assert again.config.evaluation.every == 3
    assert set(again.saved()) == {"learner.learning_rate"}


def test_every_knob_is_a_field_with_a_note():
    assert {knob.name for knob in Knobs(config(), {}).all()} == set(KNOBS)
    assert all(knob.note and knob.kind for knob in Knobs(config(), {}).all())


def test_changes_wait_for_the_next_step_and_name_it(caplog):
    async def scenario():
        controls = Controls(config(), train=True)
        session = Session(controls)
        assert controls.set("learner.learning_rate", 0.5).step == 1
        await controls.serve(session)
        assert session.done == [("adopt", ("learner.learning_rate",))]
        change = controls.set("learner.learning_rate", 0.25)  # step 1 is in progress
        assert (change.before, change.after, change.step) == (0.5, 0.25, 2)
        assert controls.config.learner.learning_rate == 0.5
        session.step = 1
        await controls.serve(session)
        assert controls.config.learner.learning_rate == 0.25
        assert str(controls.set("learner.learning_rate", 0.25)) == "learner.learning_rate is 0.25 already"

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert "a driver sets learner.learning_rate from 0.5 to 0.25, from step 2 on" in caplog.text


def test_a_paused_run_rests_and_still_does_what_drivers_ask_for():
    async def scenario():
        controls = Controls(config(), train=True)
        session = Session(controls, step=2)
        controls.pause()
        controls.pause()
        serving = asyncio.create_task(controls.serve(session))
        await asyncio.sleep(0)
        assert await controls.request("checkpoint") == "step_2"
        change = controls.set("checkpoint.every", 5)
        assert change.step == 3
        await asyncio.sleep(0.01)
        assert controls.config.checkpoint.every == 5
        assert not serving.done()
        controls.resume()
        controls.resume()
        assert await serving > 0
        assert [done for done in session.done if done != "rest"] == ["save", ("adopt", ("checkpoint.every",))]

    asyncio.run(scenario())


def test_a_stop_ends_the_rest():
    async def scenario():
        controls = Controls(config(), train=True)
        controls.pause()
        with pytest.raises(Interrupted):
            await controls.serve(Session(controls, stop_at_rest=True))

    asyncio.run(scenario())


def test_requests_are_done_in_order_and_answered_when_the_run_ends():
    async def scenario():
        controls = Controls(config(), train=True)
        session = Session(controls, step=1)
        asked = [asyncio.create_task(controls.request(what)) for what in ("evaluation", "checkpoint", "evaluation")]
        await asyncio.sleep(0)
        await controls.serve(session)
        assert session.done == ["evaluate", "save", "evaluate"]
        assert (await asked[1], (await asked[2])["eval/heldout/accuracy"]) == ("step_1", 0.5)
        late = [asyncio.create_task(controls.request(what)) for what in ("checkpoint", "evaluation")]
        await asyncio.sleep(0)
        controls.end("finished", "last")
        assert await late[0] == "last"
        with pytest.raises(UserError, match="the run finished before the evaluation was made"):
            await late[1]
        with pytest.raises(UserError, match="the run has finished: there is nothing left to steer"):
            controls.pause()

    asyncio.run(scenario())


def test_who_asked_hears_of_a_failure_that_ends_the_run():
    class Broken(Session):
        async def save_now(self):
            raise UserError("no space left")

    async def scenario():
        controls = Controls(config(), train=True)
        asked = asyncio.create_task(controls.request("checkpoint"))
        await asyncio.sleep(0)
        with pytest.raises(UserError, match="no space left"):
            await controls.serve(Broken(controls))
        with pytest.raises(UserError, match="the checkpoint was not made: no space left"):
            await asked

    asyncio.run(scenario())


def test_an_evaluation_alone_cannot_be_steered():
    async def scenario():
        controls = Controls(config(), train=False)
        for act in (controls.pause, controls.resume, lambda: controls.set("evaluation.every", 1)):
            with pytest.raises(UserError, match="this run only evaluates"):
                act()

    asyncio.run(scenario())


def test_recent_metrics_are_bounded_and_plain():
    import numpy as np

    recent = RecentMetrics([{"step": 1, "reward/mean": 0.1}])
    for step in range(2, 1500):
        recent.log(step, {"reward/mean": np.float32(0.5), "reward/std": float("nan"), "note": "x"})
    assert len(recent.last(5000)) == 1000
    newest = recent.last(1)[0]
    assert (newest["step"], newest["reward/mean"], newest["reward/std"], newest["note"]) == (1499, 0.5, None, "x")
    assert type(newest["reward/mean"]) is float
