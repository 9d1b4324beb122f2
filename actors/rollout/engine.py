"""The protocol that every rollout engine speaks: token in, token out, one engine step at a time.

An engine is synchronous and single-threaded; whoever owns it calls :meth:`RolloutEngine.step` in a loop. It knows
neither Ray nor text schedules. Requests carry everything that decides their tokens, so a request gives the same answer
whatever else is in the batch (up to floating-point near-ties, see DESIGN 8b).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from storage.records import (
    FinishReason,
    Float32Array,
    Int32Array,
    SamplingParams,
    Segment,
    TopTokens,
    WeightsManifest,
)

Int64Array = npt.NDArray[np.int64]

SwapMode = Literal["reprefill", "keep_kv", "drain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """When rows go over to new weights, if not at once. Until then the snapshot before writes them; nobody waits.

    An engine holds two snapshots. When a third arrives, rows that the oldest still writes go over to it at once.

    Attributes:
        kind: ``boundary``: rows that are being written go on to their next sentence end, line end or step mark; new
            rows begin under the new weights. ``split``: new rows, too, begin under the snapshot before, and each row
            goes over at its first boundary at or behind ``k_min`` tokens. A snapshot begins rows only while the active
            one is its direct successor, so that an engine that skipped versions writes nothing that is older.
        grace_tokens: Longest wait for a boundary with ``boundary``; 0 is no wait. Unit: tokens.
        k_min: Shortest answer that ``split`` hands over. Unit: tokens of the answer, a prefix included.
    """

    kind: Literal["boundary", "split"]
    grace_tokens: int = 0
    k_min: int = 1


@dataclass(frozen=True, slots=True)
class Swap:
    """How new weights take over from those before.

    Attributes:
        mode: What becomes of the key/value state of rows that are being written.
        handover: When such rows go over; ``None``: at once (or, with ``drain``, never).
    """

    mode: SwapMode = "reprefill"
    handover: Handover | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer to write.

    Attributes:
        request_id: Identity inside the engine and key of the sampling noise (63 bits).
        prompt_ids: int32[n], n >= 1.
        sampling: How to draw tokens.
        prefix: Segments that the answer starts with; they count towards ``max_tokens`` and are returned again.
        group: Requests with equal ``group`` have equal ``prompt_ids``; the prompt is then computed once for all.
        priority: Higher is admitted first; ties in order of submission.
        may_lag: False for an answer that the newest weights are to write from its first token on, whatever handover
            there is (an evaluation).
    """

    request_id: int
    prompt_ids: Int32Array
    sampling: SamplingParams
    prefix: tuple[Segment, ...] = ()
    group: int | None = None
    priority: float = 0.0
    may_lag: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A request that left the engine.

    Attributes:
        request_id: As in the request.
        segments: Whole answer, prefix included; one segment per run of equal source and version.
        finish_reason: ``stop``, ``length`` (its ``max_tokens`` or the model's context is used up), ``abort``, or
            ``error`` (the engine could not compute this row: ``error`` says why).
        drafted: Draft tokens verified; accepted: draft tokens accepted.
        forward_passes: Forward passes in which this row emitted tokens.
        first_token: Wall-clock second of the first new token, 0 if there is none.
        kept: True when the row's key/value state is parked in the engine and a request with the same id goes on
            without prefill.
        error: Reason of an ``error``.
    """

    request_id: int
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    drafted: int = 0
    accepted: int = 0
    forward_passes: int = 0
    first_token: float = 0.0
    kept: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one engine step did, for observers.

    Attributes:
        rows: Rows that emitted tokens.
        tokens: Tokens in the forward pass (decode, verified drafts and prefill together).
        prefill_tokens: Of those, prompt and prefix tokens.
        emitted: Tokens emitted.
        drafted: Draft tokens verified; accepted: draft tokens accepted.
        waiting: Requests that wait for a slot.
        seconds: Wall-clock duration, pacing excluded.
        paced_seconds: Duration including the pacing sleep; equals ``seconds`` without pacing.
        passes: Forward passes of the step; more than one while rows are written under older weights.
        residual_draws: Rejected tokens of lenient drafts that a draw from the residual replaced; residual_tail: mass of
            the drafters' laws that was unknown in these draws, summed.
    """

    rows: int
    tokens: int
    prefill_tokens: int
    emitted: int
    drafted: int
    accepted: int
    waiting: int
    seconds: float
    paced_seconds: float
    passes: int = 1
    residual_draws: int = 0
    residual_tail: float = 0.0


class StepObserver(Protocol):
    """Told about every engine step."""

    def __call__(self, stats: StepStats) -> None:
        """Take note of one step; must be quick and must not raise."""


@dataclass(frozen=True, slots=True)
class RunningRows:
    """Rows that may get a draft in the coming pass, in no particular order.

    Attributes:
        handles: int64[n], index of each row in the engine's arrays; a row's own from ``open`` to ``close``.
        tokens: int32[handles, columns], prompt and answer of every row of the engine; row i of this batch is
            ``tokens[handles[i], :length[i]]``. A view, valid during the call, to be read only.
        prompt: int64[n], prompt tokens.
        length: int64[n], prompt and answer tokens.
        room: int64[n], most draft tokens that the row can still use: the token behind them is its last.
    """

    handles: Int64Array
    tokens: Int32Array
    prompt: Int64Array
    length: Int64Array
    room: Int64Array


@dataclass(frozen=True, slots=True)
class Drafts:
    """Continuations of running rows, to be verified in one pass.

    Verified exactly, a draft leaves the sampled tokens what they are. Verified leniently (SPEC-RL, arXiv 2509.23232),
    draft token x is kept with probability min(1, lenience * p(x) / q(x)), p being what the row would be sampled from;
    at the first token that is not kept the answer goes on with a draw from p. That is biased. As published, a draft is
    over then, even where the token drawn happens to be the draft's: not to propose the rest is up to the source.
    Where the source knows the likeliest tokens of q, the draw is from the residual max(0, p - q) instead (see
    :mod:`actors.rollout.verification`).

    A pass has a bound on its tokens. A lenient draft that is cut there is not over: when all of the cut is kept, the
    row draws nothing behind it, and the source is asked for the rest in the next pass.

    Attributes:
        tokens: int32[n, width]; columns at and beyond ``lengths`` are ignored.
        lengths: int64[n], 0 <= length; longer than ``room`` is cut, 0 is plain decoding.
        lenience: float32[n], natural logarithm of the lenience of rows verified leniently; NaN, or ``None`` for all:
            exactly.
        logprobs: float32[n, width], log q of the draft's tokens under the law that drew them; lenient rows need it.
            A token with a value of NaN is not kept.
        tops: For each row the likeliest tokens of q at each place of its draft, ``None`` where they are unknown or not
            to be used; ``None`` for all. Views will do; only lenient rows are looked at.
    """

    tokens: Int32Array
    lengths: Int64Array
    lenience: Float32Array | None = None
    logprobs: Float32Array | None = None
    tops: Sequence[TopTokens | None] | None = None


class DraftSource(Protocol):
    """Proposes continuations that the engine verifies.

    One that raises is not asked again: the engine goes on without drafts.
    """

    @property
    def ready(self) -> bool:
        """Whether some open row may have a draft; asking costs a little of every pass, so the engine spares it else."""

    def open(self, handle: int, request: Request) -> bool:
        """Hear that a request got a slot, for the first time or again.

        Returns:
            True when there is a draft for its very first new token: the row then draws nothing in the pass that
            prefills it, and gets its draft in the next.
        """

    def close(self, handle: int) -> None:
        """Hear that a row left (finished, aborted or parked); its handle may be used again."""

    def propose(self, rows: RunningRows) -> Drafts | None:
        """Return a draft for each row; ``None`` when no row has one."""

    def observe(self, handles: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Hear how the rows fared that had a draft in the pass just done.

        Args:
            handles, drafted, accepted: int64[m] each: the rows, their draft tokens verified, and those kept.
        """


class RolloutEngine(Protocol):
    """Writes answers step by step."""

    @property
    def version(self) -> int:
        """Version of the newest active weights."""

    @property
    def opening_version(self) -> int:
        """Version of the weights that new rows begin under: ``version``, or the one before (see :class:`Handover`)."""

    @property
    def running(self) -> int:
        """Rows that hold a slot and are decoding."""

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""

    @property
    def draining(self) -> int:
        """Rows that finish under the weights before the active ones, and that no handover ends (``drain``)."""

    @property
    def asleep(self) -> bool:
        """True from :meth:`sleep` until weights are activated."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; raises ``ValueError`` that names the request when one can never run.

        A sleeping engine takes them too: they wait until it wakes.
        """

    def limit_rows(self, rows: int) -> None:
        """Admit requests while fewer than ``rows`` rows run, 0: while there are slots; rows that run go on."""

    def step(self) -> list[Completion]:
        """Run one forward pass for all active rows and return the requests that finished; [] when idle or asleep."""

    def abort(self, request_ids: Sequence[int] | None = None, *, keep_state: bool = False) -> list[Completion]:
        """Stop some requests (all when None) and return their partial answers.

        With ``keep_state`` their key/value state stays parked in its slots until a request with the same id is
        submitted, another abort without it, or the weights change with ``reprefill``.
        """

    def load_weights(self, manifest: WeightsManifest, buffer: npt.NDArray[np.uint8]) -> None:
        """Verify a snapshot against its manifest and hold it ready; raises ``WeightsError``.

        ``buffer`` must not change before it is activated or another snapshot is loaded.
        """

    def prepare_handover(self) -> None:
        """Do ahead what the first handover needs (it reads the vocabulary once); may run beside a step.

        Raises ``ValueError`` when the engine cannot tell boundaries.
        """

    def activate_weights(self, version: int, mode: SwapMode = "reprefill", handover: Handover | None = None) -> None:
        """Make a loaded snapshot the active one between two steps.

        ``reprefill`` recomputes the key/value state of running rows under the new weights, ``keep_kv`` keeps it,
        ``drain`` lets running rows finish under the weights they started with while new rows use the new ones.
        With ``handover`` that happens to each row later, when its part under the weights before is over.
        """

    def sleep(self) -> int:
        """Give back the memory of weights and key/value state, so that a learner can use it; returns the bytes.

        Weights must be loaded and activated again, the same or others, before anything is computed: that wakes the
        engine. Raises ``ValueError`` while requests run or wait.
        """

    def add_observer(self, observer: StepObserver) -> None:
        """Call ``observer`` after every step."""
