"""An object store that is too small for the groups of a step: they are spilled, and the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.chaos.laws import check_run
from storage.run_directory import RunDirectory
from tests.conftest import ROOT
from tests.faults.full_store import STEPS, STORE_MB
from tests.runs import trained_keys

pytestmark = pytest.mark.slow  # a Ray of its own, and megabytes of answers


def run(model: Path, folder: Path, spill: Path, taken_mb: int) -> tuple[dict[str, Any], str]:
    """Run the driver; returns what it found, and what it printed beside that."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.full_store", *map(str, (model, folder, spill, taken_mb))],
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
