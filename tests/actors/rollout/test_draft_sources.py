"""What the draft source of a worker proposes, row by row, from histories that are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.drafts.options import SpeculationOptions
from actors.drafts.pack import SHARED_KEY, DraftPack, PastAnswer, PastPrompt, build_pack, index_answers
from actors.rollout.draft_cost import PassCost
from actors.rollout.engine import Drafts, Request, RunningRows, StepStats
from actors.rollout.history_drafts import HistoryDrafts
from actors.rollout.lenient_reuse import is_fresh
from storage.history.schema import prompt_hash
from storage.records import SamplingParams, Segment

CHEAP = PassCost(fixed=1.0, row=0.0, token=1e-6)
PROMPT = np.arange(100, 110, dtype=np.int32)
OTHER = np.arange(200, 210, dtype=np.int32)
SAMPLING = SamplingParams(max_tokens=64)


def past(tokens: Sequence[int], sample: int = 0, **facts: Any) -> PastAnswer:
    logprobs = facts.pop("logprobs", np.full(len(tokens), -0.05, np.float32))
    return PastAnswer(token_ids=np.array(tokens, np.int32), logprobs=logprobs, sample=sample, **facts)


def pack_of(*answers: PastAnswer, prompt: np.ndarray = PROMPT, **options: Any) -> DraftPack:
    return build_pack([PastPrompt(prompt_ids=prompt, answers=answers)], generation=1, **options)


class Table:
    """Rows of an engine, as a draft source sees them."""

    def __init__(self, source: HistoryDrafts) -> None:
        self.source = source
        self.tokens = np.full((12, 128), -7, np.int32)
        self.prompt = np.zeros(12, np.int64)
        self.length = np.zeros(12, np.int64)

    def open(self, handle: int, request_id: int, *, prompt: np.ndarray = PROMPT, **fields: Any) -> bool:
        fields.setdefault("sampling", SAMPLING)
        request = Request(request_id=request_id, prompt_ids=prompt, **fields)
        prefix = [token for segment in request.prefix for token in segment.token_ids]
        self.tokens[handle] = -7
        self.tokens[handle, : len(prompt)] = prompt
        self.prompt[handle] = self.length[handle] = len(prompt)
        held = self.source.open(handle, request)
        self.write(handle, prefix)
        return held

    def write(self, handle: int, tokens: Sequence[int]) -> None:
        at = self.length[handle]
        self.tokens[handle, at : at + len(tokens)] = tokens
        self.length[handle] += len(tokens)

    def ask(self, *handles: int, room: int = 50) -> Drafts:
        rows = np.array(handles, np.int64)
        drafts = self.source.propose(
            RunningRows(rows, self.tokens, self.prompt[rows], self.length[rows], np.full(len(rows), room))
        )
        if drafts is None:
            return Drafts(np.zeros((len(rows), 0), np.int32), np.zeros(len(rows), np.int64))
        return drafts

    def draft(self, handle: int, room: int = 50) -> list[int]:
        drafts = self.ask(handle, room=room)
        return drafts.tokens[0, : drafts.lengths[0]].tolist()

    def settle(self, handle: int, drafted: int, accepted: int) -> None:
        self.source.observe(np.array([handle]), np.array([drafted]), np.array([accepted]))


def table(source: str = "history", *, cost: PassCost | None = CHEAP, **options: Any) -> Table:
    options = {"gate": "always", "live": False, "max_draft": 8, **options}
    return Table(HistoryDrafts(SpeculationOptions(source=source, **options), cost=cost))


ANSWER = list(range(1, 21))


def test_a_row_that_repeats_an_answer_is_drafted_its_continuation() -> None:
    rows = table()
    rows.source.add_pack(pack_of(past(ANSWER)))
    assert not rows.open(3, 1)
    rows.write(3, ANSWER[:1])
    assert rows.draft(3) == ANSWER[1:9]
    rows.write(3, ANSWER[1:6])
    assert rows.draft(3) == ANSWER[6:14]
    assert rows.draft(3, room=2) == ANSWER[6:8]
    rows.write(3, ANSWER[6:])
    assert rows.draft(3) == []


def test_a_row_that_left_an_answer_is_drafted_again_when_it_comes_back() -> None:
    rows = table()
    rows.source.add_pack(pack_of(past(ANSWER)))
    rows.open(0, 1)
    rows.write(0, [*ANSWER[:3], 999, 998])
    assert rows.draft(0) == []
    rows.write(0, ANSWER[10:12])
    assert rows.draft(0)[:4] == ANSWER[12:16]


def test_rows_of_several_packs_get_the_drafts_of_their_own() -> None:
    rows = table()
    rows.source.add_pack(pack_of(past(ANSWER)))
    rows.source.register(1, prompt_hash(PROMPT), 0)
    rows.open(0, 1)
    other = [t + 50 for t in ANSWER]
    rows.source.add_pack(pack_of(past(other), prompt=OTHER))
    rows.source.register(2, prompt_hash(OTHER), 0)
    rows.open(5, 2, prompt=OTHER)
    rows.write(0, ANSWER[:2])
    rows.write(5, other[:4])
    drafts = rows.ask(5, 0)
    assert drafts.tokens[0, : drafts.lengths[0]].tolist() == other[4:12]
    assert drafts.tokens[1, : drafts.lengths[1]].tolist() == ANSWER[2:10]


def test_a_handle_that_is_used_again_knows_nothing_of_the_row_before() -> None:
    rows = table("hybrid", live=True)
    rows.source.add_pack(pack_of(past(ANSWER)))
    rows.source.register(1, prompt_hash(PROMPT), 0)
    rows.open(0, 1, group=7)
    rows.write(0, ANSWER[:9])
    assert rows.draft(0)
    rows.source.close(0)
    rows.open(0, 2, prompt=OTHER, group=8)
    rows.write(0, ANSWER[:9])
    assert rows.draft(0) == []


def test_a_pack_is_dropped_when_it_is_not_the_newest_and_its_requests_are_released() -> None:
    rows = table()
    rows.source.add_pack(pack_of(past(ANSWER)))
    rows.source.register(1, prompt_hash(PROMPT), 0)
    rows.open(0, 1)
    rows.source.add_pack(pack_of(past(ANSWER), prompt=OTHER))
    assert rows.source.metrics()["packs"] == 2
    rows.source.close(0)
    assert rows.source.metrics()["packs"] == 2, "a parked row comes back to its pack"
    rows.source.release(1)
    assert rows.source.metrics()["packs"] == 1


def test_a_prompt_that_only_shares_its_hash_gets_no_drafts() -> None:
    rows = table("hybrid", verify="lenient", fresh_share=0)
    pack = pack_of(past(ANSWER))
    rows.source.add_pack(replace(pack, checks=pack.checks + np.uint64(1)))
    rows.source.register(1, prompt_hash(PROMPT), 0)
    assert not rows.open(0, 1)
    rows.write(0, ANSWER[:4])
    assert rows.draft(0) == []


def test_prompts_without_history_draft_from_the_shared_index() -> None:
    rows = table(unseen="global")
    others = [PastPrompt(prompt_ids=PROMPT, answers=[past(ANSWER)])]
    rows.source.add_pack(build_pack([], generation=1, shared={SHARED_KEY: index_answers(others, 0.7)}))
    rows.open(0, 1, prompt=OTHER)
    rows.write(0, ANSWER[4:8])
    assert rows.draft(0)[:3] == ANSWER[8:11]
    assert rows.source._source[0] == 3


def test_a_row_drafts_from_a_sibling_that_is_ahead_and_from_its_own_text() -> None:
    rows = table(live=True)
    rows.open(0, 1, group=5)
    rows.open(1, 2, group=5)
    rows.open(2, 3, group=6)
    rows.write(0, ANSWER)
    for handle in (1, 2):
        rows.write(handle, ANSWER[:6])
    drafts = rows.ask(0, 1, 2)
    assert drafts.tokens[1, : drafts.lengths[1]].tolist() == ANSWER[6:14]
    assert drafts.lengths[2] == 0
    rows.write(2, ANSWER[:4])
    assert rows.draft(2)[:2] == ANSWER[4:6]


def test_texts_of_finished_siblings_stay_until_the_group_has_left() -> None:
    rows = table(live=True)
    rows.open(0, 1, group=5)
    rows.open(1, 2, group=5)
    rows.write(0, ANSWER)
    rows.ask(0, 1)
    rows.source.close(0)
    rows.open(0, 3, group=5)
    rows.write(0, ANSWER[:5])
    assert rows.draft(0)[:4] == ANSWER[5:9]


def test_previous_answer_is_followed_across_a_replaced_a_missing_and_an_extra_token() -> None:
    rows = table("previous_epoch")
    rows.source.add_pack(pack_of(past(ANSWER, sample=2), past([99] * 20, sample=1)))
    rows.source.register(1, prompt_hash(PROMPT), 2)
    rows.open(0, 1)
    assert rows.draft(0) == ANSWER[:8]
    rows.write(0, [*ANSWER[:3], 77])
    assert rows.draft(0) == ANSWER[4:12], "a replaced token"
    rows.write(0, ANSWER[4:6] + ANSWER[7:9])
    assert rows.draft(0) == ANSWER[9:17], "a missing token"
    rows.write(0, [78, *ANSWER[9:11]])
    assert rows.draft(0) == ANSWER[11:19], "an extra token"


def test_a_row_that_left_its_previous_answer_goes_on_in_that_of_another_slot_where_that_matches_further() -> None:
    rows = table("previous_epoch")
    other = [*range(200, 210), *range(60, 80)]
    rows.source.add_pack(pack_of(past(ANSWER, sample=0), past([300, 60, 61, 301], sample=1), past(other, sample=2)))
    rows.source.register(1, prompt_hash(PROMPT), 0)
    rows.open(0, 1)
    rows.write(0, [*ANSWER[:3], 60])
    assert rows.draft(0) == ANSWER[4:12], "one token that is found elsewhere too says nothing"
    rows.write(0, [61, 62])
    assert rows.draft(0) == other[13:21], "the longest match, not the first"
    rows.write(0, [*other[13:15], *ANSWER[6:8]])
    assert rows.draft(0) == ANSWER[8:16], "and back"


def test_previous_answer_of_another_slot_is_not_used() -> None:
    rows = table("previous_epoch")
    rows.source.add_pack(pack_of(past(ANSWER, sample=2)))
    rows.source.register(1, prompt_hash(PROMPT), 1)
    rows.open(0, 1)
    rows.write(0, ANSWER[:4])
    assert rows.draft(0) == []


def test_an_aborted_answer_is_no_previous_answer_but_is_history() -> None:
    pack = pack_of(past(ANSWER, finish_reason="abort"), past(ANSWER[:5], visit=1))
    at = pack.previous.find(prompt_hash(PROMPT), 0)
    assert np.diff(pack.previous.starts)[at] == 5
    rows = table("history")
    rows.source.add_pack(pack)
    rows.open(0, 1)
    rows.write(0, ANSWER[:6])
    assert rows.draft(0) == ANSWER[6:14]


def lenient(source: str = "previous_epoch", *answers: PastAnswer, **options: Any) -> Table:
    rows = table(source, **{"verify": "lenient", "fresh_share": 0.0, "log_lenience": 0.5, **options})
    rows.source.add_pack(pack_of(*(answers or (past(ANSWER),))))
    rows.source.register(1, prompt_hash(PROMPT), 0)
    return rows


def test_lenient_reuse_offers_the_whole_answer_before_the_first_token() -> None:
    logprobs = np.linspace(-1, 0, 20).astype(np.float32)
    rows = lenient("previous_epoch", past(ANSWER, logprobs=logprobs))
    assert rows.open(0, 1)
    drafts = rows.ask(0)
    assert drafts.tokens[0, : drafts.lengths[0]].tolist() == ANSWER
    assert drafts.lenience is not None
    assert drafts.logprobs is not None
    assert drafts.lenience.tolist() == [0.5]
    assert drafts.logprobs[0, :20] == pytest.approx(logprobs)
    assert rows.ask(0, room=6).lengths.tolist() == [6]


def test_a_lenient_draft_that_was_cut_goes_on_leniently_and_behind_a_rejection_exactly() -> None:
    rows = lenient()
    rows.open(0, 1)
    rows.ask(0)
    rows.write(0, ANSWER[:12])
    rows.settle(0, drafted=12, accepted=12)
    assert rows.draft(0) == ANSWER[12:]
    rows.write(0, [*ANSWER[12:15], 99])
    rows.settle(0, drafted=8, accepted=3)
    drafts = rows.ask(0)
    assert drafts.lenience is None
    assert drafts.tokens[0, : drafts.lengths[0]].tolist() == ANSWER[16:]
    assert rows.source.reused(1)
    assert rows.source.reused_tokens(1) == 15
    metrics = rows.source.metrics()
    assert (metrics["drafted_lenient"], metrics["accepted_lenient"]) == (20, 15)
    rows.source.release(1)
    assert not rows.source.reused(1)


def test_hybrid_goes_on_with_history_behind_a_lenient_prefix() -> None:
    rows = lenient("hybrid")
    rows.open(0, 1)
    rows.ask(0)
    rows.write(0, [*ANSWER[:5], 99])
    rows.settle(0, drafted=20, accepted=5)
    rows.write(0, ANSWER[8:10])
    drafts = rows.ask(0)
    assert drafts.tokens[0, : drafts.lengths[0]].tolist() == ANSWER[10:18]
    assert drafts.lenience is None


def test_lenient_and_exact_rows_share_a_pass() -> None:
    rows = lenient("hybrid")
    rows.open(0, 1)
    rows.open(1, 2)
    rows.write(1, ANSWER[:2])
    drafts = rows.ask(1, 0)
    assert drafts.lenience is not None
    assert np.isnan(drafts.lenience).tolist() == [True, False]
    assert drafts.tokens[0, : drafts.lengths[0]].tolist() == ANSWER[2:10]
    assert drafts.lengths[1] == 20


@pytest.mark.parametrize(
    ("options", "fields", "version"),
    [
        ({"fresh_share": 1.0}, {}, 0),
        ({"max_age": 2}, {}, 3),
        ({}, {"sampling": SamplingParams(max_tokens=64, temperature=0.7)}, 0),
        ({}, {"sampling": SamplingParams(max_tokens=64, top_p=0.9)}, 0),
        ({}, {"sampling": SamplingParams(max_tokens=64, top_k=5)}, 0),
        (
            {},
            {
                "prefix": (
                    Segment(
                        source="policy",
                        version=0,
                        token_ids=np.array([1], np.int32),
                        logprobs=np.zeros(1, np.float32),
                    ),
                )
            },
            0,
        ),
    ],
    ids=["fresh", "old", "temperature", "top_p", "top_k", "resumed"],
)
def test_answers_that_reuse_would_be_wrong_for_are_drafted_exactly(
    options: dict[str, Any], fields: dict[str, Any], version: int
) -> None:
    rows = lenient("previous_epoch", **options)
    rows.source.version = version
    assert not rows.open(0, 1, **fields)
    drafts = rows.ask(0)
    assert drafts.lenience is None
    begin = int(rows.length[0] - rows.prompt[0])
    assert drafts.tokens[0, : drafts.lengths[0]].tolist() == ANSWER[begin : begin + 8]
    assert not rows.source.reused(1)


def test_answers_of_the_greatest_age_are_still_reused() -> None:
    rows = lenient("previous_epoch", past(ANSWER, oldest_version=4), max_age=2)
    rows.source.version = 6
    assert rows.open(0, 1)


def test_the_fresh_share_is_kept_and_depends_on_the_request_alone() -> None:
    fresh = [is_fresh(i, 0.1) for i in range(4000)]
    assert 0.08 < np.mean(fresh) < 0.12
    assert fresh == [is_fresh(i, 0.1) for i in range(4000)]


def test_fixed_lengths_wait_for_the_match_and_draft_so_many_tokens() -> None:
    rows = table(draft_length="fixed", match_length=4, draft_tokens=6)
    rows.source.add_pack(pack_of(past(ANSWER)))
    rows.open(0, 1)
    rows.write(0, [500, *ANSWER[4:7]])
    assert rows.draft(0) == []
    rows.write(0, ANSWER[7:8])
    assert rows.draft(0) == ANSWER[8:14]


def test_aimd_lengths_grow_by_two_and_fall_back_to_two() -> None:
    rows = table(draft_length="aimd", max_draft=7)
    rows.source.add_pack(pack_of(past(list(range(1, 60)))))
    rows.open(0, 1)
    rows.write(0, [1])
    seen = []
    for accepts in (True, True, True, False, True):
        draft = rows.draft(0)
        seen.append(len(draft))
        rows.write(0, draft)
        rows.settle(0, len(draft), len(draft) - (not accepts))
    assert seen == [2, 4, 6, 7, 2]


def test_nothing_is_drafted_before_the_cost_of_a_pass_is_known() -> None:
    rows = table(cost=None)
    rows.source.add_pack(pack_of(past(ANSWER)))
    rows.open(0, 1)
    rows.write(0, ANSWER[:2])
    assert rows.draft(0) == []
    for _ in range(8):
        rows.source.on_step(
            StepStats(
                rows=1,
                tokens=1,
                prefill_tokens=0,
                emitted=1,
                drafted=0,
                accepted=0,
                waiting=0,
                seconds=0.01,
                paced_seconds=0.01,
            )
        )
    assert rows.draft(0)[:2] == ANSWER[2:4]


def test_rows_written_while_the_gate_was_closed_are_caught_up_with() -> None:
    rows = table(live=True, gate="auto")
    rows.open(0, 1, group=5)
    rows.open(1, 2, group=5)
    rows.write(0, [3])
    rows.write(1, [4])
    while rows.source.metrics()["gate_open"]:
        rows.ask(0, 1)
    rows.write(0, ANSWER)
    rows.write(1, ANSWER[:6])
    assert rows.ask(0, 1).lengths.tolist() == [0, 0]
    for _ in range(200):
        drafts = rows.ask(0, 1)
        if drafts.lengths[1]:
            break
    assert drafts.tokens[1, : drafts.lengths[1]].tolist() == ANSWER[6:14]
    assert rows.source.gate_reason.startswith("on")


def test_acceptance_is_learned_from_reached_positions_only() -> None:
    rows = table()
    rows.source.add_pack(pack_of(past(ANSWER)))
    rows.open(0, 1)
    rows.write(0, ANSWER[:2])
    assert len(rows.draft(0)) == 8
    rows.settle(0, drafted=8, accepted=3)
    state = rows.source.export()
    assert state["tried"].sum() == 4
    assert state["accepted"].sum() == 3
    other = table()
    other.source.load(state)
    assert other.source.export()["tried"].sum() == 4


def test_counters_say_what_each_source_brought() -> None:
    rows = table()
    rows.source.add_pack(pack_of(past(ANSWER)))
    rows.open(0, 1)
    rows.write(0, ANSWER[:2])
    rows.draft(0)
    rows.settle(0, drafted=8, accepted=6)
    metrics = rows.source.metrics()
    assert (metrics["drafted_prompt"], metrics["accepted_prompt"]) == (8, 6)
    assert metrics["acceptance_length"] == 7
    assert metrics["acceptance"] == 0.75
    assert metrics["index_mb"] > 0
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("index", ["levels", "fuzzy"])
def test_other_indexes_draft_what_followed_the_last_tokens(index: str) -> None:
    rows = table(index=index)
    rows.source.add_pack(pack_of(past(ANSWER), index=index))
    rows.open(0, 1)
    rows.write(0, [*ANSWER[:3], 500, *ANSWER[4:10]])
    draft = rows.draft(0)
    assert len(draft) >= 5
    assert draft == ANSWER[10 : 10 + len(draft)]
    rows.source.close(0)
    rows.open(0, 2, prompt=OTHER)
    rows.write(0, ANSWER[4:10])
    assert rows.draft(0) == []
