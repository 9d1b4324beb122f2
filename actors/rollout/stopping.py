"""Stop strings: answers that end where a text is complete, whatever tokens it is spelled with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from storage.records import Int32Array

# Tokens that add no text (special tokens, half a character) may stand between those that spell a stop string.
_SLACK = 8


class StopStrings:
    """Finds the token that completes one of some texts.

    ``decode`` turns token ids into text, special tokens dropped. A token adds at least one byte of text or none, so a
    window of as many tokens as the longest text has bytes, and some slack, holds every text that a new token completes.
    """

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._texts = tuple(texts)
        self._decode = decode
        self._window = max(len(t.encode()) for t in texts) + _SLACK

    def first_completion(self, answer_ids: Int32Array, start: int, fresh: int) -> int | None:
        """Return the index of the first token at or behind ``fresh`` that completes a text; ``None`` if none does.

        Args:
            answer_ids: int32[m], the answer with the new tokens.
            start: Tokens before this index do not count (what an environment put in).
            fresh: Index of the first new token; the answer before it is known to hold no complete text.
        """
        begin = max(start, fresh - self._window)
        if not self._holds(answer_ids[begin:]):
            return None
        for end in range(fresh, len(answer_ids)):
            if self._holds(answer_ids[max(start, end - self._window) : end + 1]):
                return end
        return None

    def _holds(self, token_ids: Int32Array) -> bool:
        text = self._decode(token_ids.tolist())
        return any(t in text for t in self._texts)
