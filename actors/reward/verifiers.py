"""Built-in reward functions, in the shape that users write theirs.

Each takes ``completions`` and the data columns it names, as lists of equal length, and returns a list with a float in
[0, 1] per completion, or ``None`` where it cannot judge (the row has no answer). A wrong or unreadable completion is
0; an unreadable *reference* raises, because that is a fault of the data and must not look like a bad answer.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Rewards = list[float | None]

_MARKER = re.compile(r"####|answer\s*(?:is)?\s*:|=", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{")
_FRACTION_MACRO = re.compile(r"\\[dt]?frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}")
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+])?"  # a sign, unless it stands behind an operand
    r"(?:\d+\s?/\s?\d+(?![\d.])"  # 3/4
    r"|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\d))?"  # 1,234.5 or 12e3
    r"|\.\d+)"  # .5
)
_MAX_NUMBER_CHARS = 300
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def exact(completions: list[str], answer: list[Any]) -> Rewards:
    r"""1 when the final answer of the completion is the text of column ``answer``, else 0.

    The final answer is what follows the last of ``=``, ``####``, ``answer:`` up to the end of its line, or the content
    of a later ``\boxed{}``; without any of them, the whole completion. Outer white space, dollar signs and a final full
    stop are ignored. A completion whose whole text is the answer is right too. References in the form of GSM8K
    (reasoning, then ``####``) are cut in the same way.
    """
    return [_exact(completion, reference) for completion, reference in zip(completions, answer, strict=True)]


def numeric(completions: list[str], answer: list[Any], tolerance: float = 0.0) -> Rewards:
    r"""1 when the last number of the completion equals the last number of column ``answer``, else 0.

    Reads ``-1,234.5``, ``1e3``, ``3/4`` and ``\frac{3}{4}``; a comma followed by exactly three digits is a thousands
    separator. Numbers are compared as exact fractions; with a ``tolerance`` they may differ by
    ``tolerance * max(1, |answer|)``.
    """
    return [
        _numeric(completion, reference, tolerance) for completion, reference in zip(completions, answer, strict=True)
    ]


def partial_credit(
    completions: list[str],
    answer: list[Any],
    solution: list[str | None] | None = None,
) -> Rewards:
    """Credit for the part of the way that is right, so that a weak policy has something to climb.

    Half the reward is the share of ``solution`` (a worked answer) that the completion starts with, character by
    character; the other half is an answer that is :func:`exact`. A row without ``solution`` gets ``exact`` alone.
    """
    solutions = solution or [None] * len(completions)
    return [_partial(*row) for row in zip(completions, answer, solutions, strict=True)]


def math_verify(completions: list[str], answer: list[Any]) -> Rewards:
    """1 when the completion's final expression is mathematically equal to column ``answer`` (LaTeX or plain), else 0.

    Uses the math-verify package. Its own time limits are off: they need ``signal.alarm``, which fails silently outside
    the main thread; the pool's deadline kills what hangs.
    """
    return [_math_verify(completion, reference) for completion, reference in zip(completions, answer, strict=True)]


def reasoning_gym(completions: list[str], task: list[str], entry: list[Any]) -> Rewards:
    """Score of reasoning-gym's own verifier for the data set named in column ``task``.

    ``entry`` is the generated item, as JSON text or as a mapping. The answer is the content of the last
    ``<answer></answer>``. Without that tag, the whole completion, its final answer as :func:`exact` reads it, its last
    line and the last number in it are tried, and the best score counts. One that the verifier cannot read is 0.
    """
    return [_reasoning_gym(*row) for row in zip(completions, task, entry, strict=True)]


@dataclass(frozen=True, slots=True)
class Builtin:
    """A reward function that has a short name.

    Attributes:
        function: The function.
        package: Module that it needs beyond the core, or ``""``; extra: how to install it.
        prepare: Loads what the function needs, so that no sample pays for it.
    """

    function: Callable[..., Rewards]
    package: str = ""
    extra: str = ""
    prepare: Callable[[], object] | None = None


def final_answer(text: str) -> str:
    r"""Return, tidied, what follows the last ``=``, ``####``, ``answer:`` or ``\boxed{}``, else all of ``text``."""
    marker, boxed = _last(_MARKER, text), _last(_BOXED, text)
    if boxed is not None and (marker is None or boxed.start() > marker.start() or _inside(text, boxed, marker)):
        return _tidy(_braced(text, boxed.end()))
    if marker is None:
        return _tidy(text)
    return _tidy(text[marker.end() :].strip().partition("\n")[0])


def last_number(text: str) -> Fraction | None:
    """Return the last number in ``text`` as an exact fraction, ``None`` if there is none that is worth reading."""
    text = _FRACTION_MACRO.sub(r"\1/\2", text.replace("\N{MINUS SIGN}", "-"))
    last = _last(_NUMBER, text)
    if last is None or len(last.group()) > _MAX_NUMBER_CHARS:
        return None
    try:
        return Fraction(re.sub(r"[,\s]", "", last.group()))
    except (ValueError, ZeroDivisionError):
        return None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return [None, *pattern.finditer(text)][-1]


def _inside(text: str, boxed: re.Match[str], marker: re.Match[str]) -> bool:
    return boxed.end() <= marker.start() < boxed.end() + len(_braced(text, boxed.end()))


def _braced(text: str, start: int) -> str:
    depth = 1
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[start:position]
    return text[start:]


def _tidy(text: str) -> str:
    return text.strip().removesuffix(".").strip().strip("$").strip()


def _reference(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of integers with a hole in it arrives as floats
    text = str(value)
    return final_answer(text) if "####" in text else _tidy(text)


def _exact(completion: str, answer: Any) -> float | None:
    if answer is None:
        return None
    reference = _reference(answer)
    return float(final_answer(completion) == reference or _tidy(completion) == reference)


def _numeric(completion: str, answer: Any, tolerance: float) -> float | None:
    if answer is None:
        return None
    reference = last_number(str(answer))
    if reference is None:
        raise ValueError(f"column 'answer' holds no number: {str(answer)[:100]!r}")
    found = last_number(completion)
    if found is None:
        return 0.0
    return float(abs(found - reference) <= Fraction(tolerance) * max(Fraction(1), abs(reference)))


def _partial(completion: str, answer: Any, solution: str | None) -> float | None:
    right = _exact(completion, answer)
    if solution is None or right is None:
        return right
    worked, written = solution.strip(), completion.strip()
    common = 0
    while common < min(len(worked), len(written)) and worked[common] == written[common]:
        common += 1
    return 0.5 * common / max(1, len(worked)) + 0.5 * right


@functools.cache
def _math_verify_api() -> tuple[Callable[..., Any], Callable[..., Any]]:
    module = importlib.import_module("math_verify")

    def parse(text: str) -> Any:
        return module.parse(text, parsing_timeout=None)

    def verify(reference: Any, found: Any) -> bool:
        return bool(module.verify(reference, found, timeout_seconds=None))

    verify(parse(r"$\frac{1}{2}$"), parse("1/2"))  # the grammars load at first use
    return parse, verify


@functools.lru_cache(maxsize=4096)
def _parsed_reference(answer: str) -> Any:
    parse, _ = _math_verify_api()
    bare_latex = "\\" in answer and "$" not in answer and "\\boxed" not in answer
    parsed = parse(f"${answer}$" if bare_latex else answer) or parse(f"${answer}$")
    if not parsed:
        raise ValueError(f"column 'answer' cannot be read as mathematics: {answer[:100]!r}")
    return parsed


def _math_verify(completion: str, answer: Any) -> float | None:
    if answer is None:
        return None
    parse, verify = _math_verify_api()
    return float(verify(_parsed_reference(str(answer)), parse(completion)))


@functools.cache
def _gym_scorer(task: str) -> Callable[[str, Any], float]:
    scorer: Callable[[str, Any], float] = importlib.import_module("reasoning_gym").get_score_answer_fn(task)
    return scorer


@functools.lru_cache(maxsize=4096)
def _gym_item(task: str, entry: str) -> dict[str, Any]:
    """Read an item, in the variant under which its own answer scores best.

    Some verifiers compare with tuples, which JSON has made into lists. Raises ``ValueError`` when the verifier fails
    on the item's own answer; after that, an exception can only be the doing of the completion.
    """
    plain: dict[str, Any] = json.loads(entry)
    scorer = _gym_scorer(task)
    if plain.get("answer") is None:
        return plain
    scored: list[tuple[float, dict[str, Any]]] = []
    for item in (plain, _with_tuples(plain)):
        try:
            scored.append((float(scorer(plain["answer"], item)), item))
        except Exception as error:
            failure = error
    if not scored:
        raise ValueError(f"the verifier of {task} fails on its own answer {plain['answer']!r:.100}") from failure
    return max(scored, key=lambda pair: pair[0])[1]


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list) else value


def _reasoning_gym(completion: str, task: str, entry: Any) -> float:
    scorer = _gym_scorer(task)
    item = _gym_item(task, entry if isinstance(entry, str) else json.dumps(entry))
    tagged = _ANSWER_TAG.findall(completion)
    if tagged:
        candidates = [tagged[-1].strip()]
    else:
        text = completion.strip()
        number = _last(_NUMBER, text)
        candidates = [text, final_answer(text), text.rpartition("\n")[2].strip(), number.group() if number else ""]
    return max(
        (_gym_score(scorer, candidate, item) for candidate in dict.fromkeys(candidates) if candidate), default=0.0
    )


def _gym_score(scorer: Callable[[str, Any], float], candidate: str, item: dict[str, Any]) -> float:
    try:
        score = float(scorer(candidate, item))
    except Exception:
        return 0.0  # unreadable for this verifier, see _gym_item
    return score if math.isfinite(score) else 0.0


BUILTINS: dict[str, Builtin] = {
    "exact": Builtin(exact),
    "numeric": Builtin(numeric),
    "partial_credit": Builtin(partial_credit),
    "math_verify": Builtin(math_verify, "math_verify", "math", _math_verify_api),
    "reasoning_gym": Builtin(
        reasoning_gym, "reasoning_gym", "tasks", functools.partial(importlib.import_module, "reasoning_gym")
    ),
}
"""Reward functions by short name."""
