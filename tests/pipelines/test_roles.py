"""What each actor is created with: the place that the configuration names, and the options of its pool."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from pipelines.config import Config
from pipelines.roles import Role, Roles
from storage.errors import UserError


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
    assert [spawned[f"rollout-{i}"][1][0].options.max_rows for i in range(3)] == [32, 8, 8]
    assert [spawned[f"rollout-{i}"][1][0].threads for i in range(3)] == [1, 4, 4], "as many as each reserves"
    made.replace_rollout(2)
    assert spawned["rollout-2.1"][0] == long, "a successor goes where its predecessor was"


def test_without_a_long_pool_all_workers_are_alike(spawned: Any) -> None:
    start(roles(rollout={"workers": 2, "num_gpus": 0.5, "max_rows": 16}))
    assert [spawned[f"rollout-{i}"][0] for i in range(2)] == [{"num_cpus": 0, "num_gpus": 0.5}] * 2
    assert [spawned[f"rollout-{i}"][1][0].options.max_rows for i in range(2)] == [16, 16]


def test_reward_workers_go_where_their_labels_say(spawned: Any) -> None:
    start(roles(reward={"workers": 1, "num_cpus": 2, "labels": {"role": "!learner"}}))
    assert spawned["reward-0"][0] == {"num_cpus": 2, "num_gpus": 0, "label_selector": {"role": "!learner"}}


class Spare:
    """A retired rollout worker that the test plays; ``how`` its renewal goes."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.asked: list[tuple[int, Any]] = []
        self.renew = SimpleNamespace(remote=self._renew)

    async def _renewal(self) -> None:
        if self.how == "hangs":
            await asyncio.sleep(3600)
        if self.how == "dies":
            raise ray.exceptions.ActorDiedError
        if self.how == "refuses":
            raise UserError("mend the model")

    def _renew(self, term: int, settings: Any) -> Any:
        self.asked.append((term, settings))
        return self._renewal()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(ray, "kill", found.append)
    return found


def with_spares(**spares: Spare) -> Roles:
    made = roles(rollout={"workers": 3}, cluster={"start_deadline_s": 1.0})
    made.spares = {int(name[1:]): Role(f"rollout-{name[1:]}.4", actor, 4, 2) for name, actor in spares.items()}
    return made


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_spares_begin_anew_in_their_places_and_others_are_started(spawned: Any, killed: list[Any], how: str) -> None:
    good, bad = Spare("well"), Spare(how)
    made = start(with_spares(r0=good, r2=bad))
    assert [(role.name, role.incarnation, role.term) for role in made.rollout] == [
        ("rollout-0.4", 4, 3),
        ("rollout-1", 0, 0),
        ("rollout-2.4", 4, 3),
    ]
    [(term, settings)] = good.asked
    fresh = spawned["rollout-1"][1][0]
    assert (term, settings) == (3, replace(fresh, name="rollout-0.4")), "as a fresh one would be made"
    asyncio.run(made.renewed())
    assert killed == [bad]
    assert [(role.name, role.term) for role in made.rollout] == [
        ("rollout-0.4", 3),
        ("rollout-1", 0),
        ("rollout-2.5", 0),
    ]


def test_what_a_renewal_wants_the_user_to_mend_is_raised(spawned: Any, killed: list[Any]) -> None:
    made = start(with_spares(r1=Spare("refuses")))
    with pytest.raises(UserError, match="mend the model"):
        asyncio.run(made.renewed())


def test_spares_of_a_start_that_broke_off_are_ended(killed: list[Any]) -> None:
    spare = Spare("well")
    with_spares(r1=spare).shutdown()
    assert killed == [spare]
