"""An object store that is too small: groups are spilled and the run goes on; with a full disk below it ends clearly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.chaos.laws import check_run
from storage.checkpoints import CheckpointStore
from storage.run_directory import RunDirectory
from tests.conftest import ROOT
from tests.faults.conftest import Disk
from tests.faults.full_store import STEPS, STORE_MB, TAKEN_AFTER
from tests.runs import trained_keys

DEADLINE_S = 120
"""A run that has no room must say so by then; one that goes on takes half of that."""

pytestmark = pytest.mark.slow  # a Ray of its own, and megabytes of answers


def run(model: Path, folder: Path, spill: Path, taken_mb: int, *more: str) -> tuple[dict[str, Any], str]:
    """Run the driver; returns what it found, and what it printed beside that."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.full_store", *map(str, (model, folder, spill, taken_mb)), *more],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    results = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(json.loads(results[0])), done.stderr


def assert_every_prompt_counts_once(path: Path) -> None:
    verdict = check_run(RunDirectory(path))
    assert verdict.holds, verdict
    assert verdict.steps == STEPS
    keys = trained_keys(path)
    assert len(keys) == len(set(keys)) == 16 * STEPS


def test_groups_that_exceed_the_store_are_spilled_and_none_is_lost(random_llama: Path, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    found, errors = run(random_llama, tmp_path, spill, STORE_MB - 20)
    assert found["status"] == 0, errors
    assert found["taken"] == (STORE_MB - 20) * 2**20
    assert found["spilled"] > 0, "there was room for everything: the test tests nothing"
    assert_every_prompt_counts_once(tmp_path / "run")


def test_a_full_disk_below_a_full_store_ends_the_run_with_its_checkpoints(
    random_llama: Path, tmp_path: Path, disk: Disk
) -> None:
    disk.resize("1m")
    found, errors = run(random_llama, tmp_path, disk.path, STORE_MB - 20)
    assert found["status"] == 2, errors
    assert found["seconds"] < DEADLINE_S
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors
    assert "raise cluster.object_store_mb" in errors
    assert "resume with: slipstream train --resume" in errors
    kept = CheckpointStore(tmp_path / "run" / "checkpoints").latest()
    assert kept is not None
    assert kept.step >= TAKEN_AFTER
    kept.verify()

    disk.resize("512m")
    found, errors = run(random_llama, tmp_path, disk.path, 0, "RESUMED")
    assert found["status"] == 0, errors
    assert_every_prompt_counts_once(tmp_path / "run")
