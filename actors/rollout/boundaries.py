"""Where an answer may be handed from one snapshot of the weights to the next without cutting a sentence in two.

Correctness needs no such place (AReaL, arXiv 2505.24298, proposition 1: an answer of several versions is an exact draw
of the policy that is made of them, wherever they meet). A boundary only keeps a thought with the policy that began it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]

# What ends a sentence in the scripts of the world (after Unicode's property Sentence_Terminal), an ellipsis included.
_SENTENCE_ENDS = (
    ".!?…‼⁇⁈⁉"
    "。．｡！？"  # Chinese, Japanese, Korean; full and half width
    "؟۔؞"  # Arabic, Persian, Urdu
    "।॥"  # Devanagari and its neighbours
    "።፧፨"  # Ethiopic
    "։"  # Armenian
    "។៕"  # Khmer
    "၊။"  # Burmese
    "།༎"  # Tibetan
    "᠃᠉"  # Mongolian
)
_STEP_MARKS = ";；؛"
_LINE_ENDS = "\n\r\v\f\x85\u2028\u2029"
_ENDS = frozenset(_SENTENCE_ENDS + _STEP_MARKS + _LINE_ENDS)

# These may stand behind the mark and still belong to what it ends; a line break is not among them.
_CLOSERS = " \t\u3000\u00a0\"'”’»›)]}）］｝」』】》〉*_`"


def ends_here(text: str) -> bool:
    """Return whether ``text``, what one token adds, ends a sentence, a line or a step.

    A mark inside of a token (``.com``) does not count: the cut is made behind the whole token.
    """
    return text.rstrip(_CLOSERS)[-1:] in _ENDS if text else False


def boundary_mask(decode: Callable[[Sequence[int]], str], known: int, vocabulary: int) -> BoolArray:
    """Return which tokens end a sentence, a line or a step, bool[vocabulary].

    Each token is judged by its own text, once, so that a step decodes nothing. Hence a full stop in a number or an
    abbreviation counts, and a mark that is spelled with several byte tokens does not.

    Args:
        decode: Turns token ids into text, special tokens dropped.
        known: Ids from 0 on that ``decode`` knows; the model's vocabulary may be padded beyond.
        vocabulary: Logits per token.
    """
    mask = np.zeros(vocabulary, np.bool_)
    mask[: min(known, vocabulary)] = [ends_here(decode([token])) for token in range(min(known, vocabulary))]
    return mask
