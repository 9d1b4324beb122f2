"""Training in one process and without Ray, for benchmarks: engines that draft or do not, rewards, a learner.

A lane writes answers the way that a rollout worker does: packs of earlier answers come from a draft retriever over a
history store on disk, and the engine's steps are told to the draft source. A trainer scores answers with the configured
reward functions and makes real optimiser steps, so that the weights move between visits of a prompt as in a run.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from actors.drafts.options import SpeculationOptions
from actors.drafts.retriever import DraftRetriever
from actors.learner.learner import Learner
from actors.reward.pool import ScoringPool
from actors.reward.scores import ScoreItem
from actors.rollout.draft_warm_up import warm_up
from actors.rollout.engine import Completion, Request, StepStats
from actors.rollout.history_drafts import HistoryDrafts
from actors.rollout.torch_engine import TorchEngine
from actors.weights import pack
from pipelines.config import Config
from pipelines.run_data import RunData
from storage.history.schema import prompt_hash
from storage.history.store import HistoryStore
from storage.models import load_tokenizer
from storage.records import Float32Array, Group, GroupKey, Prompt, Sample, SamplingParams, WeightsManifest, request_id

_COLLECT_S = 1.0
_BURST = 16
"""Engine steps that a lane makes before the next one's turn: enough to win the caches back that the others took."""
_WARM_UP_TOKENS = 24

Batch = Sequence[tuple[GroupKey, Prompt]]
"""Prompts of a step with the keys of their groups."""

Snapshot = tuple[WeightsManifest, npt.NDArray[np.uint8]]
"""Weights to decode with, as a learner publishes them."""


class World:
    """What all lanes and trainers of a benchmark have in common.

    Attributes:
        config: The configuration of the run that is played.
        data: Its prompts.
        model_path: Local Hugging Face directory.
        sampling: How answers are drawn.
        rows: Answers that an engine decodes at once.
    """

    def __init__(self, config: Config, data: RunData, rows: int) -> None:
        self.config = config
        self.data = data
        self.model_path = Path(data.model_path)
        self.sampling: SamplingParams = data.training_sampling(config)
        self.rows = rows
        self.tokenizer = load_tokenizer(self.model_path)

    def requests(self, batch: Batch) -> list[tuple[Request, GroupKey, int]]:
        """Return the requests of a step, each with its group and its sample slot."""
        seed = self.config.run.seed
        return [
            (
                Request(
                    request_id=request_id(seed, key, index),
                    prompt_ids=prompt.token_ids,
                    sampling=self.sampling,
                    group=request_id(seed, key, -1),
                ),
                key,
                index,
            )
            for key, prompt in batch
            for index in range(self.config.rollout.samples_per_prompt)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The answers of one step, written by one lane.

    Attributes:
        groups: One group a prompt, not scored.
        seconds: From the requests to the last answer, taking the drafts over included. Unit: seconds of wall clock.
        passes: Forward passes; row_passes: rows that emitted tokens in them, added up.
        emitted: Tokens written; drafted: draft tokens verified; accepted: draft tokens accepted.
        steps: The engine's steps.
    """

    groups: tuple[Group, ...]
    seconds: float
    passes: int
    row_passes: int
    emitted: int
    drafted: int
    accepted: int
    steps: tuple[StepStats, ...]


class Lane:
    """An engine, what it drafts from, and the history behind that.

    Attributes:
        options: How it drafts; ``source`` off for plain decoding.
        drafts: The engine's draft source; ``None`` for plain decoding.
    """

    def __init__(self, world: World, options: SpeculationOptions, folder: Path) -> None:
        """Load the model; histories are kept in ``folder``, which must be the lane's own."""
        self.options = options
        self._world = world
        self.drafts: HistoryDrafts | None = None
        self._retriever: DraftRetriever | None = None
        if options.source != "off":
            warm_up(options)
            self.drafts = HistoryDrafts(options)
            self._retriever = DraftRetriever(HistoryStore(folder, world.data.tokenizer_fingerprint), options)
        rollout = world.config.rollout
        self._engine = TorchEngine(
            world.model_path,
            max_rows=world.rows,
            max_length=world.data.max_length,
            dtype=rollout.dtype,
            device=rollout.device,
            run_seed=world.config.run.seed,
            tokenizer=world.tokenizer,
            drafts=self.drafts,
        )
        self._warm_up()
        if self.drafts is not None:
            self._engine.add_observer(self.drafts.on_step)
        self._steps: list[StepStats] = []
        self._engine.add_observer(self._note)

    def take(self, snapshot: Snapshot) -> None:
        """Decode with new weights from now on."""
        manifest, buffer = snapshot
        self._engine.load_weights(manifest, buffer)
        self._engine.activate_weights(manifest.version)
        if self.drafts is not None:
            self.drafts.version = manifest.version

    def write(self, batch: Batch) -> Rollout:
        """Write all answers of a step; raises as :meth:`writing`."""
        return written_in_turns({"": self}, batch)[""]

    def writing(self, batch: Batch) -> Generator[None, None, Rollout]:
        """Write all answers of a step, a few engine steps at a time; the clock stands still in between.

        The pack of drafts is made before the clock starts: in a run the retriever makes it while the learner trains.

        Raises:
            RuntimeError: The engine gave its drafts up, or could not compute an answer.
        """
        made = None if self._retriever is None else self._retriever.pack([prompt.token_ids for _, prompt in batch])
        requests = self._world.requests(batch)
        hashes = {key: prompt_hash(prompt.token_ids) for key, prompt in batch}
        self._steps.clear()
        began = time.perf_counter()
        if self.drafts is not None and made is not None:
            self.drafts.add_pack(made)
            for request, key, index in requests:
                self.drafts.register(request.request_id, hashes[key], index)
        self._engine.submit([request for request, _, _ in requests])
        done: list[Completion] = []
        seconds = 0.0
        while self._engine.running or self._engine.waiting:
            for _ in range(_BURST):
                done += self._engine.step()
            seconds += time.perf_counter() - began
            yield
            began = time.perf_counter()
        if self._engine.draft_failure:
            raise RuntimeError(f"the engine gave its drafts up: {self._engine.draft_failure}")
        return Rollout(
            groups=self._groups(batch, requests, done),
            seconds=seconds,
            passes=sum(stats.passes for stats in self._steps),
            row_passes=sum(stats.rows for stats in self._steps),
            emitted=sum(stats.emitted for stats in self._steps),
            drafted=sum(stats.drafted for stats in self._steps),
            accepted=sum(stats.accepted for stats in self._steps),
            steps=tuple(self._steps),
        )

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Put finished groups into the history."""
        if self._retriever is not None:
            self._retriever.observe(step, groups, self._world.sampling)

    @property
    def index_mb(self) -> float:
        """Memory of all indexes that the lane holds, with the answers in their packs. Unit: megabytes."""
        if self.drafts is None or self._retriever is None:
            return 0.0
        return self._retriever.stats()["index_bytes"] / 1e6 + self.drafts.metrics().get("live_index_mb", 0.0)

    def close(self) -> None:
        """Close the history."""
        if self._retriever is not None:
            self._retriever.close()

    def _note(self, stats: StepStats) -> None:
        self._steps.append(stats)

    def _warm_up(self) -> None:
        """Let buffers grow and kernels be chosen outside of what is measured; nobody observes these steps."""
        sampling = replace(self._world.sampling, max_tokens=_WARM_UP_TOKENS)
        ids = np.arange(3, 11, dtype=np.int32) % self._world.tokenizer.vocab_size
        self._engine.submit(
            [Request(request_id=i, prompt_ids=ids, sampling=sampling, group=0) for i in range(self._world.rows)]
        )
        while self._engine.running or self._engine.waiting:
            self._engine.step()

    def _groups(
        self, batch: Batch, requests: Sequence[tuple[Request, GroupKey, int]], done: Sequence[Completion]
    ) -> tuple[Group, ...]:
        completions = {item.request_id: item for item in done}
        samples: dict[GroupKey, list[Sample]] = {key: [] for key, _ in batch}
        for request, key, index in requests:
            item = completions[request.request_id]
            if item.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"answer {index} of {key} ended as {item.finish_reason}: {item.error}")
            reused = -1
            if self.drafts is not None:
                if self.drafts.reused(request.request_id):
                    reused = self.drafts.reused_tokens(request.request_id)
                self.drafts.release(request.request_id)
            tokens = [token for segment in item.segments for token in segment.token_ids.tolist()]
            samples[key].append(
                Sample(
                    key=key,
                    index=index,
                    segments=item.segments,
                    text=self._world.tokenizer.decode(tokens, skip_special_tokens=True),
                    finish_reason=item.finish_reason,
                    drafted=item.drafted,
                    accepted=item.accepted,
                    forward_passes=item.forward_passes,
                    reused=reused,
                )
            )
        return tuple(Group(key=key, prompt=prompt, samples=tuple(samples[key])) for key, prompt in batch)


def written_in_turns(lanes: Mapping[str, Lane], batch: Batch) -> dict[str, Rollout]:
    """Let every lane write the answers of a step, in short turns.

    The speed of a shared machine drifts by tens of percent within seconds. Lanes that take turns every few
    milliseconds drift together, so that the ratios of their times hold still.
    """
    open_lanes = {name: lane.writing(batch) for name, lane in lanes.items()}
    done: dict[str, Rollout] = {}
    while open_lanes:
        for name, writing in list(open_lanes.items()):
            try:
                next(writing)
            except StopIteration as end:
                done[name] = end.value
                del open_lanes[name]
    return done


class Trainer:
    """A policy under training; a context manager, because reward functions run in a process of their own."""

    def __init__(self, world: World, steps: int) -> None:
        """Load the policy, for a run of ``steps`` optimiser steps."""
        config = world.config
        self._pool = ScoringPool(config.reward)
        self._learner = Learner(
            world.model_path,
            config.learner,
            config.algorithm,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            max_tokens=config.rollout.max_tokens,
            seed=config.run.seed,
            total_steps=steps,
        )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def score(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Return the groups with rewards; one that failed says so, as in a run."""
        places = {(sample.key, sample.index): (group, sample) for group in groups for sample in group.samples}
        for place, (group, sample) in places.items():
            prompt = group.prompt
            self._pool.submit(
                ScoreItem(ident=place, prompt=prompt.text, completion=sample.text, columns=dict(prompt.columns))
            )
        scored: dict[tuple[GroupKey, int], Sample] = {}
        while len(scored) < len(places):
            for result in self._pool.collect(_COLLECT_S):
                scored[result.ident] = replace(
                    places[result.ident][1],
                    reward=result.reward,
                    reward_parts=result.parts,
                    reward_status=result.status,
                    error=result.error,
                )
        return tuple(
            replace(group, samples=tuple(scored[sample.key, sample.index] for sample in group.samples))
            for group in groups
        )

    def train(self, step: int, groups: Sequence[Group]) -> tuple[dict[GroupKey, Float32Array], Snapshot | None]:
        """Make one optimiser step on scored groups; returns advantages by group, and the new weights if they moved."""
        report = self._learner.train_step(groups, step)
        return report.advantages, pack(self._learner.published(), self._learner.version) if report.published else None
