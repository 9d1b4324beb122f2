"""A damaged file is told and costs its own rows only; what belongs to another tokenizer or version is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from xxhash import xxh3_64_hexdigest

from storage.files import StorageError
from storage.history import reader as reader_module
from storage.history import store as store_module
from storage.history.manifest import HistoryError, Manifest, read_manifest, write_manifest
from storage.history.rows import history_schema
from storage.history.segments import Block, Segment
from storage.history.store import HistoryStore
from storage.journal import decode_line, encode_line
from storage.records import Group
from tests.storage.history.answers import FINGERPRINT, contents, expected, fill, flip, prompt_tokens


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "history"


@pytest.fixture
def appended(directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Group]]:
    """A store of two segments with several blocks each, and a log."""
    monkeypatch.setattr(store_module, "BLOCK_TOKENS", 50)
    with HistoryStore(directory, FINGERPRINT) as store:
        made = fill(store, [0, 1], prompts=4, samples=1)
        store.seal()
        made |= fill(store, [2], prompts=4, samples=1)
        store.seal()
        return made | fill(store, [3], prompts=4, samples=1)


def test_a_flipped_byte_anywhere_in_a_segment_costs_its_own_block_only(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BLOCK_TOKENS", 1)
    with HistoryStore(directory, FINGERPRINT) as store:
        everything = expected(fill(store, [0], prompts=2, samples=1, tokens=1))
        store.seal()
        (segment,) = store.segments
        blocks = [block.load().batch for block in segment.blocks]
    schema = history_schema(FINGERPRINT)
    for place in range(segment.entry.nbytes):
        flip(segment.path, place)
        lost = [entry.offset <= place < entry.end for entry in segment.entry.blocks]
        flipped = Segment(segment.path, segment.entry, schema)
        for block, batch, is_lost in zip(flipped.blocks, blocks, lost, strict=True):
            rows = block.load()
            assert (rows is None) == is_lost, place
            assert ("checksum" in block.failure) == is_lost, place
            assert rows is None or rows.batch.equals(batch), place
        assert len(flipped.frame_failures()) + sum(lost) == 1, place
        if place % 64 == 0:
            with HistoryStore(directory, FINGERPRINT) as store:
                found = contents(store)
                assert found.items() <= everything.items()
                assert len(found) == 2 - sum(lost)
                assert (len(store.damage), len(store.verify())) == (sum(lost), 1)
        flip(segment.path, place)


def test_a_block_whose_offsets_leave_it_is_damaged_whatever_its_checksum_says() -> None:
    schema = pa.schema([("tokens", pa.list_(pa.int32()))])
    batch = pa.record_batch([pa.array([[5, 6], [7, 8]], pa.list_(pa.int32()))], schema=schema)
    whole = batch.serialize().to_pybytes()
    offsets = np.array([0, 2, 4], np.int32).tobytes()
    assert whole.count(offsets) == 1
    far = whole.replace(offsets, np.array([0, 2, 2**30], np.int32).tobytes())
    for content in (far, whole[:-8], b"\0" * 64):
        block = Block("here", lambda content=content: memoryview(content), xxh3_64_hexdigest(content), schema)
        assert block.load() is None
        assert block.failure.startswith("here: no valid record batch (")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.999])
def test_a_truncated_segment_serves_the_blocks_that_are_there(
    directory: Path, appended: dict[int, list[Group]], share: float
) -> None:
    with HistoryStore(directory, FINGERPRINT) as store:
        segment = store.segments[0]
        size = int(segment.entry.nbytes * share)
        lost = sum(block.rows for block in segment.entry.blocks if block.end > size)
    segment.path.write_bytes(segment.path.read_bytes()[:size])
    with HistoryStore(directory, FINGERPRINT) as store:
        found = contents(store)
        assert found.items() <= expected(appended).items()
        assert len(found) == len(expected(appended)) - lost
        assert store.verify()


def test_a_missing_segment_is_told_and_the_rest_is_served(directory: Path, appended: dict[int, list[Group]]) -> None:
    (directory / "segments" / "000002.arrow").unlink()
    with HistoryStore(directory, FINGERPRINT) as store:
        assert contents(store) == expected({2: appended[2], 3: appended[3]})
        assert "segments/000002.arrow" in store.damage[0]
        assert "removed" in store.damage[0]
        store.compact(5)
        assert contents(store) == expected({2: appended[2], 3: appended[3]})


def test_compaction_saves_the_undamaged_rows_and_sets_the_file_aside(
    directory: Path, appended: dict[int, list[Group]]
) -> None:
    with HistoryStore(directory, FINGERPRINT) as store:
        segment = store.segments[0]
    flip(segment.path, segment.entry.blocks[0].offset + 100)
    damaged = segment.path.read_bytes()
    with HistoryStore(directory, FINGERPRINT) as store:
        found = contents(store)
        assert len(found) == len(expected(appended)) - segment.entry.blocks[0].rows
        store.compact(9)
        assert contents(store) == found
        assert "checksum" in store.damage[0]
    assert (directory / "damaged" / segment.path.name).read_bytes() == damaged
    with HistoryStore(directory, FINGERPRINT) as again:
        assert contents(again) == found
        assert again.damage == ()
        assert "damaged/000002.arrow" in again.verify()[0]


def test_a_flipped_byte_anywhere_in_the_manifest_is_an_error_that_says_what_to_do(
    directory: Path, appended: dict[int, list[Group]]
) -> None:
    path = directory / "MANIFEST.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        flip(path, place)
        with pytest.raises(HistoryError, match=r"MANIFEST.json is damaged .*move .*history away"):
            HistoryStore(directory, FINGERPRINT)
        flip(path, place)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StorageError, match="damaged"):
        HistoryStore(directory, FINGERPRINT)
    path.unlink()
    with pytest.raises(HistoryError, match=r"missing beside 3 files"):
        HistoryStore(directory, FINGERPRINT)
    path.mkdir()
    with pytest.raises(HistoryError, match="cannot be read"):
        HistoryStore(directory, FINGERPRINT)


def test_a_store_of_another_tokenizer_is_refused(directory: Path, appended: dict[int, list[Group]]) -> None:
    with pytest.raises(HistoryError, match=r"tokenizer 0123456789abcdef, this model has 0000000000000005"):
        HistoryStore(directory, 5)
    with HistoryStore(directory, None) as store:
        assert store.tokenizer_fingerprint == FINGERPRINT
        assert contents(store) == expected(appended)
        with pytest.raises(HistoryError, match="fingerprint"):
            store.compact(1)


def test_a_store_of_another_schema_version_is_refused(directory: Path, appended: dict[int, list[Group]]) -> None:
    path = directory / "MANIFEST.json"
    path.write_bytes(encode_line({**decode_line(path.read_bytes()), "schema_version": 99}))
    with pytest.raises(HistoryError, match="schema version 99, this program reads 1"):
        HistoryStore(directory, FINGERPRINT)


@pytest.mark.parametrize(
    "wrong",
    [
        {"generation": None},
        {"generation": "3"},
        {"tokenizer_fp": "zz"},
        {"segments": [{}]},
        {"segments": 7},
        {"name": "../../../etc/passwd"},
        {"blocks": []},
        {"blocks": [[0, 8]]},
        {"blocks": [[8, 0, "", 0, 0, 1, 1]]},
        {"nbytes": "many"},
    ],
)
def test_a_manifest_of_something_else_is_an_error_that_says_what_to_do(
    directory: Path, appended: dict[int, list[Group]], wrong: dict[str, Any]
) -> None:
    path = directory / "MANIFEST.json"
    record = decode_line(path.read_bytes())
    known = record if wrong.keys() <= record.keys() else record["segments"][0]
    known |= wrong
    path.write_bytes(encode_line(record))
    with pytest.raises(HistoryError, match=r"is no manifest of a history .*move .*history away"):
        HistoryStore(directory, FINGERPRINT)


def test_the_manifest_comes_back_as_it_was(directory: Path, appended: dict[int, list[Group]]) -> None:
    manifest = read_manifest(directory, FINGERPRINT)
    assert manifest is not None
    assert len(manifest.segments) == 2
    write_manifest(directory, manifest)
    assert read_manifest(directory, None) == manifest
    assert read_manifest(directory / "nowhere", 1) is None


def test_a_manifest_that_is_replaced_while_it_is_read_is_read_again(
    directory: Path, appended: dict[int, list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = reader_module.Segment
    writer = HistoryStore(directory, FINGERPRINT)
    turns = iter([True])

    def slow(*arguments: object) -> object:
        if next(turns, False):
            writer.compact(9)
        return original(*arguments)

    monkeypatch.setattr(reader_module, "Segment", slow)
    with HistoryStore(directory, FINGERPRINT) as reader:
        assert reader.generation == writer.generation
        assert reader.damage == ()
        assert contents(reader) == expected(appended)


@pytest.mark.parametrize(
    ("column", "value", "law"),
    [
        ("length", np.int32(99), "as many tokens"),
        ("n_accepted", np.int32(99), "accepted"),
        ("tokenizer_fp", np.uint64(5), "tokenizer"),
        ("finish_reason", "tired", "finish reason"),
        ("prompt_hash", np.uint64(5), "hash"),
    ],
)
def test_rows_that_break_a_law_are_found(
    directory: Path, column: str, value: object, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa

    original = store_module.to_rows

    def wrong(*arguments: object, **named: object) -> object:
        batch = original(*arguments, **named)
        index = batch.schema.get_field_index(column)
        field = batch.schema.field(index)
        changed = pa.array([value, *batch.column(index).to_pylist()[1:]], field.type)
        return batch.set_column(index, field, changed)

    monkeypatch.setattr(store_module, "to_rows", wrong)
    with HistoryStore(directory, FINGERPRINT) as store:
        fill(store, [0])
        assert any(law in problem for problem in store.verify())


def test_answers_that_are_there_twice_are_found(directory: Path) -> None:
    with HistoryStore(directory, FINGERPRINT) as store:
        fill(store, [0])
        fill(store, [0], prompts=1)
        assert store.verify() == ("2 answers are there twice (same epoch, prompt, duplicate and sample)",)


def test_a_wrong_manifest_entry_never_becomes_a_wrong_token(directory: Path, appended: dict[int, list[Group]]) -> None:
    from dataclasses import replace

    manifest = read_manifest(directory, FINGERPRINT)
    assert manifest is not None
    entry = manifest.segments[0]
    swapped = replace(entry, blocks=(replace(entry.blocks[0], offset=entry.blocks[0].offset + 8), *entry.blocks[1:]))
    write_manifest(directory, Manifest(manifest.generation, FINGERPRINT, (swapped, *manifest.segments[1:])))
    with HistoryStore(directory, FINGERPRINT) as store:
        assert contents(store).items() <= expected(appended).items()
        assert "checksum" in store.damage[0]
        assert store.visits(prompt_tokens(0), 1)
