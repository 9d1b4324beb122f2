"""What is refused can never be placed, what can be placed is accepted, and each sentence names the field."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pipelines.cluster import coming_nodes
from pipelines.config import Config
from pipelines.placement import Node, long_need, matches, needs_of, request_problems, rollout_need
from pipelines.placement_check import placement_doubts, placement_problems, table_lines

HEAD = Node(name="head", cpus=0, gpus=0, labels={"role": "head", "ray.io/node-id": "f00"})
LEARNER = Node(name="10.0.0.2", cpus=8, gpus=2, labels={"role": "learner", "zone": "a"})
ROLLOUT = Node(name="10.0.0.3", cpus=4, gpus=1, labels={"role": "rollout", "zone": "a"})
ROLLOUT_B = Node(name="10.0.0.4", cpus=4, gpus=1, labels={"role": "rollout", "zone": "b"})
NODES = [HEAD, LEARNER, ROLLOUT, ROLLOUT_B]


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


def long_pool(**long: Any) -> dict[str, Any]:
    return {"dispatch": "skew_aware", "pools": {"long": long}}


def problem(nodes: list[Node] = NODES, **sections: Any) -> str:
    [text] = placement_problems(config(**sections), nodes)
    return text


@pytest.mark.parametrize(
    ("selector", "value", "expected"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "b", True),
        ("!a", "a", False),
        ("!a", None, True),
        ("in(a,b)", "b", True),
        ("in(a, b)", "b", True),
        ("in(a,b)", "c", False),
        ("in(a,b)", None, False),
        ("!in(a,b)", "c", True),
        ("!in(a,b)", "a", False),
        ("!in(a,b)", None, True),
    ],
)
def test_label_selectors_mean_what_ray_takes_them_for(selector: str, value: str | None, expected: bool) -> None:
    node = Node(name="n", cpus=1, gpus=0, labels={} if value is None else {"zone": value})
    assert matches({"zone": selector}, node) is expected


def test_what_fits_is_accepted() -> None:
    wanted = config(
        rollout={"workers": 4, "num_cpus": 2, "num_gpus": 0.5, "labels": {"role": "rollout"}},
        learner={"num_cpus": 8, "num_gpus": 2, "labels": {"role": "learner"}},
        cluster={"labels": {"role": "head"}},
    )
    assert placement_problems(wanted, NODES) == []
    assert placement_doubts(wanted, NODES) == []


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"role": "rolout"}, "rollout.labels: a label nobody has: role=rolout; did you mean role=rollout?"),
        ({"rol": "rollout"}, "rollout.labels: a label nobody has: rol=rollout; did you mean role=rollout?"),
        ({"role": "gpu-node"}, "rollout.labels: a label nobody has: role=gpu-node; did you mean role="),
        ({"disk": "ssd"}, "disk=ssd; there are role=head, role=learner, role=rollout, zone=a, zone=b"),
        ({"role": "learner", "zone": "b"}, "no node has all of role=learner, zone=b, though each of them exists"),
    ],
)
def test_label_nobody_has_is_refused_with_the_nearest(labels: dict[str, str], expected: str) -> None:
    text = problem(rollout={"labels": labels})
    assert text.startswith("rollout.labels: ")
    assert expected in text
    assert "node-id" not in text


def test_actor_larger_than_any_node_is_refused() -> None:
    assert problem(learner={"num_cpus": 9}) == ("learner.num_cpus=9: the largest node has 8 CPUs; ask for at most that")
    assert problem(rollout={"num_gpus": 2, "labels": {"role": "rollout"}}) == (
        "rollout.num_gpus=2: the largest node with role=rollout has 1 GPUs; ask for at most that"
    )
    apart = [Node(name="a", cpus=8, gpus=0, labels={}), Node(name="b", cpus=1, gpus=1, labels={})]
    assert "rollout.num_cpus=2 and rollout.num_gpus=1: no node has both" in problem(
        apart, rollout={"num_cpus": 2, "num_gpus": 1}
    )


def test_fractions_of_gpus_do_not_span_two() -> None:
    two = [Node(name="a", cpus=64, gpus=2, labels={})]
    assert placement_problems(config(rollout={"workers": 4, "num_gpus": 0.5}), two) == []
    assert placement_problems(config(rollout={"workers": 2, "num_gpus": 0.6}), two) == []
    assert "rollout.workers=3 with rollout.num_gpus=0.6: the nodes have room for 2" in problem(
        two, rollout={"workers": 3, "num_gpus": 0.6}
    )


def test_too_many_workers_for_their_nodes_are_refused() -> None:
    text = problem(rollout={"workers": 5, "num_cpus": 2, "labels": {"role": "rollout"}})
    assert text.startswith("rollout.workers=5 with rollout.num_cpus=2: the nodes with role=rollout have room for 4")


def test_roles_that_share_too_few_nodes_are_refused_together() -> None:
    text = problem(
        rollout={"workers": 3, "num_cpus": 2, "labels": {"role": "rollout"}},
        reward={"workers": 3, "num_cpus": 1, "labels": {"role": "rollout"}},
        learner={"num_cpus": 8},
    )
    assert text.startswith(
        "rollout.num_cpus=2 x 3 (rollout.workers) + reward.num_cpus=1 x 3 (reward.workers) = 9 CPUs, the nodes with "
        "role=rollout have 8: some actors would wait for ever"
    )


def test_long_pool_takes_what_it_leaves_open_from_the_regular_one() -> None:
    rollout = {"workers": 5, "num_cpus": 1, "num_gpus": 0.5, "labels": {"role": "rollout"}}
    plain = long_need(config(rollout=rollout, schedule=long_pool(workers=2)))
    assert plain.options() == {"num_cpus": 1, "num_gpus": 0.5, "label_selector": {"role": "rollout"}}
    own = config(rollout=rollout, schedule=long_pool(workers=2, num_cpus=4, num_gpus=1, labels={"zone": "b"}))
    assert long_need(own).options() == {"num_cpus": 4, "num_gpus": 1, "label_selector": {"zone": "b"}}
    assert (rollout_need(own).count, long_need(own).count) == (3, 2)
    assert "schedule.pools.long.labels: a label nobody has: zone=c" in problem(
        rollout={"workers": 2}, schedule=long_pool(workers=1, labels={"zone": "c"})
    )


def test_nothing_is_refused_that_a_search_through_all_placements_can_place() -> None:
    nodes = [Node(name="a", cpus=3, gpus=1, labels={"x": "1"}), Node(name="b", cpus=2, gpus=1, labels={"x": "2"})]
    placeable = refused = 0
    for workers, cpus, gpus, learner, pinned in product((1, 2, 3), (0, 1, 2), (0, 0.5, 1), (0, 2, 3), ({}, {"x": "2"})):
        wanted = config(
            rollout={"workers": workers, "num_cpus": cpus, "num_gpus": gpus, "labels": pinned},
            learner={"num_cpus": learner, "num_gpus": 0.5},
        )
        fits = can_be_placed(wanted, nodes)
        problems = placement_problems(wanted, nodes)
        assert not (fits and problems), (wanted, problems)
        if not fits and not problems:
            assert placement_doubts(wanted, nodes), "a placement that does not exist is doubted at least"
        placeable += fits
        refused += bool(problems)
    assert placeable > 40
    assert refused > 40


def can_be_placed(wanted: Config, nodes: list[Node]) -> bool:
    """Try every GPU of every node for every actor."""
    actors = [need for need in needs_of(wanted) for _ in range(need.count) if need.cpus or need.gpus]
    slots = [(node, gpu) for node in nodes for gpu in range(int(node.gpus))]
    for choice in product(slots, repeat=len(actors)):
        cpus = {node.name: node.cpus for node in nodes}
        gpus = {(node.name, gpu): 1.0 for node, gpu in slots}
        for need, (node, gpu) in zip(actors, choice, strict=True):
            if not matches(need.labels, node):
                break
            cpus[node.name] -= need.cpus
            gpus[node.name, gpu] -= need.gpus
        else:
            if min(*cpus.values(), *gpus.values()) >= 0:
                return True
    return False


def test_workers_that_reserve_nothing_on_several_nodes_are_doubtful() -> None:
    [doubt] = placement_doubts(config(rollout={"workers": 4}), NODES)
    assert doubt.startswith("rollout.num_cpus=0: Ray may put all 4 of rollout.workers on one node")
    assert placement_doubts(config(rollout={"workers": 4}), [ROLLOUT]) == []


def test_table_says_what_is_requested_and_what_there_is() -> None:
    wanted = config(
        rollout={"workers": 4, "num_cpus": 2, "num_gpus": 0.5, "labels": {"role": "rollout"}},
        learner={"num_gpus": 1},
    )
    rows = [line.split() for line in table_lines(wanted, NODES)]
    assert rows[0] == ["role", "resource", "requested", "available", "nodes"]
    assert ["rollout", "CPU", "4", "x", "2", "=", "8", "8", "2", "with", "role=rollout"] in rows
    assert ["rollout", "GPU", "4", "x", "0.5", "=", "2", "2", "2", "with", "role=rollout"] in rows
    assert ["learner", "GPU", "1", "x", "1", "=", "1", "4", "4"] in rows


@pytest.mark.parametrize(
    ("labels", "accepted"),
    [
        ({"role": "rollout"}, True),
        ({"ray.io/accelerator-type": "in(H100, A100)"}, True),
        ({"a.b/c": "!x"}, True),
        ({"role": "-x"}, False),
        ({"ro le": "x"}, False),
        ({"role": "in()"}, False),
        ({"role": "!in(a,"}, False),
        ({"role": "a,b"}, False),
    ],
)
def test_labels_are_accepted_exactly_where_ray_accepts_them(labels: dict[str, str], accepted: bool) -> None:
    from ray._private.label_utils import validate_label_selector

    assert (request_problems(config(rollout={"labels": labels})) == []) is accepted
    assert (validate_label_selector(labels) is None) is accepted


def test_node_types_of_the_cluster_file_are_nodes_to_come(tmp_path: Path) -> None:
    file = tmp_path / "ray_bootstrap_config.yaml"
    file.write_text(
        """
max_workers: 3
head_node_type: head
available_node_types:
  head: {resources: {CPU: 0}, labels: {role: head}}
  rollout: {max_workers: 4, resources: {CPU: 16, GPU: 1}, labels: {role: rollout}}
"""
    )
    up = Node(name="x", cpus=16, gpus=1, labels={"role": "rollout", "ray.io/node-group": "rollout"})
    coming = coming_nodes([HEAD, up], file)
    assert [(n.name, n.cpus, n.gpus, n.labels) for n in coming] == [("rollout", 16, 1, {"role": "rollout"})] * 2
    assert coming_nodes([HEAD, up, up, up], file) == [], "max_workers are there"
    assert coming_nodes([HEAD], tmp_path / "none.yaml") == []


def test_machines_of_an_on_premises_file_may_turn_out_to_be_anything(tmp_path: Path) -> None:
    file = tmp_path / "ray_bootstrap_config.yaml"
    file.write_text("max_workers: 2\navailable_node_types: {local.cluster.node: {resources: {}, max_workers: 2}}")
    coming = coming_nodes([HEAD], file)
    assert len(coming) == 2
    wanted = config(rollout={"workers": 2, "num_gpus": 8, "labels": {"role": "rollout"}})
    assert placement_problems(wanted, [HEAD, *coming]) == []
