"""The reward actor: scores bundles of samples as they come."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ray

from actors.bundles import Bundle, BundleHeader, RewardEnvelope, StopEnvelope, bundles_of
from actors.channels import QueueReader
from actors.reward.options import RewardOptions
from actors.reward.pool import ScoreItem, ScoreResult, ScoringPool
from actors.turns import turn
from storage.records import GroupKey, Prompt, Sample, SampleHeader

CONCURRENCY_GROUPS = {"work": 1, "control": 2}

_COLLECT_S = 0.05

_Identity = tuple[GroupKey, int, int]
"""Group, sibling and call: a sibling that was begun anew may meet what was written of it before."""

log = logging.getLogger(__name__)


class RewardWorker:
    """Feeds one scoring pool; wrap with ``ray.remote(concurrency_groups=CONCURRENCY_GROUPS)``."""

    _name = "?"  # Ray asks for it also where an actor cannot be made, and would lose the reason

    def __init__(self, name: str, options: RewardOptions) -> None:
        """Start the scoring processes."""
        self._name = name
        self._pool = ScoringPool(options)
        self._busy_s = 0.0
        self._last_progress = time.time()
        self._loop: Iterator[BundleHeader | Bundle] | None = None

    def __repr__(self) -> str:
        """Name shown on the Ray dashboard."""
        return f"RewardWorker({self._name})"

    @ray.method(concurrency_group="work")  # type: ignore[untyped-decorator]
    def run(self, queue: Any) -> Iterator[Any]:
        """Take envelopes until a :class:`StopEnvelope`, in turns (see :func:`actors.turns.turn`).

        Yields a header and a scored bundle as results come in.
        """
        self._loop = self._loop or self._work(queue)
        yield from turn(self._loop)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def health(self) -> dict[str, float]:
        """Return ``pending`` samples, ``busy_s`` of scoring and the wall-clock second of the last result."""
        return {"pending": self._pool.pending, "busy_s": self._busy_s, "last_progress": self._last_progress}

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def close(self) -> None:
        """End the scoring processes."""
        self._pool.close()

    def _work(self, queue: Any) -> Iterator[BundleHeader | Bundle]:
        reader = QueueReader(queue)
        waiting: dict[_Identity, _Waiting] = {}
        prompts: dict[GroupKey, Prompt] = {}
        stopping = False
        while not (stopping and not waiting):
            envelope = None if stopping else reader.get(timeout_s=0.0 if waiting else None)
            done: list[_Waiting] = []
            if isinstance(envelope, StopEnvelope):
                stopping = True
            elif isinstance(envelope, RewardEnvelope):
                try:
                    bundle: Bundle = ray.get(envelope.refs[0])
                except (ray.exceptions.ObjectLostError, ray.exceptions.RayActorError) as error:
                    # lost with a node, or never put: whoever wrote them died in between
                    log.warning("answers were lost before they were scored: %s", error)
                    yield replace(envelope.header, worker=self._name, busy_s=self._busy_s)  # pending, as they came
                    yield Bundle(samples=(), prompts={})
                    continue
                prompts.update(bundle.prompts)
                arrived = {(sample.key, sample.index): sample for sample in bundle.samples}
                for header in envelope.header.items:  # a part of the bundle, when it is put for the second time
                    identity = (header.key, header.index, header.call)
                    if identity in waiting:
                        continue  # put again after another worker died, while this one has it in hand
                    sample = arrived[header.key, header.index]
                    if sample.finish_reason in ("stop", "length"):
                        waiting[identity] = _Waiting(header, sample)
                        deadline = envelope.deadlines.get(header.key)
                        self._pool.submit(self._item(identity, sample, bundle.prompts[header.key], deadline))
                    else:  # an answer that never ended has nothing to score
                        reason = sample.error or f"the engine returned {sample.finish_reason!r}"
                        done.append(_Waiting(header, replace(sample, reward_status="error", error=reason)))
            if waiting:
                done += [self._scored(waiting.pop(result.ident), result) for result in self._pool.collect(_COLLECT_S)]
            if done:
                self._last_progress = time.time()
                yield from self._emit(done, prompts)
                for key in {one.header.key for one in done} - {key for key, *_ in waiting}:
                    prompts.pop(key, None)
        reader.close()

    def _item(self, identity: _Identity, sample: Sample, prompt: Prompt, deadline: float | None) -> ScoreItem:
        return ScoreItem(
            ident=identity,
            prompt=prompt.text,
            completion=sample.text,
            columns=dict(prompt.columns),
            timeout_s=deadline,
        )

    def _scored(self, one: _Waiting, result: ScoreResult) -> _Waiting:
        self._busy_s += result.seconds
        scored = replace(
            one.sample,
            reward=result.reward,
            reward_parts=result.parts,
            reward_status=result.status,
            error=result.error,
            timings=replace(one.sample.timings, rewarded=time.time()),
            score_s=result.seconds,
        )
        return _Waiting(one.header, scored)

    def _emit(self, done: list[_Waiting], prompts: dict[GroupKey, Prompt]) -> Iterator[BundleHeader | Bundle]:
        yield BundleHeader(
            items=tuple(SampleHeader.of(one.sample, one.header.attempt, one.header.call) for one in done),
            worker=self._name,
            busy_s=self._busy_s,
            version=-1,
        )
        yield bundles_of([one.sample for one in done], prompts)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A sample, and how the conductor announced it."""

    header: SampleHeader
    sample: Sample
