"""Starts a Ray that believes in several GPUs, places engines and a learner on it, and prints who got which.

A program of its own: the Ray that tests share has no GPUs. It only counts them; nothing is computed.
"""

from __future__ import annotations

import json
import sys

import ray
from ray.cluster_utils import Cluster

from pipelines.config_loader import load
from pipelines.placement import learner_need, rollout_need

SIZE = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": 100 * 2**20}
LIMIT_S = 90.0


@ray.remote
class Holder:
    """Takes up what it is created with."""

    def place(self) -> tuple[str, str]:
        """Node and GPU that it was given."""
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]


def main() -> None:
    """Place engines on two nodes of two GPUs each, then a learner beside them, and print both as JSON."""
    cluster = Cluster(initialize_head=True, head_node_args={**SIZE, "include_dashboard": False, "dashboard_port": 0})
    cluster.add_node(**SIZE)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    config = load(
        [
            "cluster.placement=colocated",
            "rollout.num_gpus=0.9",
            "learner.num_gpus=0.1",
            "rollout.workers=3",
        ]
    ).config
    engines = [Holder.options(**rollout_need(config).options()).remote() for _ in range(config.rollout.workers)]
    engine_places = ray.get([engine.place.remote() for engine in engines], timeout=LIMIT_S)
    nodes = "in(" + ",".join(sorted({node for node, _ in engine_places})) + ")"
    options = learner_need(config).options() | {"label_selector": {"ray.io/node-id": nodes}}
    learner_place = ray.get(Holder.options(**options).remote().place.remote(), timeout=LIMIT_S)
    sys.stdout.write(json.dumps({"engines": engine_places, "learner": learner_place}) + "\n")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
