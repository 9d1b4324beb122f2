"""What each actor is created with: the place that the configuration names, and the options of its pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.config import Config
from pipelines.roles import Roles


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]]:
    """Place, arguments and keyword arguments of each actor by name, instead of the actor."""
    made: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {}

    def record(_self: Roles, _module: Any, _cls: type, name: str, place: Any, *args: Any, **kwargs: Any) -> str:
        made[name] = (place, args, kwargs)
        return name

    monkeypatch.setattr(Roles, "_spawn", record)
    monkeypatch.setattr(Roles, "_queue", lambda *_: None)
    return made


def roles(**sections: Any) -> Roles:
    data: Any = SimpleNamespace(model_path="model", max_length=64)
    return Roles(Config.model_validate(sections), data, "namespace")


def start(made: Roles) -> Roles:
    made.start(version=0, learner_directory=None, with_learner=False, archive=None, history=None)
    return made


def test_the_last_workers_are_the_long_pool_with_resources_of_their_own(spawned: Any) -> None:
    pool = {"workers": 2, "num_cpus": 4, "num_gpus": 1, "labels": {"zone": "b"}, "max_rows": 8}
    rollout = {"workers": 3, "num_cpus": 1, "labels": {"role": "rollout"}, "max_rows": 32}
    made = start(roles(rollout=rollout, schedule={"dispatch": "skew_aware", "pools": {"long": pool}}))
    regular = {"num_cpus": 1, "num_gpus": 0, "label_selector": {"role": "rollout"}}
    long = {"num_cpus": 4, "num_gpus": 1, "label_selector": {"zone": "b"}}
    assert [spawned[f"rollout-{i}"][0] for i in range(3)] == [regular, long, long]
    assert [spawned[f"rollout-{i}"][1][2].max_rows for i in range(3)] == [32, 8, 8]
    assert [spawned[f"rollout-{i}"][2]["threads"] for i in range(3)] == [1, 4, 4], "as many as each reserves"
    made.replace_rollout(2)
    assert spawned["rollout-2.1"][0] == long, "a successor goes where its predecessor was"


def test_without_a_long_pool_all_workers_are_alike(spawned: Any) -> None:
    start(roles(rollout={"workers": 2, "num_gpus": 0.5, "max_rows": 16}))
    assert [spawned[f"rollout-{i}"][0] for i in range(2)] == [{"num_cpus": 0, "num_gpus": 0.5}] * 2
    assert [spawned[f"rollout-{i}"][1][2].max_rows for i in range(2)] == [16, 16]


def test_reward_workers_go_where_their_labels_say(spawned: Any) -> None:
    start(roles(reward={"workers": 1, "num_cpus": 2, "labels": {"role": "!learner"}}))
    assert spawned["reward-0"][0] == {"num_cpus": 2, "num_gpus": 0, "label_selector": {"role": "!learner"}}
