"""The learner actor: pulls groups from its queue, trains, and yields new weights.

torch is imported inside the actor only: the conductor names this class and must stay small.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ray

from actors.bundles import RateEnvelope, SaveEnvelope, StepEnvelope, StopEnvelope
from actors.channels import QueueReader, fetch_groups
from actors.learner.asynchrony_options import AsynchronyOptions
from actors.learner.options import AlgorithmOptions, LearnerOptions
from actors.threads import set_torch_threads
from actors.turns import turn

if TYPE_CHECKING:
    from actors.learner.learn import Command

CONCURRENCY_GROUPS = {"work": 1, "control": 2}


class QueueChannel:
    """Turns envelopes into the learner's commands; a batch is whole and sorted before it is handed over.

    Attributes:
        received: When the groups of the last batch were all here, on the clock ``time.perf_counter``.
    """

    def __init__(self, queue: Any) -> None:
        """Read envelopes from ``queue``, on a thread."""
        self._reader = QueueReader(queue)
        self.received = 0.0

    def receive(self) -> Command:
        """Wait for the next command and fetch what it is about."""
        from actors.learner.learn import Save, SetLearningRate, Stop, TrainBatch

        while True:
            envelope = self._reader.get()
            if isinstance(envelope, StepEnvelope):
                groups = tuple(fetch_groups(envelope.groups))
                self.received = time.perf_counter()
                return TrainBatch(step=envelope.step, groups=groups)
            if isinstance(envelope, RateEnvelope):
                return SetLearningRate(value=envelope.learning_rate)
            if isinstance(envelope, SaveEnvelope):
                return Save(path=envelope.directory, uri=envelope.uri)
            if isinstance(envelope, StopEnvelope):
                self._reader.close()
                return Stop()


class LearnerWorker:
    """Owns the policy that is trained; wrap with ``ray.remote(concurrency_groups=CONCURRENCY_GROUPS)``."""

    def __init__(
        self,
        model_path: str,
        options: LearnerOptions,
        algorithm: AlgorithmOptions,
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        max_tokens: int,
        seed: int,
        total_steps: int,
        resume_directory: str | None,
        asynchrony: AsynchronyOptions | None = None,
        takes_turns: bool = False,
    ) -> None:
        """Load the model, and the optimiser state from ``resume_directory`` where there is one.

        With ``takes_turns`` rollout engines compute on the same hardware between its steps: see
        :func:`actors.learner.learn.announce`.
        """
        self._takes_turns = takes_turns
        self._loop: Iterator[Any] | None = None
        set_torch_threads(options.threads or len(os.sched_getaffinity(0)))
        from actors.learner.learner import Learner
        from storage.remote.parcels import local_folder

        self._learner = Learner(
            local_folder(model_path),
            options,
            algorithm,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=max_tokens,
            seed=seed,
            total_steps=total_steps,
            asynchrony=asynchrony,
        )
        if resume_directory is not None:
            self._learner.load(local_folder(resume_directory))

    def __repr__(self) -> str:
        """Name shown on the Ray dashboard."""
        return "LearnerWorker"

    @ray.method(concurrency_group="work")  # type: ignore[untyped-decorator]
    def run(self, queue: Any) -> Iterator[Any]:
        """Announce the published weights, then train until a :class:`StopEnvelope`; yields headers and flat buffers.

        In turns: see :func:`actors.turns.turn`.
        """
        self._loop = self._loop or self._work(queue)
        yield from turn(self._loop)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def health(self) -> dict[str, float]:
        """Return the version that the learner is on."""
        return {"version": float(self._learner.version)}

    def _work(self, queue: Any) -> Iterator[Any]:
        from actors.learner.learn import announce
        from actors.weights import HandOver

        for header, buffer in announce(self._learner, QueueChannel(queue), takes_turns=self._takes_turns):
            yield header
            payload = None if buffer is None else HandOver(buffer)
            del buffer  # a snapshot is as large as the model: none may outlive its hand-over
            yield payload
