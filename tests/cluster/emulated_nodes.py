"""A driver of its own on a cluster of four emulated nodes: trains, refuses, scrapes; prints what it saw as JSON.

Run as ``python -m tests.cluster.emulated_nodes MODEL FOLDER``: a process can be the driver of one Ray at a time, and
the test session has one.
"""

from __future__ import annotations

import io
import json
import re
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster
from rich.console import Console

from pipelines.launch import train
from storage.errors import UserError
from tests.runs import small_config

LABELS = (
    "rollout.workers=2",
    "rollout.num_cpus=1",
    "rollout.labels={role: rollout}",
    "reward.labels={role: in(rollout)}",
    "learner.num_cpus=2",
    "learner.labels={role: '!rollout', zone: a}",
    "cluster.labels={role: head}",
)
JOINED = "cluster.address=joined"
"""The driver has joined already; the address says that this machine's own cores are not what counts."""
INFEASIBLE = {
    "label": ["rollout.labels={role: rolout}"],
    "cpus": ["learner.num_cpus=9"],
    "workers": ["rollout.workers=3", "rollout.num_cpus=1", "rollout.labels={role: rollout}"],
    "gpus": ["rollout.num_gpus=0.5"],
}


def main(model: Path, folder: Path) -> None:
    """Print one JSON object."""
    head = {"num_cpus": 0, "labels": {"role": "head"}, "include_dashboard": True, "dashboard_port": 0}
    cluster = Cluster(
        initialize_head=True, head_node_args={**head, "_system_config": {"metrics_report_interval_ms": 1000}}
    )
    cluster.add_node(num_cpus=2, labels={"role": "learner", "zone": "a"})
    cluster.add_node(num_cpus=1, labels={"role": "rollout", "zone": "a"})
    cluster.add_node(num_cpus=1, labels={"role": "rollout", "zone": "b"})
    ray.init(address=cluster.address, log_to_driver=False)
    found: dict[str, Any] = {"refusals": {name: refusal(model, folder, name) for name in INFEASIBLE}}
    names: set[str] = set()
    over = threading.Event()
    scraper = threading.Thread(target=scrape, args=(names, over), daemon=True)
    scraper.start()
    out = io.StringIO()
    steps = ("run.steps=12", "rollout.pacing.profile=middle", "speculation.source=history", "speculation.gate=always")
    config = small_config(model, folder, "run", *steps, *LABELS, JOINED)
    found["status"] = train(config, name="run", console=Console(file=out, width=200))
    over.set()
    scraper.join(30)
    found |= {"metrics": sorted(names), "output": out.getvalue(), "places": places()}
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found["drafted"] = sum(record.get("speculation/drafted/prompt", 0.0) for record in records)
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    found["files"] = sorted(str(path.relative_to(session)) for path in (session / "metrics").rglob("*.*"))
    ray.shutdown()
    cluster.shutdown()
    sys.stdout.write("RESULT " + json.dumps(found) + "\n")


def refusal(model: Path, folder: Path, name: str) -> dict[str, Any]:
    """What a run that cannot be placed is told, and after how many seconds."""
    began = time.monotonic()
    try:
        train(
            small_config(model, folder, name, *INFEASIBLE[name], JOINED), name=name, console=Console(file=io.StringIO())
        )
    except UserError as error:
        return {"text": str(error), "seconds": time.monotonic() - began}
    return {"text": "", "seconds": time.monotonic() - began}


def scrape(names: set[str], over: threading.Event) -> None:
    """Collect the names of all metrics of ours that any node exports, each second."""
    urls = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in ray.nodes()]
    while not over.wait(1):
        for url in urls:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    text = answer.read().decode()
            except OSError:
                continue
            names.update(re.findall(r'^(ray_slipstream_\w+){[^}]*run="run"', text, re.M))


def places() -> dict[str, str]:
    """The role label and the zone of the node of each named actor."""
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    found = {}
    for actor in actors().values():
        if actor["Name"]:
            place = labels[actor["Address"]["NodeID"]]
            found[actor["Name"]] = f"{place.get('role')} {place.get('zone', '')}".strip()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
