"""The rollout actor: turns assignments into bundles of finished samples."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import ray

from actors.bundles import Bundle, BundleHeader, bundles_of
from actors.rollout.engine import Completion, Request, RolloutEngine, SwapMode
from actors.rollout.engine_loop import EngineLoop
from actors.rollout.options import RolloutOptions
from actors.threads import set_torch_threads
from storage.records import Assignment, GroupKey, Prompt, Sample, SampleHeader, Timings, WeightsManifest, request_id

CONCURRENCY_GROUPS = {"work": 16, "control": 4}


class RolloutWorker:
    """Drives one engine; wrap with ``ray.remote(concurrency_groups=CONCURRENCY_GROUPS)``."""

    def __init__(
        self,
        name: str,
        model_path: str,
        options: RolloutOptions,
        *,
        run_seed: int,
        max_length: int,
        threads: int,
        version: int,
    ) -> None:
        """Load the policy from ``model_path`` as snapshot ``version``."""
        set_torch_threads(threads)
        from actors.rollout.paced import PacedEngine
        from actors.rollout.torch_engine import TorchEngine
        from storage.models import load_tokenizer

        self._name = name
        self._options = options
        self._tokenizer = load_tokenizer(model_path)
        engine: RolloutEngine = TorchEngine(
            model_path,
            max_rows=options.max_rows,
            max_length=max_length,
            dtype=options.dtype,
            device=options.device,
            run_seed=run_seed,
            tokenizer=self._tokenizer,
            version=version,
        )
        if options.pacing.profile != "off":
            engine = PacedEngine(engine, options.pacing)
        self._engine = engine
        self._loop = EngineLoop(engine)

    def __repr__(self) -> str:
        """Name shown on the Ray dashboard."""
        return f"RolloutWorker({self._name})"

    @ray.method(concurrency_group="work")  # type: ignore[untyped-decorator]
    def generate(self, assignments: Sequence[Assignment]) -> Iterator[BundleHeader | Bundle]:
        """Write the assigned samples; yields a header and a bundle whenever some have finished, until all have.

        Streaming: the caller owns what is yielded, so finished samples outlive this actor.
        """
        arrived: queue.SimpleQueue[tuple[float, Completion | BaseException]] = queue.SimpleQueue()
        requests, owners, prompts = self._requests(assignments)
        dispatched = time.time()
        self._loop.submit(requests, lambda item: arrived.put((time.time(), item)))
        missing = len(requests)
        while missing:
            batch = [arrived.get()]
            deadline = time.monotonic() + self._options.stream_interval_s
            while len(batch) < missing:
                try:
                    batch.append(arrived.get(timeout=max(0.0, deadline - time.monotonic())))
                except queue.Empty:
                    break
            samples = [self._sample(item, owners, dispatched, finished) for finished, item in batch]
            missing -= len(samples)
            stats = self._loop.stats()
            attempts = {a.key: a.attempt for a in assignments}
            yield BundleHeader(
                items=tuple(SampleHeader.of(sample, attempts[sample.key]) for sample in samples),
                worker=self._name,
                busy_s=stats.busy_s,
                version=stats.version,
            )
            yield bundles_of(samples, prompts)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def set_weights(self, manifest: WeightsManifest, refs: list[Any], mode: SwapMode = "reprefill") -> dict[str, float]:
        """Fetch, verify and activate a snapshot; returns ``version``, ``pause_s`` and ``fetch_s``."""
        started = time.perf_counter()
        buffer = ray.get(refs[0])
        fetched = time.perf_counter()
        pause = self._loop.swap_weights(manifest, buffer, mode)
        return {"version": manifest.version, "pause_s": pause, "fetch_s": fetched - started}

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def abort(self) -> None:
        """Stop all running requests; their ``generate`` calls yield the partial samples and end."""
        self._loop.abort()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def health(self) -> dict[str, Any]:
        """Return the loop's counters and, with pacing, the share of steps that were too slow to pace."""
        report: dict[str, Any] = asdict(self._loop.stats())
        overrun = getattr(self._engine, "overrun_share", None)
        if overrun is not None:
            report["pacing_overrun_share"] = overrun
        return report

    def _requests(
        self, assignments: Sequence[Assignment]
    ) -> tuple[list[Request], dict[int, tuple[Assignment, int]], dict[GroupKey, Prompt]]:
        requests: list[Request] = []
        owners: dict[int, tuple[Assignment, int]] = {}
        for assignment in assignments:
            group = request_id(assignment.run_seed, assignment.key, -1)
            for index in assignment.samples:
                identity = request_id(assignment.run_seed, assignment.key, index)
                owners[identity] = (assignment, index)
                requests.append(
                    Request(
                        request_id=identity,
                        prompt_ids=assignment.prompt.token_ids,
                        sampling=assignment.sampling,
                        prefix=assignment.resume.get(index, ()),
                        group=group,
                        priority=assignment.priority,
                    )
                )
        return requests, owners, {a.key: a.prompt for a in assignments}

    def _sample(
        self,
        item: Completion | BaseException,
        owners: dict[int, tuple[Assignment, int]],
        dispatched: float,
        finished: float,
    ) -> Sample:
        if isinstance(item, BaseException):
            raise item
        assignment, index = owners[item.request_id]
        tokens = [token for segment in item.segments for token in segment.token_ids.tolist()]
        return Sample(
            key=assignment.key,
            index=index,
            segments=item.segments,
            text=self._tokenizer.decode(tokens, skip_special_tokens=True),
            finish_reason=item.finish_reason,
            error=item.error,
            timings=Timings(dispatched=dispatched, first_token=item.first_token, finished=finished),
            drafted=item.drafted,
            accepted=item.accepted,
            forward_passes=item.forward_passes,
            worker=self._name,
        )
