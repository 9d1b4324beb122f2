"""How big a run is: bytes of weights, optimiser and key/value cache, held against what the machine has.

An estimate from the shapes in ``config.json`` and the headers of the weight files; no weights are loaded. It counts
what must be there all the time. Activations and logits come on top and depend on ``learner.tokens_per_microbatch``.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.config import Config
from pipelines.placement import Node, needs_of
from pipelines.placement_check import placement_problems
from storage.errors import UserError

_PROCESS_BYTES = {"torch": 350_000_000, "plain": 120_000_000, "ray": 600_000_000}
"""Measured order of magnitude (PSS) of a process that imported torch, one that did not, and a local Ray."""
_FLOAT32 = 4
_BFLOAT16 = 2
_LEARNER_BYTES = 4 * _FLOAT32
"""Weight, gradient and two Adam moments of one parameter, all float32."""
_CHECKPOINT_BYTES = 3 * _FLOAT32
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What sizes follow from.

    Attributes:
        parameters: Number of weights in the files (tied ones once).
        layers, kv_heads, head_dim: Shape of the key/value cache.
    """

    parameters: int
    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def read(cls, path: Path) -> ModelShape:
        """Read the shape of the model in a Hugging Face directory; raises ``UserError`` for an unreadable one."""
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            config = config.get("text_config", config)
            heads = _first(config, "num_attention_heads", "n_head")
            hidden = _first(config, "hidden_size", "n_embd", "d_model")
            return cls(
                parameters=_count_parameters(path),
                layers=_first(config, "num_hidden_layers", "n_layer", "num_layers"),
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise UserError(f"model.path: the size of the model in {path} cannot be read: {error!r}") from error

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes that a run keeps in host memory, all processes together.

    Attributes:
        engine: Weights in each rollout worker, twice where it may write under two versions at once; 0 on a GPU.
        kv_cache: Slots of all rollout workers at their longest; 0 on a GPU.
        learner: Weights, gradients and Adam moments, the reference model and the published snapshot if there are such:
            whole in each worker, or in pieces that all workers share; 0 on a GPU.
        snapshot: Published weights in the object store: the current ones and the next.
        processes: Interpreters, libraries and Ray.
        checkpoint: Size of one checkpoint on disk (not memory).
        turns: Bytes counted above that are never needed at the same time: engines sleep while there are gradients
            (``cluster.placement=colocated``).
    """

    engine: int
    kv_cache: int
    learner: int
    snapshot: int
    processes: int
    checkpoint: int
    turns: int = 0

    @property
    def total(self) -> int:
        """Largest sum in memory at any time."""
        return self.engine + self.kv_cache + self.learner + self.snapshot + self.processes - self.turns

    @classmethod
    def of(cls, config: Config, shape: ModelShape, max_length: int, *, gpus: int = 0) -> MemoryEstimate:
        """Estimate for sequences of at most ``max_length`` tokens, on a machine with ``gpus`` GPUs."""
        rollout, learner = config.rollout, config.learner
        engine_on_cpu = not _on_gpu(rollout.device, rollout.num_gpus, gpus)
        learner_on_cpu = not _on_gpu(learner.device, learner.num_gpus, gpus)
        width = _BFLOAT16 if rollout.dtype == "bfloat16" else _FLOAT32
        long = config.schedule.pools.long
        rows = (rollout.workers - long.workers) * rollout.max_rows + long.workers * (long.max_rows or rollout.max_rows)
        slots = rows * max_length
        copies = 2 if config.asynchrony.holds_two_versions else 1
        reference = _FLOAT32 if config.algorithm.kl.coefficient > 0 else 0
        # Where the engines do not have the newest weights, the learner keeps what they have.
        published = _FLOAT32 if config.asynchrony.publish_blend < 1 or config.asynchrony.sync_every > 1 else 0
        trained = learner.workers if learner.parallel == "ddp" else 1
        # A group of learners has a front and Ray Train's controller beside its workers.
        torch_processes = rollout.workers + learner.workers + (2 if learner.workers > 1 else 0)
        plain_processes = 3 + config.reward.workers * (1 + config.reward.processes)
        engine = engine_on_cpu * rollout.workers * copies * width * shape.parameters
        kv_cache = engine_on_cpu * slots * shape.kv_bytes_per_token(width)
        gradients = learner_on_cpu * trained * _FLOAT32 * shape.parameters
        return cls(
            engine=engine,
            kv_cache=kv_cache,
            learner=learner_on_cpu * trained * (_LEARNER_BYTES + reference + published) * shape.parameters,
            snapshot=2 * _FLOAT32 * shape.parameters,
            processes=torch_processes * _PROCESS_BYTES["torch"]
            + plain_processes * _PROCESS_BYTES["plain"]
            + _PROCESS_BYTES["ray"],
            checkpoint=_CHECKPOINT_BYTES * shape.parameters,
            turns=min(engine + kv_cache, gradients) if config.colocated else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this machine offers: cores that the process may use, bytes of free memory, GPUs (None: not looked for)."""

    cores: int
    memory: int
    gpus: int | None

    @classmethod
    def look(cls, *, gpus: bool) -> Machine:
        """Measure the machine; GPUs only on request, because that imports torch."""
        import psutil

        free = psutil.virtual_memory().available
        limit = _container_memory()
        return cls(
            cores=len(os.sched_getaffinity(0)),
            memory=free if limit is None else min(free, limit),
            gpus=_count_gpus() if gpus else None,
        )

    def node(self, config: Config) -> Node:
        """Return this machine as the one node of a local Ray.

        It has no labels but those under ``ray.io/`` that Ray finds itself: with these it may match once it is up.
        """
        unknown = any(key.startswith("ray.io/") for need in needs_of(config) for key in need.labels)
        return Node(
            name="this machine",
            cpus=float(self.cores),
            gpus=float(self.gpus or 0),
            labels=None if unknown else {},
        )


def asks_for_gpu(config: Config) -> list[str]:
    """Fields that want a GPU, as ``field=value``."""
    fields = []
    for name, section in (("rollout", config.rollout), ("learner", config.learner)):
        if section.device == "cuda":
            fields.append(f"{name}.device=cuda")
        if section.num_gpus > 0:
            fields.append(f"{name}.num_gpus={section.num_gpus:g}")
    return fields


def machine_problems(config: Config, machine: Machine, estimate: MemoryEstimate | None) -> list[str]:
    """Return what this machine cannot give, one sentence each, naming the fields and what to do."""
    problems = []
    for name, threads in (("rollout.threads", config.rollout.threads), ("learner.threads", config.learner.threads)):
        if threads > machine.cores:
            problems.append(
                f"{name}={threads}: this process may use {machine.cores} cores only; "
                "ask for at most that, or 0 for the default"
            )
    problems.extend(_gpu_problems(config, machine) or placement_problems(config, [machine.node(config)]))
    if estimate is not None and estimate.total > machine.memory:
        problems.append(_memory_problem(config, machine, estimate))
    return problems


def machine_doubts(config: Config, machine: Machine, estimate: MemoryEstimate | None) -> list[str]:
    """Return what will run slowly on this machine, one sentence each."""
    doubts = []
    threads = config.rollout.workers * max(1, config.rollout.threads)
    if threads > machine.cores and config.rollout.pacing.profile == "off":
        doubts.append(
            f"rollout.workers={config.rollout.workers} with {max(1, config.rollout.threads)} threads each share "
            f"{machine.cores} cores: they slow one another down"
        )
    if estimate is not None and estimate.snapshot > config.cluster.object_store_mb * 2**20:
        doubts.append(
            f"cluster.object_store_mb={config.cluster.object_store_mb} is less than two snapshots of the weights take "
            f"({math.ceil(estimate.snapshot / 2**20)} MB): Ray will spill them to disk at each step; raise it"
        )
    return doubts


def _gpu_problems(config: Config, machine: Machine) -> list[str]:
    asked = asks_for_gpu(config)
    if not asked or machine.gpus != 0:
        return []
    return [f"{', '.join(asked)}: torch sees no GPU here; set device to auto or cpu and num_gpus to 0"]


def _memory_problem(config: Config, machine: Machine, estimate: MemoryEstimate) -> str:
    rollout, reward, model = config.rollout, config.reward, f"model.path={config.model.path}"
    workers = f"rollout.workers={rollout.workers}"
    parts = {
        f"key/value cache (rollout.max_rows={rollout.max_rows}, rollout.max_tokens={rollout.max_tokens}, "
        f"{workers})": estimate.kv_cache,
        f"weights in the engine ({workers}, {model})": estimate.engine,
        f"learner ({_learners(config)}{model})": estimate.learner,
        f"processes ({workers}, reward.workers={reward.workers}, "
        f"reward.processes={reward.processes})": estimate.processes,
    }
    biggest = max(parts, key=lambda name: parts[name])
    return (
        f"the run needs about {estimate.total / 1e9:.1f} GB of memory and {machine.memory / 1e9:.1f} GB are free; the "
        f"largest part is the {biggest} with {parts[biggest] / 1e9:.1f} GB: lower one of these"
    )


def _learners(config: Config) -> str:
    workers = config.learner.workers
    return f"learner.workers={workers}, " if workers > 1 and config.learner.parallel == "ddp" else ""


def _on_gpu(device: str, num_gpus: float, gpus: int) -> bool:
    return device == "cuda" or (device == "auto" and num_gpus > 0 and gpus > 0)


def _first(config: dict[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise KeyError(names[0])


def _count_parameters(path: Path) -> int:
    shards = sorted(path.glob("*.safetensors"))
    if shards:
        return sum(_count_in_header(shard) for shard in shards)
    binaries = sorted(path.glob("pytorch_model*.bin"))
    if not binaries:
        raise ValueError("no .safetensors and no pytorch_model*.bin")
    return sum(file.stat().st_size for file in binaries) // _FLOAT32


def _count_in_header(file: Path) -> int:
    """Sum the tensor sizes in a safetensors header: 8 bytes of length, little endian, then JSON."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} is not a safetensors file")
        header = json.loads(stream.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _container_memory() -> int | None:
    """Bytes left below the container's limit (cgroup v2), None without one."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        return None if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return None


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
