"""Small random models on disk, and helpers that drive an engine to its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from actors.rollout.engine import Completion, Drafts, Request, RunningRows
from actors.rollout.packed_model import PackedModel
from actors.rollout.torch_engine import TorchEngine
from actors.weights import pack, policy_state
from storage.records import SamplingParams

VOCABULARY = 61

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=7),
    "gemma2": lambda: Gemma2Config(
        **_SIZES,
        head_dim=16,
        sliding_window=6,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
    ),
}


def save_model(kind: str, path: Path, seed: int = 0, *, scale: float = 6.0) -> Path:
    """Write a random model whose logits depend strongly on the context (large weights)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and kind != "gpt2":
                parameter.mul_(scale)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Path of a random model of some kind and seed, written once."""
    root = tmp_path_factory.mktemp("models")

    def get(kind: str = "llama", seed: int = 0) -> Path:
        path = root / f"{kind}-{seed}"
        return path if path.exists() else save_model(kind, path, seed)

    return get


@pytest.fixture(scope="session")
def random_llama(model_path: Callable[..., Path]) -> Path:
    return model_path("llama")


@pytest.fixture(scope="session")
def load_once(model_path: Callable[..., Path]) -> Callable[..., PackedModel]:
    """As ``PackedModel.load``, but what ``model_path`` wrote is read once, and copied for each engine."""
    load, copy_of = PackedModel.load, PackedModel.twin  # tests count the engines' own
    loaded: dict[tuple[Any, ...], PackedModel] = {}
    written = model_path("llama").parent

    def get(path: str | Path, dtype: str, device: str) -> PackedModel:
        if Path(path).parent != written:
            return load(path, dtype, device)
        key = (str(path), dtype, device)
        if key not in loaded:
            loaded[key] = load(path, dtype, device)
        return copy_of(loaded[key])

    return get


@pytest.fixture(scope="session")
def engine_of(random_llama: Path, load_once: Callable[..., PackedModel]) -> Callable[..., TorchEngine]:
    """Build an engine on the random Llama (or on ``path``)."""

    def build(path: Path = random_llama, **options: Any) -> TorchEngine:
        settings: dict[str, Any] = {"max_rows": 4, "max_length": 64, "dtype": "float32", "device": "cpu", "run_seed": 3}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PackedModel, "load", load_once)
            return TorchEngine(path, **(settings | options))

    return build


def request(
    request_id: int, prompt: Any = (5, 6, 7, 8), *, max_tokens: int = 12, temperature: float = 1.0, **more: Any
) -> Request:
    """Make a request; keywords of ``Request`` go there, the others to ``SamplingParams``."""
    own = {k: more.pop(k) for k in ("prefix", "group", "priority", "may_lag") if k in more}
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, **more)
    return Request(request_id=request_id, prompt_ids=np.asarray(prompt, np.int32), sampling=sampling, **own)


def finish(engine: TorchEngine, requests: Any = (), *, limit: int = 500) -> dict[int, Completion]:
    """Submit, step until idle, and return the completions by id; each id must leave exactly once."""
    engine.submit(list(requests))
    done: dict[int, Completion] = {}
    for _ in range(limit):
        for completion in engine.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
        if not engine.running and not engine.waiting:
            assert not getattr(engine, "draft_failure", "")
            return done
    raise AssertionError(f"engine still busy after {limit} steps")


class ScriptedDrafts:
    """A draft source by a function of (request id, answer so far, room) that remembers what it saw and heard.

    ``propose`` returns token ids, or (token ids, log q of each, log lenience) for a draft that is verified leniently.
    ``first`` says for which requests there is a draft before the first token.
    """

    ready = True

    def __init__(self, propose: Callable[..., Any], first: Callable[[Request], bool] = lambda request: False) -> None:
        self._propose = propose
        self._first = first
        self.open_rows: dict[int, Request] = {}
        self.opened: list[tuple[int, int]] = []
        self.heard: dict[int, list[int]] = defaultdict(lambda: [0, 0])

    def open(self, handle: int, request: Request) -> bool:
        assert handle not in self.open_rows
        self.open_rows[handle] = request
        self.opened.append((handle, request.request_id))
        return self._first(request)

    def close(self, handle: int) -> None:
        del self.open_rows[handle]

    def propose(self, rows: RunningRows) -> Drafts:
        assert len(set(rows.handles.tolist())) == len(rows.handles)
        drafts = []
        for i, handle in enumerate(rows.handles.tolist()):
            request, prompt, length = self.open_rows[handle], int(rows.prompt[i]), int(rows.length[i])
            assert rows.tokens[handle, :prompt].tolist() == request.prompt_ids.tolist()
            draft = self._propose(request.request_id, rows.tokens[handle, prompt:length].tolist(), int(rows.room[i]))
            drafts.append(draft if isinstance(draft, tuple) else (draft, [np.nan] * len(draft), np.nan))
        width = max(len(tokens) for tokens, _, _ in drafts)
        padded = [(list(t) + [7] * (width - len(t)), list(q) + [0.0] * (width - len(q))) for t, q, _ in drafts]
        return Drafts(
            tokens=np.array([t for t, _ in padded], np.int32).reshape(len(drafts), width),
            lengths=np.array([len(t) for t, _, _ in drafts], np.int64),
            lenience=np.array([lenience for _, _, lenience in drafts], np.float32),
            logprobs=np.array([q for _, q in padded], np.float32).reshape(len(drafts), width),
        )

    def observe(self, handles: Any, drafted: Any, accepted: Any) -> None:
        for handle, offered, kept in zip(handles.tolist(), drafted.tolist(), accepted.tolist(), strict=True):
            assert 0 <= kept <= offered
            assert offered > 0
            heard = self.heard[self.open_rows[handle].request_id]
            heard[0] += offered
            heard[1] += kept


def tokens_of(completion: Completion) -> list[int]:
    return [int(t) for s in completion.segments for t in s.token_ids]


def logprobs_of(completion: Completion) -> list[float]:
    return [float(p) for s in completion.segments for p in s.logprobs]


def recomputed_logprobs(
    model: Any, prompt: Any, answer: list[int], *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> np.ndarray:
    """Logprobs of an answer from one full forward pass without a cache, processed in plain numpy, float64[m]."""
    ids = [*map(int, prompt), *answer]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double().numpy()
    result = []
    for at, token in enumerate(answer, start=len(prompt)):
        row = logits[at - 1] / temperature
        if top_k:
            row = np.where(row < np.sort(row)[-top_k], -np.inf, row)
        p = np.exp(row - row.max())
        p /= p.sum()
        if top_p < 1:
            order = np.argsort(-p)
            keep = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1]
            p = np.where(np.isin(np.arange(len(p)), keep), p, 0)
            p /= p.sum()
        result.append(p[token])
    with np.errstate(divide="ignore"):
        return np.log(np.array(result))


@pytest.fixture(scope="session")
def reference_model(model_path: Callable[..., Path]) -> Callable[..., Any]:
    """Load a model with the attention that transformers ships; it is shared, and only read."""

    @cache
    def get(kind: str = "llama", seed: int = 0) -> Any:
        return AutoModelForCausalLM.from_pretrained(model_path(kind, seed), dtype=torch.float32).eval()

    return get


@pytest.fixture(scope="session")
def model_of(reference_model: Callable[..., Any]) -> Callable[[int], Any]:
    """Reference models by version, 0 to 3."""
    models = {version: reference_model("llama", version) for version in range(4)}
    return models.__getitem__


@pytest.fixture(scope="session")
def snapshots(model_of: Callable[[int], Any]) -> dict[int, Any]:
    """Snapshots of them, packed: versions 1 to 3."""
    return {version: pack(policy_state(model_of(version)), version) for version in (1, 2, 3)}
