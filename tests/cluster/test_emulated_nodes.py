"""Four emulated nodes with labels: roles land where the configuration says, what cannot be placed is refused at once,
and what a run exports is what the dashboard draws.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.metrics_table import LIVE, exported_names
from tests.pipelines.test_grafana import drawn

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.slow  # a cluster of its own; tests/pipelines/test_placement.py has the laws without one


@pytest.fixture(scope="module")
def seen(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the driver saw."""
    folder = tmp_path_factory.mktemp("emulated")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.emulated_nodes", str(random_llama), str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    results = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return dict(json.loads(results[0]))


def test_roles_land_on_the_nodes_that_the_configuration_names(seen: dict[str, Any]) -> None:
    places = seen["places"]
    assert seen["status"] == 0
    assert {places["rollout-0"], places["rollout-1"]} == {"rollout a", "rollout b"}, "one CPU each: one a node"
    assert places["reward-0"].startswith("rollout")
    assert places["learner"] == "learner a"
    for name in ("conductor", "reward-queue", "learner-queue", "history-queue", "history"):
        assert places[name] == "head", name


def test_rollouts_far_from_the_history_draft_from_a_retriever_on_their_own_node(seen: dict[str, Any]) -> None:
    retrievers = [place for name, place in seen["places"].items() if name.startswith("drafts-")]
    assert sorted(retrievers) == ["rollout a", "rollout b"]
    assert seen["places"]["history"] == "head"
    assert seen["drafted"] > 100


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("label", "rollout.labels: a label nobody has: role=rolout; did you mean role=rollout?"),
        ("cpus", "learner.num_cpus=9: the largest node has 2 CPUs; ask for at most that"),
        ("workers", "rollout.workers=3 with rollout.num_cpus=1: the nodes with role=rollout have room for 2"),
        ("gpus", "rollout.num_gpus=0.5: the largest node has 0 GPUs"),
    ],
)
def test_what_cannot_be_placed_is_refused_at_once(seen: dict[str, Any], name: str, expected: str) -> None:
    refusal = seen["refusals"][name]
    assert expected in refusal["text"]
    assert refusal["seconds"] < 30, "long before cluster.start_deadline_s"


def test_the_table_is_printed_before_the_run_starts(seen: dict[str, Any]) -> None:
    lines = [line.split() for line in seen["output"].splitlines()]
    assert ["rollout", "CPU", "2", "x", "1", "=", "2", "2", "2", "with", "role=rollout"] in lines


def test_a_run_exports_every_metric_of_the_table_and_the_dashboard_draws_them(seen: dict[str, Any]) -> None:
    exported = set(seen["metrics"])
    assert exported == {full for name in LIVE for full in exported_names(name)}
    assert drawn() <= exported


def test_ray_keeps_the_files_where_the_command_says(seen: dict[str, Any]) -> None:
    files = seen["files"]
    assert "metrics/prometheus/prometheus.yml" in files
    assert "metrics/grafana/grafana.ini" in files
    assert any(file.startswith("metrics/grafana/dashboards/") and file.endswith(".json") for file in files)
