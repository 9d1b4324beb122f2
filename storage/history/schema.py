"""One row per answer: the Arrow schema of rollouts, and the way from records to rows and back.

Choices that the schema does not show:

* Prompts are repeated in each row of a group. Rows stay complete on their own, and zstd folds the copies.
* ``segments`` holds source, version and token count of each run of tokens: the run-length form of both the versions
  and the sources, and exactly the boundaries of ``Sample.segments``. Tokens and logprobs are flat.
* Rewards are float64, as in the records: a weighted sum need not be a float32.
* ``prompt_columns`` is JSON; values that JSON lacks (dates, bytes) come back as text.
* Offsets of lists are int32, so one batch must stay below 2**31 tokens; the archive writes far smaller batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from storage.records import Float32Array, Group, GroupKey, Int32Array, Prompt, Sample, SamplingParams, Segment, Timings

SCHEMA_VERSION = 1
VERSION_KEY = b"schema_version"

_TIMES = ("dispatched", "first_token", "finished", "rewarded")

SCHEMA = pa.schema(
    [
        pa.field("prompt_hash", pa.uint64(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("prompt", pa.int64(), nullable=False),
        pa.field("duplicate", pa.int32(), nullable=False),
        pa.field("sample_idx", pa.int16(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("policy_version", pa.int32(), nullable=False),
        pa.field(
            "segments",
            pa.list_(pa.struct([("source", pa.string()), ("version", pa.int32()), ("count", pa.int32())])),
            nullable=False,
        ),
        pa.field("prompt_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("reward_status", pa.string(), nullable=False),
        pa.field("error", pa.string(), nullable=False),
        pa.field("advantage", pa.float32()),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("temperature", pa.float32(), nullable=False),
        pa.field("top_p", pa.float32(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("tokenizer_fp", pa.uint64(), nullable=False),
        pa.field("n_drafted", pa.int32(), nullable=False),
        pa.field("n_accepted", pa.int32(), nullable=False),
        pa.field("forward_passes", pa.int32(), nullable=False),
        pa.field("prompt_text", pa.string(), nullable=False),
        pa.field("prompt_columns", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        *(pa.field(f"{name}_at", pa.float64(), nullable=False) for name in _TIMES),
        pa.field("worker", pa.string(), nullable=False),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
"""Columns of a rollout. ``policy_version`` is the oldest version among the policy's tokens, -1 if there are none;
``*_at`` are seconds since the epoch, 0 where it has not happened; ``advantage`` is null where none was computed."""


def prompt_hash(token_ids: Int32Array) -> int:
    """Return xxh3-64 of the ids as little-endian int32: which prompt this is, whatever its place in the data."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())


def to_batch(
    groups: Sequence[Group],
    advantages: Mapping[GroupKey, Float32Array],
    *,
    step: int,
    sampling: SamplingParams,
    tokenizer_fingerprint: int,
) -> Any:
    """Return the ``pyarrow.RecordBatch`` of ``groups``, one row per sample, in order.

    Args:
        groups: Groups to write down; samples may lack a reward.
        advantages: float32[samples] by group; a group without any gets null.
        step: Step that the groups belong to.
        sampling: How their tokens were drawn.
        tokenizer_fingerprint: 64-bit identity of the tokenizer.

    Raises:
        ValueError: Keys or lengths contradict each other; names the group.
    """
    rows = [(group, sample) for group in groups for sample in group.samples]
    for group in groups:
        _check(group, advantages.get(group.key))
    samples = [sample for _, sample in rows]
    hashes = {id(group): prompt_hash(group.prompt.token_ids) for group in groups}
    columns = {id(group): json.dumps(dict(group.prompt.columns), default=_plain) for group in groups}
    count = len(rows)
    values: dict[str, Any] = {
        "prompt_hash": [hashes[id(group)] for group, _ in rows],
        "split": [sample.key.split for sample in samples],
        "epoch": [sample.key.epoch for sample in samples],
        "prompt": [sample.key.prompt for sample in samples],
        "duplicate": [sample.key.duplicate for sample in samples],
        "sample_idx": [sample.index for sample in samples],
        "step": [step] * count,
        "policy_version": [sample.oldest_version for sample in samples],
        "segments": [
            [{"source": s.source, "version": s.version, "count": len(s.token_ids)} for s in sample.segments]
            for sample in samples
        ],
        "prompt_tokens": _lists([group.prompt.token_ids for group, _ in rows], np.dtype(np.int32)),
        "tokens": _lists([sample.token_ids() for sample in samples], np.dtype(np.int32)),
        "logprobs": _lists([sample.logprobs() for sample in samples], np.dtype(np.float32)),
        "length": [sample.length for sample in samples],
        "reward": [sample.reward for sample in samples],
        "reward_parts": [[(_text(name), part) for name, part in sample.reward_parts.items()] for sample in samples],
        "reward_status": [sample.reward_status for sample in samples],
        "error": [_text(sample.error) for sample in samples],
        "advantage": [value for group in groups for value in _advantages(group, advantages.get(group.key))],
        "finish_reason": [sample.finish_reason for sample in samples],
        "temperature": [sampling.temperature] * count,
        "top_p": [sampling.top_p] * count,
        "top_k": [sampling.top_k] * count,
        "max_tokens": [sampling.max_tokens] * count,
        "tokenizer_fp": [tokenizer_fingerprint] * count,
        "n_drafted": [sample.drafted for sample in samples],
        "n_accepted": [sample.accepted for sample in samples],
        "forward_passes": [sample.forward_passes for sample in samples],
        "prompt_text": [_text(group.prompt.text) for group, _ in rows],
        "prompt_columns": [columns[id(group)] for group, _ in rows],
        "text": [_text(sample.text) for sample in samples],
        "worker": [sample.worker for sample in samples],
    }
    for name in _TIMES:
        values[f"{name}_at"] = [getattr(sample.timings, name) for sample in samples]
    arrays = [
        values[column.name] if isinstance(values[column.name], pa.Array) else pa.array(values[column.name], column.type)
        for column in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def to_samples(table: Any) -> list[Sample]:
    """Return the samples of a ``pyarrow.Table`` in :data:`SCHEMA`, in row order; arrays are copies of their own."""
    return [sample for batch in table.to_batches() for sample, _ in _read(batch)]


def to_groups(table: Any) -> list[Group]:
    """Return the groups of a ``pyarrow.Table`` in :data:`SCHEMA`, in order of first appearance, siblings by index."""
    prompts: dict[GroupKey, Prompt] = {}
    siblings: dict[GroupKey, list[Sample]] = {}
    for batch in table.to_batches():
        for sample, prompt in _read(batch):
            prompts.setdefault(sample.key, prompt)
            siblings.setdefault(sample.key, []).append(sample)
    return [
        Group(key=key, prompt=prompts[key], samples=tuple(sorted(samples, key=lambda sample: sample.index)))
        for key, samples in siblings.items()
    ]


def _read(batch: Any) -> list[tuple[Sample, Prompt]]:
    ragged = ("prompt_tokens", "tokens", "logprobs", "segments")
    columns = {name: batch.column(name).to_pylist() for name in SCHEMA.names if name not in ragged}
    prompt_tokens, tokens, logprobs = (_ragged(batch.column(name)) for name in ragged[:3])
    segments = batch.column("segments").to_pylist()
    rows = []
    prompts: dict[GroupKey, Prompt] = {}
    for row in range(batch.num_rows):
        cell = {name: values[row] for name, values in columns.items()}
        key = GroupKey(cell["split"], cell["epoch"], cell["prompt"], cell["duplicate"])
        if key not in prompts:
            prompts[key] = Prompt(
                index=key.prompt,
                token_ids=prompt_tokens[row].copy(),
                text=cell["prompt_text"],
                columns=json.loads(cell["prompt_columns"]),
            )
        sample = Sample(
            key=key,
            index=cell["sample_idx"],
            segments=_cut(segments[row], tokens[row], logprobs[row]),
            text=cell["text"],
            finish_reason=cell["finish_reason"],
            reward=cell["reward"],
            reward_parts=dict(cell["reward_parts"]),
            reward_status=cell["reward_status"],
            error=cell["error"],
            timings=Timings(**{name: cell[f"{name}_at"] for name in _TIMES}),
            drafted=cell["n_drafted"],
            accepted=cell["n_accepted"],
            forward_passes=cell["forward_passes"],
            worker=cell["worker"],
        )
        rows.append((sample, prompts[key]))
    return rows


def _cut(runs: list[dict[str, Any]], tokens: Int32Array, logprobs: Float32Array) -> tuple[Segment, ...]:
    segments, start = [], 0
    for run in runs:
        end = start + run["count"]
        segments.append(
            Segment(
                source=run["source"],
                version=run["version"],
                token_ids=tokens[start:end].copy(),
                logprobs=logprobs[start:end].copy(),
            )
        )
        start = end
    return tuple(segments)


def _ragged(column: Any) -> list[Any]:
    """Views of the rows of a list column; offsets already count from the start of ``values``."""
    values = column.values.to_numpy()
    offsets = column.offsets.to_numpy()
    return [values[start:end] for start, end in pairwise(offsets)]


def _lists(rows: list[Any], dtype: np.dtype[Any]) -> Any:
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.concatenate(rows) if rows else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(dtype, copy=False)))


def _check(group: Group, advantages: Float32Array | None) -> None:
    if group.prompt.index != group.key.prompt or any(sample.key != group.key for sample in group.samples):
        raise ValueError(f"group {group.key}: its prompt or a sample carries another key")
    if advantages is not None and len(advantages) != len(group.samples):
        raise ValueError(f"group {group.key}: {len(advantages)} advantages for {len(group.samples)} samples")


def _advantages(group: Group, advantages: Float32Array | None) -> list[float | None]:
    return [None] * len(group.samples) if advantages is None else [float(value) for value in advantages]


def _text(text: str) -> str:
    """Replace lone surrogates, which Python allows in text and UTF-8 does not."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
