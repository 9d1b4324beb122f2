"""History drafts inside the engine: fewer passes, and the very same answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from actors.drafts.options import SpeculationOptions
from actors.drafts.pack import DraftPack, PastAnswer, PastPrompt, build_pack
from actors.rollout.draft_cost import PassCost
from actors.rollout.engine import Completion, Drafts, Request, RunningRows, StepStats
from actors.rollout.history_drafts import HistoryDrafts
from actors.rollout.torch_engine import TorchEngine
from storage.history.schema import prompt_hash
from tests.actors.rollout.conftest import finish, request, tokens_of

CHEAP = PassCost(fixed=1.0, row=0.0, token=1e-4)
PROMPTS = [np.array([5, 6, 7, 8, 9, 10], np.int32), np.array([11, 12, 13], np.int32)]
SAMPLES = 3


def requests(**fields: Any) -> list[Request]:
    fields = {"max_tokens": 40, **fields}
    return [
        request(10 * group + sample, prompt, group=group, **fields)
        for group, prompt in enumerate(PROMPTS)
        for sample in range(SAMPLES)
    ]


def remember(answers: dict[int, Completion], *, wrong: float, seed: int = 0) -> DraftPack:
    """A pack of answers in which some tokens were replaced."""
    rng = np.random.default_rng(seed)
    prompts = []
    for group, prompt in enumerate(PROMPTS):
        past = []
        for sample in range(SAMPLES):
            completion = answers[10 * group + sample]
            tokens = np.array(tokens_of(completion), np.int32)
            tokens = np.where(rng.random(len(tokens)) < wrong, rng.integers(0, 61, len(tokens)), tokens).astype(
                np.int32
            )
            logprobs = np.concatenate([s.logprobs for s in completion.segments])
            past.append(PastAnswer(token_ids=tokens, logprobs=logprobs, sample=sample))
        prompts.append(PastPrompt(prompt_ids=prompt, answers=past))
    return build_pack(prompts, generation=1)


def source_of(pack: DraftPack, wanted: Sequence[Request], **options: Any) -> HistoryDrafts:
    drafts = HistoryDrafts(SpeculationOptions(**{"gate": "always", **options}), cost=CHEAP)
    drafts.add_pack(pack)
    for item in wanted:
        drafts.register(item.request_id, prompt_hash(item.prompt_ids), item.request_id % 10)
    return drafts


def run(engine: TorchEngine, wanted: Sequence[Request]) -> tuple[dict[int, Completion], list[StepStats]]:
    steps: list[StepStats] = []
    engine.add_observer(steps.append)
    return finish(engine, wanted), steps


def test_a_source_with_nothing_to_draft_from_is_not_asked(engine_of: Callable[..., TorchEngine]) -> None:
    """The first epoch of ``previous_epoch``: each pass would pay for a question whose answer is known."""
    asked: list[int] = []

    class Counted(HistoryDrafts):
        def propose(self, rows: RunningRows) -> Drafts | None:
            asked.append(len(rows.handles))
            return super().propose(rows)

    wanted = requests()
    options = SpeculationOptions(source="previous_epoch", gate="always")
    drafts = Counted(options, cost=CHEAP)
    plain, _ = run(engine_of(max_rows=4, drafts=drafts), wanted)
    assert not asked
    drafts.add_pack(remember(plain, wrong=0.0))
    for item in wanted[:1]:
        drafts.register(item.request_id, prompt_hash(item.prompt_ids), item.request_id % 10)
    again, _ = run(engine_of(max_rows=4, drafts=drafts), wanted)
    assert asked
    assert {i: tokens_of(c) for i, c in again.items()} == {i: tokens_of(c) for i, c in plain.items()}
    assert not drafts.ready


@pytest.mark.parametrize("source", ["history", "previous_epoch", "hybrid"])
@pytest.mark.parametrize("draft_length", ["calibrated", "fixed", "aimd"])
def test_answers_are_those_of_plain_decoding_in_fewer_passes(
    source: str, draft_length: str, engine_of: Callable[..., TorchEngine]
) -> None:
    wanted = requests()
    plain, plain_steps = run(engine_of(max_rows=4), wanted)
    drafts = source_of(remember(plain, wrong=0.15), wanted, source=source, draft_length=draft_length)
    engine = engine_of(max_rows=4, drafts=drafts)
    engine.add_observer(drafts.on_step)
    drafted, steps = run(engine, wanted)
    assert {i: tokens_of(c) for i, c in drafted.items()} == {i: tokens_of(c) for i, c in plain.items()}
    assert len(steps) < 0.7 * len(plain_steps)
    metrics = drafts.metrics()
    assert sum(metrics[f"drafted_{s}"] for s in ("previous", "prompt", "live", "shared")) == sum(
        s.drafted for s in steps
    )
    assert sum(metrics[f"accepted_{s}"] for s in ("previous", "prompt", "live", "shared")) == sum(
        s.accepted for s in steps
    )


def test_a_lenient_previous_answer_that_the_policy_agrees_with_is_kept_in_one_pass(
    engine_of: Callable[..., TorchEngine],
) -> None:
    wanted = requests()
    plain, _ = run(engine_of(max_rows=6), wanted)
    options = {"source": "previous_epoch", "verify": "lenient", "log_lenience": 5.0, "fresh_share": 0.0}
    drafts = source_of(remember(plain, wrong=0.0), wanted, **options)
    kept, steps = run(engine_of(max_rows=6, drafts=drafts), wanted)
    assert {i: tokens_of(c) for i, c in kept.items()} == {i: tokens_of(c) for i, c in plain.items()}
    assert len(steps) <= 3
    assert all(drafts.reused(item.request_id) for item in wanted)
    assert all(drafts.reused_tokens(item.request_id) >= 39 for item in wanted)


def test_lenient_answers_are_full_length_when_little_is_kept(engine_of: Callable[..., TorchEngine]) -> None:
    wanted = requests()
    plain, _ = run(engine_of(max_rows=6), wanted)
    for source in ("previous_epoch", "hybrid"):
        options = {"source": source, "verify": "lenient", "log_lenience": 0.0, "fresh_share": 0.3}
        drafts = source_of(remember(plain, wrong=0.5), wanted, **options)
        answers, _ = run(engine_of(max_rows=6, drafts=drafts), wanted)
        assert all(len(tokens_of(c)) == 40 for c in answers.values())


def test_rows_that_are_aborted_and_resumed_end_as_if_nothing_had_been(engine_of: Callable[..., TorchEngine]) -> None:
    wanted = requests()
    plain, _ = run(engine_of(max_rows=6), wanted)
    drafts = source_of(remember(plain, wrong=0.1), wanted, source="hybrid")
    engine = engine_of(max_rows=6, drafts=drafts)
    engine.submit(wanted)
    for _ in range(3):
        engine.step()
    stopped = engine.abort(keep_state=True)
    assert stopped
    again = [
        request(
            c.request_id,
            PROMPTS[c.request_id // 10],
            group=c.request_id // 10,
            max_tokens=40,
            prefix=c.segments,
        )
        for c in stopped
    ]
    done = finish(engine, again)
    assert {i: tokens_of(c) for i, c in done.items()} == {i: tokens_of(plain[i]) for i in done}


def test_the_cost_is_fitted_and_drafting_begins_without_being_told(engine_of: Callable[..., TorchEngine]) -> None:
    wanted = requests(max_tokens=50)
    plain, _ = run(engine_of(max_rows=6), wanted)
    drafts = HistoryDrafts(SpeculationOptions(source="history", gate="always"))
    drafts.add_pack(remember(plain, wrong=0.05))
    engine = engine_of(max_rows=6, drafts=drafts)
    engine.add_observer(drafts.on_step)
    answers, steps = run(engine, wanted)
    assert {i: tokens_of(c) for i, c in answers.items()} == {i: tokens_of(c) for i, c in plain.items()}
    assert drafts.cost is not None
    assert all(step.drafted == 0 for step in steps[:8])
