"""The likeliest tokens at each place of an answer: kept where asked for, absent without harm where they were not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from storage.history.manifest import read_manifest
from storage.history.reader import HistoryReader
from storage.history.rows import in_parts
from storage.history.store import HistoryStore
from storage.history.top_columns import top_laws
from storage.records import Group, Segment, TopTokens
from tests.storage.history.answers import (
    FINGERPRINT,
    SAMPLING,
    contents,
    expected,
    fill,
    flip,
    is_answer,
    make_group,
    prompt_tokens,
)


def top_of(segment: Segment, width: int) -> Segment:
    """The segment with likeliest tokens that differ by place; its tokens of a tool have none."""
    if segment.source == "environment":
        return segment
    count = len(segment.token_ids)
    ids = np.arange(count * width, dtype=np.int32).reshape(count, width) + segment.token_ids[:, None]
    logprobs = np.sort(-np.random.default_rng(count).random((count, width), dtype=np.float32))[:, ::-1].copy()
    return replace(segment, top=TopTokens(ids=ids, logprobs=logprobs))


def with_top(group: Group, width: int = 3) -> Group:
    """The group with likeliest tokens, but for its last sample."""
    samples = [replace(s, segments=tuple(top_of(p, width) for p in s.segments)) for s in group.samples[:-1]]
    return replace(group, samples=(*samples, group.samples[-1]))


def same(one: TopTokens | None, other: TopTokens | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one.ids, other.ids) and np.array_equal(one.logprobs, other.logprobs)


def holds(store: HistoryReader, groups: dict[int, list[Group]], *, top: bool = True) -> bool:
    for step, some in groups.items():
        for group in some:
            visits = store.visits(group.prompt.token_ids, 99)
            found = next(visit for visit in visits if visit[0].step == step)
            for answer, sample in zip(found, group.samples, strict=True):
                assert is_answer(answer, sample, step)
                if not same(answer.top, sample.top() if top else None):
                    return False
    return True


def append(store: HistoryStore, steps: list[int], width: int = 3) -> dict[int, list[Group]]:
    groups = {step: [with_top(make_group(p, epoch=step, samples=3), width) for p in range(3)] for step in steps}
    for step, some in groups.items():
        store.append(step, some, SAMPLING)
    return groups


def test_likeliest_tokens_come_back_from_log_segment_and_compaction(tmp_path: Path) -> None:
    with HistoryStore(tmp_path, FINGERPRINT, keep_top=True) as store:
        groups = append(store, [1, 2])
        assert holds(store, groups)
        store.seal()
        # Another width, as after a resume with another setting, stands beside the first.
        groups |= append(store, [3], width=5)
        assert holds(store, groups)
        store.compact(2)
        assert holds(store, {step: groups[step] for step in (2, 3)})
        assert store.verify() == ()
    assert holds(HistoryReader(tmp_path, None), {3: groups[3]})


def test_a_tools_tokens_and_whole_samples_may_lack_them(tmp_path: Path) -> None:
    with HistoryStore(tmp_path, FINGERPRINT, keep_top=True) as store:
        append(store, [1])
        (visit,) = store.visits(prompt_tokens(0), 1)
        assert visit[-1].top is None
        top, mask = visit[0].top, visit[0].policy_mask()
        assert top is not None
        assert not mask.all()
        assert (top.ids[~mask] == -1).all()
        assert np.isneginf(top.logprobs[~mask]).all()
        assert (top.ids[mask] >= 0).all()


def test_a_copied_answer_owns_its_likeliest_tokens(tmp_path: Path) -> None:
    with HistoryStore(tmp_path, FINGERPRINT, keep_top=True) as store:
        append(store, [1])
        answer = store.visits(prompt_tokens(1), 1)[0][0]
        copied = answer.copy()
        assert answer.top is not None
        assert copied.top is not None
        assert same(copied.top, answer.top)
        assert not np.shares_memory(copied.top.ids, answer.top.ids)
        assert copied.top.ids.base is None


def test_a_store_that_does_not_keep_them_stays_at_the_first_version(tmp_path: Path) -> None:
    with HistoryStore(tmp_path, FINGERPRINT) as store:
        groups = append(store, [1])
        assert holds(store, groups, top=False)
    manifest = read_manifest(tmp_path, FINGERPRINT)
    assert manifest is not None
    assert manifest.schema_version == 1


@pytest.mark.parametrize("sealed", [0, 1, 2])
def test_an_older_store_is_read_as_it_is_and_rewritten_by_the_first_write(tmp_path: Path, sealed: int) -> None:
    with HistoryStore(tmp_path, FINGERPRINT) as store:
        old = fill(store, [1])
        if sealed:
            store.seal()
        old |= fill(store, [2])
        if sealed == 2:
            store.seal()
    files = sorted(path.name for path in tmp_path.rglob("*.arrow*"))
    newer = HistoryStore(tmp_path, FINGERPRINT, keep_top=True)
    assert contents(newer) == expected(old)
    assert holds(newer, old, top=False)
    assert sorted(path.name for path in tmp_path.rglob("*.arrow*")) == files
    with newer:
        fresh = append(newer, [3])
        assert contents(newer) == expected(old | fresh)
        assert holds(newer, old, top=False)
        assert holds(newer, fresh)
        newer.seal()
        assert newer.verify() == ()
    with HistoryStore(tmp_path, FINGERPRINT) as later:  # switched off again: nothing is lost, nothing rewritten
        more = fill(later, [4])
        assert holds(later, fresh)
        assert holds(later, more, top=False)
        later.truncate_to(3)
        assert contents(later) == expected(old | fresh)
        assert holds(later, fresh)


def test_a_reader_of_the_older_version_follows_the_writer_to_the_newer_one(tmp_path: Path) -> None:
    with HistoryStore(tmp_path, FINGERPRINT) as store:
        old = fill(store, [1])
    reader = HistoryReader(tmp_path, FINGERPRINT)
    with HistoryStore(tmp_path, FINGERPRINT, keep_top=True) as writer:
        fresh = append(writer, [2])
        assert contents(reader) == expected(old)  # type: ignore[arg-type]
        reader.refresh()
        assert holds(reader, old | fresh)


def test_a_flipped_byte_in_them_is_found(tmp_path: Path) -> None:
    with HistoryStore(tmp_path, FINGERPRINT, keep_top=True) as store:
        append(store, [1])
        store.seal()
        segment = store.segments[0]
    flip(segment.path, segment.entry.blocks[0].end - 40)
    with HistoryStore(tmp_path, FINGERPRINT) as store:
        assert any("checksum" in problem for problem in store.verify())


def test_arrays_that_contradict_the_tokens_are_refused_and_named(tmp_path: Path) -> None:
    group = with_top(make_group(1))
    top = group.samples[0].segments[0].top
    assert top is not None
    for torn in (top.part(0, 2), TopTokens(ids=top.ids, logprobs=top.logprobs[:, :2])):
        segments = (replace(group.samples[0].segments[0], top=torn), *group.samples[0].segments[1:])
        wrong = replace(group, samples=(replace(group.samples[0], segments=segments),))
        with (
            HistoryStore(tmp_path, FINGERPRINT, keep_top=True) as store,
            pytest.raises(ValueError, match=r"group train/e0/p1/d0: sample 0 has top tokens of shape"),
        ):
            store.append(1, [wrong], SAMPLING)


def test_verification_knows_their_laws() -> None:
    def batch(ids: list[int], logprobs: list[float], length: int = 2) -> pa.RecordBatch:
        return pa.record_batch(
            {
                "length": pa.array([length], pa.int32()),
                "top_ids": pa.array([ids], pa.list_(pa.int32())),
                "top_logprobs": pa.array([logprobs], pa.list_(pa.float32())),
            }
        )

    def broken(found: pa.RecordBatch) -> int:
        return sum(not np.asarray(law).all() for law in top_laws(found).values())

    assert broken(batch([3, -1, 4, 5], [0.0, -np.inf, -1.0, -2.0])) == 0
    assert broken(batch([3, 4, 5], [0.0, -1.0, -2.0])) == 1
    assert broken(batch([3, 4], [0.0])) == 1
    assert broken(batch([3, -2], [0.0, -1.0])) == 1
    assert broken(batch([3, 4], [0.5, -1.0])) == broken(batch([3, 4], [np.nan, -1.0])) == 1


def test_batches_are_cut_by_all_that_they_hold() -> None:
    plain = [make_group(p, samples=3, tokens=10) for p in range(6)]
    rich = [with_top(group, width=20) for group in plain]
    assert len(list(in_parts(plain, 200))) < len(list(in_parts(rich, 200))) == 6
