"""The length predictor without Ray: asks every ranker, fuses what they say, learns from every finished answer."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.length_predictor.fusion import Fusion, Ranking, combine_rankings, influence, weighted_mean
from actors.length_predictor.options import LengthPredictorOptions
from actors.length_predictor.probe import GroupProbe, OpenGroups
from actors.length_predictor.quality import PrequentialQuality, QualityFigures
from actors.length_predictor.rankers import Float64Array, HistoryRanker, OutputLengthRanker, Ranker, State
from actors.length_predictor.records import FinishedGroup, Observation, Prediction, Query, identity
from actors.length_predictor.semantic import Embedder, HashingEmbedder, SemanticSimilarityRanker, SentenceEmbedder
from storage.errors import UserError

FUSED = "fused"
"""Name of the combined prediction among the quality figures."""

_STATE_VERSION = 1
_WINDOW = 1024
_MOST_ASKED = 131_072
_PRIOR_GROUPS = 16.0  # groups that a ranker's prior correlation is worth
_PRIOR_P90 = 3.6  # P90 over P50 of answers before any was seen; 3.55 was published for a math run (TailSieve)


class LengthPredictor:
    """Predicts and learns. Not thread-safe; costs per batch, so ask for a whole batch at once."""

    def __init__(self, options: LengthPredictorOptions | None = None, embedder: Embedder | None = None) -> None:
        """Start without knowledge.

        Args:
            options: Its options.
            embedder: What prompts are compared by; None: made as the options say.

        Raises:
            UserError: The embedding that is asked for is not installed.
        """
        self.options = options or LengthPredictorOptions()
        if embedder is None:
            embedder = SentenceEmbedder() if self.options.embedding == "minilm" else HashingEmbedder()
        self._embedder = embedder
        self._open = OpenGroups()
        self._probe = GroupProbe(self._open)
        self._rankers: tuple[Ranker, ...] = (
            HistoryRanker(self.options.max_prompts),
            self._probe,
            OutputLengthRanker(self.options.half_life),
            SemanticSimilarityRanker(embedder, self.options.memory, self.options.neighbours),
        )
        names = [*(ranker.name for ranker in self._rankers), FUSED]
        self._quality = PrequentialQuality(names, _WINDOW, self.options.half_life)
        self._asked: OrderedDict[str, Float64Array] = OrderedDict()
        self._weights: dict[str, float] | None = None
        self.answers = 0
        self.groups = 0

    def predict(self, queries: Sequence[Query]) -> list[Prediction]:
        """Predict lengths; ranks are among the queries of this call.

        Before anything was observed all ranks are 0.5, confidence is 0 and lengths follow the option ``prior_tokens``.
        """
        if not queries:
            return []
        scores = self._scores(queries)
        fused = self._combine(scores)
        for query, row in zip(queries, np.column_stack([scores, np.log(fused.quantiles[:, 2])]), strict=True):
            self._asked.setdefault(_name(query.group, query.text), row)
        while len(self._asked) > _MOST_ASKED:
            self._asked.popitem(last=False)
        prior = float(self.options.prior_tokens) * np.array([1.0, _PRIOR_P90, _PRIOR_P90])
        tokens = np.where(np.isfinite(fused.quantiles), fused.quantiles, prior)
        tokens[:, 2] = np.maximum(tokens[:, 2], [self._longest_so_far(query) for query in queries])
        return [
            Prediction(rank=rank, p50=p50, p90=p90, longest=longest, confidence=confidence)
            for rank, (p50, p90, longest), confidence in zip(
                fused.rank.tolist(), tokens.tolist(), fused.confidence.tolist(), strict=True
            )
        ]

    def observe(self, observations: Iterable[Observation]) -> None:
        """Learn from finished answers. A group teaches when its last sibling is there.

        Raises:
            UserError: A length below 0, or a group size below 1; names the observation. Nothing was learnt then.
        """
        batch = list(observations)
        for place, seen in enumerate(batch):
            if seen.length < 0 or seen.group_size < 1:
                raise UserError(
                    f"observation {place}: length {seen.length} and group_size {seen.group_size}; "
                    "a length is at least 0 and a group has at least 1 answer"
                )
        finished = [group for seen in batch for group in self._open.add(seen)]
        self.answers += len(batch)
        if finished:
            self._learn(finished)

    def quality(self) -> dict[str, QualityFigures]:
        """Return the quality of each ranker and of their fusion (``fused``) over the last 1,024 groups.

        Measured against the longest answer of each group, with the first prediction that was made for it; for the
        group probe, with what it said after the first sibling.
        """
        return self._quality.figures()

    def weights(self) -> dict[str, float]:
        """Return the weight of each ranker: its recent Spearman, less one standard error, shrunk towards its prior."""
        if self._weights is None:
            self._weights = {ranker.name: self._weight(ranker) for ranker in self._rankers}
        return dict(self._weights)

    def state(self) -> State:
        """Return arrays from which :meth:`load_state` restores everything but groups under way; of bounded size."""
        parts = {ranker.name: ranker.state() for ranker in self._rankers}
        residuals = {f"{ranker.name}_residuals": ranker.residuals.state() for ranker in self._rankers}
        parts |= residuals | {"quality": self._quality.state()}
        arrays = {f"{part}/{key}": value for part, values in parts.items() for key, value in values.items()}
        counts = np.array([_STATE_VERSION, self.answers, self.groups], np.int64)
        return arrays | {"counts": counts, "embedding": np.array(self.options.embedding)}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over what :meth:`state` returned; groups under way are forgotten.

        Raises:
            UserError: It is of another version or embedding, or incomplete. The predictor is as it was before.
        """
        fresh = LengthPredictor(self.options, self._embedder)
        try:
            fresh._fill(state)
        except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise UserError(f"state of the length predictor cannot be used: {error}; start without it") from error
        self.__dict__.update(fresh.__dict__)

    def forget(self) -> None:
        """Start anew, without knowledge."""
        self.__dict__.update(LengthPredictor(self.options, self._embedder).__dict__)

    def _fill(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        version, answers, groups = (int(count) for count in state["counts"])
        if version != _STATE_VERSION:
            raise ValueError(f"it has version {version}, this program reads {_STATE_VERSION}")
        if str(state["embedding"]) != self.options.embedding:
            raise ValueError(f"it was made with embedding={state['embedding']}, not {self.options.embedding}")
        for ranker in self._rankers:
            ranker.load_state(_part(state, ranker.name))
            ranker.residuals.load_state(_part(state, f"{ranker.name}_residuals"))
        self._quality.load_state(_part(state, "quality"))
        self.answers, self.groups = answers, groups

    def _learn(self, finished: Sequence[tuple[str, FinishedGroup]]) -> None:
        """Judge the predictions made for these groups, then learn from them; in this order."""
        groups = [group for _, group in finished]
        predicted = self._predicted_before(finished)
        self._quality.add(predicted, np.array([group.log_longest for group in groups]))
        for column, ranker in enumerate(self._rankers):
            ranker.residuals.add(predicted[:, column], groups)
            ranker.observe(groups)
        self.groups += len(groups)
        self._weights = None

    def _predicted_before(self, finished: Sequence[tuple[str, FinishedGroup]]) -> Float64Array:
        """Return float64[n, rankers + 1]: what each ranker, and their fusion, said when a group was first asked for.

        For a group that nobody asked for it is what they say now, which is before they learn from it. The fusion
        stands in log tokens, because ranks are comparable within one batch only.
        """
        asked = [self._asked.pop(_name(name, group.text), None) for name, group in finished]
        result = np.full((len(finished), len(self._rankers) + 1), np.nan)
        missing = [i for i, row in enumerate(asked) if row is None]
        if missing:
            scores = self._scores([Query(text=finished[i][1].text) for i in missing])
            result[missing] = np.column_stack([scores, np.log(self._combine(scores).quantiles[:, 2])])
        for i, row in enumerate(asked):
            if row is not None:
                result[i] = row
        probe = self._rankers.index(self._probe)
        for i, (_, group) in enumerate(finished):
            result[i, probe] = self._probe.score(group.lengths[:1]) if len(group.lengths) > 1 else np.nan
        return result

    def _scores(self, queries: Sequence[Query]) -> Float64Array:
        return np.column_stack([ranker.rank(queries) for ranker in self._rankers])

    def _combine(self, scores: Float64Array) -> Fusion:
        """Fuse float64[n, rankers] of scores.

        Where a ranker has no opinion, what the others expect takes its place in its order: percentiles among the few
        prompts that a ranker knows, if those are all long ones, would not compare with percentiles among all.
        """
        weights = [self.weights()[ranker.name] for ranker in self._rankers]
        quantiles = [ranker.quantiles(scores[:, i]) for i, ranker in enumerate(self._rankers)]
        expected = np.log(np.stack([tokens[:, 2] for tokens in quantiles]))
        known = np.isfinite(expected)
        others = weighted_mean(expected, np.where(known, influence(weights)[:, None], 0.0), empty=np.nan)
        placed = np.where(known, expected, others)
        return combine_rankings([Ranking(s, q) for s, q in zip(placed, quantiles, strict=True)], weights)

    def _weight(self, ranker: Ranker) -> float:
        measured, groups = self._quality.correlation(ranker.name)
        # One standard error off: chance must not look like skill. Lengths that are all equal leave nothing to rank.
        skill = 0.0 if math.isnan(measured) else max(0.0, measured - 1 / math.sqrt(groups))
        return (groups * skill + _PRIOR_GROUPS * ranker.prior) / (groups + _PRIOR_GROUPS)

    def _longest_so_far(self, query: Query) -> float:
        group = self._open.get(query.group)
        return float(max(group.lengths)) if group else 0.0


def dump_state(state: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return a state as the bytes of a compressed ``.npz`` file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **state)  # type: ignore[arg-type]
    return buffer.getvalue()


def parse_state(data: bytes) -> State:
    """Read back what :func:`dump_state` returned; nothing in it is executed.

    Raises:
        UserError: It is not such a file, or is damaged.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, EOFError, KeyError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"state of the length predictor is damaged ({error}); start without it") from error


def _name(group: str, text: str) -> str:
    return group or f"#{identity(text)}"


def _part(state: Mapping[str, npt.NDArray[Any]], part: str) -> State:
    prefix = f"{part}/"
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
