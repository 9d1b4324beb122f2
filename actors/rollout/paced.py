"""Gives any engine the clock of a GPU: each forward pass is stretched to tau = t0 + k_row * rows + k_tok * tokens.

With real models, real Ray and real clocks, scheduling and speculation can then be measured on a machine whose own
arithmetic would hide them. Where the coefficients come from: decoding an 8-billion-parameter model (Llama 3 8B: 32
layers, 8 key heads of 128, bfloat16) on one H100 SXM (3.35 TB/s, 989 TFLOP/s dense), as a roofline with 80 %
of the bandwidth and 50 % of the arithmetic reached:

* t0 reads the weights: 16.1 GB / (0.8 * 3.35 TB/s) = 6.0 ms;
* k_row reads a row's keys and values: context * 131 kB / (0.8 * 3.35 TB/s);
* k_tok multiplies: 2 * 8.03e9 / (0.5 * 989 TFLOP/s) = 0.033 ms = 0.0054 t0.

The three profiles differ in the mean context of the rows, 0.6 k, 2.5 k and 10 k tokens. They are shapes: ``t0_ms`` sets
the scale, so that the CPU that stands in for the GPU can keep up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from actors.rollout.engine import Completion, Handover, Request, RolloutEngine, StepObserver, StepStats, SwapMode
from actors.rollout.options import PacingOptions
from storage.records import WeightsManifest

_WEIGHT_BYTES = 2 * 8.03e9
_CACHE_BYTES_PER_TOKEN = 32 * 8 * 128 * 2 * 2
_BANDWIDTH = 0.8 * 3.35e12
_ARITHMETIC = 0.5 * 989e12

OVERRUN = 0.7
INVALID_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class PacingProfile:
    """Shape of the time law, relative to t0: ``row`` per row and ``token`` per token in the pass."""

    row: float
    token: float

    @classmethod
    def for_context(cls, context: float) -> PacingProfile:
        """Derive the shape for rows of ``context`` tokens on average (see the module's docstring)."""
        t0 = _WEIGHT_BYTES / _BANDWIDTH
        return cls(row=context * _CACHE_BYTES_PER_TOKEN / _BANDWIDTH / t0, token=2 * 8.03e9 / _ARITHMETIC / t0)


PROFILES = {
    "latency_bound": PacingProfile.for_context(600),
    "middle": PacingProfile.for_context(2_500),
    "throughput_bound": PacingProfile.for_context(10_000),
}


class PacedEngine:
    """An engine whose steps take the time of :data:`PROFILES`; everything else is the wrapped engine's."""

    def __init__(self, engine: RolloutEngine, options: PacingOptions) -> None:
        """Wrap ``engine``; raises ``ValueError`` when the profile is ``off``."""
        if options.profile == "off":
            raise ValueError("pacing profile 'off' needs no PacedEngine")
        self._engine = engine
        self._t0 = options.t0_ms / 1000
        self._profile = PROFILES[options.profile]
        self._observers: list[StepObserver] = []
        self._noted: list[StepStats] = []
        self._steps = 0
        self._overruns = 0
        engine.add_observer(self._note)

    def tau(self, rows: int, tokens: int, passes: int = 1) -> float:
        """Seconds that a step with so many rows, tokens and forward passes takes."""
        return self._t0 * (passes + self._profile.row * rows + self._profile.token * tokens)

    @property
    def overrun_share(self) -> float:
        """Share of steps whose real time was above 0.7 of the paced time."""
        return self._overruns / self._steps if self._steps else 0.0

    @property
    def invalid(self) -> bool:
        """True when more than 5 % of the steps overran: the pace was the machine's, not the profile's."""
        return self.overrun_share > INVALID_SHARE

    @property
    def version(self) -> int:
        """As in the wrapped engine."""
        return self._engine.version

    @property
    def opening_version(self) -> int:
        """As in the wrapped engine."""
        return self._engine.opening_version

    @property
    def running(self) -> int:
        """As in the wrapped engine."""
        return self._engine.running

    @property
    def waiting(self) -> int:
        """As in the wrapped engine."""
        return self._engine.waiting

    @property
    def draining(self) -> int:
        """As in the wrapped engine."""
        return self._engine.draining

    @property
    def asleep(self) -> bool:
        """As in the wrapped engine."""
        return self._engine.asleep

    def submit(self, requests: Sequence[Request]) -> None:
        """As in the wrapped engine."""
        self._engine.submit(requests)

    def step(self) -> list[Completion]:
        """Step the wrapped engine, then sleep until tau has passed since the call."""
        begin = time.perf_counter()
        self._noted.clear()
        finished = self._engine.step()
        if not self._noted:
            return finished
        stats = self._noted[0]
        tau = self.tau(stats.rows, stats.tokens, stats.passes)
        real = time.perf_counter() - begin
        self._steps += 1
        self._overruns += real > OVERRUN * tau
        if real < tau:
            time.sleep(tau - real)
        paced = replace(stats, paced_seconds=time.perf_counter() - begin)
        for observer in self._observers:
            observer(paced)
        return finished

    def limit_rows(self, rows: int) -> None:
        """As in the wrapped engine."""
        self._engine.limit_rows(rows)

    def abort(self, request_ids: Sequence[int] | None = None, *, keep_state: bool = False) -> list[Completion]:
        """As in the wrapped engine."""
        return self._engine.abort(request_ids, keep_state=keep_state)

    def load_weights(self, manifest: WeightsManifest, buffer: npt.NDArray[np.uint8]) -> None:
        """As in the wrapped engine."""
        self._engine.load_weights(manifest, buffer)

    def prepare_handover(self) -> None:
        """As in the wrapped engine."""
        self._engine.prepare_handover()

    def activate_weights(self, version: int, mode: SwapMode = "reprefill", handover: Handover | None = None) -> None:
        """As in the wrapped engine."""
        self._engine.activate_weights(version, mode, handover)

    def sleep(self) -> int:
        """As in the wrapped engine."""
        return self._engine.sleep()

    def add_observer(self, observer: StepObserver) -> None:
        """Call ``observer`` after every step, with the paced duration."""
        self._observers.append(observer)

    def _note(self, stats: StepStats) -> None:
        self._noted.append(stats)
