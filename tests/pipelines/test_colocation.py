"""What colocated placement refuses, doubts, counts and shows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.config import Config
from pipelines.config_loader import load
from pipelines.placement import Node, learner_need
from pipelines.placement_check import placement_doubts, placement_problems, table_lines
from pipelines.roles import Roles
from pipelines.sizes import MemoryEstimate, ModelShape
from storage.errors import UserError

COLOCATED = "cluster.placement=colocated"
SHAPE = ModelShape(parameters=1_000_000, layers=4, kv_heads=2, head_dim=16)


def message(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load([COLOCATED, *overrides])
    return str(caught.value)


def config(**sections: Any) -> Config:
    return Config.model_validate({"cluster": {"placement": "colocated"}, **sections})


@pytest.mark.parametrize(
    ("overrides", "named", "choice"),
    [
        (("asynchrony.pipeline=stream",), "asynchrony.pipeline=stream", "set asynchrony.pipeline=step"),
        (
            ("asynchrony.partial=split", "asynchrony.max_staleness=1"),
            "asynchrony.partial=split",
            "set asynchrony.partial=off",
        ),
        (
            ("rollout.num_gpus=0.6",),
            "rollout.num_gpus=0.6 and learner.num_gpus=0:",
            "rollout.num_gpus=0.9 and learner.num_gpus=0.1",
        ),
        (
            ("learner.num_gpus=1",),
            "rollout.num_gpus=0 and learner.num_gpus=1:",
            "rollout.num_gpus=0.9 and learner.num_gpus=0.1",
        ),
        (
            ("rollout.num_gpus=0.5", "learner.num_gpus=0.5"),
            "rollout.num_gpus=0.5: ",
            "set rollout.num_gpus above 0.5",
        ),
        (
            ("rollout.num_gpus=0.9", "learner.num_gpus=0.3"),
            "rollout.num_gpus=0.9 + learner.num_gpus=0.3 = 1.2:",
            "set rollout.num_gpus=0.7",
        ),
        (
            ("rollout.num_gpus=1", "learner.num_gpus=1"),
            "rollout.num_gpus=1 + learner.num_gpus=1 = 2:",
            "set rollout.num_gpus=0.9 and learner.num_gpus=0.1",
        ),
        (
            ("rollout.num_gpus=0.9", "learner.num_gpus=0.1", "learner.workers=2", "rollout.workers=2"),
            "learner.workers=2 with cluster.placement=colocated and learner.num_gpus=0.1",
            "set learner.workers=1",
        ),
        (
            (
                "rollout.num_gpus=0.6",
                "learner.num_gpus=0.4",
                "rollout.workers=2",
                "schedule.dispatch=skew_aware",
                "schedule.pools.long.workers=1",
                "schedule.pools.long.num_gpus=1",
            ),
            "schedule.pools.long.num_gpus=1 + learner.num_gpus=0.4 = 1.4:",
            "set schedule.pools.long.num_gpus=0.6",
        ),
        (("rollout.labels={zone: a}",), "learner.labels and rollout.labels differ", "give both the same"),
    ],
)
def test_what_does_not_go_with_taking_turns_is_refused_with_the_nearest_choice(
    overrides: tuple[str, ...], named: str, choice: str
) -> None:
    text = message(*overrides)
    assert named in text
    assert COLOCATED in text
    assert choice in text


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("rollout.workers=4",),
        ("rollout.num_gpus=0.6", "learner.num_gpus=0.4"),
        ("rollout.num_gpus=0.7", "learner.num_gpus=0.3", "rollout.workers=8"),
        ("rollout.workers=2", "learner.workers=2"),
        ("rollout.num_gpus=0.6", "learner.num_gpus=0.4", "rollout.labels={zone: a}", "learner.labels={zone: a}"),
        ("schedule.batching=tail", "schedule.overlaunch_prompts=1.25", "schedule.deferred=restart"),
    ],
)
def test_everything_else_is_accepted(overrides: tuple[str, ...]) -> None:
    assert load([COLOCATED, *overrides]).config.colocated


def test_streaming_presets_are_refused_and_the_others_are_not() -> None:
    for preset in ("areal", "streamrl"):
        with pytest.raises(UserError, match=r"asynchrony\.pipeline=stream"):
            load([preset, COLOCATED])
    for preset in ("baseline", "rollpacker", "histospec", "specrl"):
        assert load([preset, COLOCATED]).config.colocated


def test_learners_without_an_engine_are_doubtful() -> None:
    text = "learner.workers=3 exceeds rollout.workers=2"
    assert any(text in doubt for doubt in config(learner={"workers": 3}, rollout={"workers": 2}).warnings())
    assert not any(text in doubt for doubt in config(learner={"workers": 2}, rollout={"workers": 2}).warnings())
    apart = Config.model_validate({"learner": {"workers": 3}, "rollout": {"workers": 2}})
    assert not any(text in doubt for doubt in apart.warnings())


SHARING: dict[str, Any] = {
    "rollout": {"workers": 2, "num_gpus": 0.9, "num_cpus": 2},
    "learner": {"num_gpus": 0.1, "num_cpus": 4},
}


def test_a_gpu_that_two_roles_share_is_needed_once() -> None:
    nodes = [Node(name="a", cpus=8, gpus=2, labels={})]
    assert placement_problems(config(**SHARING), nodes) == []
    assert placement_doubts(config(**SHARING), nodes) == []
    apart = {"rollout": {"workers": 2, "num_gpus": 1}, "learner": {"num_gpus": 1}}
    assert placement_problems(Config.model_validate(apart), nodes), "on GPUs of their own there is none left"


@pytest.mark.parametrize(
    ("gpus", "per_node", "trap"),
    [
        (0.6, 2, True),
        (0.7, 2, False),
        (0.6, 1, False),
        (0.8, 8, True),
        (0.9, 8, False),
        (0.4, 2, True),
        (0.5, 8, False),
    ],
)
def test_parts_of_which_a_full_node_seems_to_have_one_left_are_doubtful(gpus: float, per_node: int, trap: bool) -> None:
    """Ray sums what is left of the GPUs of a node, and waits for a part that none of them has."""
    nodes = [Node(name=name, cpus=64, gpus=per_node, labels={}) for name in "ab"]
    count = per_node * int(1 / gpus) + 1
    doubts = placement_doubts(Config.model_validate({"rollout": {"workers": count, "num_gpus": gpus}}), nodes)
    assert any(doubt.startswith(f"rollout.num_gpus={gpus}: ") for doubt in doubts) is trap
    fitting = {"rollout": {"workers": count - 1, "num_gpus": gpus}}
    assert not any("num_gpus" in doubt for doubt in placement_doubts(Config.model_validate(fitting), nodes))


def test_the_table_shows_who_takes_turns_on_what() -> None:
    nodes = [Node(name="a", cpus=8, gpus=2, labels={})]
    lines = table_lines(config(**SHARING), nodes)
    assert any(line.split()[:3] == ["learner,", "beside", "rollout"] and "1 x 0.1 = 0.1" in line for line in lines)
    assert lines[-1] == "cluster.placement=colocated: rollout and learner take turns on 2 GPUs"
    assert table_lines(config(), nodes)[-1].endswith("take turns on the same CPUs and memory")
    assert not any("turns" in line for line in table_lines(Config(), nodes))


def test_an_engine_and_a_learner_that_no_node_holds_together_are_refused() -> None:
    nodes = [Node(name=name, cpus=4, gpus=0, labels={}) for name in "ab"]
    wanted: dict[str, Any] = {"rollout": {"num_cpus": 3}, "learner": {"num_cpus": 2}}
    [problem] = placement_problems(config(**wanted), nodes)
    assert problem.startswith("rollout.num_cpus=3 + learner.num_cpus=2 = 5 CPUs: with cluster.placement=colocated")
    assert placement_problems(Config.model_validate(wanted), nodes) == []


def test_the_estimate_takes_the_larger_of_what_never_meets() -> None:
    big_cache = {"rollout": {"max_rows": 64}}
    apart = MemoryEstimate.of(Config.model_validate(big_cache), SHAPE, 1000)
    turns = MemoryEstimate.of(config(**big_cache), SHAPE, 1000)
    gradients = 4 * SHAPE.parameters
    assert apart.engine + apart.kv_cache > gradients
    assert apart.total - turns.total == turns.turns == gradients
    assert apart.turns == 0
    small_cache = {"rollout": {"max_rows": 1}, "learner": {"workers": 2}}
    turns = MemoryEstimate.of(config(**small_cache), SHAPE, 10)
    assert turns.turns == turns.engine + turns.kv_cache < 2 * gradients
    on_gpu = MemoryEstimate.of(config(rollout={"num_gpus": 0.6}, learner={"num_gpus": 0.4}), SHAPE, 1000, gpus=1)
    assert on_gpu.turns == 0, "nothing of it is in host memory"


def test_the_learner_starts_on_a_node_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    nodes = iter(["b" * 56, "a" * 56, "b" * 56])

    def spawn(_self: Roles, _module: Any, _cls: type, name: str, place: Any, *args: Any, **kwargs: Any) -> Any:
        made[name] = (place, args, kwargs)

        async def node() -> str:
            return next(nodes)

        return SimpleNamespace(node=SimpleNamespace(remote=node))

    monkeypatch.setattr(Roles, "_spawn", spawn)
    monkeypatch.setattr(Roles, "_queue", lambda *_: None)
    data: Any = SimpleNamespace(model_path="model", max_length=64, total_steps=3)
    labels = {"zone": "x"}
    wanted = config(
        rollout={"workers": 3, "num_gpus": 0.6, "labels": labels}, learner={"num_gpus": 0.4, "labels": labels}
    )
    roles = Roles(wanted, data, "namespace")
    roles.start(version=0, learner_directory=None, with_learner=False, archive=None, history=None)
    assert roles.learner is None
    asyncio.run(roles.find_engines())
    roles.start_learner(None)
    place, args, kwargs = made["learner"]
    pinned = {"zone": "x", "ray.io/node-id": f"in({'a' * 56},{'b' * 56})"}
    assert place == {**learner_need(wanted).options(), "label_selector": pinned}
    assert args[1].labels == pinned, "a group of learners places its own workers"
    assert kwargs["takes_turns"]


def test_a_dry_run_says_who_takes_turns(tmp_path: Path, random_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pipelines.dry_run import print_dry_run

    overrides = (COLOCATED, f"model={random_llama}", f"run.directory={tmp_path}", "data.prompts=16")
    print_dry_run(load([*overrides]))
    shown = capsys.readouterr().out
    assert "rollout and learner take turns on the same CPUs and memory" in shown
    assert "taken in turns" in shown
