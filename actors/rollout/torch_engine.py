"""The rollout engine on PyTorch: continuous batching, shared prompts, verified drafts, hot weights.

A step is one forward pass over the tokens of all rows (two while some are written under older weights): the last token
and the draft of each running row, and what new rows must prefill. Finished rows are replaced before the next pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from actors.memory import release_freed_memory
from actors.rollout.boundaries import boundary_mask
from actors.rollout.drafting import Drafting
from actors.rollout.emission import Emission
from actors.rollout.engine import (
    Completion,
    DraftSource,
    Handover,
    Request,
    StepObserver,
    StepStats,
    Swap,
    SwapMode,
)
from actors.rollout.handovers import opening_version, staying
from actors.rollout.packed_model import PackedModel
from actors.rollout.pass_planner import Pass, PassPlanner
from actors.rollout.row_pool import RowPool
from actors.rollout.row_table import NOT_COMPUTED
from actors.rollout.sampling import Sampler, position_keys
from actors.rollout.step_layout import plan_pass
from actors.weights import WeightsError, unpack, verify
from storage.records import WeightsManifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class TorchEngine:
    """Writes answers with a transformers model; see :class:`actors.rollout.engine.RolloutEngine`.

    Attributes:
        max_rows: Slots: rows that run or are parked at once.
        max_length: Longest prompt with its answer. Unit: tokens.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        max_rows: int,
        max_length: int,
        dtype: str = "auto",
        device: str = "auto",
        run_seed: int = 0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        drafts: DraftSource | None = None,
        version: int = 0,
        prefill_tokens: int = 8192,
        top_tokens: int = 0,
    ) -> None:
        """Load a model and make an empty engine.

        Args:
            model_path: Local Hugging Face directory.
            max_rows: Slots: rows that run or are parked at once.
            max_length: Longest prompt with its answer; cut to the model's context. Unit: tokens.
            dtype: ``float32`` or ``bfloat16``; ``auto`` is float32 on a CPU and bfloat16 elsewhere.
            device: Torch device; ``auto`` is a GPU where there is one.
            run_seed: With the request's id it keys the sampling noise.
            tokenizer: Needed for requests with stop strings and for handovers.
            drafts: Proposes continuations that are verified; ``None`` decodes one token a pass.
            version: Version of the weights at ``model_path``.
            prefill_tokens: Most prompt, prefix and draft tokens in one pass; longer work is spread over several.
            top_tokens: Likeliest tokens to record at each place of an answer; 0: none.

        Raises:
            UserError: The model is not one that this engine can run.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        self._model = PackedModel.load(model_path, dtype, device)
        self.max_rows = max_rows
        self.max_length = min(max_length, self._model.context or max_length)
        self._spare: PackedModel | None = None
        self._loaded: tuple[int, dict[str, torch.Tensor]] | None = None
        self._old: PackedModel | None = None
        self._old_version = NOT_COMPUTED
        self._tokenizer = tokenizer
        self._drafting = Drafting(drafts, self._model.vocabulary)
        self._pool = RowPool(
            max_rows,
            self.max_length,
            run_seed=run_seed,
            version=version,
            decode=None if tokenizer is None else _decoder(tokenizer),
            drafting=self._drafting,
            top_tokens=top_tokens,
        )
        self._top_tokens = top_tokens
        self._planner = PassPlanner(self._pool, self._drafting, prefill_tokens)
        self._sampler = Sampler(self._model.vocabulary, self._model.device)
        self._observers: list[StepObserver] = []

    @property
    def version(self) -> int:
        """Version of the newest active weights."""
        return self._pool.version

    @property
    def opening_version(self) -> int:
        """Version of the weights that new rows begin under."""
        return self._pool.opening

    @property
    def running(self) -> int:
        """Rows that hold a slot and are being written."""
        return len(self._pool.active)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return self._pool.waiting

    @property
    def parked(self) -> int:
        """Aborted rows whose key/value state is kept."""
        return len(self._pool.parked)

    @property
    def draining(self) -> int:
        """Rows that finish under the weights before the active ones, and that no handover ends."""
        return self._pool.draining

    @property
    def asleep(self) -> bool:
        """True while the engine has given its memory back and waits for weights."""
        return self._model.released

    @property
    def draft_failure(self) -> str:
        """Why the engine stopped asking its draft source; empty while it has not failed."""
        return self._drafting.failure

    def add_observer(self, observer: StepObserver) -> None:
        """Call ``observer`` after every step."""
        self._observers.append(observer)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none; raises ``ValueError`` that names the request when one can never run."""
        self._pool.enqueue(requests, self._model.vocabulary)

    def limit_rows(self, rows: int) -> None:
        """Admit requests while fewer than ``rows`` rows run, 0: while there are slots; rows that run go on."""
        self._pool.row_limit = rows

    def step(self) -> list[Completion]:
        """Run one forward pass for all active rows and return the requests that finished; [] when idle or asleep."""
        if self.asleep:
            return []
        begin = time.perf_counter()
        pool = self._pool
        finished = pool.admit()
        if not len(pool.active):
            return finished
        pool.compact()
        parts = [(self._model, pool.version, pool.active)]
        if self._old is not None:
            old = pool.table.old[pool.active]
            parts = [(self._old, self._old_version, pool.active[old]), (self._model, pool.version, pool.active[~old])]
        done: list[tuple[Pass, Emission | None]] = []
        for model, version, rows in parts:
            if len(rows):
                work = self._planner.plan(rows, version)
                done.append((work, self._run(model, version, work)))
        for _, emission in done:
            if emission is not None:
                finished += emission.release_ended()
        self._retire_old()
        seconds = time.perf_counter() - begin
        emissions = [e for _, e in done if e is not None]
        stats = StepStats(
            rows=sum(int(np.count_nonzero(e.emitted)) for e in emissions),
            tokens=sum(len(w.feed.tokens) for w, _ in done),
            prefill_tokens=sum(w.prefill for w, _ in done),
            emitted=sum(int(e.emitted.sum()) for e in emissions),
            drafted=sum(int(w.draft_lengths.sum()) for w, _ in done),
            accepted=sum(int(e.accepted.sum()) for e in emissions),
            waiting=self.waiting,
            seconds=seconds,
            paced_seconds=seconds,
            passes=len(done),
            residual_draws=sum(e.residual_draws for e in emissions),
            residual_tail=sum(e.residual_tail for e in emissions),
        )
        for observer in self._observers:
            observer(stats)
        return finished

    def abort(self, request_ids: Sequence[int] | None = None, *, keep_state: bool = False) -> list[Completion]:
        """Stop some requests (all when None) and return their partial answers; ids that are not here are ignored.

        State is kept of rows whose prompt is computed and that are not written under older weights; parked rows lose
        it, the least important first, when their slots are needed.
        """
        completions = self._pool.abort(request_ids, keep_state=keep_state)
        self._retire_old()
        return completions

    def sleep(self) -> int:
        """Give the memory of weights and key/value state back; returns its bytes, 0 when asleep already.

        Parked rows lose their state, and the weights before the active ones are let go of. Activating weights wakes
        the engine.

        Raises:
            ValueError: Requests are running or waiting.
        """
        if self.asleep:
            return 0
        pool = self._pool
        if self.running or self.waiting:
            raise ValueError(
                f"{self.running} requests run and {self.waiting} wait: abort them before the engine goes to sleep"
            )
        pool.unpark()
        pool.opening = pool.version
        copies = [model for model in (self._model, self._spare, self._old) if model is not None]
        freed = pool.cache.release() + sum(model.release() for model in copies)
        self._loaded = self._spare = self._old = None
        self._old_version = NOT_COMPUTED
        release_freed_memory(gpu=True)
        return freed

    def load_weights(self, manifest: WeightsManifest, buffer: npt.NDArray[np.uint8]) -> None:
        """Verify a snapshot and hold it ready; ``buffer`` must not change before it is activated.

        It is not copied yet: nothing decodes between the two calls, and a second copy of the weights is needed only
        where rows are still written under the first.

        Raises:
            WeightsError: The snapshot is damaged or does not fit the model, or rows still drain under older weights
                (there are two copies of the weights at most): step until ``draining`` is 0.
        """
        if self.draining:
            raise WeightsError(
                f"weights version {manifest.version} cannot be loaded while {self.draining} rows drain under version "
                f"{self._old_version}; step until they have finished, or abort them"
            )
        verify(manifest, buffer)
        state = unpack(manifest, buffer)
        self._model.check_state(state)
        self._loaded = manifest.version, state

    def prepare_handover(self) -> None:
        """Learn which tokens are boundaries, once; may run beside a step. Without tokenizer raises ``ValueError``."""
        if self._tokenizer is None:
            raise ValueError("a handover at a boundary needs an engine with a tokenizer")
        if self._pool.table.boundaries is None:
            decode, known = _decoder(self._tokenizer), len(self._tokenizer)
            self._pool.table.boundaries = boundary_mask(decode, known, self._model.vocabulary)

    def activate_weights(self, version: int, mode: SwapMode = "reprefill", handover: Handover | None = None) -> None:
        """Make a loaded snapshot the active one between two steps; raises ``WeightsError`` when it is not loaded.

        The weights are overwritten in place unless rows go on under them: then the snapshot goes to the other copy, and
        rows that are still written under what that one holds go over to the new weights at once. So nobody waits, and
        there are two copies at most. The state of parked rows survives ``keep_kv`` only.
        """
        if self._loaded is None or self._loaded[0] != version:
            held = None if self._loaded is None else self._loaded[0]
            raise WeightsError(f"weights version {version} is not loaded; loaded is {held}")
        if handover is not None:
            if mode == "drain":
                raise ValueError("mode=drain never hands rows over: use reprefill or keep_kv, or no handover")
            self.prepare_handover()
        if self.asleep:
            handover = None  # nothing is left of the weights that would go on
            self._model.reclaim()
        pool, state, swap = self._pool, self._loaded[1], Swap(mode, handover)
        stays = staying(pool.table, pool.active, pool.version, swap)
        if len(stays) or opening_version(pool.version, version, swap) != version:
            other = self._old or self._spare or self._model.twin()
            self._old, self._old_version = self._model, pool.version
            self._model, self._spare = other, None
        self._loaded = None
        self._model.load_state(state)
        pool.change_version(version, swap, stays)
        self._retire_old()

    def _retire_old(self) -> None:
        if self._old is not None and not self._pool.needs_old:
            self._spare, self._old, self._old_version = self._old, None, NOT_COMPUTED

    def _run(self, model: PackedModel, version: int, work: Pass) -> Emission | None:
        """Execute a pass and append what it emits; ``None`` when it only prefilled."""
        pool, table, feed = self._pool, self._pool.table, work.feed
        pool.cache.reserve(int((feed.starts + feed.counts).max()))
        plan, token_ids = plan_pass(feed, pool.cache.capacity, model.windows, model.device)
        index = torch.from_numpy(work.logit_index).to(model.device)
        logits = model.forward(plan, pool.cache, token_ids, index)
        table.cached[work.rows] = feed.starts + feed.counts
        for leader, followers in work.followers.items():
            prompt = int(table.prompt[leader])
            pool.cache.copy(int(table.slot[leader]), table.slot[followers].tolist(), prompt)
            table.cached[followers] = prompt
        filled = work.rows[feed.decoding :].tolist() + [row for rows in work.followers.values() for row in rows]
        for row in filled:
            if table.cached[row] >= table.prompt[row] and table[row].prompt_version == NOT_COMPUTED:
                table[row].prompt_version = version
        if not len(work.drawing):
            return None
        counts = work.draft_lengths + 1
        rows = np.repeat(work.drawing, counts)
        ahead = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        keys = position_keys(table.key[rows], table.length[rows] - table.prompt[rows] + ahead)
        temperature, top_p, top_k = table.temperature[rows], table.top_p[rows], table.top_k[rows]
        with torch.inference_mode():
            draws = self._sampler.sample_and_score(
                logits, keys, temperature, top_p, top_k, work.wanted(), self._top_tokens
            )
        tokens, logprobs, scored, ids, likely = (None if t is None else t.cpu().numpy() for t in draws)
        assert tokens is not None
        assert logprobs is not None

        def redraw(some: Int64Array, ids: Int64Array, scores: Float32Array) -> tuple[Int64Array, Float32Array]:
            there = torch.from_numpy(some).to(model.device)
            with torch.inference_mode():
                drawn = self._sampler.sample_residual(
                    logits[there], keys[some], temperature[some], top_p[some], top_k[some], ids, scores
                )
            return drawn[0].cpu().numpy(), drawn[1].cpu().numpy()

        top = None if ids is None or likely is None else (ids, likely)
        emission = Emission(pool, work, tokens, logprobs, scored, version, top=top, redraw=redraw)
        self._drafting.observe(work.drawing, work.draft_lengths, emission.accepted)
        return emission


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return the function that shows token ids as rewards and people see them."""
    return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))
