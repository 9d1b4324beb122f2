"""The laws that a storm checks: a sound run keeps them, and a run with one thing wrong is found out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipelines.chaos.laws import check_run
from storage.checkpoints import CheckpointStore
from storage.errors import UserError
from storage.journal import decode_line, encode_line
from storage.ledger import Ledger
from storage.records import GroupKey
from storage.run_directory import RunDirectory
from tests.runs import small_run

STEPS = 4


@pytest.fixture(scope="module")
def sound(ray_session: None, random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of eight prompts, four a step."""
    parent = tmp_path_factory.mktemp("runs")
    return small_run(random_llama, parent, "sound", f"run.steps={STEPS}", "evaluation.before=false")


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> RunDirectory:
    """A copy to doctor."""
    return RunDirectory(Path(shutil.copytree(sound, tmp_path / "doctored")))


def doctor_ledger(run: RunDirectory, change: Callable[[dict[str, Any]], None]) -> None:
    """Change records of the journal; their lines must keep their lengths, so that offsets stay true."""
    lines = run.ledger.read_bytes().splitlines(keepends=True)
    records = [decode_line(line) for line in lines]
    for record in records:
        change(record)
    changed = [encode_line(record) for record in records]
    assert [len(line) for line in changed] == [len(line) for line in lines]
    run.ledger.write_bytes(b"".join(changed))


def doctor_archive(run: RunDirectory, step: int, change: Callable[[pa.Table], pa.Table]) -> None:
    path = run.rollouts / "train" / f"step_{step:06d}.parquet"
    table = pq.read_table(path)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), path)


def groups_of(run: RunDirectory, step: int) -> list[GroupKey]:
    keys: list[GroupKey] = []

    def note(record: dict[str, Any]) -> None:
        if record["op"] == "train" and record["step"] == step - 1:
            keys.extend(map(GroupKey.parse, record["keys"]))

    doctor_ledger(run, note)
    return keys


def rename(run: RunDirectory, step: int, old: GroupKey, new: GroupKey, *, ledger: bool = True) -> None:
    """Have a step train ``new`` where it trained ``old``."""

    def in_ledger(record: dict[str, Any]) -> None:
        if record["op"] == "train" and record["step"] == step - 1:
            record["keys"] = [str(new) if key == str(old) else key for key in record["keys"]]

    def in_archive(table: pa.Table) -> pa.Table:
        hit = pc.equal(table["prompt"], old.prompt)
        for name, value in (("prompt", new.prompt), ("duplicate", new.duplicate)):
            column = pc.if_else(hit, pa.scalar(value, table[name].type), table[name])
            table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
        return table

    if ledger:
        doctor_ledger(run, in_ledger)
    doctor_archive(run, step, in_archive)


def test_a_sound_run_keeps_every_law(run: RunDirectory) -> None:
    verdict = check_run(run)
    assert verdict.holds
    assert (verdict.steps, verdict.trained, verdict.ended, verdict.waiting) == (STEPS, 16, 0, 0)


def test_a_lost_prompt_is_found(run: RunDirectory) -> None:
    old = groups_of(run, 3)[0]
    rename(run, 3, old, old._replace(duplicate=7))  # something else was trained in its place
    verdict = check_run(run)
    assert verdict.lost == (old,)
    assert verdict.trained_twice == ()
    assert not verdict.holds


def test_a_prompt_that_is_trained_twice_is_found(run: RunDirectory) -> None:
    old, again = groups_of(run, 2)[0], groups_of(run, 1)[0]
    assert old.epoch == again.epoch
    rename(run, 2, old, again)
    verdict = check_run(run)
    assert verdict.trained_twice == (again,)
    assert verdict.lost == (old,)


def test_answers_that_are_in_a_step_twice_are_found(run: RunDirectory) -> None:
    doctor_archive(run, 2, lambda table: pa.concat_tables([table, table.slice(0, 4)]))
    assert check_run(run).trained_twice == (groups_of(run, 2)[0],)


def test_an_archive_that_contradicts_the_ledger_is_found(run: RunDirectory) -> None:
    old = groups_of(run, 4)[0]
    rename(run, 4, old, old._replace(duplicate=3), ledger=False)
    [problem] = check_run(run).problems
    assert problem.startswith("step 4: archive and ledger differ in 2 groups")


def test_a_step_without_rollouts_is_found(run: RunDirectory) -> None:
    (run.rollouts / "train" / "step_000002.parquet").unlink()
    [problem] = check_run(run).problems
    assert problem.startswith("step 2 is not in the archive")


def test_a_step_that_is_reported_twice_is_found(run: RunDirectory) -> None:
    lines = run.metrics.read_text().splitlines(keepends=True)
    [second] = [line for line in lines if json.loads(line)["step"] == 2]
    run.metrics.write_text("".join([*lines, second]))
    [problem] = check_run(run).problems
    assert problem == "metrics.jsonl: steps none are missing, [2] are there more than once"


def test_a_step_that_is_not_reported_is_found(run: RunDirectory) -> None:
    lines = run.metrics.read_text().splitlines(keepends=True)
    padding = " " * (max(len(line) for line in lines) - 1) + "\n"  # not shorter than the checkpoint says
    kept = [line for line in lines if json.loads(line)["step"] != 3]
    run.metrics.write_text("".join(kept).rstrip("\n") + padding)
    [problem] = check_run(run).problems
    assert "steps [3] are missing" in problem


def test_what_lies_behind_the_checkpoint_is_no_part_of_the_weights(run: RunDirectory) -> None:
    key = GroupKey("train", 2, 0)
    with run.ledger.open("ab") as file:
        for record in ({"op": "open", "key": str(key)}, {"op": "lease", "key": str(key), "worker": "w", "attempt": 0}):
            file.write(encode_line(record))
    assert check_run(run).holds


def test_epochs_whose_lines_were_compacted_away_are_still_checked(run: RunDirectory) -> None:
    checkpoint = CheckpointStore(run.checkpoints).latest()
    assert checkpoint is not None
    offset = checkpoint.meta["ledger_offset"]
    ledger = Ledger.replay(run.ledger, offset)
    ledger.compact(offset)
    ledger.close()
    verdict = check_run(run)
    assert verdict.holds
    assert verdict.trained == 16
    old = GroupKey("train", 0, 0)
    step = next(
        s for s in (1, 2) if 0 in pq.read_table(run.rollouts / f"train/step_{s:06d}.parquet")["prompt"].to_pylist()
    )
    rename(run, step, old, old._replace(duplicate=7), ledger=False)
    assert check_run(run).lost == (old,)


def test_damaged_weights_and_missing_ones_are_found(run: RunDirectory) -> None:
    checkpoint = CheckpointStore(run.checkpoints).latest()
    assert checkpoint is not None
    weights = checkpoint.component("model") / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UserError, match="is damaged"):
        check_run(run)
    shutil.rmtree(run.checkpoints)
    assert check_run(run).problems == ("there is no complete checkpoint: no weights have survived",)
