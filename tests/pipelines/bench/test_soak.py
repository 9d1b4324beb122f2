"""The soak's judgement on made-up readings, and its way to read a real run."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from pipelines.bench import soak
from pipelines.bench.census import Census, Usage, session_folder, store_bytes
from pipelines.bench.trends import trend
from storage.errors import UserError

HOUR = 3600.0
NOTHING = {"history": 0, "archive": 0, "ledger": 0, "metrics": 0, "TensorBoard": 0, "events log": 0, "Ray logs": 0}


def readings(count=240, hours=1.0, seed=0, *, leak_mb_h=0.0, **growth_mb_h):
    """Readings of a run whose learner leaks, and whose files grow, by so many megabytes an hour."""
    noise = np.random.default_rng(seed)
    drift = np.convolve(noise.normal(size=count + 9), np.ones(10) / 10, "valid")  # neighbours move together
    found = []
    for i in range(count):
        at = i / count * hours
        roles = {
            "learner": Usage(int(400e6 + 2e6 * drift[i] + leak_mb_h * 1e6 * at), 20, 50),
            "conductor": Usage(int(100e6 + 1e6 * noise.normal()), 10, 30 + i % 2),
        }
        files = {name: int(1e6 + growth_mb_h.get(name.replace(" ", "_"), 0) * 1e6 * at) for name in NOTHING}
        found.append(soak.Reading(at * HOUR, 1e4 * at, 2e6 * at, Census(roles=roles, store=int(5e6), files=files)))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_flat(seed):
    result = soak.report(readings(seed=seed))
    assert result.figures["rss_flat"] == 1
    assert abs(result.figures["rss_slope_mb_h_learner"]) < 8
    assert not [note for note in result.notes if "WARNING" in note]
    assert {row[0]: row[4] for row in result.rows} == dict.fromkeys(
        ("learner", "conductor", "object store", "all together"), "flat"
    )
    assert result.figures["projected_24h_memory_gb"] == pytest.approx(0.5, rel=0.02)
    assert result.figures["steps_per_h"] == pytest.approx(1e4)
    assert result.figures["tokens_per_h"] == pytest.approx(2e6)


@pytest.mark.parametrize("seed", range(8))
def test_a_leak_is_found_and_projected(seed):
    result = soak.report(readings(seed=seed, leak_mb_h=30))
    assert result.figures["rss_flat"] == 0
    assert result.figures["rss_slope_mb_h_learner"] == pytest.approx(30, abs=8)
    assert [note.split(":")[1] for note in result.notes if "WARNING" in note] == [" memory of learner grows"]
    assert result.figures["projected_24h_memory_gb"] == pytest.approx(0.5 + 24 * 0.03, rel=0.2)
    rows = {row[0]: row for row in result.rows}
    assert float(rows["learner"][6]) == pytest.approx(30e6 / 1e4, rel=0.3), "bytes a step"
    assert rows["all together"][4] == "LEAKS"


def test_growth_below_a_percent_of_its_size_goes_unnoticed():
    steady = np.arange(100.0)
    assert trend(steady * 36, 1e6 + steady * 50).flat, "5000 an hour is half a percent"
    assert not trend(steady * 36, 1e6 + steady * 200).flat


def test_stores_grow_with_the_data_and_logs_may_not():
    result = soak.report(readings(history=20, archive=60, Ray_logs=5))
    rows = {row[0]: row for row in result.more[0].rows}
    assert rows["history"][4] == rows["archive"][4] == "with the data"
    assert rows["Ray logs"][4] == "flat"
    assert rows["history"][6] == "10.0", "20 MB an hour for 2 million tokens an hour"
    assert result.figures["history_bytes_per_token"] == pytest.approx(10, rel=0.01)
    assert result.figures["log_growth_mb_h"] == pytest.approx(5, rel=0.01)
    assert result.figures["projected_24h_gb"] == pytest.approx(24 * 0.085 + 0.04, rel=0.05)
    loud = soak.report(readings(Ray_logs=40))
    assert [note for note in loud.notes if note.startswith("WARNING: Ray logs grows: +40.0")]


def test_open_files_that_are_never_closed_are_shown():
    found = [
        soak.Reading(
            r.seconds, r.steps, r.tokens, Census(roles={"learner": Usage(1, 5, 10 + i)}, store=0, files=NOTHING)
        )
        for i, r in enumerate(readings())
    ]
    (row,) = soak.report(found).more[1].rows
    assert row[2] == "flat"
    assert row[4].startswith("LEAKS")


def test_the_slope_of_few_readings_is_not_trusted():
    line = trend(np.array([0.0, 1.0]), np.array([1.0, 9.0]))
    assert line.flat
    assert line.error == math.inf
    with pytest.raises(UserError, match="too few readings"):
        soak.run({"minutes": 0.1, "every_s": 5.0, "seed": 0, "keep": ""})


def test_the_object_store_is_read_from_what_the_raylet_writes_down(tmp_path):
    session = tmp_path / "session_2026-01-02_03-04-05_678901_23"
    (session / "logs").mkdir(parents=True)
    assert session_folder(["python -m x", f"raylet --log_dir={session}/logs --y"]) == session
    assert store_bytes(session) is None
    (session / "logs" / "debug_state.txt").write_text(
        'Local id: 1 Local resources: {"total":{CPU: [80000], object_store_memory: [2097152000000]}, "available": '
        '{CPU: [80000], object_store_memory: [2045152000000]}, "labels":{}}\n'
    )
    assert store_bytes(session) == 5_200_000


@pytest.mark.slow
def test_a_short_soak_of_a_real_run(tmp_path):
    result = soak.run({"minutes": 0.5, "every_s": 1.0, "seed": 0, "keep": str(tmp_path)})
    assert {"learner", "rollout", "reward", "history", "conductor", "queues", "driver"} <= {r[0] for r in result.rows}
    assert result.figures["tokens_per_h"] > result.figures["steps_per_h"] > 0
    assert result.figures["history_bytes_per_token"] > 0
    assert (tmp_path / "soak" / "metrics.jsonl").exists()


def test_memory_of_a_process_is_what_it_holds_for_itself(tmp_path):
    script = """
import mmap, sys
from pathlib import Path
from pipelines.bench.census import anonymous_memory
import os
before = anonymous_memory(os.getpid())
path = Path(sys.argv[1])
path.write_bytes(b"x" * (32 << 20))
with path.open("rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sum(mapped[at] for at in range(0, len(mapped), 4096))
shared = mmap.mmap(-1, 32 << 20)
for at in range(0, len(shared), 4096):
    shared[at] = 1
files = anonymous_memory(os.getpid()) - before
held = bytearray(64 << 20)
print(files, anonymous_memory(os.getpid()) - before - files)
"""
    told = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "file")], capture_output=True, text=True, check=True
    )
    files, held = map(int, told.stdout.split())
    assert files < 8 << 20, "neither a mapped file nor shared memory counts"
    assert (60 << 20) < held < (72 << 20)
