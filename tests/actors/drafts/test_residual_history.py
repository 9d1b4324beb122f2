"""The likeliest tokens of old laws on their way from finished groups to draft packs."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.drafts.options import SpeculationOptions
from actors.drafts.pack import PastAnswer, PastPrompt, build_pack
from actors.drafts.retriever import DraftRetriever
from storage.errors import UserError
from storage.history.store import HistoryStore
from storage.records import Group, GroupKey, Prompt, Sample, SamplingParams, Segment, TopTokens

PROMPT = np.arange(3, 9, dtype=np.int32)
SAMPLING = SamplingParams(max_tokens=16)
LENIENT = {"source": "previous_epoch", "verify": "lenient"}


def top(count: int, mark: int, width: int = 3) -> TopTokens:
    ids = np.full((count, width), mark, np.int32) + np.arange(width, dtype=np.int32)
    return TopTokens(ids=ids, logprobs=np.full((count, width), -2.0, np.float32))


def visit(epoch: int, reasons: tuple[str, ...] = ("stop", "stop")) -> Group:
    """A visit whose answers' likeliest tokens begin at 100 * epoch + 10 * sample."""
    key = GroupKey("train", epoch, 0)
    samples = []
    for index, reason in enumerate(reasons):
        count = 4 + index
        segment = Segment(
            source="policy",
            version=epoch,
            token_ids=np.arange(count, dtype=np.int32),
            logprobs=-np.ones(count, np.float32),
            top=top(count, 100 * epoch + 10 * index),
        )
        samples.append(Sample(key=key, index=index, segments=(segment,), text="", finish_reason=reason))  # type: ignore[arg-type]
    return Group(key=key, prompt=Prompt(index=0, token_ids=PROMPT, text=""), samples=tuple(samples))


def retriever(folder: Path, **options: object) -> DraftRetriever:
    wanted = SpeculationOptions(**(LENIENT | options))  # type: ignore[arg-type]
    return DraftRetriever(HistoryStore(folder, 1, keep_top=wanted.top_tokens > 0), wanted)


def test_a_pack_knows_the_old_law_of_the_answers_that_may_be_reused(tmp_path: Path) -> None:
    drafts = retriever(tmp_path, residual=True)
    drafts.observe(1, [visit(1)], SAMPLING)
    drafts.observe(2, [visit(2, ("stop", "abort"))], SAMPLING)
    previous = drafts.pack([PROMPT]).previous
    assert previous.top is not None
    # The second slot's latest answer was cut short, so the one before it is reused.
    assert [previous.top.ids[start].tolist() for start in previous.starts[:2]] == [[200, 201, 202], [110, 111, 112]]
    assert len(previous.top.ids) == len(previous.tokens) == 4 + 5
    drafts.close()
    again = retriever(tmp_path, residual=True).pack([PROMPT]).previous
    assert again.top is not None
    assert again.top.ids.tolist() == previous.top.ids.tolist()


def test_answers_that_are_not_reused_do_not_keep_the_old_law_in_memory(tmp_path: Path) -> None:
    drafts = retriever(tmp_path, residual=True)
    for epoch in (1, 2, 3):
        drafts.observe(epoch, [visit(epoch)], SAMPLING)
    once = retriever(tmp_path / "other", residual=True)
    once.observe(1, [visit(1)], SAMPLING)
    tokens = (4 + 5) * 8
    assert drafts.stats()["index_bytes"] == once.stats()["index_bytes"] + 2 * tokens


def test_a_pack_without_the_residual_is_as_small_as_ever(tmp_path: Path) -> None:
    rich = retriever(tmp_path, residual=True)
    rich.observe(1, [visit(1)], SAMPLING)
    rich.close()
    # The store goes on holding what it holds.
    plain = retriever(tmp_path).pack([PROMPT])
    assert plain.previous.top is None
    again = retriever(tmp_path, residual=True).pack([PROMPT])
    assert again.previous.nbytes - plain.previous.nbytes == 9 * 3 * 8


def test_an_older_store_gives_no_old_law_and_still_answers(tmp_path: Path) -> None:
    old = retriever(tmp_path)
    old.observe(1, [visit(1)], SAMPLING)
    old.close()
    drafts = retriever(tmp_path, residual=True)
    assert drafts.pack([PROMPT]).previous.top is None
    assert len(drafts.pack([PROMPT]).previous.keys) == 2
    drafts.observe(2, [visit(2, ("stop", "error"))], SAMPLING)
    previous = drafts.pack([PROMPT]).previous
    assert previous.top is not None
    # The first slot has a new answer, the second only the one of which nothing was recorded.
    assert (previous.top.ids[:4] >= 0).all()
    assert (previous.top.ids[4:] == -1).all()
    assert drafts.failure == ""


def test_old_laws_travel_out_of_band_and_as_wide_as_the_widest() -> None:
    answers = [
        PastAnswer(
            token_ids=np.arange(n, dtype=np.int32), logprobs=np.zeros(n, np.float32), sample=n, top=top(n, n, width)
        )
        for n, width in ((3, 2), (4, 5))
    ]
    pack = build_pack([PastPrompt(prompt_ids=PROMPT, answers=answers)], generation=1)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(pack, protocol=5, buffer_callback=buffers.append)
    back = pickle.loads(stream, buffers=buffers).previous
    assert back.top.ids.shape == (7, 5)
    assert back.top.ids[0].tolist() == [3, 4, -1, -1, -1]
    assert np.isneginf(back.top.logprobs[:3, 2:]).all()
    assert np.shares_memory(back.top.ids, pack.previous.top.ids)
    assert len(stream) < 4000
    torn = replace(answers[0], top=top(2, 0))
    with pytest.raises(UserError, match="slot 3 has 3 tokens and the likeliest ones of 2 places"):
        build_pack([PastPrompt(prompt_ids=PROMPT, answers=[torn])], generation=1)


def test_nothing_is_recorded_unless_lenient_reuse_asks_for_it() -> None:
    assert SpeculationOptions(**LENIENT, residual=True, residual_top_k=20).top_tokens == 20  # type: ignore[arg-type]
    assert SpeculationOptions(**LENIENT).top_tokens == 0  # type: ignore[arg-type]
    assert SpeculationOptions(source="hybrid", residual=True).top_tokens == 0
    assert SpeculationOptions(source="off", verify="lenient", residual=True).top_tokens == 0
