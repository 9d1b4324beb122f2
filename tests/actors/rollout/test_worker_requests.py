"""What a rollout worker asks of its engine for an assignment."""

import queue
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from actors.bundles import Call, Question
from actors.drafts.options import SpeculationOptions
from actors.rollout import worker as rollout_worker
from actors.rollout.engine import Swap
from actors.rollout.options import RolloutOptions
from actors.rollout.worker import RolloutWorker, WorkerSettings
from storage.records import Assignment, GroupKey, Prompt, SamplingParams

from .conftest import save_model
from .handovers import TOKENIZER


def settings(model, **others):
    known = {"name": "rollout-0", "options": RolloutOptions(max_rows=2), "speculation": SpeculationOptions()}
    made = {"model_path": str(model), "version": 0, "run_seed": 0, "max_length": 32, "threads": 1, **known, **others}
    return WorkerSettings(**made)


@pytest.fixture
def worker(tmp_path):
    TOKENIZER.save_pretrained(save_model("llama", tmp_path))
    worker = RolloutWorker(settings(tmp_path))
    yield worker
    worker._loop.close()


def test_answers_of_an_evaluation_may_not_lag(worker):
    prompt = Prompt(index=0, token_ids=np.array([1, 5], np.int32), text="a")
    assignments = [
        Assignment(
            key=GroupKey(split, 0, 0),
            prompt=prompt,
            samples=(0, 1),
            group_size=2,
            sampling=SamplingParams(max_tokens=3),
            run_seed=0,
        )
        for split in ("train", "heldout")
    ]
    requests, owners = worker._requests(assignments)
    assert {(owners[r.request_id][0].split, r.may_lag) for r in requests} == {("train", True), ("heldout", False)}


def call_of(tokens):
    prompt = Prompt(index=0, token_ids=np.array([1, 5], np.int32), text="a")
    assignment = Assignment(
        key=GroupKey("train", 0, 0),
        prompt=prompt,
        samples=(0, 1, 2),
        group_size=3,
        sampling=SamplingParams(max_tokens=tokens),
        run_seed=0,
    )
    return Call(number=1, assignments=(assignment,))


QUESTION = Question(
    prompt="ab",
    requests=(7, 8),
    sampling=SamplingParams(max_tokens=4),
    chat_template=None,
    system_prompt="",
    deadline_s=60.0,
)


def in_thread(work):
    found = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: found.put(work()), daemon=True)
    thread.start()
    return found


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_that_goes_to_sleep_hands_over_what_it_writes_and_answers_questions_when_it_wakes(
    worker, snapshots, monkeypatch
):
    asked_awake = worker.answer(QUESTION)
    observed = worker._engine.step
    monkeypatch.setattr(worker._engine, "step", lambda: (time.sleep(0.05), observed())[1])
    written = in_thread(lambda: list(worker.generate(call_of(28))))
    until(lambda: worker._loop.stats().running == 2)
    asked = in_thread(lambda: worker.answer(QUESTION))  # both slots are taken: it waits
    until(lambda: worker._loop.stats().waiting == 3)
    freed = worker.sleep()
    assert freed > 0
    assert worker.health()["asleep"]
    bundles = written.get(timeout=30)[1::2]
    samples = [sample for bundle in bundles for sample in bundle.samples]
    assert {(s.index, s.finish_reason) for s in samples} == {(i, "abort") for i in range(3)}
    assert worker.sleep() == 0
    assert (worker._loop.stats().running, worker._loop.stats().waiting) == (0, 2), "the question waits"
    manifest, buffer = snapshots[1]
    monkeypatch.setattr(ray, "get", lambda ref: buffer)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    assert worker.set_weights(manifest, [None], Swap())["version"] == 1
    answers = asked.get(timeout=30)
    assert len(answers) == 2
    assert not worker.health()["asleep"]
    assert answers == worker.answer(QUESTION) != asked_awake, "with the weights that came"


def answers_of(bundles):
    samples = [sample for bundle in bundles for sample in bundle.samples]
    return {s.index: (s.text, s.finish_reason, [segment.version for segment in s.segments]) for s in samples}


@pytest.mark.parametrize("drafts", ["off", "history"])
def test_a_worker_that_is_made_anew_is_like_a_fresh_one_and_calls_of_before_write_nothing(
    worker, tmp_path, monkeypatch, drafts
):
    observed = worker._engine.step
    monkeypatch.setattr(worker._engine, "step", lambda: (time.sleep(0.05), observed())[1])
    written = in_thread(lambda: list(worker.generate(call_of(28))))
    until(lambda: worker._loop.stats().running == 2)
    worker.retire()
    aborted = answers_of(written.get(timeout=30)[1::2])
    assert [reason for _, reason, _ in aborted.values()] == ["abort"] * 3
    again = settings(tmp_path, version=5, run_seed=3, speculation=SpeculationOptions(source=drafts))
    asked = in_thread(lambda: worker.answer(QUESTION))
    worker.renew(2, again)
    assert len(asked.get(timeout=30)) == 2
    assert (worker.health()["version"], worker.health()["steps"] > 0) == (5, True)
    for stale in (0, 1, -1):
        assert list(worker.generate(replace(call_of(28), term=stale))) == []
    fresh = RolloutWorker(again)
    try:
        expected = answers_of(list(fresh.generate(call_of(28)))[1::2])
    finally:
        fresh._loop.close()
    found = answers_of(list(worker.generate(replace(call_of(28), term=2)))[1::2])
    assert found == expected
    assert all(versions == [5] for _, _, versions in found.values())


def test_a_worker_whose_calls_do_not_end_cannot_be_used_again(worker, monkeypatch):
    monkeypatch.setattr(rollout_worker, "_RETIRE_S", 0.2)
    let = threading.Event()
    monkeypatch.setattr(ray, "get", lambda ref: let.wait(30))

    def take_weights():
        with pytest.raises(RuntimeError) as refusal:
            worker.set_weights(None, [None], Swap())
        return str(refusal.value)

    refused = in_thread(take_weights)
    until(lambda: worker._under_way._calls == 1)
    with pytest.raises(RuntimeError, match="1 calls have not ended"):
        worker.retire()
    let.set()
    assert "the engine loop has ended" in refused.get(timeout=30), "and weights of before go nowhere"


@pytest.mark.parametrize(("drafts", "asleep"), [("off", False), ("history", False), ("off", True)])
def test_a_retired_worker_holds_no_engine_any_more(tmp_path, drafts, asleep):
    TOKENIZER.save_pretrained(save_model("llama", tmp_path))
    made = settings(tmp_path, speculation=SpeculationOptions(source=drafts))
    worker = RolloutWorker(made)
    assert len(list(worker.generate(call_of(4)))) > 0
    if asleep:  # a colocated learner has died
        worker.sleep()
    engine, weights = weakref.ref(worker._engine), weakref.ref(worker._engine._pool)
    worker.retire()
    assert engine() is None
    assert weights() is None
    worker.renew(1, made)
    worker._loop.close()
