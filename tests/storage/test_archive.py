"""Every rollout comes back from the archive as it was."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from storage import files
from storage.files import StorageError
from storage.history import archive as archive_module
from storage.history.archive import ArchiveError, RolloutArchive
from storage.history.schema import SCHEMA, VERSION_KEY, prompt_hash, to_groups, to_samples
from storage.records import Group, GroupKey, Prompt, Sample, SamplingParams, Segment, Timings

SAMPLING = SamplingParams(max_tokens=64, temperature=0.5, top_p=0.75, top_k=20)

int32s = hnp.arrays(np.int32, st.integers(0, 12), elements=st.integers(0, 2**31 - 1))
finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**31 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | finite | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def segments(draw) -> Segment:
    tokens = draw(int32s)
    if draw(st.booleans()):
        logprobs = draw(hnp.arrays(np.float32, len(tokens), elements=st.floats(-50, 0, width=32)))
        return Segment(source="policy", version=draw(counts), token_ids=tokens, logprobs=logprobs)
    return Segment(source="environment", version=-1, token_ids=tokens, logprobs=np.zeros(len(tokens), np.float32))


@st.composite
def groups(draw) -> Group:
    key = GroupKey("train", draw(counts), draw(st.integers(0, 2**40)), draw(st.integers(0, 3)))
    prompt = Prompt(
        index=key.prompt,
        token_ids=draw(int32s),
        text=draw(st.text(max_size=20)),
        columns=draw(st.dictionaries(st.text(max_size=4), json_values, max_size=3)),
    )
    samples = [
        Sample(
            key=key,
            index=index,
            segments=tuple(draw(st.lists(segments(), max_size=4))),
            text=draw(st.text(max_size=20)),
            finish_reason=draw(st.sampled_from(["stop", "length", "abort", "error"])),
            reward=draw(st.none() | finite),
            reward_parts=draw(st.dictionaries(st.text(max_size=4), st.none() | finite, max_size=3)),
            reward_status=draw(st.sampled_from(["pending", "ok", "abstained", "error", "timeout"])),
            error=draw(st.text(max_size=8)),
            timings=draw(st.builds(Timings, dispatched=finite, first_token=finite, finished=finite, rewarded=finite)),
            drafted=draw(counts),
            accepted=draw(counts),
            forward_passes=draw(counts),
            worker=draw(st.text(max_size=8)),
        )
        for index in range(draw(st.integers(0, 4)))
    ]
    return Group(key=key, prompt=prompt, samples=tuple(samples))


def same(left: object, right: object) -> bool:
    """Equal field by field, with dtypes; records that hold arrays have no usable ``==``."""
    if is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left)
        )
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def policy_segment(version: int, *tokens: int) -> Segment:
    ids = np.array(tokens, np.int32)
    return Segment(source="policy", version=version, token_ids=ids, logprobs=-0.25 * np.ones(len(ids), np.float32))


def make_group(prompt: int = 7, split: str = "train", samples: int = 2) -> Group:
    key = GroupKey(split, 0, prompt)
    tool = Segment(
        source="environment",
        version=-1,
        token_ids=np.array([9, 9], np.int32),
        logprobs=np.zeros(2, np.float32),
    )
    return Group(
        key=key,
        prompt=Prompt(index=prompt, token_ids=np.array([1, 5, 6], np.int32), text="1+1=", columns={"answer": "2"}),
        samples=tuple(
            Sample(
                key=key,
                index=index,
                segments=(policy_segment(3, 4, 5), tool, policy_segment(4, 6)),
                text=f"answer {index}",
                finish_reason="stop",
                reward=0.1 * index,
                reward_parts={"exact": 0.1 * index, "style": None},
                reward_status="ok",
                drafted=3,
                accepted=2,
                forward_passes=1,
                worker="rollout-0",
            )
            for index in range(samples)
        ),
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(groups(), max_size=4, unique_by=lambda group: group.key))
def test_records_come_back_exactly(made):
    with tempfile.TemporaryDirectory() as folder:
        archive = RolloutArchive(folder)
        archive.append(3, made, {}, sampling=SAMPLING)
        table = archive.read(3)
    filled = [group for group in made if group.samples]
    assert same(to_groups(table), filled)
    assert same(to_samples(table), [sample for group in filled for sample in group.samples])


def test_comparison_of_records_sees_each_difference():
    """Negative control of the round trip: a comparison that is always true would pass it too."""
    group = make_group()
    assert same(group, make_group())
    assert not same(group, make_group(prompt=8))
    changed = make_group()
    changed.samples[1].segments[2].logprobs[0] += 1e-6
    assert not same(group, changed)
    changed = make_group()
    changed.prompt.columns["answer"] = "3"
    assert not same(group, changed)


def test_rows_say_what_was_drawn_and_how(tmp_path):
    group = make_group()
    archive = RolloutArchive(tmp_path, tokenizer_fingerprint=2**64 - 1)
    path = archive.append(12, [group], {group.key: np.array([-0.5, 0.5], np.float32)}, sampling=SAMPLING)
    assert path == tmp_path / "train" / "step_000012.parquet"
    rows = archive.read(12).to_pylist()
    expected = {
        "prompt_hash": xxhash.xxh3_64_intdigest(np.array([1, 5, 6], "<i4").tobytes()),
        "split": "train",
        "epoch": 0,
        "prompt": 7,
        "duplicate": 0,
        "sample_idx": 1,
        "step": 12,
        "policy_version": 3,
        "segments": [
            {"source": "policy", "version": 3, "count": 2},
            {"source": "environment", "version": -1, "count": 2},
            {"source": "policy", "version": 4, "count": 1},
        ],
        "prompt_tokens": [1, 5, 6],
        "tokens": [4, 5, 9, 9, 6],
        "logprobs": [-0.25, -0.25, 0, 0, -0.25],
        "length": 5,
        "reward": 0.1,
        "reward_parts": [("exact", 0.1), ("style", None)],
        "reward_status": "ok",
        "error": "",
        "advantage": 0.5,
        "finish_reason": "stop",
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 20,
        "max_tokens": 64,
        "tokenizer_fp": 2**64 - 1,
        "n_drafted": 3,
        "n_accepted": 2,
        "forward_passes": 1,
        "prompt_text": "1+1=",
        "prompt_columns": '{"answer": "2"}',
        "text": "answer 1",
        "dispatched_at": 0.0,
        "first_token_at": 0.0,
        "finished_at": 0.0,
        "rewarded_at": 0.0,
        "worker": "rollout-0",
    }
    assert rows[1] == expected
    assert list(expected) == SCHEMA.names
    other_reader = pq.read_table(path)  # nothing of ours is needed to read it
    assert other_reader.column("advantage").to_pylist() == [-0.5, 0.5]


def test_hash_of_a_prompt_does_not_depend_on_layout():
    ids = np.arange(10, dtype=np.int32)
    assert prompt_hash(ids[::2]) == prompt_hash(ids[::2].copy()) == prompt_hash(ids[::2].astype(">i4"))
    assert prompt_hash(ids) != prompt_hash(ids[:-1])


def test_groups_without_advantages_or_with_odd_columns_are_kept(tmp_path):
    group = make_group()
    group.prompt.columns.update(count=np.int64(3), row=np.array([1, 2]), when=Path("a/b"))
    archive = RolloutArchive(tmp_path)
    archive.append(1, [group], {}, sampling=SAMPLING)
    table = archive.read(1)
    assert table.column("advantage").null_count == 2
    assert to_groups(table)[0].prompt.columns == {"answer": "2", "count": 3, "row": [1, 2], "when": "a/b"}


def test_text_that_is_not_unicode_does_not_stop_a_run(tmp_path):
    key = GroupKey("train", 0, 0)
    sample = Sample(key=key, index=0, segments=(), text="a\ud800b", finish_reason="error", error="\udcff")
    prompt = Prompt(index=0, token_ids=np.zeros(0, np.int32), text="p")
    archive = RolloutArchive(tmp_path)
    archive.append(1, [Group(key=key, prompt=prompt, samples=(sample,))], {}, sampling=SAMPLING)
    assert to_samples(archive.read(1))[0].text == "a?b"


def test_large_steps_are_written_in_parts_and_read_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_module, "_TOKENS_PER_ROW_GROUP", 40)
    made = [make_group(prompt) for prompt in range(9)]
    archive = RolloutArchive(tmp_path)
    path = archive.append(1, made, {}, sampling=SAMPLING)
    assert pq.ParquetFile(path).num_row_groups == 5
    table = archive.read(1)
    assert same(to_groups(table), made)
    assert same(
        to_groups(table.slice(5, 6)),
        [
            Group(key=g.key, prompt=g.prompt, samples=g.samples[s])
            for g, s in [(made[2], slice(1, 2)), (made[3], slice(0, 2)), (made[4], slice(0, 2)), (made[5], slice(0, 1))]
        ],
    )


def test_samples_do_not_hold_on_to_the_table(tmp_path):
    archive = RolloutArchive(tmp_path)
    archive.append(1, [make_group()], {}, sampling=SAMPLING)
    sample = to_samples(archive.read(1))[0]
    assert all(segment.token_ids.base is None and segment.logprobs.base is None for segment in sample.segments)


def test_steps_and_splits_are_listed_and_cut_back(tmp_path):
    archive = RolloutArchive(tmp_path / "rollouts")
    assert (archive.steps(), archive.splits()) == ([], [])
    archive.truncate_after(0)
    for step in (1, 2, 10):
        archive.append(step, [make_group()], {}, sampling=SAMPLING)
    for split in ("held/out", "a.b"):
        archive.append(2, [make_group(split=split)], {}, sampling=SAMPLING, split=split)
        archive.append(10, [make_group(split=split)], {}, sampling=SAMPLING, split=split)
    (tmp_path / "rollouts" / "train" / ".step_000011.parquet.tmp-1").write_bytes(b"half")
    assert archive.splits() == ["a.b", "held/out", "train"]
    assert [(step, table.num_rows) for step, table in archive.iterate()] == [(1, 2), (2, 2), (10, 2)]
    archive.truncate_after(2)
    assert archive.steps() == [1, 2]
    assert archive.steps("held/out") == archive.steps("a.b") == [2]
    assert sorted(p.name for p in (tmp_path / "rollouts" / "train").iterdir()) == [
        "step_000001.parquet",
        "step_000002.parquet",
    ]


def test_step_written_again_replaces_the_first(tmp_path):
    archive = RolloutArchive(tmp_path)
    archive.append(1, [make_group(1)], {}, sampling=SAMPLING)
    archive.append(1, [make_group(2)], {}, sampling=SAMPLING)
    assert [g.key.prompt for g in to_groups(archive.read(1))] == [2]


def test_contradicting_records_are_refused(tmp_path):
    archive = RolloutArchive(tmp_path)
    group = make_group()
    with pytest.raises(ValueError, match="does not belong to split 'heldout'"):
        archive.append(1, [group], {}, sampling=SAMPLING, split="heldout")
    with pytest.raises(ValueError, match="3 advantages for 2 samples"):
        archive.append(1, [group], {group.key: np.zeros(3, np.float32)}, sampling=SAMPLING)
    stranger = Group(key=GroupKey("train", 0, 8), prompt=group.prompt, samples=group.samples)
    with pytest.raises(ValueError, match="another key"):
        archive.append(1, [stranger], {}, sampling=SAMPLING)
    assert archive.steps() == []
    assert list(tmp_path.rglob("*.parquet*")) == []


def test_missing_step_says_what_there_is(tmp_path):
    archive = RolloutArchive(tmp_path)
    with pytest.raises(ArchiveError, match=r"no rollouts of step 3 .*rollouts are kept for no split"):
        archive.read(3)
    archive.append(1, [make_group()], {}, sampling=SAMPLING)
    archive.append(2, [make_group()], {}, sampling=SAMPLING)
    with pytest.raises(ArchiveError, match="there are 2 steps from 1 to 2"):
        archive.read(3)
    with pytest.raises(ArchiveError, match="rollouts are kept for train"):
        archive.read(3, "heldout")


def test_damaged_file_is_one_clear_error(tmp_path):
    archive = RolloutArchive(tmp_path)
    path = archive.append(1, [make_group(p) for p in range(20)], {}, sampling=SAMPLING)
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[: len(whole) // 2], whole[:-1], b"x" * 50):
        path.write_bytes(content)
        with pytest.raises(ArchiveError, match=r"step_000001\.parquet is damaged"):
            archive.read(1)
    path.write_bytes(whole)
    assert len(to_groups(archive.read(1))) == 20


def test_text_that_is_not_utf8_never_comes_back(tmp_path):
    """Whoever wrote the file: its page checksums are right."""
    archive = RolloutArchive(tmp_path)
    path = archive.append(1, [make_group()], {}, sampling=SAMPLING)
    table = archive.read(1)
    offsets = np.arange(table.num_rows + 1, dtype=np.int32)
    broken = pa.Array.from_buffers(
        pa.string(), table.num_rows, [None, pa.py_buffer(offsets), pa.py_buffer(b"\xff" * table.num_rows)]
    )
    place = table.schema.get_field_index("text")
    pq.write_table(table.set_column(place, SCHEMA.field("text"), broken), path, write_page_checksum=True)
    with pytest.raises(ArchiveError, match=r"step_000001\.parquet is damaged.*UTF8"):
        archive.read(1)


def test_flipped_bits_never_come_back_as_logprobs(tmp_path):
    rng = np.random.default_rng(0)
    group = make_group()
    noise = Segment(
        source="policy", version=1, token_ids=np.arange(2000, dtype=np.int32), logprobs=-rng.random(2000, np.float32)
    )
    group = replace(group, samples=tuple(replace(sample, segments=(noise,)) for sample in group.samples))
    archive = RolloutArchive(tmp_path)
    path = archive.append(1, [group], {}, sampling=SAMPLING)
    whole = path.read_bytes()
    metadata = pq.ParquetFile(path).metadata
    columns = [metadata.row_group(0).column(index) for index in range(metadata.num_columns)]
    column = next(c for c in columns if c.path_in_schema.startswith("logprobs"))
    start = column.dictionary_page_offset or column.data_page_offset
    for position in rng.integers(start + 100, start + column.total_compressed_size - 100, 20):
        damaged = bytearray(whole)
        damaged[position] ^= 0x04
        path.write_bytes(damaged)
        with pytest.raises(ArchiveError, match=r"step_000001\.parquet is damaged"):
            archive.read(1)


def test_other_schema_version_is_refused(tmp_path):
    archive = RolloutArchive(tmp_path)
    path = archive.append(1, [make_group()], {}, sampling=SAMPLING)
    table = archive.read(1)
    pq.write_table(table.replace_schema_metadata({VERSION_KEY: b"2"}), path)
    with pytest.raises(ArchiveError, match=r"step_000001\.parquet has schema version 2, this program reads 1"):
        archive.read(1)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(ArchiveError, match="not a file of rollouts"):
        archive.read(1)


def test_disk_error_leaves_the_file_of_that_step(tmp_path, monkeypatch):
    archive = RolloutArchive(tmp_path)
    archive.append(1, [make_group(1)], {}, sampling=SAMPLING)

    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "fsync_file", refuse)
    with pytest.raises(StorageError, match=r"step_000001\.parquet: No space left on device"):
        archive.append(1, [make_group(2)], {}, sampling=SAMPLING)
    assert [g.key.prompt for g in to_groups(archive.read(1))] == [1]
    assert len(list((tmp_path / "train").iterdir())) == 1


def test_storage_loads_neither_torch_nor_ray():
    modules = "storage.files, storage.journal, storage.ledger, storage.checkpoints, storage.run_directory"
    code = (
        f"import sys, {modules}; assert 'pyarrow' not in sys.modules; import storage.history.archive; "
        "loaded = {'torch', 'ray', 'transformers'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
