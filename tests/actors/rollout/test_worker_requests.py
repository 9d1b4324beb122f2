"""What a rollout worker asks of its engine for an assignment."""

import queue
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from actors.bundles import Call, Question
from actors.drafts.options import SpeculationOptions
from actors.rollout.engine import Swap
from actors.rollout.options import RolloutOptions
from actors.rollout.worker import RolloutWorker
from storage.records import Assignment, GroupKey, Prompt, SamplingParams

from .conftest import save_model
from .handovers import TOKENIZER


@pytest.fixture
def worker(tmp_path):
    TOKENIZER.save_pretrained(save_model("llama", tmp_path))
    worker = RolloutWorker(
        "rollout-0",
        str(tmp_path),
        RolloutOptions(max_rows=2),
        run_seed=0,
        max_length=32,
        threads=1,
        version=0,
        speculation=SpeculationOptions(),
    )
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
    question = Question(
        prompt="ab",
        requests=(7, 8),
        sampling=SamplingParams(max_tokens=4),
        chat_template=None,
        system_prompt="",
        deadline_s=60.0,
    )
    asked_awake = worker.answer(question)
    observed = worker._engine.step
    monkeypatch.setattr(worker._engine, "step", lambda: (time.sleep(0.05), observed())[1])
    written = in_thread(lambda: list(worker.generate(call_of(28))))
    until(lambda: worker._loop.stats().running == 2)
    asked = in_thread(lambda: worker.answer(question))  # both slots are taken: it waits
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
    assert answers == worker.answer(question) != asked_awake, "with the weights that came"
