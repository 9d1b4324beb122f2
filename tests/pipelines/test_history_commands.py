"""`slipstream history` on run directories as a run leaves them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from pipelines import history_view
from pipelines.config_loader import load, write_config
from pipelines.history_commands import history_app
from pipelines.run_data import tokenizer_fingerprint
from storage.errors import UserError
from storage.history.store import HistoryStore
from storage.models import load_tokenizer
from storage.records import TopTokens
from storage.run_directory import RunDirectory
from tests.storage.history.answers import FINGERPRINT, SAMPLING, contents, expected, fill, flip, make_group


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a history of three epochs of three prompts, two sealed."""
    directory = RunDirectory.create(tmp_path, "demo")
    write_config(load(["model=/nowhere/model"]).config, directory.config)
    with HistoryStore(directory.history, FINGERPRINT) as store:
        fill(store, [0, 1])
        store.seal()
        fill(store, [2])
    return directory.path


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def call(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(history_app, list(arguments))
    return result.exit_code, result.output, result.exception


def test_stats_counts_answers_and_bytes_of_each_part(run: Path) -> None:
    status, output, _ = call("stats", str(run))
    assert status == 0
    lines = {line[: line.find("  ")].strip(): line[line.find("  ") :].strip() for line in output.splitlines()}
    assert lines["answers"] == "18"
    assert lines["prompts"] == "3"
    assert lines["visits"] == "9 (3.0 a prompt)"
    assert lines["steps"] == "0 to 2"
    assert lines["segments"].startswith("1, ")
    for part in ("write-ahead log", "manifest"):
        assert lines[part].endswith("KiB")
        assert lines[part] != "0.0 KiB"


def test_show_prints_token_ids_and_why_when_the_tokenizer_is_not_here(run: Path, console: Console) -> None:
    history_view.print_answers(run, console, prompt=1, visits=1)
    output = printed(console)
    assert "token ids, not text" in output
    ids = make_group(1, epoch=2).samples[1].token_ids()
    assert " ".join(map(str, ids)) in output
    assert "step 2" in output
    assert "step 1" not in output


def test_show_begins_with_the_prompts_that_were_answered_last(run: Path, console: Console) -> None:
    with HistoryStore(RunDirectory(run).history, FINGERPRINT) as store:
        store.append(3, [make_group(8, epoch=3)], SAMPLING)
    history_view.print_answers(run, console, limit=1)
    assert "prompt 8" in printed(console)
    assert "3 more prompts" in printed(console)


def test_show_decodes_with_the_tokenizer_of_the_run_and_finds_text(
    tmp_path: Path, random_llama: Path, console: Console
) -> None:
    directory = RunDirectory.create(tmp_path, "with-model")
    write_config(load([f"model={random_llama}"]).config, directory.config)
    tokenizer = load_tokenizer(random_llama)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in ("add one and two", "count the\x07stars")]
    with HistoryStore(directory.history, tokenizer_fingerprint(random_llama)) as store:
        groups = [make_group(row, prompt_ids=ids, tokens=0, samples=1) for row, ids in enumerate(prompts)]
        store.append(0, groups, SAMPLING)
    history_view.print_answers(directory.path, console, fragment="stars")
    assert "stars" in printed(console)
    assert "add one" not in printed(console)
    assert "\x07" not in printed(console)
    with pytest.raises(UserError, match="has 'moon' in its text"):
        history_view.print_answers(directory.path, console, fragment="moon")


def test_show_does_not_decode_with_another_tokenizer(run: Path, random_llama: Path, console: Console) -> None:
    write_config(load([f"model={random_llama}"]).config, run / "config.yaml")
    history_view.print_answers(run, console, limit=1)
    assert "is not the one that wrote these tokens" in printed(console)
    with pytest.raises(UserError, match=r"--text needs the tokenizer .*--prompt"):
        history_view.print_answers(run, console, fragment="x")


def test_show_names_the_nearest_rows_when_a_prompt_has_no_answers(run: Path, console: Console) -> None:
    with pytest.raises(UserError, match="no answers to prompt 77; the nearest rows are 0, 1, 2"):
        history_view.print_answers(run, console, prompt=77)


def test_compact_says_what_it_dropped(run: Path) -> None:
    status, output, _ = call("compact", str(run), "--window", "1")
    assert status == 0
    assert "12 of 18 answers dropped" in output
    with HistoryStore(RunDirectory(run).history, FINGERPRINT) as store:
        assert contents(store) == expected({2: [make_group(prompt, epoch=2) for prompt in range(3)]})


def test_compact_waits_for_no_other_writer(run: Path) -> None:
    with HistoryStore(RunDirectory(run).history, FINGERPRINT) as store:
        store.append(3, [], SAMPLING)
        _, _, error = call("compact", str(run))
    assert isinstance(error, UserError)
    assert "being written by another process" in str(error)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".jsonl"])
def test_exported_rows_carry_everything_and_their_prompt(run: Path, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"answers{suffix}"
    status, output, _ = call("export", str(run), "--to", str(target))
    assert status == 0
    assert "18 answers written" in output
    if suffix == ".parquet":
        rows = pq.read_table(target).to_pylist()
    elif suffix == ".arrow":
        rows = pa.ipc.open_file(target).read_all().to_pylist()
    else:
        rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(rows) == 18
    for row in rows:
        group = make_group(row["prompt"], epoch=row["epoch"])
        sample = group.samples[row["sample_idx"]]
        assert row["prompt_tokens"] == group.prompt.token_ids.tolist()
        assert row["tokens"] == sample.token_ids().tolist()
        assert np.array_equal(np.array(row["logprobs"], np.float32), sample.logprobs())
        assert row["reward"] == sample.reward


def test_likeliest_tokens_are_exported_where_the_format_has_room_for_them(run: Path, tmp_path: Path) -> None:
    group = make_group(7, epoch=3)
    segments = [
        replace(
            s, top=TopTokens(ids=np.full((len(s.token_ids), 2), 4, np.int32), logprobs=s.logprobs[:, None] - [1, 2])
        )
        for s in group.samples[1].segments
    ]
    group = replace(group, samples=(group.samples[0], replace(group.samples[1], segments=tuple(segments))))
    with HistoryStore(RunDirectory(run).history, FINGERPRINT, keep_top=True) as store:
        store.append(3, [group], SAMPLING)
    for suffix in (".parquet", ".jsonl"):
        status, output, _ = call("export", str(run), "--to", str(tmp_path / f"all{suffix}"))
        assert (status, "20 answers written" in output) == (0, True)
    table = pq.read_table(tmp_path / "all.parquet")
    counts = [None if ids is None else len(ids) for ids in table["top_ids"].to_pylist()]
    assert sorted(c for c in counts if c is not None) == [2 * group.samples[1].length]
    assert "top_ids" not in (tmp_path / "all.jsonl").read_text()


@pytest.mark.parametrize(("name", "message"), [("x.csv", "must end in .parquet"), ("no/x.arrow", "does not exist")])
def test_an_export_that_cannot_be_written_says_why(run: Path, tmp_path: Path, name: str, message: str) -> None:
    _, _, error = call("export", str(run), "--to", str(tmp_path / name))
    assert isinstance(error, UserError)
    assert message in str(error)


@pytest.mark.parametrize("name", ["ledger.jsonl", "history/segments/000002.arrow", "new.parquet"])
def test_an_export_never_lands_among_the_files_of_a_run(run: Path, name: str) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    _, _, error = call("export", str(run), "--to", str(run / name))
    assert isinstance(error, UserError)
    assert "choose another folder" in str(error)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_verify_is_content_with_a_sound_history(run: Path) -> None:
    status, output, _ = call("verify", str(run))
    assert status == 0
    assert "18 answers in the log and 1 sealed file:" in output


def test_verify_lists_what_is_damaged_and_exits_with_1(run: Path) -> None:
    history = RunDirectory(run).history
    (segment,) = (history / "segments").iterdir()
    flip(segment, segment.stat().st_size // 2)
    status, output, _ = call("verify", str(run))
    assert status == 1
    assert f"segments/{segment.name}" in output
    assert "1 problem in" in output
    status, output, _ = call("stats", str(run))
    assert status == 0
    assert "damaged:" in output
    flip(history / "MANIFEST.json", 50)
    status, output, _ = call("verify", str(run))
    assert status == 1
    assert "MANIFEST.json is damaged" in output


def test_a_run_without_a_history_says_what_keeps_one(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "plain")
    write_config(load([]).config, directory.config)
    for command in (["stats"], ["verify"], ["compact"], ["export", "--to", "x.arrow"], ["show"]):
        _, _, error = call(command[0], str(directory.path), *command[1:])
        assert isinstance(error, UserError)
        assert "speculation.source" in str(error)
