"""Sizes of a run: from file headers to bytes, and from bytes to a refusal that names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipelines.config import Config
from pipelines.sizes import Machine, MemoryEstimate, ModelShape, asks_for_gpu, machine_doubts, machine_problems
from storage.errors import UserError

SHAPE = ModelShape(parameters=1_000_000, layers=4, kv_heads=2, head_dim=16)
PLENTY = Machine(cores=8, memory=10**12, gpus=None)


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


def model_directory(path: Path, **values: Any) -> Path:
    settings = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, **values}
    (path / "config.json").write_text(json.dumps(settings))
    weights = {"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float16)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_shape_is_read_without_weights(tmp_path: Path) -> None:
    shape = ModelShape.read(model_directory(tmp_path, num_key_value_heads=2))
    assert shape == ModelShape(parameters=22, layers=2, kv_heads=2, head_dim=8)
    assert shape.kv_bytes_per_token(4) == 2 * 2 * 2 * 8 * 4


def test_shape_of_sharded_older_and_nested_models(tmp_path: Path) -> None:
    model_directory(tmp_path)
    save_file({"c": np.zeros(100, np.float32)}, tmp_path / "model-00002.safetensors")
    assert ModelShape.read(tmp_path).parameters == 122
    (tmp_path / "config.json").write_text(json.dumps({"n_layer": 3, "n_head": 2, "n_embd": 64}))
    assert ModelShape.read(tmp_path) == ModelShape(parameters=122, layers=3, kv_heads=2, head_dim=32)
    nested = {"text_config": {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 64, "head_dim": 128}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert ModelShape.read(tmp_path).head_dim == 128


@pytest.mark.parametrize("damage", ["no weights", "no layers", "not safetensors", "not json"])
def test_unreadable_model_is_a_user_error(tmp_path: Path, damage: str) -> None:
    model_directory(tmp_path)
    if damage == "no weights":
        (tmp_path / "model.safetensors").unlink()
    elif damage == "no layers":
        (tmp_path / "config.json").write_text("{}")
    elif damage == "not safetensors":
        (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    else:
        (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"model\.path: the size of the model in"):
        ModelShape.read(tmp_path)


def test_estimate_counts_each_part() -> None:
    estimate = MemoryEstimate.of(config(rollout={"workers": 2, "max_rows": 10}), SHAPE, 100)
    assert estimate.engine == 2 * 4 * 1_000_000
    assert estimate.kv_cache == 2 * 10 * 100 * SHAPE.kv_bytes_per_token(4)
    assert estimate.learner == 16 * 1_000_000
    assert estimate.checkpoint == 12 * 1_000_000
    parts = (estimate.engine, estimate.kv_cache, estimate.learner, estimate.snapshot, estimate.processes)
    assert estimate.total == sum(parts)


def test_reference_model_and_precision_change_the_estimate() -> None:
    plain = MemoryEstimate.of(config(), SHAPE, 100)
    with_reference = MemoryEstimate.of(config(algorithm={"kl": {"coefficient": 0.1}}), SHAPE, 100)
    assert with_reference.learner - plain.learner == 4 * 1_000_000
    half = MemoryEstimate.of(config(rollout={"dtype": "bfloat16"}), SHAPE, 100)
    assert 2 * half.kv_cache == plain.kv_cache
    assert 2 * half.engine == plain.engine


def test_engines_that_write_under_two_versions_hold_both() -> None:
    plain = MemoryEstimate.of(config(), SHAPE, 100)
    stream = MemoryEstimate.of(config(asynchrony={"pipeline": "stream", "max_staleness": 1}), SHAPE, 100)
    assert stream.engine == 2 * plain.engine


@pytest.mark.parametrize("fields", [{"publish_blend": 0.5}, {"sync_every": 2}])
def test_a_learner_that_publishes_something_else_than_its_weights_holds_both(fields: dict[str, Any]) -> None:
    plain = MemoryEstimate.of(config(), SHAPE, 100)
    holding = MemoryEstimate.of(config(asynchrony=fields), SHAPE, 100)
    assert holding.learner - plain.learner == 4 * 1_000_000


def test_each_learner_holds_everything_unless_they_share_pieces() -> None:
    blend = {"publish_blend": 0.5}
    one = MemoryEstimate.of(config(asynchrony=blend), SHAPE, 100)
    three = MemoryEstimate.of(config(asynchrony=blend, learner={"workers": 3}), SHAPE, 100)
    pieces = MemoryEstimate.of(config(asynchrony=blend, learner={"workers": 3, "parallel": "fsdp"}), SHAPE, 100)
    assert three.learner == 3 * one.learner
    assert pieces.learner == one.learner
    assert three.processes == pieces.processes > one.processes
    assert three.checkpoint == one.checkpoint


def test_what_lies_on_a_gpu_takes_no_host_memory() -> None:
    on_gpu = {"num_gpus": 1}
    assert MemoryEstimate.of(config(rollout=on_gpu, learner=on_gpu), SHAPE, 100, gpus=2).learner == 0
    assert MemoryEstimate.of(config(rollout=on_gpu), SHAPE, 100, gpus=2).kv_cache == 0
    assert MemoryEstimate.of(config(rollout=on_gpu), SHAPE, 100, gpus=0).kv_cache > 0


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"rollout": {"threads": 9}}, "rollout.threads=9: this process may use 8 cores only"),
        ({"learner": {"threads": 64}}, "learner.threads=64: this process may use 8 cores only"),
        (
            {"rollout": {"workers": 5, "num_cpus": 2}},
            "rollout.workers=5 with rollout.num_cpus=2: the nodes have room for 4",
        ),
        (
            {"rollout": {"workers": 3, "num_cpus": 2}, "learner": {"num_cpus": 3}},
            "rollout.num_cpus=2 x 3 (rollout.workers) + learner.num_cpus=3 = 9 CPUs, the nodes have 8",
        ),
    ],
)
def test_more_cores_than_there_are_is_refused_by_field(sections: dict[str, Any], expected: str) -> None:
    [problem] = machine_problems(config(**sections), PLENTY, None)
    assert expected in problem


def test_what_fits_is_accepted() -> None:
    wanted = config(rollout={"threads": 8, "workers": 4, "num_cpus": 1}, learner={"num_cpus": 4, "threads": 8})
    assert machine_problems(wanted, PLENTY, MemoryEstimate.of(wanted, SHAPE, 1000)) == []


@pytest.mark.parametrize(
    ("rollout", "shape", "expected"),
    [
        (
            {"max_rows": 4096, "max_tokens": 100_000},
            SHAPE,
            "key/value cache (rollout.max_rows=4096, rollout.max_tokens=100000",
        ),
        ({"max_rows": 1}, ModelShape(parameters=10**10, layers=1, kv_heads=1, head_dim=1), "learner (model.path=tiny)"),
        (
            {"max_rows": 1, "workers": 20},
            ModelShape(parameters=10**9, layers=1, kv_heads=1, head_dim=1),
            "weights in the engine",
        ),
        ({"max_rows": 1, "workers": 128}, SHAPE, "processes (rollout.workers=128"),
    ],
)
def test_too_little_memory_names_the_largest_part_and_its_fields(
    rollout: dict[str, Any], shape: ModelShape, expected: str
) -> None:
    wanted = config(rollout=rollout)
    estimate = MemoryEstimate.of(wanted, shape, wanted.rollout.max_tokens)
    [problem] = machine_problems(wanted, Machine(cores=8, memory=8 * 10**9, gpus=None), estimate)
    assert "8.0 GB are free" in problem
    assert expected in problem


def test_gpus_are_asked_for_by_device_or_number() -> None:
    assert asks_for_gpu(config()) == []
    wanted = config(rollout={"device": "cuda", "num_gpus": 0.5}, learner={"num_gpus": 1})
    assert asks_for_gpu(wanted) == ["rollout.device=cuda", "rollout.num_gpus=0.5", "learner.num_gpus=1"]
    [problem] = machine_problems(wanted, Machine(cores=8, memory=10**12, gpus=0), None)
    assert problem.startswith("rollout.device=cuda, rollout.num_gpus=0.5, learner.num_gpus=1: torch sees no GPU here")
    [problem] = machine_problems(wanted, Machine(cores=8, memory=10**12, gpus=1), None)
    assert "rollout.num_gpus=0.5 + learner.num_gpus=1 = 1.5 GPUs, the nodes have 1" in problem
    assert machine_problems(wanted, Machine(cores=8, memory=10**12, gpus=2), None) == []


def test_sharing_cores_is_doubtful_unless_paced() -> None:
    two = Machine(cores=2, memory=10**12, gpus=None)
    assert "they slow one another down" in machine_doubts(config(rollout={"workers": 4}), two, None)[0]
    assert machine_doubts(config(rollout={"workers": 4, "pacing": {"profile": "middle"}}), two, None) == []
    assert machine_doubts(config(rollout={"workers": 2}), two, None) == []


def test_object_store_smaller_than_two_snapshots_is_doubtful() -> None:
    shape = ModelShape(parameters=64 * 2**20, layers=1, kv_heads=1, head_dim=1)
    wanted = config(cluster={"object_store_mb": 511})
    [doubt] = machine_doubts(wanted, PLENTY, MemoryEstimate.of(wanted, shape, 10))
    assert "cluster.object_store_mb=511 is less than two snapshots of the weights take (512 MB)" in doubt
    enough = config(cluster={"object_store_mb": 512})
    assert machine_doubts(enough, PLENTY, MemoryEstimate.of(enough, shape, 10)) == []


def test_machine_is_measured() -> None:
    machine = Machine.look(gpus=False)
    assert machine.cores >= 1
    assert machine.memory > 10**7
    assert machine.gpus is None
