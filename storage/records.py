"""The records that travel between roles.

Frozen and slotted: a record is written once, by the role that knows the fact, and read by everybody else. Token ids,
logprobs and versions travel together from the engine to the loss, so that nobody re-tokenises text, guesses a mask
from token values, or recovers a group by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

SegmentSource = Literal["policy", "environment"]
FinishReason = Literal["stop", "length", "abort", "error"]
RewardStatus = Literal["pending", "ok", "abstained", "error", "timeout"]
RoundClass = Literal["short", "long"]

TRAIN_SPLIT = "train"


class GroupKey(NamedTuple):
    """Names one group of samples, for ever: a prompt that occurs twice in the data has two keys.

    Attributes:
        split: ``train``, or the name of an evaluation set.
        epoch: Pass over the data for training; the training step for an evaluation.
        prompt: Row number of the prompt in its dataset.
        duplicate: 0, or 1, 2, ... where a schedule repeats a prompt inside an epoch.
    """

    split: str
    epoch: int
    prompt: int
    duplicate: int = 0

    def __str__(self) -> str:
        return f"{self.split}/e{self.epoch}/p{self.prompt}/d{self.duplicate}"

    @classmethod
    def parse(cls, text: str) -> GroupKey:
        """Read back what ``str(key)`` wrote; raises ``ValueError`` on anything else."""
        split, epoch, prompt, duplicate = text.rsplit("/", 3)
        if epoch[:1] != "e" or prompt[:1] != "p" or duplicate[:1] != "d":
            raise ValueError(f"not a group key: {text!r}")
        return cls(split, int(epoch[1:]), int(prompt[1:]), int(duplicate[1:]))


def request_id(run_seed: int, key: GroupKey, sample: int) -> int:
    """Return the 63-bit identity of one sample's request, which also keys its sampling noise.

    It depends on nothing else, so a request that is issued again after a crash draws the same noise.
    """
    return xxhash.xxh3_64_intdigest(f"{run_seed}|{key}|{sample}".encode()) >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request draws its tokens.

    Attributes:
        max_tokens: Most tokens to generate, prefix included.
        temperature: Divides the logits; 0 is greedy decoding (the logprobs are then those of a point mass: 0).
        top_p: Nucleus mass in (0, 1]; 1 keeps everything.
        top_k: Number of highest logits kept; 0 keeps everything.
        stop_token_ids: Ids that end the answer; the id itself is part of the answer. Holds all EOS ids of the model.
        stop_strings: Texts that end the answer; the token that completes one is part of the answer.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a dataset, rendered.

    Attributes:
        index: Row number in its dataset.
        token_ids: int32[n], exactly what the model reads (chat template applied, one BOS).
        text: The rendered prompt, for rewards, people and logs; never tokenised again.
        columns: The row's other columns; they reach reward functions as keyword arguments.
    """

    index: int
    token_ids: Int32Array
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """The likeliest tokens of the distributions that some tokens were drawn from.

    At K = 32 they take 256 bytes a token, where id and log-probability take 8: they are recorded only where asked for.

    Attributes:
        ids: int32[n, K], in each row the K likeliest tokens; -1 where the distribution has fewer, and in all places of
            a token of which nothing was recorded.
        logprobs: float32[n, K], their log-probabilities (after temperature, top-k and top-p); -inf where the id is -1.
    """

    ids: Int32Array
    logprobs: Float32Array

    @property
    def nbytes(self) -> int:
        """Memory of both arrays in bytes."""
        return self.ids.nbytes + self.logprobs.nbytes

    def part(self, begin: int, end: int) -> TopTokens:
        """Return a view of tokens ``begin`` to ``end`` (exclusive)."""
        return TopTokens(ids=self.ids[begin:end], logprobs=self.logprobs[begin:end])

    def copy(self) -> TopTokens:
        """Return the same with arrays of its own."""
        return TopTokens(ids=self.ids.copy(), logprobs=self.logprobs.copy())

    @classmethod
    def join(cls, parts: Sequence[TopTokens | None], counts: Sequence[int]) -> TopTokens | None:
        """Return the top tokens of consecutive runs of tokens, as wide as the widest; ``None`` when no run has any.

        Args:
            parts: Of each run; ``None`` where nothing was recorded.
            counts: Tokens of each run.

        Raises:
            ValueError: A part does not have a row for each token of its run, or its arrays differ in shape.
        """
        width = max((part.ids.shape[1] for part in parts if part is not None), default=0)
        if not width:
            return None
        ids = np.full((sum(counts), width), -1, np.int32)
        logprobs = np.full(ids.shape, -np.inf, np.float32)
        at = 0
        for part, count in zip(parts, counts, strict=True):
            if part is not None:
                if len(part.ids) != count or part.ids.shape != part.logprobs.shape:
                    raise ValueError(
                        f"top tokens of shape {part.ids.shape} with log-probabilities of shape {part.logprobs.shape} "
                        f"for {count} tokens"
                    )
                ids[at : at + count, : part.ids.shape[1]] = part.ids
                logprobs[at : at + count, : part.ids.shape[1]] = part.logprobs
            at += count
        return cls(ids=ids, logprobs=logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens of one answer that share a source and a version.

    Attributes:
        source: ``policy`` for sampled tokens, ``environment`` for tokens put in from outside (never in the loss).
        version: Published snapshot of weights that produced the tokens, stamped by the engine; -1 for environment.
        token_ids: int32[n].
        logprobs: float32[n] under the distribution that was sampled (after temperature, top-k and top-p); 0 for
            environment tokens.
        top: The likeliest tokens at each place, where the engine was asked to record them.
    """

    source: SegmentSource
    version: int
    token_ids: Int32Array
    logprobs: Float32Array
    top: TopTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Wall-clock marks of one sample, in seconds since the epoch; 0 where it has not happened."""

    dispatched: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    rewarded: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer to one prompt.

    Attributes:
        key: The group it belongs to.
        index: Position among its siblings, 0 to group size - 1.
        segments: The answer, in order.
        text: The answer as text (special tokens dropped), for rewards, people and logs.
        finish_reason: Given by the engine; truncation is read from here and nowhere else.
        reward: Weighted sum of the reward functions; ``None`` unless ``reward_status`` is ``ok``.
        reward_parts: Raw value of each reward function by name; ``None`` where it abstained or failed.
        reward_status: ``pending`` before scoring; an error or a timeout is never a reward of 0.
        error: What went wrong, where something did.
        timings: Wall-clock marks.
        drafted: Draft tokens that were verified for this sample.
        accepted: Draft tokens that were accepted.
        forward_passes: Target forward passes that emitted this sample's tokens.
        worker: Name of the rollout worker that wrote it.
        reused: Tokens of the previous epoch's answer that it leniently kept (SPEC-RL); -1 when it was written afresh.
        score_s: Seconds that the reward functions took.
    """

    key: GroupKey
    index: int
    segments: tuple[Segment, ...]
    text: str
    finish_reason: FinishReason
    reward: float | None = None
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    reward_status: RewardStatus = "pending"
    error: str = ""
    timings: Timings = field(default_factory=Timings)
    drafted: int = 0
    accepted: int = 0
    forward_passes: int = 0
    worker: str = ""
    reused: int = -1
    score_s: float = 0.0

    @property
    def length(self) -> int:
        """Number of tokens of the answer, environment tokens included."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def oldest_version(self) -> int:
        """Smallest version among the policy's tokens; -1 for an answer without any."""
        return min((s.version for s in self.segments if s.source == "policy"), default=-1)

    def token_ids(self) -> Int32Array:
        """All tokens of the answer, int32[length]."""
        return _concatenate([s.token_ids for s in self.segments], np.dtype(np.int32))

    def logprobs(self) -> Float32Array:
        """Behaviour logprobs, float32[length]; 0 on environment tokens."""
        return _concatenate([s.logprobs for s in self.segments], np.dtype(np.float32))

    def versions(self) -> Int32Array:
        """Version of each token, int32[length]; -1 on environment tokens."""
        return np.concatenate([np.full(len(s.token_ids), s.version, np.int32) for s in self.segments] or [_EMPTY_INT])

    def top(self) -> TopTokens | None:
        """The likeliest tokens at each place, of ``length`` rows; ``None`` where none were recorded."""
        return TopTokens.join([s.top for s in self.segments], [len(s.token_ids) for s in self.segments])

    def policy_mask(self) -> npt.NDArray[np.bool_]:
        """True where the policy wrote the token, bool[length]; only those enter the loss."""
        parts = [np.full(len(s.token_ids), s.source == "policy", np.bool_) for s in self.segments]
        return np.concatenate(parts) if parts else np.zeros(0, np.bool_)


_EMPTY_INT: Int32Array = np.zeros(0, np.int32)


def _concatenate(parts: list[npt.NDArray[Any]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One group of samples that a rollout worker is to write.

    Attributes:
        key: Ledger key of the group.
        prompt: The prompt.
        samples: Indices of the siblings to write, normally 0 to group size - 1; fewer when only some were lost.
        group_size: Siblings in the whole group.
        sampling: How to draw tokens.
        run_seed: Seed of the run; with key and index it keys the noise.
        attempt: 0 at first; counts re-issues after a worker died.
        round_class: Kind of round it runs in.
        resume: Tokens that earlier attempts left, by sample index; generation goes on behind them.
        priority: Rows with a higher value are admitted to the engine first.
        stay_tokens: New tokens after which a sample is interrupted and goes on elsewhere; 0: no limit.
        stay_s: Seconds after which it is; 0: no limit.
        last_stay: A sample that uses up its stay ends as truncated instead.
    """

    key: GroupKey
    prompt: Prompt
    samples: tuple[int, ...]
    group_size: int
    sampling: SamplingParams
    run_seed: int
    attempt: int = 0
    round_class: RoundClass = "short"
    resume: Mapping[int, tuple[Segment, ...]] = field(default_factory=dict)
    priority: float = 0.0
    stay_tokens: int = 0
    stay_s: float = 0.0
    last_stay: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All samples of one prompt, complete, in index order."""

    key: GroupKey
    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def oldest_version(self) -> int:
        """Smallest version among the tokens of all siblings."""
        return min((s.oldest_version for s in self.samples), default=-1)

    def staleness(self, version: int) -> int:
        """Versions between the oldest token and an optimiser step that starts from ``version``."""
        return version - self.oldest_version


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleHeader:
    """What the conductor learns about a sample without fetching it; a few dozen bytes."""

    key: GroupKey
    index: int
    attempt: int
    tokens: int
    oldest_version: int
    newest_version: int
    finish_reason: FinishReason
    drafted: int
    accepted: int
    forward_passes: int
    reward: float | None
    reward_parts: Mapping[str, float | None]
    reward_status: RewardStatus
    timings: Timings
    error: str = ""
    reused: int = -1
    score_s: float = 0.0
    call: int = 0

    @classmethod
    def of(cls, sample: Sample, attempt: int, call: int = 0) -> SampleHeader:
        """Summarise ``sample``; ``call`` is the number of the conductor's call that had it written."""
        versions = [s.version for s in sample.segments if s.source == "policy"]
        return cls(
            key=sample.key,
            index=sample.index,
            attempt=attempt,
            tokens=sample.length,
            oldest_version=min(versions, default=-1),
            newest_version=max(versions, default=-1),
            finish_reason=sample.finish_reason,
            drafted=sample.drafted,
            accepted=sample.accepted,
            forward_passes=sample.forward_passes,
            reward=sample.reward,
            reward_parts=sample.reward_parts,
            reward_status=sample.reward_status,
            timings=sample.timings,
            error=sample.error,
            reused=sample.reused,
            score_s=sample.score_s,
            call=call,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Place of one tensor in a flat weight buffer: name, shape, dtype name and byte range."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsManifest:
    """Describes one published snapshot of weights.

    Attributes:
        version: 0 for the initial weights, then 1 more with each published snapshot.
        tensors: Layout of the flat buffer; tied tensors occur once.
        nbytes: Size of the buffer in bytes.
        hash: xxh3-128 of the buffer, hexadecimal; readers verify it before they swap.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    nbytes: int
    hash: str
