"""Is what the engine writes with drafts what the policy says? Enumeration of the verifier, chi-square on the engine.

A small random Llama writes thousands of answers to one prompt while an adversary drafts the likeliest path, the least
likely tokens or anything, before the first token or later. The law of the first three tokens is known exactly from full
forward passes. Two controls break the law through the same engine and must be caught: always-accept (lenience without
limit) and lenient verification at lenience 1, which SPEC-RL leaves without the residual draw; the latter must moreover
agree with the law that is documented for it. With the residual draw, and drafts that do not depend on the policy, the
law is the policy's again. (In a run they do depend on it, since it was trained on them: reuse stays biased there.)
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from actors.rollout.engine import Drafts, DraftSource, Request, RunningRows
from pipelines.bench.harness import BenchResult, OptionValue
from pipelines.bench.verification_laws import (
    TokenLaw,
    chi_square_p,
    enumerated_law,
    exact_rule_error,
    holm,
    lenient_law,
    lenient_rule_error,
    random_law,
    residual_redraw,
    residual_rule_error,
    total_variation,
)
from storage.records import SamplingParams, TopTokens

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

OPTIONS: dict[str, OptionValue] = {"samples": 20_000, "seed": 0}

VOCABULARY = 24
_PROMPT = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
# Tokens whose law is tested, and one more, so that a draft may be as long as what is tested.
_TESTED, _WRITTEN = 3, 4
_ROWS = 128


@dataclass(frozen=True, slots=True)
class Setting:
    """Sampling parameters that are tested together, and what the table calls them."""

    name: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


SETTINGS = (
    Setting("T = 1"),
    Setting("T = 0.7, top-p 0.8", temperature=0.7, top_p=0.8),
    Setting("top-k 5", top_k=5),
)


@dataclass(frozen=True, slots=True)
class AnswerLaw:
    """Exact law of the first three tokens behind the prompt.

    Attributes:
        tables: float64[V], float64[V, V] and float64[V, V, V]: law of a token behind those before it (last axis).
    """

    tables: tuple[Float64Array, Float64Array, Float64Array]

    @property
    def pair(self) -> TokenLaw:
        """Law of the first two tokens."""
        return TokenLaw(self.tables[0], self.tables[1])

    def cells(self) -> dict[str, tuple[tuple[int, ...], Float64Array]]:
        """What is tested: positions, and the law of the tokens there, by name."""
        one, two = self.tables[0], self.pair.joint
        three = two[:, :, None] * self.tables[2]
        return {
            "token 1": ((0,), one),
            "token 2": ((1,), two.sum(axis=0)),
            "token 3": ((2,), three.sum(axis=(0, 1))),
            "tokens 1, 2": ((0, 1), two),
            "tokens 2, 3": ((1, 2), three.sum(axis=0)),
        }


class Adversary:
    """Drafts that are verified exactly: the likeliest path, the least likely tokens, or any, of any length."""

    ready = True

    def __init__(self, law: AnswerLaw, seed: int) -> None:
        self._law = law
        self._rng = np.random.default_rng(seed)

    def open(self, handle: int, request: Request) -> bool:
        """Half of the rows ask before their first token."""
        return request.request_id % 2 == 0

    def close(self, handle: int) -> None:
        """Nothing is kept of a row."""

    def propose(self, rows: RunningRows) -> Drafts:
        """Draft up to three tokens a row."""
        n, rng = len(rows.handles), self._rng
        path = np.zeros((n, _WRITTEN + _TESTED), np.int64)
        written = rows.length - rows.prompt
        path[:, :_WRITTEN] = rows.tokens[rows.handles[:, None], rows.prompt[:, None] + np.arange(_WRITTEN)]
        kind = rng.integers(0, 3, n)
        for at in range(_TESTED):
            table = self._law.tables[at][tuple(path[:, i] for i in range(at))]
            table = np.broadcast_to(table, (n, table.shape[-1]))
            guess = np.where(kind == 0, table.argmax(axis=1), table.argmin(axis=1))
            guess = np.where(kind == 2, rng.integers(0, table.shape[1], n), guess)
            path[:, at] = np.where(at < written, path[:, at], guess)
        tokens = path[np.arange(n)[:, None], written[:, None] + np.arange(_TESTED)]
        return Drafts(tokens.astype(np.int32), rng.integers(0, _TESTED + 1, n))

    def observe(self, handles: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """The adversary does not learn."""


class OldAnswers(Adversary):
    """Answers drawn from an older law, one whole draft before the first token, verified leniently."""

    def __init__(self, drafter: AnswerLaw, log_lenience: float, seed: int, *, known: int = 0) -> None:
        """Draw drafts from ``drafter``; the engine hears the ``known`` likeliest tokens of its law at each place."""
        super().__init__(drafter, seed)
        self._log_lenience = log_lenience
        self._known = known

    def open(self, handle: int, request: Request) -> bool:
        """All rows have a draft."""
        return True

    def propose(self, rows: RunningRows) -> Drafts:
        """Draw three tokens for each row that has none yet."""
        n = len(rows.handles)
        tokens, scores = np.zeros((n, _TESTED), np.int64), np.zeros((n, _TESTED))
        ids = np.zeros((n, _TESTED, self._known), np.int32)
        likely = np.zeros(ids.shape, np.float32)
        for at in range(_TESTED):
            table = self._law.tables[at][tuple(tokens[:, i] for i in range(at))]
            table = np.broadcast_to(table, (n, table.shape[-1]))
            below = table.cumsum(axis=1) < self._rng.random(n)[:, None] * table.sum(axis=1, keepdims=True)
            tokens[:, at] = below.sum(axis=1)
            scores[:, at] = np.log(table[np.arange(n), tokens[:, at]])
            ids[:, at] = np.argsort(-table, axis=1)[:, : self._known]
            likely[:, at] = np.log(np.take_along_axis(table, ids[:, at].astype(np.int64), axis=1))
        lengths = np.where(rows.length == rows.prompt, _TESTED, 0)
        lenience = np.full(n, self._log_lenience, np.float32)
        tops = [TopTokens(ids=some, logprobs=values) for some, values in zip(ids, likely, strict=True)]
        return Drafts(
            tokens.astype(np.int32), lengths, lenience, scores.astype(np.float32), tops if self._known else None
        )


def run(options: Mapping[str, OptionValue]) -> BenchResult:
    """Enumerate the verifier, test the engine and its controls."""
    samples, seed = int(options["samples"]), int(options["seed"])
    errors = enumeration_errors(seed)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        path = random_policy(Path(folder), seed)
        rows, exact = _exact_cells(path, samples, seed)
        older = random_policy(Path(other), seed + 1)
        controls, stated, bias = _controls(path, older, samples, seed)
        residual, partial = _residual(path, older, samples, seed)
    adjusted = holm(exact)
    table = [(*row, f"{p:.3g}", f"{q:.3g}") for row, p, q in zip(rows, exact, adjusted, strict=True)]
    table += [(name, "tokens 1, 2", f"{p:.3g}", "control: must fail") for name, p in controls.items()]
    table.append(("lenient, against its stated law", "tokens 1, 2", f"{stated:.3g}", ""))
    table.append(("lenient with residual, drafts independent", "tokens 1, 2", f"{residual:.3g}", ""))
    return BenchResult(
        name="losslessness",
        columns=("setting", "cell", "p", "p after Holm"),
        rows=tuple(table),
        figures={
            "worst_p": min(adjusted),
            "control_p": max(controls.values()),
            "stated_law_p": stated,
            "residual_p": residual,
            "enumeration_error": max(errors.values()),
        },
        notes=(
            f"{samples} answers a setting; enumeration, largest difference of a cell: "
            + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()),
            "controls, p values (below 1e-6 they are caught): "
            + ", ".join(f"{name} {p:.1e}" for name, p in controls.items()),
            f"lenient at lenience 1: the law of the first token is {bias:.3f} from the policy's (total variation)",
            "with residual, by how many of the drafter's likeliest tokens are known: "
            + ", ".join(f"{known} {moved:.4f} (bound {tail:.4f})" for known, (moved, tail) in partial.items()),
        ),
    )


def enumeration_errors(seed: int) -> dict[str, float]:
    """Return how far the enumerated laws of both rules are from what they must be, for vocabularies of 8, 16 and 32."""
    errors = {"exact rule": 0.0, "lenient rule": 0.0, "residual rule": 0.0}
    for vocabulary in (8, 16, 32):
        law = random_law(vocabulary, seed, cut=vocabulary // 4)
        drafter = random_law(vocabulary, seed + 1)
        likely, never = int(law.first.argmax()), int(law.first.argmin())
        for draft in ((likely, int(law.next[likely].argmax())), (likely, never), (never, likely), (1, 1)):
            errors["exact rule"] = max(errors["exact rule"], exact_rule_error(law, draft))
        for log_lenience in (-0.5, 0.0, 0.5):
            error = lenient_rule_error(law, drafter, log_lenience)
            errors["lenient rule"] = max(errors["lenient rule"], error)
        errors["residual rule"] = max(errors["residual rule"], residual_rule_error(law, drafter, vocabulary))
    return errors


def residual_bias(policy: TokenLaw, drafter: TokenLaw, known: int) -> tuple[float, float]:
    """Return how far the first token's law moves when only so many tokens of q are known, and the mass beyond them."""
    law = enumerated_law(policy, drafter, 0.0, redraw=residual_redraw(known)).sum(axis=1)
    tail = np.sort(drafter.first)[: len(law) - known].sum()
    return total_variation(law, policy.first), float(tail)


def random_policy(folder: Path, seed: int) -> Path:
    """Write a Llama with random weights, large enough that its tokens depend on those before them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    model.save_pretrained(folder)
    return folder


def answer_law(path: Path, setting: Setting) -> AnswerLaw:
    """Compute the law of the first three tokens by full forward passes over all that may stand before each."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tables = []
    for before in range(_TESTED):
        contexts = np.array(list(np.ndindex((VOCABULARY,) * before)), np.int64).reshape(VOCABULARY**before, before)
        ids = np.concatenate([np.tile(_PROMPT, (len(contexts), 1)), contexts], axis=1, dtype=np.int64)
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(ids)).logits[:, -1].double().numpy()
        tables.append(processed_law(logits, setting).reshape((VOCABULARY,) * (before + 1)))
    return AnswerLaw((tables[0], tables[1], tables[2]))


def processed_law(logits: Float64Array, setting: Setting) -> Float64Array:
    """Return softmax after temperature, top-k, top-p, float64[n, V]; written apart from the engine's."""
    logits = logits / setting.temperature
    if setting.top_k:
        logits = np.where(logits < np.sort(logits, axis=1)[:, -setting.top_k, None], -np.inf, logits)
    law = np.exp(logits - logits.max(axis=1, keepdims=True))
    law /= law.sum(axis=1, keepdims=True)
    order = np.argsort(-law, axis=1)
    ordered = np.take_along_axis(law, order, axis=1)
    ordered[ordered.cumsum(axis=1) - ordered >= setting.top_p] = 0
    np.put_along_axis(law, order, ordered, axis=1)
    kept: Float64Array = law / law.sum(axis=1, keepdims=True)
    return kept


def write_answers(path: Path, setting: Setting, source: DraftSource | None, samples: int, seed: int) -> Int64Array:
    """Let the engine write ``samples`` answers and return their tokens int64[samples, 4].

    Raises:
        RuntimeError: The engine switched the drafts off.
    """
    from actors.rollout.torch_engine import TorchEngine

    engine = TorchEngine(
        path,
        max_rows=_ROWS,
        max_length=len(_PROMPT) + _WRITTEN,
        dtype="float32",
        device="cpu",
        run_seed=seed,
        drafts=source,
    )
    sampling = SamplingParams(
        max_tokens=_WRITTEN, temperature=setting.temperature, top_p=setting.top_p, top_k=setting.top_k
    )
    engine.submit([Request(request_id=i, prompt_ids=_PROMPT, sampling=sampling, group=0) for i in range(samples)])
    answers = np.zeros((samples, _WRITTEN), np.int64)
    while engine.running or engine.waiting:
        for done in engine.step():
            answers[done.request_id] = np.concatenate([s.token_ids for s in done.segments])
    if engine.draft_failure:
        raise RuntimeError(f"the engine switched the drafts off: {engine.draft_failure}")
    return answers


def cell_p(answers: Int64Array, positions: tuple[int, ...], law: Float64Array) -> float:
    """Return the chi-square p value of the tokens at some positions under their law."""
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(answers[:, at] for at in positions), 1)
    return chi_square_p(counts, law)


def _exact_cells(path: Path, samples: int, seed: int) -> tuple[list[tuple[str, str]], list[float]]:
    names, values = [], []
    for number, setting in enumerate(SETTINGS):
        law = answer_law(path, setting)
        answers = write_answers(path, setting, Adversary(law, seed), samples, seed + number)
        for cell, (positions, expected) in law.cells().items():
            names.append((setting.name, cell))
            values.append(cell_p(answers, positions, expected))
    return names, values


def _controls(path: Path, older: Path, samples: int, seed: int) -> tuple[dict[str, float], float, float]:
    """The controls' p values, that of the lenient rule under its stated law, and the lenient rule's bias."""
    law, old = answer_law(path, SETTINGS[0]), answer_law(older, SETTINGS[0])
    rules = {"always accept": np.inf, "lenient without residual": 0.0}
    answers = {
        name: write_answers(path, SETTINGS[0], OldAnswers(old, lenience, seed), samples, seed)
        for name, lenience in rules.items()
    }
    stated = lenient_law(law.pair, old.pair, 0.0)
    return (
        {name: cell_p(tokens, (0, 1), law.pair.joint) for name, tokens in answers.items()},
        cell_p(answers["lenient without residual"], (0, 1), stated.joint),
        total_variation(stated.first, law.pair.first),
    )


def _residual(path: Path, older: Path, samples: int, seed: int) -> tuple[float, dict[int, tuple[float, float]]]:
    """The p value of the policy's law with residuals of all of q; bias and its bound where less of it is known."""
    law, old = answer_law(path, SETTINGS[0]), answer_law(older, SETTINGS[0])
    answers = write_answers(path, SETTINGS[0], OldAnswers(old, 0.0, seed, known=VOCABULARY), samples, seed)
    partial = {known: residual_bias(law.pair, old.pair, known) for known in (4, 8, 16)}
    return cell_p(answers, (0, 1), law.pair.joint), partial
