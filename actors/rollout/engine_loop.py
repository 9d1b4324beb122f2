"""Runs an engine on a thread of its own and hands completions to whoever submitted the requests.

An engine is single-threaded; actors are not. Everything that touches the engine (submit, abort, weights) is a command
that the loop executes between two steps, so weights never change under a forward pass and callers never block a step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from actors.rollout.engine import Completion, Request, RolloutEngine, StepStats, Swap
from storage.records import WeightsManifest

T = TypeVar("T")

Sink = Callable[[Completion | BaseException], None]

_IDLE_WAIT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStats:
    """Counters since the loop started.

    Attributes:
        steps: Engine steps.
        row_passes: Rows that emitted tokens, summed over the steps.
        emitted: Tokens emitted.
        tokens: Tokens in forward passes, prefill and drafts included.
        drafted: Draft tokens verified; accepted: draft tokens accepted.
        busy_s: Seconds inside engine steps.
        draining: Rows that finish under the weights before the active ones, and that no handover ends.
        running: Rows decoding now; waiting: requests without a slot.
        version: Active version of the weights; opening_version: that of the weights which new rows begin under.
        last_progress: Wall-clock second of the last step that did work.
        swap_s: Seconds that the last change of weights kept the loop from stepping.
        asleep: The engine has given its memory back and waits for weights.
    """

    steps: int
    row_passes: int
    emitted: int
    tokens: int
    drafted: int
    accepted: int
    busy_s: float
    draining: int
    running: int
    waiting: int
    version: int
    opening_version: int
    last_progress: float
    swap_s: float
    asleep: bool


class EngineLoop:
    """Thread-safe front of one engine."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Start the thread; ``engine`` belongs to it from now on."""
        self._engine = engine
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._inside: dict[int, tuple[Request, Sink]] = {}
        self._stopped = False
        self._ended = threading.Event()
        self._steps = self._emitted = self._tokens = self._drafted = self._accepted = 0
        self._row_passes = 0
        self._busy_s = self._swap_s = 0.0
        self._last_progress = time.time()
        self._failure: BaseException | None = None
        engine.add_observer(self._observe)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """Queue requests; ``sink`` gets each completion, or the exception that broke the engine, on the loop's thread.

        All requests of one call enter the engine between the same two steps, so a batch that is submitted at once runs
        the same way every time. Raises what the engine raises for a request that can never run.
        """

        def command() -> None:
            self._engine.submit(requests)
            for request in requests:
                self._inside[request.request_id] = request, sink

        self._call(command).result()

    def abort(self, request_ids: Sequence[int] | None = None, *, keep_state: bool = False) -> None:
        """Stop requests (all when None); their partial completions reach their sinks before this returns."""

        def command() -> None:
            self._deliver(self._engine.abort(request_ids, keep_state=keep_state))

        self._call(command).result()

    def sleep(self, give_up: Collection[int] = ()) -> int:
        """Put the engine to sleep until weights are swapped in; returns the bytes that it gave back.

        Requests of ``give_up`` end as aborted, before this returns. Whatever else is inside, or comes meanwhile, waits;
        what was begun of it begins anew, since its key/value state is gone and other weights will go on.
        """

        def command() -> int:
            self._deliver(self._engine.abort(list(give_up)))
            interrupted = {completion.request_id for completion in self._engine.abort()}
            freed = self._engine.sleep()
            self._engine.submit([request for i, (request, _) in self._inside.items() if i in interrupted])
            return freed

        return self._call(command).result()

    def swap_weights(self, manifest: WeightsManifest, buffer: npt.NDArray[np.uint8], swap: Swap) -> float:
        """Load, verify and activate a snapshot; returns the seconds for which decoding paused. Raises WeightsError."""
        if swap.handover is not None:
            self._engine.prepare_handover()  # here, so that decoding does not pause for it

        def command() -> float:
            started = time.perf_counter()
            self._engine.load_weights(manifest, buffer)
            self._engine.activate_weights(manifest.version, swap.mode, swap.handover)
            self._swap_s = time.perf_counter() - started
            return self._swap_s

        return self._call(command).result()

    def limit_rows(self, rows: int) -> None:
        """Decode at most ``rows`` rows at once from now on, 0: as many as there are slots. Running rows go on."""
        self._call(lambda: self._engine.limit_rows(rows)).result()

    def stats(self) -> LoopStats:
        """Return the counters; never waits for the engine."""
        return LoopStats(
            steps=self._steps,
            row_passes=self._row_passes,
            emitted=self._emitted,
            tokens=self._tokens,
            drafted=self._drafted,
            accepted=self._accepted,
            busy_s=self._busy_s,
            draining=self._engine.draining,
            running=self._engine.running,
            waiting=self._engine.waiting,
            version=self._engine.version,
            opening_version=self._engine.opening_version,
            last_progress=self._last_progress,
            swap_s=self._swap_s,
            asleep=self._engine.asleep,
        )

    def close(self) -> None:
        """Stop the thread; requests still inside end as aborted."""
        if not self._ended.is_set():
            self._call(self._stop).result()
            self._thread.join()

    def _stop(self) -> None:
        self._deliver(self._engine.abort())
        self._stopped = True

    def _call(self, command: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._commands.put((command, future))
        if self._ended.is_set():  # nobody else would ever answer
            self._drain_commands()
        return future

    def _observe(self, stats: StepStats) -> None:
        self._steps += 1
        self._row_passes += stats.rows
        self._emitted += stats.emitted
        self._tokens += stats.tokens
        self._drafted += stats.drafted
        self._accepted += stats.accepted
        self._busy_s += stats.paced_seconds
        self._last_progress = time.time()

    def _run(self) -> None:
        try:
            while not self._stopped:
                idle = self._engine.asleep or not (self._engine.running or self._engine.waiting)
                self._execute_commands(wait=idle)
                if not (self._stopped or self._engine.asleep):
                    self._deliver(self._engine.step())
        except BaseException as error:  # supervision: the owner of each request must hear of it
            self._failure = error
            for _, sink in list(self._inside.values()):
                sink(error)
            self._inside.clear()
        finally:
            self._ended.set()
            self._drain_commands()

    def _execute_commands(self, *, wait: bool) -> None:
        block = wait
        while not self._stopped:  # what comes behind the end is refused
            try:
                command, future = self._commands.get(block=block, timeout=_IDLE_WAIT_S if block else None)
            except queue.Empty:
                return
            block = False
            try:
                future.set_result(command())
            except Exception as error:  # belongs to the caller, the engine goes on
                future.set_exception(error)

    def _drain_commands(self) -> None:
        while True:
            try:
                _, future = self._commands.get_nowait()
            except queue.Empty:
                return
            future.set_exception(RuntimeError(f"the engine loop has ended: {self._failure or 'closed'}"))

    def _deliver(self, completions: list[Completion]) -> None:
        for completion in completions:
            known = self._inside.pop(completion.request_id, None)
            if known is not None:
                known[1](completion)
