"""Answers the prompts of people who watch a run, through the same engine and template as the training answers."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from typing import Any

from actors.bundles import Question
from actors.rollout.engine import Completion, Request
from actors.rollout.engine_loop import EngineLoop
from storage.errors import UserError
from storage.rendering import Renderer

_FIRST = 1e9
"""Priority: a person waits, and one row more costs the others little."""


def answer(question: Question, loop: EngineLoop, tokenizer: Any, max_length: int) -> list[str]:
    """Return the texts of the answers, one a request, in order.

    Args:
        question: What is asked, and how to draw.
        loop: The engine that draws.
        tokenizer: The model's.
        max_length: Longest prompt with its answer that the engine holds. Unit: tokens.

    Raises:
        UserError: The prompt cannot be rendered or is too long, or the answers take too long.
    """
    try:
        renderer = Renderer(tokenizer, chat_template=question.chat_template, system_prompt=question.system_prompt)
        _, token_ids = renderer.render(question.prompt)
    except UserError as error:
        raise UserError(f"the prompt cannot be shown to the model: {error}") from None
    if not len(token_ids):
        raise UserError("the prompt is empty: give the model something to read")
    room = max_length - len(token_ids)
    if room < 1:
        raise UserError(
            f"the prompt has {len(token_ids)} tokens and leaves no room for an answer: the engines of this run hold "
            f"{max_length} tokens, its longest prompt and rollout.max_tokens together; shorten it"
        )
    sampling = replace(question.sampling, max_tokens=min(question.sampling.max_tokens, room))
    arrived: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
    loop.submit(
        [
            Request(
                request_id=identity,
                prompt_ids=token_ids,
                sampling=sampling,
                group=question.requests[0],
                priority=_FIRST,
            )
            for identity in question.requests
        ],
        arrived.put,
    )
    completions: dict[int, Completion] = {}
    ends = time.monotonic() + question.deadline_s
    while len(completions) < len(question.requests):
        try:
            item = arrived.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            loop.abort(question.requests)
            raise UserError(
                f"the answers were not complete after {question.deadline_s:g} s: ask for fewer or shorter ones "
                "(n, max_tokens), or raise timeout_s"
            ) from None
        if isinstance(item, BaseException):
            raise item
        if item.finish_reason in ("abort", "error"):
            raise UserError(f"the answer was cut off ({item.error or 'the run stops its answers'}): ask again")
        completions[item.request_id] = item
    return [renderer.decode(_tokens(completions[identity])) for identity in question.requests]


def _tokens(completion: Completion) -> list[int]:
    return [token for segment in completion.segments for token in segment.token_ids.tolist()]
