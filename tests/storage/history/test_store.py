"""What is appended to the history comes back by prompt, whatever was sealed, compacted or cut meanwhile."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from storage.history import store as store_module
from storage.history.manifest import HistoryError
from storage.history.rows import copy_out, expand_prompts
from storage.history.schema import prompt_hash
from storage.history.store import HistoryStore
from storage.records import Group, GroupKey
from tests.storage.history.answers import (
    FINGERPRINT,
    SAMPLING,
    contents,
    expected,
    fill,
    is_answer,
    make_group,
    prompt_tokens,
)


@pytest.fixture
def store(tmp_path: Path) -> HistoryStore:
    return HistoryStore(tmp_path / "history", FINGERPRINT)


def test_an_empty_store_answers_and_leaves_no_file(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / "history", FINGERPRINT) as store:
        assert store.visits(prompt_tokens(0), 4) == []
        assert list(store.prompts()) == []
        assert store.recent_answers(100) == []
        assert store.stats().answers == 0
        assert store.verify() == store.damage == ()
        store.refresh()
        store.sync()
    assert not (tmp_path / "history").exists()


@pytest.mark.parametrize("sealed", [False, True])
def test_visits_come_back_newest_first_with_every_field(store: HistoryStore, sealed: bool) -> None:
    appended = fill(store, [3, 4, 9], prompts=4, samples=3)
    if sealed:
        store.seal()
    for prompt in range(4):
        visits = store.visits(prompt_tokens(prompt), 2)
        assert [[answer.step for answer in visit] for visit in visits] == [[9] * 3, [4] * 3]
        for visit in visits:
            group = appended[visit[0].step][prompt]
            assert all(is_answer(a, s, visit[0].step) for a, s in zip(visit, group.samples, strict=True))
    assert store.visits(np.array([99], np.int32), 2) == []
    assert store.visits(prompt_tokens(0), 0) == []


def test_a_prompt_that_stands_in_two_rows_of_the_data_has_the_visits_of_both(store: HistoryStore) -> None:
    store.append(0, [make_group(1, prompt_ids=[5]), make_group(2, prompt_ids=[5])], SAMPLING)
    store.append(1, [make_group(1, prompt_ids=[5], duplicate=1, epoch=0)], SAMPLING)
    for _ in range(2):
        visits = store.visits(np.array([5], np.int32), 9)
        assert [visit[0].visit for visit in visits] == [(0, 1, 1), (0, 2, 0), (0, 1, 0)]
        store.seal()


def test_siblings_that_are_appended_apart_are_one_visit(store: HistoryStore) -> None:
    whole = make_group(1, samples=4)
    store.append(0, [replace(whole, samples=whole.samples[2:])], SAMPLING)
    store.seal()
    store.append(0, [replace(whole, samples=whole.samples[:2])], SAMPLING)
    (visit,) = store.visits(prompt_tokens(1), 1)
    assert [answer.sample_idx for answer in visit] == [0, 1, 2, 3]


def test_prompts_with_equal_hashes_are_both_kept_and_told_apart(tmp_path: Path) -> None:
    with HistoryStore(tmp_path, FINGERPRINT, hash_prompt=lambda ids: len(ids)) as store:
        appended = {0: [make_group(p, prompt_ids=[p, p]) for p in (4, 9)], 1: []}
        store.append(0, appended[0], SAMPLING)
        for change in (lambda: None, store.seal, lambda: store.compact(1)):
            change()
            for group in appended[0]:
                ((answer, *_),) = store.visits(group.prompt.token_ids, 5)
                assert is_answer(answer, group.samples[0], 0)
            assert store.visits(np.array([4, 9], np.int32), 5) == []
            found = [(hash_, ids.tolist()) for hash_, ids in store.prompts()]
            assert sorted(found) == [(2, [4, 4]), (2, [9, 9])]
            assert store.verify() == ()


def test_answers_without_tokens_and_prompts_without_tokens_are_rows_like_others(store: HistoryStore) -> None:
    group = make_group(0, prompt_ids=[], tokens=0, samples=1)
    store.append(0, [replace(group, samples=(replace(group.samples[0], segments=()),))], SAMPLING)
    store.append(0, [make_group(1)], SAMPLING)
    store.seal()
    ((answer,),) = store.visits(np.zeros(0, np.int32), 1)
    assert (len(answer.tokens), answer.segments, answer.oldest_version) == (0, (), -1)
    assert store.verify() == ()


def test_a_group_without_samples_and_a_step_without_groups_add_nothing(store: HistoryStore) -> None:
    store.append(0, [], SAMPLING)
    store.append(1, [make_group(0, samples=0), make_group(1)], SAMPLING)
    assert {key[1] for key in contents(store)} == {1}


@pytest.mark.parametrize("group", [make_group(0), make_group(1)])
def test_groups_of_another_split_or_with_another_key_are_refused_and_nothing_is_added(
    store: HistoryStore, group: Group
) -> None:
    key = GroupKey("heldout", 0, 0) if group.key.prompt == 0 else GroupKey("train", 5, 1)
    with pytest.raises(ValueError, match=str(key)):
        store.append(0, [make_group(3), replace(group, key=key)], SAMPLING)
    assert contents(store) == {}


def test_a_sample_without_one_logprob_a_token_is_refused(store: HistoryStore) -> None:
    group = make_group(1)
    (segment,) = group.samples[1].segments
    wrong = replace(group.samples[1], segments=(replace(segment, logprobs=segment.logprobs[1:]),))
    with pytest.raises(ValueError, match="train/e0/p1/d0: sample 1"):
        store.append(0, [make_group(0), replace(group, samples=(group.samples[0], wrong))], SAMPLING)
    assert contents(store) == {}


def test_compaction_keeps_the_last_visits_of_each_prompt(store: HistoryStore) -> None:
    appended = fill(store, [0, 1], prompts=2)
    store.seal()
    appended |= fill(store, [2], prompts=1)
    store.compact(2)
    kept = {0: appended[0][1:], 1: appended[1], 2: appended[2]}
    assert contents(store) == expected(kept)
    assert len(store.segments) == 1
    assert store.verify() == ()


def test_a_reader_keeps_its_generation_until_it_looks_again(store: HistoryStore) -> None:
    appended = fill(store, [0, 1])
    store.seal()
    with HistoryStore(store.directory, FINGERPRINT) as reader:
        before = contents(reader)
        held = reader.visits(prompt_tokens(1), 9)
        store.compact(1)
        assert contents(reader) == before == expected(appended)
        reader.refresh()
        assert reader.generation == store.generation
        assert contents(reader) == expected({1: appended[1]})
        assert is_answer(held[1][0], appended[0][1].samples[0], 0)


def test_what_was_verified_once_is_not_verified_again_after_a_seal(store: HistoryStore) -> None:
    fill(store, [0])
    store.seal()
    rows = store.segments[0].blocks[0].load()
    fill(store, [1])
    store.seal()
    assert store.segments[0].blocks[0].load() is rows


def test_files_of_old_generations_go(store: HistoryStore) -> None:
    fill(store, [0])
    store.seal()
    fill(store, [1])
    store.seal()
    store.compact(1)
    files = {path.relative_to(store.directory).as_posix() for path in store.directory.rglob("*") if path.is_file()}
    assert files == {".lock", "MANIFEST.json", "segments/000004.arrow", "wal/000004.arrows"}


def test_a_reader_sees_appends_without_a_new_generation(store: HistoryStore) -> None:
    appended = fill(store, [0])
    with HistoryStore(store.directory, FINGERPRINT) as reader:
        appended |= fill(store, [1])
        assert contents(reader) == expected({0: appended[0]})
        reader.refresh()
        assert contents(reader) == expected(appended)


def test_answers_outlive_the_store_and_cannot_be_written(store: HistoryStore) -> None:
    group = make_group(1)
    store.append(0, [group], SAMPLING)
    store.seal()
    ((answer, *_),) = store.visits(prompt_tokens(1), 1)
    store.close()
    del store
    assert is_answer(answer, group.samples[0], 0)
    with pytest.raises(ValueError, match="read-only"):
        answer.tokens[0] = 1


def test_what_is_sent_away_does_not_drag_the_file_along(store: HistoryStore) -> None:
    fill(store, [0], prompts=200, tokens=200)
    store.seal()
    (visit,) = store.visits(prompt_tokens(7), 1)
    copied = visit[0].copy()
    assert copied.tokens.base is None
    assert np.array_equal(copied.tokens, visit[0].tokens)
    assert len(pickle.dumps(copied)) < 10_000
    batch = store.blocks()[0].load().batch
    piece = batch.slice(4, 2)
    assert len(pickle.dumps(piece)) > 100_000, "the trap has gone: copy_out is no longer needed"
    assert len(pickle.dumps(copy_out(piece))) < 10_000
    assert copy_out(piece).equals(piece)


def test_every_row_can_carry_its_prompt(store: HistoryStore) -> None:
    fill(store, [0], prompts=3, samples=2)
    batch = expand_prompts(store.blocks()[0].load().batch)
    assert batch.column("prompt_tokens").to_pylist() == [prompt_tokens(p).tolist() for p in (0, 0, 1, 1, 2, 2)]


def test_recent_answers_are_the_newest_within_the_limit(store: HistoryStore) -> None:
    fill(store, [0], prompts=2)
    fill(store, [1], prompts=2)
    store.seal()
    fill(store, [2], prompts=1)
    assert [answer.step for answer in store.recent_answers(10**6)] == [2, 2, 1, 1, 1, 1, 0, 0, 0, 0]
    few = store.recent_answers(30)
    assert [answer.step for answer in few] == [2, 2, 1]
    assert sum(len(answer.tokens) for answer in few) <= 30


def test_truncation_removes_later_steps_from_log_and_segments_and_is_idempotent(store: HistoryStore) -> None:
    appended = fill(store, [0, 1])
    store.seal()
    appended |= fill(store, [2, 3])
    store.seal()
    appended |= fill(store, [4])
    store.truncate_to(2)
    kept = {step: groups for step, groups in appended.items() if step <= 2}
    assert contents(store) == expected(kept)
    generation = store.generation
    assert store.segments[0].entry.name == "000002.arrow", "a segment without later steps is left as it is"
    store.truncate_to(2)
    assert store.generation == generation
    store.close()
    with HistoryStore(store.directory, FINGERPRINT) as again:
        assert contents(again) == expected(kept)
        again.append(3, [make_group(0, epoch=3)], SAMPLING)
        assert len(again.visits(prompt_tokens(0), 9)) == 4
        again.truncate_to(-1)
        assert contents(again) == {}
        assert again.verify() == ()


def test_truncation_cuts_a_step_out_of_the_middle_of_an_unsealed_log(store: HistoryStore) -> None:
    appended = fill(store, [0, 1, 2])
    store.truncate_to(1)
    assert contents(store) == expected({0: appended[0], 1: appended[1]})


def test_a_long_log_is_sealed_by_itself(tmp_path: Path) -> None:
    with HistoryStore(tmp_path, FINGERPRINT, seal_bytes=20_000) as store:
        appended = {}
        for step in range(12):
            appended |= fill(store, [step], prompts=5, tokens=40)
        assert len(store.segments) >= 2
        assert store.wal_bytes < 40_000
        assert contents(store) == expected(appended)


def test_large_steps_and_segments_are_split_into_batches(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BLOCK_TOKENS", 60)
    monkeypatch.setattr(store_module, "_BATCH_TOKENS", 100)
    appended = fill(store, [0, 1, 2, 3], prompts=7)
    assert len(store.blocks()) > 4
    store.seal()
    assert len(store.segments[0].blocks) > 5
    assert contents(store) == expected(appended)
    visits = store.visits(prompt_tokens(3), 9)
    assert [visit[0].step for visit in visits] == [3, 2, 1, 0]
    assert store.verify() == ()
    store.compact(2)
    assert contents(store) == expected({2: appended[2], 3: appended[3]})


def test_segments_and_logs_are_plain_arrow_files(store: HistoryStore) -> None:
    fill(store, [0, 1], prompts=3)
    with pa.memory_map(str(next((store.directory / "wal").glob("*.arrows")))) as source:
        table = pa.ipc.open_stream(source).read_all()
    assert table.num_rows == 12
    store.seal()
    with pa.memory_map(str(store.directory / "segments" / store.segments[0].entry.name)) as source:
        table = pa.ipc.open_file(source).read_all()
        assert table.schema.metadata == {b"schema_version": b"1", b"tokenizer_fp": b"0123456789abcdef"}
        hashes = table.column("prompt_hash").to_pylist()
        assert hashes == sorted(hashes)
        assert set(hashes) == {prompt_hash(prompt_tokens(p)) for p in range(3)}
        assert table.column("prompt_tokens").null_count == 9, "a prompt is written once a run"


def test_one_process_writes(store: HistoryStore) -> None:
    fill(store, [0])
    with HistoryStore(store.directory, FINGERPRINT) as other:
        with pytest.raises(HistoryError, match="another process"):
            fill(other, [1])
        store.close()
        fill(other, [1])
        assert len(contents(other)) == 12


def test_statistics_count_what_is_there(store: HistoryStore) -> None:
    appended = fill(store, [2, 3], prompts=3, samples=2, tokens=4)
    store.seal()
    store.append(5, [make_group(0, epoch=9, samples=2, tokens=0)], SAMPLING)
    store.append(5, [make_group(1, epoch=2, duplicate=1, samples=1, tokens=4, seed=1)], SAMPLING)
    again = replace(appended[2][1].samples[1], key=GroupKey("train", 8, 1), index=0)
    store.append(6, [replace(appended[2][1], key=again.key, samples=(again,))], SAMPLING)
    stats = store.stats()
    samples = [s for groups in appended.values() for group in groups for s in group.samples]
    assert stats.answers == len(samples) + 4
    assert (stats.prompts, stats.visits, stats.first_step, stats.last_step) == (3, 9, 2, 6)
    assert stats.tokens == sum(s.length for s in samples) + (0 + 1) + 9 + 5
    assert stats.duplicate_share == pytest.approx(1 / stats.answers)
    assert stats.drafted == 9 * stats.answers
    assert stats.length_quantiles[3] == 9
    assert 0.3 < stats.entropy < 0.7, "the logprobs are uniform between -1 and 0"
    assert (stats.oldest_version, stats.newest_version) == (2, 9)


class StoreMachine(RuleBasedStateMachine):
    """Any order of operations, reopened at any time, is a list of groups with a window and a cut."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.step = 0
        self.number = 0
        self.model: list[tuple[int, Group]] = []
        self.collide = data.draw(st.booleans())
        self.open()

    def open(self) -> None:
        hash_ = (lambda ids: 2**64 - 1 - len(ids)) if self.collide else prompt_hash
        self.store = HistoryStore(Path(self.folder.name) / "h", FINGERPRINT, seal_bytes=8192, hash_prompt=hash_)

    @rule(prompts=st.lists(st.integers(0, 4), max_size=4), samples=st.integers(1, 3), tokens=st.integers(0, 30))
    def append(self, prompts: list[int], samples: int, tokens: int) -> None:
        self.step += 1
        groups = []
        for prompt in prompts:
            self.number += 1
            groups.append(make_group(prompt, epoch=self.number, samples=samples, tokens=tokens))
        self.store.append(self.step, groups, SAMPLING)
        self.model += [(self.step, group) for group in groups]

    @rule()
    def seal(self) -> None:
        self.store.seal()

    @rule(window=st.integers(1, 3))
    def compact(self, window: int) -> None:
        self.store.compact(window)
        kept, seen = [], dict.fromkeys(range(5), 0)
        for step, group in reversed(self.model):
            seen[group.key.prompt] += 1
            if seen[group.key.prompt] <= window:
                kept.append((step, group))
        self.model = kept[::-1]

    @rule(back=st.integers(0, 3))
    def truncate(self, back: int) -> None:
        self.step = max(0, self.step - back)
        self.store.truncate_to(self.step)
        self.model = [(step, group) for step, group in self.model if step <= self.step]

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @invariant()
    def the_store_is_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        by_step: dict[int, list[Group]] = {}
        for step, group in self.model:
            by_step.setdefault(step, []).append(group)
        assert contents(self.store) == expected(by_step)
        assert self.store.damage == ()
        for prompt in range(5):
            visits = self.store.visits(prompt_tokens(prompt), 2)
            wanted = [group.key.epoch for _, group in reversed(self.model) if group.key.prompt == prompt][:2]
            assert [visit[0].epoch for visit in visits] == wanted

    def teardown(self) -> None:
        if hasattr(self, "store"):
            assert self.store.verify() == ()
            self.store.close()
            self.folder.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=25, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
