"""The rollout actor: turns assignments into bundles of finished samples."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from actors.bundles import Bundle, BundleHeader, Call, Question, bundles_of
from actors.drafts.options import SpeculationOptions
from actors.memory import release_freed_memory
from actors.rollout.engine import Completion, Request, RolloutEngine, Swap
from actors.rollout.engine_loop import EngineLoop
from actors.rollout.options import RolloutOptions
from actors.rollout.under_way import UnderWay
from actors.rollout.written import Written
from actors.threads import set_torch_threads
from storage.errors import UserError
from storage.history.schema import prompt_hash
from storage.records import (
    TRAIN_SPLIT,
    Assignment,
    FinishReason,
    GroupKey,
    Sample,
    SampleHeader,
    Segment,
    Timings,
    WeightsManifest,
    request_id,
)

if TYPE_CHECKING:
    from actors.rollout.history_drafts import HistoryDrafts

log = logging.getLogger(__name__)

_LATE_PACK_S = 120.0
_DRAIN_POLL_S = 0.02
_MOST_REVOKED = 1024
_RETIRE_S = 5.0

CONCURRENCY_GROUPS = {"work": 16, "control": 4, "questions": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What makes one rollout worker.

    Attributes:
        name: Its name in logs and records.
        model_path: Folder or URI of the policy; version: of which snapshot that is.
        options: How it writes; speculation: how it drafts.
        run_seed: Keys the noise of all samples.
        max_length: Of prompt and answer together. Unit: tokens.
        threads: Torch threads.
    """

    name: str
    model_path: str
    version: int
    options: RolloutOptions
    speculation: SpeculationOptions
    run_seed: int
    max_length: int
    threads: int


class RolloutWorker:
    """Drives one engine; wrap with ``ray.remote(concurrency_groups=CONCURRENCY_GROUPS)``.

    When a run goes back to a checkpoint, its workers are made anew without their processes being started anew, which
    takes most of the time: :meth:`retire` ends one term of a worker, :meth:`renew` begins the next.
    """

    _name = "?"  # Ray asks for it also where an actor cannot be made, and would lose the reason

    def __init__(self, settings: WorkerSettings) -> None:
        """Load the policy."""
        self._term = 0
        self._under_way = UnderWay()
        self._loaded = threading.Event()
        self._load(settings)

    def _load(self, settings: WorkerSettings) -> None:
        options, speculation, version = settings.options, settings.speculation, settings.version
        set_torch_threads(settings.threads)
        from actors.rollout.paced import PacedEngine
        from actors.rollout.torch_engine import TorchEngine
        from storage.models import load_tokenizer
        from storage.remote.parcels import local_folder

        model = local_folder(settings.model_path)
        self._name = settings.name
        self._options = options
        self._max_length = settings.max_length
        self._tokenizer = load_tokenizer(model)
        self._speculation = speculation
        self._drafts = _draft_source(speculation, version)
        engine: RolloutEngine = TorchEngine(
            model,
            max_rows=options.max_rows,
            max_length=settings.max_length,
            dtype=options.dtype,
            device=options.device,
            run_seed=settings.run_seed,
            tokenizer=self._tokenizer,
            drafts=self._drafts,
            version=version,
            top_tokens=speculation.top_tokens,
        )
        if options.pacing.profile != "off":
            engine = PacedEngine(engine, options.pacing)
        if self._drafts is not None:
            engine.add_observer(self._drafts.on_step)
        self._engine = engine
        self._loop = EngineLoop(engine)
        self._calls_lock = threading.Lock()
        self._calls: dict[int, _Running] = {}
        self._revoked: dict[int, set[tuple[GroupKey, int]]] = {}
        self._row_limit = 0
        self._loaded.set()

    def __repr__(self) -> str:
        """Name shown on the Ray dashboard."""
        return f"RolloutWorker({self._name})"

    @ray.method(concurrency_group="work")  # type: ignore[untyped-decorator]
    def generate(self, call: Call) -> Iterator[BundleHeader | Bundle]:
        """Write the assigned samples; yields a header and a bundle whenever some have finished, until all have.

        Streaming: the caller owns what is yielded, so finished samples outlive this actor. Samples that are stopped or
        that use up their stay come back with finish reason ``abort`` and go on with a later call. A call of an earlier
        term of the worker has no reader any more, and writes nothing.
        """
        with self._under_way.one():
            if call.term == self._term:
                yield from self._write(call)

    def _write(self, call: Call) -> Iterator[BundleHeader | Bundle]:
        if self._drafts is not None:
            self._drafts.switch(call.drafts, call.gate)
        self._take_packs(call.packs)
        assignments = self._resumed(call)
        written = self._begin(call, assignments)
        prompts = {a.key: a.prompt for a in assignments}
        attempts = {a.key: a.attempt for a in assignments}
        missing = sum(len(a.samples) for a in assignments)
        ends = time.monotonic() + min((a.stay_s for a in assignments if a.stay_s), default=math.inf)
        while missing:
            samples = written.next_batch(self._options.stream_interval_s, ends)
            if not samples:
                written.over = True
                self._loop.abort(written.unfinished())
                ends = math.inf
                continue
            missing -= len(samples)
            stats = self._loop.stats()
            yield BundleHeader(
                items=tuple(SampleHeader.of(sample, attempts[sample.key]) for sample in samples),
                worker=self._name,
                busy_s=stats.busy_s,
                passes=stats.steps,
                row_passes=stats.row_passes,
                version=stats.version,
                drafts={} if self._drafts is None else self._drafts.metrics(),
            )
            yield bundles_of(samples, prompts)
        with self._calls_lock:
            self._calls.pop(call.number, None)
            self._limit_rows()

    @ray.method(concurrency_group="questions")  # type: ignore[untyped-decorator]
    def answer(self, question: Question) -> list[str]:
        """Answer a person's prompt with the weights that are active, beside whatever is being written.

        Raises:
            UserError: The prompt cannot be rendered or is too long, or the answers take too long.
        """
        from actors.rollout.questions import answer

        ends = time.monotonic() + question.deadline_s
        while True:
            with self._under_way.one():
                if self._loaded.is_set():
                    left = replace(question, deadline_s=max(0.0, ends - time.monotonic()))
                    texts = answer(left, self._loop, self._tokenizer, self._max_length)
                    if self._drafts is not None:
                        for request in question.requests:
                            self._drafts.release(request)
                    return texts
            if not self._loaded.wait(max(0.0, ends - time.monotonic())):
                raise UserError("the run goes back to a checkpoint, and its workers begin anew: ask again in a moment")

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def stop(self, calls: Mapping[int, Sequence[tuple[GroupKey, int]]]) -> None:
        """Stop some samples of calls by number; their partial answers come with those calls.

        A call that has not begun yet, because its actor task waits or its drafts do, will not write them either.
        """
        with self._under_way.one():
            self._stop(calls)

    def _stop(self, calls: Mapping[int, Sequence[tuple[GroupKey, int]]]) -> None:
        running: list[int] = []
        with self._calls_lock:
            for number, samples in calls.items():
                self._revoked.setdefault(number, set()).update(samples)
                call = self._calls.get(number)
                if call is not None and call.begun:
                    revoked = self._revoked.pop(number)
                    running += [request for request, owner in call.owners.items() if owner in revoked]
            while len(self._revoked) > _MOST_REVOKED:  # of calls that had ended already
                self._revoked.pop(next(iter(self._revoked)))
        if running:
            self._loop.abort(running)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def set_weights(self, manifest: WeightsManifest, refs: list[Any], swap: Swap) -> dict[str, Any]:
        """Fetch, verify and activate a snapshot.

        Returns ``version``, ``opening_version`` (of the weights that rows begin under), ``pause_s``, ``fetch_s`` and
        ``node``, Ray's id of the node that this runs on.
        """
        with self._under_way.one():
            return self._take_weights(manifest, refs, swap)

    def _take_weights(self, manifest: WeightsManifest, refs: list[Any], swap: Swap) -> dict[str, Any]:
        started = time.perf_counter()
        buffer = ray.get(refs[0])
        fetched = time.perf_counter()
        while self._loop.stats().draining:  # two versions at most: rows of the one before have to finish first
            time.sleep(_DRAIN_POLL_S)
        pause = self._loop.swap_weights(manifest, buffer, swap)
        if self._drafts is not None:
            self._drafts.version = manifest.version
        opening = self._loop.stats().opening_version
        return {
            "version": manifest.version,
            "opening_version": opening,
            "pause_s": pause,
            "fetch_s": fetched - started,
            "node": self.node(),
        }

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def sleep(self) -> int:
        """Give the memory of the engine back until weights are set again; returns its bytes.

        What calls still write comes back with them as aborted: between two rounds nobody waits for it. Questions wait
        for the weights.
        """
        with self._under_way.one():
            with self._calls_lock:
                written = [request for call in self._calls.values() for request in call.owners]
            return self._loop.sleep(written)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def retire(self) -> None:
        """Let go of the engine and of all that belongs to the run so far; what is being written ends as aborted.

        Calls of before are over when this returns: those that steer came first, as the calls of a concurrency group
        begin in order, and ``generate`` knows its term. Until :meth:`renew` only questions may come, and wait.

        Raises:
            RuntimeError: A call does not end.
        """
        self._term = -1
        self._loaded.clear()
        self._loop.close()
        self._under_way.wait_for_none(_RETIRE_S)
        del self._loop, self._engine, self._drafts
        gc.collect()  # engine and observers refer to each other
        release_freed_memory(gpu=True)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def renew(self, term: int, settings: WorkerSettings) -> None:
        """Begin a term of this number, positive, as a fresh worker of these settings would begin."""
        self._load(settings)
        self._term = term

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def node(self) -> str:
        """Return the id of the Ray node that the engine runs on."""
        return str(ray.get_runtime_context().get_node_id())

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
        if self._drafts is not None:
            report["gate"] = self._drafts.gate_reason
        return report

    def _take_packs(self, packs: Sequence[Any]) -> None:
        """Fetch draft packs, waiting no longer than the options allow; without them decoding is plain."""
        if self._drafts is None or not packs:
            return
        try:
            fetched = ray.get(list(packs), timeout=self._speculation.pack_wait_s)
        except ray.exceptions.GetTimeoutError:
            threading.Thread(
                target=self._await_packs, args=(self._drafts, list(packs)), name="late-drafts", daemon=True
            ).start()
            return
        except ray.exceptions.RayError as error:
            log.warning("no drafts: %s", error)
            return
        for pack in fetched:
            if pack is not None:
                self._drafts.add_pack(pack)

    @staticmethod
    def _await_packs(drafts: HistoryDrafts, packs: list[Any]) -> None:
        try:
            fetched = ray.get(packs, timeout=_LATE_PACK_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            log.warning("no drafts: %s", error)
            return
        for pack in fetched:
            if pack is not None:
                drafts.add_pack(pack)

    def _resumed(self, call: Call) -> tuple[Assignment, ...]:
        """Fetch the tokens that samples go on behind; where they are lost with a node, the sample begins anew."""
        if not call.resumptions:
            return call.assignments
        refs = list(dict.fromkeys(resumption.refs[0] for resumption in call.resumptions))
        fetched: dict[Any, Bundle] = {}
        for ref in refs:
            try:
                fetched[ref] = ray.get(ref)
            except ray.exceptions.ObjectLostError as error:
                log.warning("interrupted samples begin anew: %s", error)
        prefixes: dict[GroupKey, dict[int, tuple[Segment, ...]]] = {}
        for resumption in call.resumptions:
            bundle = fetched.get(resumption.refs[0])
            if bundle is not None:
                sample = bundle.samples[resumption.position]
                prefixes.setdefault(resumption.key, {})[resumption.index] = sample.segments
        return tuple(replace(a, resume=prefixes.get(a.key, {})) for a in call.assignments)

    def _begin(self, call: Call, assignments: Sequence[Assignment]) -> Written:
        """Submit the requests of a call, but for samples that were stopped before it began."""
        requests, owners = self._requests(assignments)
        written = Written(self.sample, assignments, owners)
        if self._drafts is not None:
            hashes = {a.key: prompt_hash(a.prompt.token_ids) for a in assignments if a.key.split == TRAIN_SPLIT}
            for request in requests:
                key, index = owners[request.request_id]
                if key in hashes:
                    self._drafts.register(request.request_id, hashes[key], index)
        with self._calls_lock:
            revoked = self._revoked.pop(call.number, set())
            self._calls[call.number] = _Running(owners, call.row_limit)
            self._limit_rows()
        stopped = [request for request in requests if owners[request.request_id] in revoked]
        for request in stopped:
            written.put(Completion(request_id=request.request_id, segments=request.prefix, finish_reason="abort"))
        if len(stopped) < len(requests):
            self._loop.submit([r for r in requests if owners[r.request_id] not in revoked], written.put)
        with self._calls_lock:  # stopped between the two looks, when the engine did not know the requests yet
            late = self._revoked.pop(call.number, set())
            self._calls[call.number].begun = True
        if late:
            self._loop.abort([request for request, owner in owners.items() if owner in late])
        return written

    def _limit_rows(self) -> None:
        """Decode at once as many rows as the most modest of the running calls wants; called with the lock."""
        limit = min((call.row_limit for call in self._calls.values() if call.row_limit), default=0)
        if limit != self._row_limit:
            self._row_limit = limit
            self._loop.limit_rows(limit)

    def _requests(self, assignments: Sequence[Assignment]) -> tuple[list[Request], dict[int, tuple[GroupKey, int]]]:
        requests: list[Request] = []
        owners: dict[int, tuple[GroupKey, int]] = {}
        for assignment in assignments:
            group = request_id(assignment.run_seed, assignment.key, -1)
            for index in assignment.samples:
                identity = request_id(assignment.run_seed, assignment.key, index)
                owners[identity] = (assignment.key, index)
                prefix = assignment.resume.get(index, ())
                sampling = assignment.sampling
                if assignment.stay_tokens:
                    room = sum(len(segment.token_ids) for segment in prefix) + assignment.stay_tokens
                    sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
                requests.append(
                    Request(
                        request_id=identity,
                        prompt_ids=assignment.prompt.token_ids,
                        sampling=sampling,
                        prefix=prefix,
                        group=group,
                        priority=assignment.priority,
                        may_lag=assignment.key.split == TRAIN_SPLIT,
                    )
                )
        return requests, owners

    def sample(
        self, item: Completion, assignment: Assignment, index: int, reason: FinishReason, timings: Timings
    ) -> Sample:
        """Make the record of a completion that ended for ``reason``."""
        reused = -1
        if self._drafts is not None:
            if self._drafts.reused(item.request_id):
                reused = self._drafts.reused_tokens(item.request_id)
            self._drafts.release(item.request_id)
        tokens = [token for segment in item.segments for token in segment.token_ids.tolist()]
        return Sample(
            key=assignment.key,
            index=index,
            segments=item.segments if assignment.key.split == TRAIN_SPLIT else _bare(item.segments),
            text=self._tokenizer.decode(tokens, skip_special_tokens=True),
            finish_reason=reason,
            error=item.error,
            timings=timings,
            drafted=item.drafted,
            accepted=item.accepted,
            forward_passes=item.forward_passes,
            worker=self._name,
            reused=reused,
        )


@dataclass(slots=True)
class _Running:
    """A call under way.

    Attributes:
        owners: Whose sample each request writes.
        row_limit: Rows that it wants decoded at once.
        begun: The engine has its requests.
    """

    owners: dict[int, tuple[GroupKey, int]]
    row_limit: int
    begun: bool = False


def _bare(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Drop the likeliest tokens, most of the bytes: nobody reuses what is not training."""
    return tuple(segment if segment.top is None else replace(segment, top=None) for segment in segments)


def _draft_source(options: SpeculationOptions, version: int) -> HistoryDrafts | None:
    """Make the draft source; its kernels are loaded only where they are used."""
    if options.source == "off":
        return None
    from actors.rollout.draft_warm_up import warm_up
    from actors.rollout.history_drafts import HistoryDrafts

    warm_up(options)
    drafts = HistoryDrafts(options)
    drafts.version = version
    return drafts
