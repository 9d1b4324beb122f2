"""``ray up``, ``ray job submit`` and ``ray down`` with the shipped file, on two nodes that are both this machine."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.cluster.loopback.cluster import HEAD, WORKER, LoopbackCluster
from tests.cluster.loopback.processes import own_processes
from tests.runs import SMALL, steps_of, trained_keys

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 and subreapers are Linux's"),
]


@pytest.fixture
def cluster() -> Iterator[LoopbackCluster]:
    """A cluster that is not up yet; all its processes end with the test."""
    # Below /tmp itself, because Ray's sockets must have short names.
    directory = Path(tempfile.mkdtemp(prefix="loop-", dir="/tmp"))
    try:
        with own_processes():
            yield LoopbackCluster(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_a_job_trains_on_the_second_node(cluster: LoopbackCluster, random_llama: Path, tmp_path: Path) -> None:
    cluster.run("ray", "up", "--yes", "--no-config-cache", str(cluster.file), timeout=180)
    nodes = {node["node_ip"]: node for node in cluster.wait_for_nodes(2, timeout=120)}
    worker = nodes.pop(WORKER)
    (head,) = nodes.values()
    assert head["is_head_node"]
    assert head["labels"]["role"] == "head"
    assert worker["labels"]["role"] == "rollout"
    assert head["resources_total"].get("CPU", 0) == 0

    assert cluster.ask("/api/v0/nodes", token=None) == 401
    assert cluster.ask("/api/v0/nodes", token="f" * 48) == 403

    run = tmp_path / "loopback"
    submit = ["ray", "job", "submit", "--address", cluster.url, "--working-dir", ".", "--"]
    settings = [*SMALL, "run.steps=2", "data.train=builtin:running_sums", f"model={random_llama}"]
    settings += [f"run.directory={tmp_path}", f"run.name={run.name}", "rollout.num_cpus=1"]
    printed = cluster.run(*submit, "python", "-m", "pipelines", "train", *settings, timeout=300)
    assert "succeeded" in printed

    assert [record["step"] for record in steps_of(run)] == [1, 2]
    keys = trained_keys(run)
    assert len(keys) == len(set(keys)) == 8
    actors = cluster.ask("/api/v0/actors?detail=true&limit=100")
    places = {actor["node_id"] for actor in actors if actor["class_name"] == "RolloutWorker"}
    assert places == {worker["node_id"]}

    log = cluster.log.read_text()
    assert f"pip install -q ray[default,train,serve]=={ray.__version__} {cluster.home}/slipstream[tasks,math,hf]" in log
    assert (cluster.home / "slipstream/pipelines/conductor.py").is_file()
    assert "RAY_AUTH_MODE=token" in (cluster.home / ".bashrc").read_text()

    cluster.run("ray", "down", "--yes", str(cluster.file), timeout=120)
    stops = [line for line in cluster.log.read_text().splitlines() if line.endswith(": ray stop")]
    assert stops == [f"{HEAD}: ray stop", f"{WORKER}: ray stop", f"{HEAD}: ray stop"]
    with pytest.raises(OSError, match="refused"):
        cluster.ask("/api/v0/nodes")
