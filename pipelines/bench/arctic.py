"""The suffix trees of arctic-inference, measured beside our own indexes where that package is installed.

Its Python entry points are called as its vLLM plug-in calls them: one tree over earlier answers to all prompts, one of
the running request, and a draft whose length is up to four times the match.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

_DEPTH = 64
_SPEC_FACTOR = 4.0


def installed() -> bool:
    """Return whether the package is there."""
    return find_spec("arctic_inference") is not None and find_spec("arctic_inference.suffix_decoding") is not None


class ArcticTrees:
    """A cache of earlier answers, and requests that draft from it."""

    def __init__(self, answers: Sequence[Int32Array]) -> None:
        """Take in earlier answers, int32[n] each."""
        module: Any = importlib.import_module("arctic_inference.suffix_decoding")
        self._cache = module.SuffixDecodingCache(max_tree_depth=_DEPTH)
        self._requests = 0
        for answer in answers:
            request = self.begin()
            self._cache.add_active_response(request, answer)
            self._cache.stop_request(request)

    @property
    def nbytes(self) -> int:
        """Memory of the tree over all answers, by its own estimate."""
        return int(self._cache._global_tree.estimate_memory())

    def forget(self, request: int) -> None:
        """End a request and take its answer out of the tree, so that no later one drafts from it."""
        self._cache.stop_request(request)
        self._cache.evict_cached_response(request)

    def begin(self) -> int:
        """Start a request; its number is what the other calls take."""
        self._requests += 1
        self._cache.start_request(self._requests, np.zeros(0, np.int32))
        return self._requests

    def step(self, request: int, text: Int32Array, new: int, width: int) -> list[int]:
        """Take in the last ``new`` tokens of ``text`` and return a draft of at most ``width`` tokens."""
        self._cache.add_active_response(request, text[len(text) - new :])
        draft = self._cache.speculate(
            request, text[-_DEPTH:], max_spec_tokens=width, max_spec_factor=_SPEC_FACTOR, min_token_prob=0.1
        )
        return list(draft.token_ids)
