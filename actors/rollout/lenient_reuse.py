"""Which rows begin with their previous answer, leniently verified (SPEC-RL, arXiv 2509.23232), and how that went."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from actors.drafts.options import SpeculationOptions
from actors.drafts.pack import PreviousAnswers
from actors.rollout.engine import Drafts, Request, RunningRows
from actors.rollout.pack_shelf import Binding
from storage.records import TopTokens

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Reuse:
    """A row whose previous answer is not verified to its end: where that lies, and what was kept of it."""

    answers: PreviousAnswers
    start: int
    end: int
    binding: Binding
    kept: int = 0


class LenientReuse:
    """Rows that still have to verify their previous answer."""

    def __init__(self, options: SpeculationOptions) -> None:
        self._log_lenience = options.log_lenience
        self._fresh_share = options.fresh_share
        self._max_age = options.max_age
        self._residual = options.residual
        self._rows: dict[int, _Reuse] = {}

    @property
    def pending(self) -> bool:
        """Whether any row has not finished its previous answer."""
        return bool(self._rows)

    def open(self, handle: int, request: Request, binding: Binding, at: int, version: int) -> bool:
        """Return whether a row begins with answer ``at`` of its pack.

        It does not when its slot is drawn to be written afresh, when it goes on with tokens that it has, or when the
        answer is too old for ``version`` or was drawn under another law.
        """
        assert binding.pack is not None
        answers = binding.pack.previous
        if (
            request.prefix
            or is_fresh(request.request_id, self._fresh_share)
            or (self._max_age and version - int(answers.oldest[at]) > self._max_age)
            or not answers.same_law(at, request.sampling)
        ):
            return False
        binding.reused = 0
        self._rows[handle] = _Reuse(answers, int(answers.starts[at]), int(answers.starts[at + 1]), binding)
        return True

    def close(self, handle: int) -> None:
        """Let go of a row."""
        self._rows.pop(handle, None)

    def merge(self, rows: RunningRows, exact: Drafts) -> tuple[Drafts, BoolArray]:
        """Put the rest of the previous answers in the place of the drafts of their rows.

        Returns:
            The drafts of all rows, and bool[n]: which are lenient.
        """
        lenient = np.zeros(len(rows.handles), np.bool_)
        parts: list[tuple[int, PreviousAnswers, int, int]] = []
        for i, handle in enumerate(rows.handles.tolist()):
            reuse = self._rows.get(handle)
            if reuse is None:
                continue
            begin = reuse.start + int(rows.length[i] - rows.prompt[i])
            end = min(reuse.end, begin + int(rows.room[i]))
            if begin < end:
                parts.append((i, reuse.answers, begin, end))
                lenient[i] = True
        if not parts:
            return exact, lenient
        width = max(exact.tokens.shape[1], *(end - begin for _, _, begin, end in parts))
        tokens = np.zeros((len(lenient), width), np.int32)
        tokens[:, : exact.tokens.shape[1]] = exact.tokens
        lengths = exact.lengths.copy()
        logprobs = np.zeros((len(lenient), width), np.float32)
        tops: list[TopTokens | None] = [None] * len(lenient)
        for i, answers, begin, end in parts:
            lengths[i] = end - begin
            tokens[i, : end - begin] = answers.tokens[begin:end]
            logprobs[i, : end - begin] = answers.logprobs[begin:end]
            if self._residual and answers.top is not None:
                tops[i] = answers.top.part(begin, end)
        lenience = np.where(lenient, self._log_lenience, np.nan).astype(np.float32)
        return Drafts(tokens, lengths, lenience, logprobs, tops), lenient

    def observe(self, handles: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """Note what was kept; a row that kept all it was shown is shown the rest."""
        for handle, offered, kept in zip(handles.tolist(), drafted.tolist(), accepted.tolist(), strict=True):
            reuse = self._rows.get(handle)
            if reuse is None:
                continue
            reuse.kept += kept
            reuse.binding.reused = reuse.kept
            if kept < offered or reuse.start + reuse.kept >= reuse.end:
                del self._rows[handle]


def is_fresh(request_id: int, share: float) -> bool:
    """Return whether a request is one of the ``share`` that are written afresh; depends on nothing but its id."""
    return xxhash.xxh3_64_intdigest(f"fresh|{request_id}".encode()) < share * 2.0**64
