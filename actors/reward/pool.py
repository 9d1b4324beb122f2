"""A pool of killable scoring processes with a deadline for every sample.

One thread supervises all children through non-blocking pipes. Quick functions get a window of several samples per
child, so that a child never waits for us; a child works through them in order, so the one it has in hand is the oldest,
and that one's clock starts when the one before it came back. When a child is killed or dies, only the sample in hand
is charged; those behind it go back to the head of the queue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Self

from actors.reward.functions import START_DEADLINE_S, function_names
from actors.reward.options import RewardOptions
from actors.reward.process import ChildProcess
from actors.reward.scores import ScoreItem, ScoreResult, ScoreStatus
from actors.reward.wire import WireError, encode
from storage.errors import UserError

__all__ = ["ScoreItem", "ScoreResult", "ScoringPool"]

logger = logging.getLogger(__name__)

_WINDOW = 8
_QUICK_S = 0.005  # functions slower than this gain nothing from a window, and would keep samples from idle children
_LIVENESS_S = 0.25  # how often a busy child is checked for having died behind an open pipe
_BARREN_STARTS = 3
_OUTPUT_LINES = 200


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    ident: Any
    frame: bytes
    timeout_s: float | None


class _Child:
    """A process with the samples it was given; ``busy_since`` is when it took up the first of them."""

    def __init__(self, process: ChildProcess) -> None:
        self.process = process
        self.ready = False
        self.busy_since = time.monotonic()
        self.in_flight: deque[_Job] = deque()
        self.productive = False


class ScoringPool:
    """Scores answers in ``options.processes`` child processes. All methods may be called from any thread.

    The caller bounds the number of pending items. Use as a context manager, or call :meth:`close`.
    """

    def __init__(self, options: RewardOptions, *, start_deadline_s: float = START_DEADLINE_S) -> None:
        """Start the children; returns at once (see :meth:`wait_ready`).

        ``start_deadline_s`` is the longest time that a child may take to import the functions.
        """
        self._functions: list[dict[str, Any]] = [
            {"function": f.function, "arguments": f.arguments} for f in options.functions
        ]
        self._passed = options.pass_environment
        self._weights = [f.weight for f in options.functions]
        self.names = function_names([f.function for f in options.functions])
        self._start_deadline_s = start_deadline_s
        self._timeout_s = options.timeout_s

        self._changed = threading.Condition()  # guards all that follows
        self._queue: deque[_Job] = deque()
        self._results: list[ScoreResult] = []
        self._pending = 0
        self._submitted = 0
        self._ready = 0  # children that have loaded their functions
        self._ever_ready = False
        self._failure = ""
        self._closing = False
        self._awake = False
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)

        # from here on the supervisor's own
        self._processes = options.processes
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._mean_seconds: float | None = None
        self._barren = 0
        self._lines_left = _OUTPUT_LINES
        self._thread = threading.Thread(target=self._supervise, name="reward-pool", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pending(self) -> int:
        """Items submitted whose results have not been collected."""
        with self._changed:
            return self._pending

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that are running."""
        return [child.process.pid for child in list(self._children)]

    def submit(self, item: ScoreItem) -> None:
        """Queue ``item``; never blocks. An item whose columns cannot be sent gets an ``error`` result.

        Raises ``UserError`` when the functions cannot be loaded, ``RuntimeError`` when the pool is closed.
        """
        with self._changed:
            self._check_usable()
            number = self._submitted
            self._submitted += 1
        request = {"id": number, "prompt": item.prompt, "completion": item.completion, "columns": item.columns}
        try:
            frame = encode(request)
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"the row's columns cannot be sent to the reward process: {error}"
            with self._changed:
                self._pending += 1
                self._results.append(self._failed(item.ident, "error", reason, 0.0))
                self._changed.notify_all()
            return
        with self._changed:
            self._check_usable()
            self._pending += 1
            self._queue.append(_Job(number, item.ident, frame, item.timeout_s))
            self._wake()

    def collect(self, timeout_s: float) -> list[ScoreResult]:
        """Wait up to ``timeout_s`` seconds for results and return all there are, in order of completion.

        Raises ``UserError`` when the functions cannot be loaded. Returns nothing after :meth:`close`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._failure or self._closing, timeout_s)
            results, self._results = self._results, []
            self._pending -= len(results)
            if not results and self._failure:
                raise UserError(self._failure)
            return results

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until every child has loaded its functions; whether that happened in time. Raises like ``collect``."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready >= self._processes or self._failure or self._closing, timeout_s)
            if self._failure:
                raise UserError(self._failure)
            return self._ready >= self._processes

    def set_timeout(self, seconds: float) -> None:
        """Change the deadline of samples without one of their own, also of those in hand."""
        with self._changed:
            self._timeout_s = seconds
            self._wake()

    def close(self) -> None:
        """End all children and the supervisor; uncollected items are dropped. May be repeated."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._wake()
        self._thread.join()

    def _check_usable(self) -> None:
        if self._failure:
            raise UserError(self._failure)
        if self._closing:
            raise RuntimeError("the scoring pool is closed")

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            os.write(self._wake_in, b"!")

    # The supervisor's thread.

    def _supervise(self) -> None:
        failure = "the supervisor of the scoring pool ended unexpectedly; its traceback is in the log"
        try:
            for _ in range(self._processes):
                self._start_child()
            while not self._closing:
                self._dispatch()
                for key, _ in self._selector.select(self._patience()):
                    self._on_event(key)
                self._check_deadlines()
            failure = ""
        except UserError as error:
            failure = str(error)
        except Exception:
            logger.exception("scoring pool failed")
        finally:
            for child in self._children:
                child.process.kill()
            self._children.clear()
            self._selector.close()
            with self._changed:
                self._failure = failure
                self._awake = True  # nobody reads the wake-up pipe any more
                os.close(self._wake_out)
                os.close(self._wake_in)
                self._changed.notify_all()

    def _start_child(self) -> None:
        try:
            process = ChildProcess(self._functions, self._passed)
        except OSError as error:
            raise UserError(f"no scoring process can be started: {error}") from error
        child = _Child(process)
        self._children.append(child)
        self._selector.register(process.replies, selectors.EVENT_READ, (child, self._on_reply))
        self._selector.register(process.output, selectors.EVENT_READ, (child, self._on_output))
        self._watch_writing(child)

    def _watch_writing(self, child: _Child) -> None:
        watched = child.process.requests in self._selector.get_map()
        if child.process.writing and not watched:
            self._selector.register(child.process.requests, selectors.EVENT_WRITE, (child, self._on_writable))
        elif watched and not child.process.writing:
            self._selector.unregister(child.process.requests)

    def _replace_dead(self) -> None:
        """Notice idle children that are gone before a sample is given to them, and charged for it."""
        for child in list(self._children):
            if child.ready and not child.in_flight and not child.process.alive:
                self._on_death(child)

    def _dispatch(self) -> None:
        if self._queue:
            self._replace_dead()
        window = _WINDOW if self._mean_seconds is not None and self._mean_seconds < _QUICK_S else 1
        frames: dict[_Child, list[bytes]] = {}
        with self._changed:
            while self._queue:
                open_children = (c for c in self._children if c.ready and len(c.in_flight) < window)
                child = min(open_children, key=lambda c: len(c.in_flight), default=None)
                if child is None:
                    break
                job = self._queue.popleft()
                child.in_flight.append(job)
                frames.setdefault(child, []).append(job.frame)
        for child, batch in frames.items():
            if len(child.in_flight) == len(batch):
                child.busy_since = time.monotonic()
            child.process.send(b"".join(batch))
            self._watch_writing(child)

    def _deadline(self, child: _Child) -> float:
        if not child.ready:
            return child.busy_since + self._start_deadline_s
        return child.busy_since + self._timeout(child) if child.in_flight else float("inf")

    def _timeout(self, child: _Child) -> float:
        """Seconds that the sample in hand may take."""
        own = child.in_flight[0].timeout_s
        return self._timeout_s if own is None else own

    def _patience(self) -> float | None:
        earliest = min(map(self._deadline, self._children), default=float("inf"))
        if earliest == float("inf"):
            return None
        return min(_LIVENESS_S, max(0.0, earliest - time.monotonic()))

    def _on_event(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            with self._changed:
                self._awake = False
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_out, 64)
            return
        child, handle = key.data
        if child in self._children:  # it may have been replaced while this batch of events was handled
            handle(child)

    def _on_writable(self, child: _Child) -> None:
        child.process.flush()
        self._watch_writing(child)

    def _on_output(self, child: _Child) -> None:
        data = child.process.read_output()
        if not data:
            self._selector.unregister(child.process.output)
            return
        for line in data.decode(errors="replace").splitlines()[: self._lines_left]:
            logger.info("reward process %d: %s", child.process.pid, line[:1000])
            self._lines_left -= 1
            if not self._lines_left:
                logger.info("reward functions print a lot: further output is dropped")

    def _on_reply(self, child: _Child) -> None:
        try:
            replies, ended = child.process.receive()
            for reply in replies:
                if child not in self._children:
                    return
                if child.ready:
                    self._take_result(child, reply)
                else:
                    self._take_greeting(child, reply)
        except (WireError, KeyError, TypeError) as error:
            self._replace(
                child,
                "error",
                f"its process broke the protocol ({error}); reward functions must not write "
                "to descriptors that they did not open",
            )
            return
        if ended and child in self._children:
            self._on_death(child)

    def _on_death(self, child: _Child) -> None:
        cause = child.process.cause_of_death()
        if not child.ready:
            self._give_up_or_restart(child, f"the reward functions cannot be loaded: the process {cause}")
        else:
            self._replace(child, "error", f"the process {cause}")

    def _take_greeting(self, child: _Child, reply: dict[str, Any]) -> None:
        if "failed" in reply:
            self._give_up_or_restart(child, str(reply["failed"]))
            return
        if "ready" not in reply:
            raise WireError("no greeting")
        child.ready = self._ever_ready = True
        with self._changed:
            self._ready += 1
            self._changed.notify_all()

    def _take_result(self, child: _Child, reply: dict[str, Any]) -> None:
        if not child.in_flight or reply["id"] != child.in_flight[0].number:
            raise WireError(f"an answer to request {reply['id']!r}, which it was not working on")
        parts = dict(zip(self.names, reply["parts"], strict=True))
        given = [w * p for w, p in zip(self._weights, reply["parts"], strict=True) if p is not None]
        job = child.in_flight.popleft()
        child.busy_since = time.monotonic()
        child.productive = True
        self._barren = 0
        seconds = float(reply["seconds"])
        self._mean_seconds = seconds if self._mean_seconds is None else 0.9 * self._mean_seconds + 0.1 * seconds
        status: ScoreStatus = "error" if reply["error"] else "ok" if given else "abstained"
        self._finish(
            ScoreResult(
                ident=job.ident,
                reward=sum(given) if status == "ok" else None,
                parts=parts,
                status=status,
                error=reply["error"],
                seconds=seconds,
            )
        )

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for child in list(self._children):
            if self._deadline(child) <= now:
                self._on_deadline(child)
            elif (child.in_flight or not child.ready) and not child.process.alive:
                self._on_reply(child)  # takes what it still had to say
                if child in self._children:
                    self._on_death(child)

    def _on_deadline(self, child: _Child) -> None:
        if child.ready:
            self._on_reply(child)  # the answer may have arrived while this thread was held up
            if child not in self._children or self._deadline(child) > time.monotonic():
                return
        where = child.process.where()
        hint = f", it was in {where}" if where else ""
        if child.ready:
            setting = "reward.timeout_s" if child.in_flight[0].timeout_s is None else "schedule.reward_deadlines"
            reason = f"no result within {self._timeout(child):g} s{hint}; its process was killed (see {setting})"
            self._replace(child, "timeout", reason)
        else:
            reason = f"importing the reward functions takes longer than {self._start_deadline_s:g} s{hint}"
            self._give_up_or_restart(child, reason)

    def _give_up_or_restart(self, child: _Child, reason: str) -> None:
        """A child ended before it did anything: restart it unless that is how it always goes."""
        self._barren += 1
        if not self._ever_ready or self._barren >= _BARREN_STARTS:
            raise UserError(reason)
        logger.warning("restarting a reward process: %s", reason)
        self._remove(child)
        self._start_child()

    def _replace(self, child: _Child, status: ScoreStatus, reason: str) -> None:
        """Charge the sample in hand, put those behind it back, and start another child.

        A child that died before it read the sample (killed while it was idle) had none in hand.
        """
        waiting = list(child.in_flight)
        begun = child.process.unread < sum(len(job.frame) for job in waiting)
        seconds = time.monotonic() - child.busy_since
        child.in_flight.clear()
        if begun:
            specs = ", ".join(f["function"] for f in self._functions)
            self._finish(self._failed(waiting.pop(0).ident, status, f"{specs}: {reason}", seconds))
            self._barren = 0
        with self._changed:
            self._queue.extendleft(reversed(waiting))
        if not begun and not child.productive:
            self._give_up_or_restart(child, reason)
        else:
            self._remove(child)
            self._start_child()

    def _remove(self, child: _Child) -> None:
        self._children.remove(child)
        with self._changed:
            self._ready -= child.ready
        for pipe in (child.process.requests, child.process.replies, child.process.output):
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
        child.process.kill()

    def _failed(self, ident: Any, status: ScoreStatus, reason: str, seconds: float) -> ScoreResult:
        parts = dict.fromkeys(self.names)
        return ScoreResult(ident=ident, reward=None, parts=parts, status=status, error=reason, seconds=seconds)

    def _finish(self, result: ScoreResult) -> None:
        with self._changed:
            self._results.append(result)
            self._changed.notify_all()
