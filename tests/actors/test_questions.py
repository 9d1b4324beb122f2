"""Prompts of people, answered by a worker's engine beside the training."""

import threading

import numpy as np
import pytest

from actors.bundles import Question
from actors.rollout.engine import Completion, Request
from actors.rollout.engine_loop import EngineLoop
from actors.rollout.questions import answer
from actors.rollout.torch_engine import TorchEngine
from storage.errors import UserError
from storage.models import load_tokenizer
from storage.records import SamplingParams

MOST = 48


@pytest.fixture
def tokenizer(random_llama):
    return load_tokenizer(random_llama)


@pytest.fixture
def loop(random_llama):
    loop = EngineLoop(TorchEngine(random_llama, max_rows=2, max_length=MOST))
    yield loop
    loop.close()


def question(prompt, *requests, deadline_s=60.0, **sampling):
    return Question(
        prompt=prompt,
        requests=requests,
        sampling=SamplingParams(**{"max_tokens": 6, **sampling}),
        chat_template=None,
        system_prompt="",
        deadline_s=deadline_s,
    )


def test_answers_come_in_order_and_depend_on_their_request_alone(loop, tokenizer):
    both = answer(question("1+1=", 5, 6), loop, tokenizer, MOST)
    assert answer(question("1+1=", 6), loop, tokenizer, MOST) == both[1:]
    assert answer(question("1+1=", 5), loop, tokenizer, MOST) == both[:1]
    assert all(0 < len(text) <= 6 for text in both)


def test_a_person_is_answered_before_rows_that_wait(loop, tokenizer):
    order, finished = [], threading.Event()

    def sink(item):
        order.append(item.request_id)
        if len(order) == 6:
            finished.set()

    prompt = tokenizer("1+2=")["input_ids"]
    sampling = SamplingParams(max_tokens=30)
    loop.submit(
        [Request(request_id=i, prompt_ids=np.array(prompt, np.int32), sampling=sampling) for i in range(6)], sink
    )
    answer(question("1+1=", 77, max_tokens=2), loop, tokenizer, MOST)
    assert len(order) < 6
    assert finished.wait(60)


def test_an_answer_ends_where_the_engine_has_no_more_room(loop, tokenizer):
    [text] = answer(question("x" * 40, 1, max_tokens=100, temperature=0.0), loop, tokenizer, MOST)
    assert len(text) <= MOST - 40


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("x" * 60, "leaves no room for an answer"),
        ([{"role": "user", "content": "hello"}], "cannot be shown to the model: it is a list of messages"),
        (5, "cannot be shown to the model: it is of type int"),
        ("", "the prompt is empty"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_one_line(loop, tokenizer, prompt, told):
    tokenizer.bos_token = None
    with pytest.raises(UserError, match=told) as error:
        answer(question(prompt, 1), loop, tokenizer, MOST)
    assert "\n" not in str(error.value)


def test_a_deadline_takes_the_rows_out_again(loop, tokenizer):
    with pytest.raises(UserError, match="not complete after 0 s"):
        answer(question("1+1=", 1, 2, 3, max_tokens=40, deadline_s=0.0), loop, tokenizer, MOST)
    assert answer(question("1+1=", 1, 2, 3), loop, tokenizer, MOST)
    assert loop.stats().running == loop.stats().waiting == 0


def test_a_run_that_stops_its_answers_says_so(tokenizer):
    class Stopping:
        def submit(self, requests, sink):
            for request in requests:
                sink(Completion(request_id=request.request_id, segments=(), finish_reason="abort"))

    with pytest.raises(UserError, match="was cut off"):
        answer(question("1+1=", 1), Stopping(), tokenizer, MOST)


def test_a_broken_engine_is_not_hidden(tokenizer):
    class Broken:
        def submit(self, requests, sink):
            sink(RuntimeError("out of memory"))

    with pytest.raises(RuntimeError, match="out of memory"):
        answer(question("1+1=", 1), Broken(), tokenizer, MOST)
