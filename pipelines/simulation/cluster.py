"""The modelled cluster: what a decoding pass, a prefill, a score, a training step and a weight update take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage.errors import UserError

# Quantiles of the time that RollPacker's code sandbox took for 2,001 answers (KodCode; its public repository), seconds.
CODE_GRADING = (
    (0.05, 0.028),
    (0.25, 0.029),
    (0.5, 0.031),
    (0.75, 0.036),
    (0.9, 0.078),
    (0.95, 0.156),
    (0.99, 9.14),
    (1.0, 21.05),
)
MAX_GPUS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterModel:
    """A cluster that generates and trains in turns on the same GPUs.

    A pass over ``rows`` rows with ``context`` tokens of keys and values in all takes
    ``t0_s + row_s * rows + context_s * context`` seconds and moves each row one token. The defaults are those of a
    7-billion-parameter model with grouped keys (57 kB a token) in bfloat16 on an H800: 15 GB of weights and 57 kB a
    token at 80 % of 3.35 TB/s, plus 2 ms of launches; 45 % of 989 TFLOP/s for prefill. Training is set so that the
    synchronous schedule spends about 72 % of a step on rollout, as RollPacker measured (table 1).

    Attributes:
        gpus: GPUs, 1 to 1024.
        gpus_per_replica: GPUs that share one model (tensor parallel).
        slots: Rows that a replica decodes at once.
        kv_tokens: Tokens of keys and values that a replica holds; beyond, the youngest row is preempted and its keys
            and values are computed again later.
        t0_s: Seconds of a pass without rows.
        row_s: Seconds more per row.
        context_s: Seconds more per token of context.
        prefill_s: Seconds per token of prompt, or of an answer that is resumed.
        prompt_tokens: Tokens of a prompt.
        grading: Quantiles of the seconds from the end of an answer to its score, ascending; empty scores at once.
        grading_deadline_s: Longest time for a score, after which it fails; seconds.
        train_gpu_s: GPU-seconds of training per trained token.
        sync_s: Seconds to give all replicas new weights.
    """

    gpus: int = 128
    gpus_per_replica: int = 1
    slots: int = 64
    kv_tokens: int = 900_000
    t0_s: float = 0.008
    row_s: float = 0.000_035
    context_s: float = 2.1e-8
    prefill_s: float = 3.4e-5
    prompt_tokens: int = 200
    grading: Sequence[tuple[float, float]] = CODE_GRADING
    grading_deadline_s: float = 10.0
    train_gpu_s: float = 9e-4
    sync_s: float = 4.0

    def __post_init__(self) -> None:
        """Raises ``UserError`` for a cluster that cannot exist; names the value and what to change."""
        if not 1 <= self.gpus <= MAX_GPUS:
            raise UserError(f"a simulated cluster has 1 to {MAX_GPUS} GPUs, not {self.gpus}: change --gpus")
        if self.gpus_per_replica < 1 or self.gpus % self.gpus_per_replica:
            raise UserError(
                f"{self.gpus} GPUs cannot be shared out in replicas of {self.gpus_per_replica}: choose "
                "a --gpus-per-replica that divides --gpus"
            )
        if self.slots < 1 or self.kv_tokens < 1:
            raise UserError("a replica needs at least one slot (--slots) and one token of cache (--kv-tokens)")
        if min(self.t0_s, self.row_s, self.context_s, self.prefill_s, self.train_gpu_s, self.sync_s) < 0:
            raise UserError("times of the simulated cluster must not be negative")

    @property
    def replicas(self) -> int:
        """Model replicas that generate."""
        return self.gpus // self.gpus_per_replica

    def pass_seconds(self, rows: float, context: float) -> float:
        """Seconds of one decoding pass."""
        return self.t0_s + self.row_s * rows + self.context_s * context

    def passes_seconds(self, passes: int, rows: int, context: int) -> float:
        """Seconds of ``passes`` passes in a row, with ``context`` tokens before the first; a pass adds one per row."""
        grown = passes * context + rows * passes * (passes - 1) / 2
        return passes * (self.t0_s + self.row_s * rows) + self.context_s * grown

    def passes_within(self, seconds: float, rows: int, context: int) -> int:
        """Most whole passes that fit into ``seconds``: the root of :meth:`passes_seconds`, rounded down."""
        quadratic = self.context_s * rows / 2
        linear = self.t0_s + self.row_s * rows + self.context_s * context - quadratic
        if quadratic > 0:
            estimate = (-linear + (linear * linear + 4 * quadratic * seconds) ** 0.5) / (2 * quadratic)
        else:
            estimate = seconds / linear
        passes = max(0, int(estimate))
        # One step of correction either way: the root is rounded, the comparison below is what counts.
        while passes and self.passes_seconds(passes, rows, context) > seconds * (1 + 1e-12):
            passes -= 1
        while self.passes_seconds(passes + 1, rows, context) <= seconds * (1 + 1e-12):
            passes += 1
        return passes

    def train_seconds(self, tokens: int) -> float:
        """Seconds to train ``tokens`` tokens on all GPUs."""
        return tokens * self.train_gpu_s / self.gpus

    def grading_seconds(self, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Seconds to a score for uniform numbers in [0, 1), float64 of the same shape, by interpolated quantiles."""
        if not self.grading:
            return np.zeros_like(uniform)
        shares, seconds = zip((0.0, self.grading[0][1]), *self.grading, strict=True)
        waits: npt.NDArray[np.float64] = np.minimum(np.interp(uniform, shares, seconds), self.grading_deadline_s)
        return waits


def batch_seconds(cluster: ClusterModel, lengths: Sequence[int], prompt_tokens: int = 0) -> float:
    """Closed form for rows that start together on one replica and are never joined by others.

    With lengths sorted descending, L_1 >= L_2 >= ... and L_{n+1} = 0, the batch decodes j rows for L_j - L_{j+1}
    passes: T = sum over j of the seconds of these passes. Excludes prefill; there must be a slot for every row.
    """
    ordered = sorted(lengths)
    total, done = 0.0, 0
    for index, length in enumerate(ordered):
        rows = len(ordered) - index
        total += cluster.passes_seconds(length - done, rows, rows * (prompt_tokens + done))
        done = length
    return total
