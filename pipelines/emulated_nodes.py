"""A Ray cluster of several nodes on one machine: each node is a raylet of its own, with workers and an object store."""

from __future__ import annotations

from typing import Any

LABEL = "emulated"
_STORE_BYTES = 150 * 2**20

ON_NODES = (
    f"cluster.labels={{{LABEL}: head}}",
    f"rollout.labels={{{LABEL}: worker}}",
    f"reward.labels={{{LABEL}: worker}}",
    f"learner.labels={{{LABEL}: worker}}",
    "rollout.num_cpus=1",
    "reward.num_cpus=0.1",
    "learner.num_cpus=1",
)
"""Settings of a run: the conductor on the head, everything else on worker nodes."""


class EmulatedNodes:
    """A head without CPUs and some worker nodes.

    Attributes:
        address: How processes join it.
        nodes: The worker nodes, in the order in which they were added.
    """

    def __init__(self, count: int, cpus: int) -> None:
        """Start a head and ``count`` worker nodes of ``cpus`` CPUs each; these are promises, not cores."""
        from ray.cluster_utils import Cluster

        self._cpus = cpus
        head = {"num_cpus": 0, "labels": {LABEL: "head"}, "include_dashboard": False, "dashboard_port": 0}
        self._cluster = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": _STORE_BYTES})
        self.address = str(self._cluster.address)
        self.nodes = [self._add() for _ in range(count)]
        self._cluster.wait_for_nodes()

    def ids(self) -> list[str]:
        """Ray's ids of the worker nodes."""
        return [str(node._node_id) for node in self.nodes]

    def kill(self, node_id: str) -> None:
        """End all processes of a worker node without a warning, and start another one like it in its place."""
        index = self.ids().index(node_id)
        self._cluster.remove_node(self.nodes[index], allow_graceful=False)
        self.nodes[index] = self._add()

    def shutdown(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()

    def _add(self) -> Any:
        return self._cluster.add_node(
            wait=False, num_cpus=self._cpus, labels={LABEL: "worker"}, object_store_memory=_STORE_BYTES
        )
