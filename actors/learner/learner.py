"""The learner: groups in, better weights out. Knows neither Ray nor queues."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.learner import saving
from actors.learner.advantages import GroupAdvantages, group_advantages
from actors.learner.algorithms import check_algorithm, resolve_algorithm
from actors.learner.logprobs import Scorer
from actors.learner.losses import aggregate, denominator, token_losses
from actors.learner.optimiser import Optimiser, Update
from actors.learner.options import AlgorithmOptions, LearnerOptions
from actors.learner.packing import Answer, MicroBatch, collate, plan_microbatches
from actors.learner.statistics import TokenStatistics, record_metrics
from actors.weights import policy_state
from storage.models import load_policy
from storage.records import Float32Array, Group, GroupKey, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Outcome of one training step.

    Attributes:
        step: As given to ``train_step``.
        stepped: True when at least one optimiser update was applied; the version then went up by one.
        metrics: See ``statistics.METRICS``.
        advantages: Per group float32[group size] in the order of its samples; 0 for an answer that left the loss.
    """

    step: int
    stepped: bool
    metrics: dict[str, float]
    advantages: dict[GroupKey, Float32Array]


@dataclass(slots=True)
class _Minibatch:
    """Answers behind one optimiser update, and the counts that its loss is divided by.

    The counts cover every answer in the loss; ``answers`` only those that have a gradient.
    """

    answers: list[Answer]
    tokens: int = 0
    count: int = 0


class Learner:
    """Owns the policy under training, its optimiser and, with a KL term, the frozen reference."""

    def __init__(
        self,
        model_path: str | Path,
        options: LearnerOptions,
        algorithm: AlgorithmOptions,
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        max_tokens: int,
        seed: int,
        total_steps: int,
    ) -> None:
        """Load the policy.

        Args:
            model_path: Hugging Face directory: a base model, or what :meth:`save_model` wrote.
            options: How to update; weights and moments are fp32 whatever its dtype.
            algorithm: Which objective.
            temperature: Of the sampler in training, as are ``top_p`` and ``top_k``: the learner scores tokens under the
                distribution that was sampled.
            top_p: Nucleus mass.
            top_k: Highest logits kept; 0 keeps all.
            max_tokens: Longest answer, for the constant denominator and the overlong penalty. Unit: tokens.
            seed: Seed of the run; decides how groups are dealt to minibatches.
            total_steps: Length of the run, for falling learning rates. Unit: training steps.

        Raises:
            UserError: ``algorithm`` contradicts itself, or CUDA is asked for and not there.
        """
        check_algorithm(algorithm, max_tokens=max_tokens)
        self.algorithm = resolve_algorithm(algorithm)
        self.version = 0
        self._overlong = algorithm.overlong
        self._options, self._seed, self._max_tokens = options, seed, max_tokens
        self._model_path = Path(model_path)
        self._device = saving.resolve_device(options.device)
        on_gpu = self._device == "cuda"
        low = options.dtype == "bfloat16" or (options.dtype == "auto" and on_gpu)
        self._sampling: dict[str, Any] = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "autocast": torch.bfloat16 if low else None,
        }
        self.model = load_policy(self._model_path, dtype="float32", device=self._device)
        self._scorer = Scorer(self.model, **self._sampling)
        if options.gradient_checkpointing if options.gradient_checkpointing is not None else on_gpu:
            _recompute_activations(self.model)
        self._optimiser = Optimiser(self.model, options, total_steps * options.minibatches)
        self._reference: Scorer | None = None
        if self.algorithm.kl_coefficient > 0:
            frozen = load_policy(self._model_path, dtype="float32", device=self._device)
            self._reference = Scorer(frozen.requires_grad_(False), **self._sampling)

    def state(self) -> dict[str, Tensor]:
        """The policy's tensors, for ``actors.weights.pack``; not copies."""
        return policy_state(self.model)

    def train_step(self, groups: Sequence[Group], step: int) -> StepReport:
        """Make the updates of one global batch.

        Order of ``groups`` does not matter: they are sorted by key. The batch is divided into ``minibatches`` by group,
        each minibatch into micro-batches, and each minibatch ends with one update. When no answer has a gradient (all
        advantages 0, no KL term) nothing is computed or moved: Adam would drift on its momentum.

        Args:
            groups: Complete, scored groups with distinct keys.
            step: Number of the step; with the seed it decides the deal of groups to minibatches.

        Raises:
            ValueError: A record that cannot be right: repeated key, foreign sibling, tokens without logprobs, a token
                from the future.
        """
        groups = sorted(groups, key=lambda group: group.key)
        _check_records(groups, self.version)
        advantages = [
            group_advantages(g, self.algorithm.advantage, overlong=self._overlong, max_tokens=self._max_tokens)
            for g in groups
        ]
        metrics = record_metrics(groups, advantages, self.version)
        minibatches, rejected = self._deal(groups, advantages, step)
        statistics = TokenStatistics(self.algorithm)
        clock = {"forward_backward": 0.0, "proximal": 0.0, "optimiser": 0.0}
        updates: list[Update] = []
        proximals = self._proximal(minibatches, clock)
        for minibatch, proximal in zip(minibatches, proximals, strict=True):
            if minibatch.answers:
                began = time.perf_counter()
                self._backward(minibatch, proximal, statistics)
                self._synchronise()
                clock["forward_backward"] += time.perf_counter() - began
                began = time.perf_counter()
                updates.append(self._optimiser.step())
                self._synchronise()
                clock["optimiser"] += time.perf_counter() - began
        applied = [update for update in updates if update.applied]
        self.version += bool(applied)
        metrics |= statistics.metrics()
        metrics |= {
            "rejected_nonfinite": float(rejected),
            "updates": float(len(applied)),
            "skipped_nonfinite": float(len(updates) - len(applied)),
            "grad_norm": float(np.mean([update.grad_norm for update in applied])) if applied else 0.0,
            "learning_rate": applied[-1].learning_rate if applied else 0.0,
        }
        metrics |= {f"seconds_{name}": seconds for name, seconds in clock.items()}
        return StepReport(
            step=step,
            stepped=bool(applied),
            metrics=metrics,
            advantages={group.key: a.values for group, a in zip(groups, advantages, strict=True)},
        )

    def save(self, directory: str | Path) -> None:
        """Write everything but the policy's weights: optimiser, schedule, version, random states, reference.

        Raises:
            StorageError: The disk refuses it; the message names the path.
        """
        state = {
            "version": self.version,
            "optimiser": self._optimiser.state_dict(),
            "weights": saving.fingerprint(self.state()),
            "random": saving.random_states(),
        }
        reference = None if self._reference is None else policy_state(self._reference.model)
        saving.write_trainer(Path(directory), state, reference)

    def load(self, directory: str | Path) -> None:
        """Continue from :meth:`save`, on the weights that :meth:`save_model` wrote at the same moment.

        Raises:
            StorageError: The component is missing or does not belong to the weights that were loaded.
        """
        reference = None if self._reference is None else policy_state(self._reference.model)
        state = saving.read_trainer(Path(directory), saving.fingerprint(self.state()), reference)
        self._optimiser.load_state_dict(state["optimiser"])
        self.version = int(state["version"])
        saving.restore_random_states(state["random"])

    def save_model(self, directory: str | Path) -> None:
        """Write a Hugging Face directory: fp32 safetensors, config, and the tokenizer files of the base model.

        Raises:
            StorageError: The disk refuses it; the message names the path.
        """
        saving.write_model(self.model, self._model_path, Path(directory))

    def _deal(
        self, groups: Sequence[Group], advantages: Sequence[GroupAdvantages], step: int
    ) -> tuple[list[_Minibatch], int]:
        """Deal groups to minibatches; also returns how many answers were rejected for non-finite logprobs."""
        rejected = 0
        count = self._options.minibatches
        order = np.arange(len(groups))
        if count > 1:  # neighbouring prompts may be alike, so minibatches are dealt at random
            order = np.random.default_rng((self._seed, step)).permutation(order)
        minibatches = []
        for part in np.array_split(order, count):
            minibatch = _Minibatch(answers=[])
            for position in sorted(part.tolist()):
                group, values = groups[position], advantages[position]
                for i, sample in enumerate(group.samples):
                    mask = sample.policy_mask()
                    if not values.in_loss[i] or not mask.any():
                        continue
                    minibatch.tokens += int(mask.sum())
                    minibatch.count += 1
                    behaviour = sample.logprobs()
                    if not np.isfinite(behaviour[mask]).all():
                        rejected += 1
                    elif values.values[i] != 0 or self.algorithm.kl_coefficient > 0:
                        minibatch.answers.append(
                            Answer(
                                key=group.key,
                                index=sample.index,
                                token_ids=np.concatenate([group.prompt.token_ids, sample.token_ids()]),
                                prompt_tokens=len(group.prompt.token_ids),
                                policy=mask,
                                behaviour=behaviour,
                                advantage=float(values.values[i]),
                            )
                        )
            minibatches.append(minibatch)
        return minibatches, rejected

    def _microbatches(self, answers: Sequence[Answer]) -> list[MicroBatch]:
        lengths = [len(answer.token_ids) - 1 for answer in answers]
        plan = plan_microbatches(lengths, self._options.tokens_per_microbatch)
        return [collate(answers, rows, self._device) for rows in plan]

    @torch.no_grad()
    def _proximal(self, minibatches: Sequence[_Minibatch], clock: dict[str, float]) -> list[list[Tensor] | None]:
        """Logprobs under the weights before the first update, per minibatch and micro-batch.

        None where the training pass itself provides them: with a single update its detached logprobs are the same.
        """
        if self.algorithm.anchor == "behaviour" or sum(bool(m.answers) for m in minibatches) <= 1:
            return [None] * len(minibatches)
        began = time.perf_counter()
        result: list[list[Tensor] | None] = [
            [self._scorer(batch).logprobs for batch in self._microbatches(m.answers)] for m in minibatches
        ]
        self._synchronise()
        clock["proximal"] += time.perf_counter() - began
        return result

    def _backward(self, minibatch: _Minibatch, proximal: list[Tensor] | None, statistics: TokenStatistics) -> None:
        """Accumulate the gradient of one minibatch."""
        divisor = denominator(
            self.algorithm.aggregation,
            tokens=minibatch.tokens,
            answers=minibatch.count,
            max_tokens=self._max_tokens,
        )
        for i, batch in enumerate(self._microbatches(minibatch.answers)):
            reference = None
            if self._reference is not None:
                with torch.no_grad():
                    reference = self._reference(batch).logprobs
            scores = self._scorer(batch)
            anchor = None if proximal is None else proximal[i]
            losses = token_losses(
                scores.logprobs,
                behaviour=batch.behaviour,
                advantages=batch.advantages,
                algorithm=self.algorithm,
                proximal=anchor,
                reference=reference,
            )
            loss = aggregate(
                losses,
                answer_tokens=batch.answer_tokens,
                kept=scores.in_support,
                aggregation=self.algorithm.aggregation,
                denominator=divisor,
            )
            torch.autograd.backward(loss)
            statistics.add(batch, scores, scores.logprobs if anchor is None else anchor, reference)

    def _synchronise(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def _recompute_activations(model: Any) -> None:
    """Turn gradient checkpointing on; it lives in training mode, which is harmless: dropout was removed at loading."""
    # transformers 5 renamed the method on the way
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()


def _check_records(groups: Sequence[Group], version: int) -> None:
    """Raise ``ValueError`` that names the first record that cannot be right."""
    seen: set[GroupKey] = set()
    for group in groups:
        if group.key in seen:
            raise ValueError(f"group {group.key} occurs twice in one batch")
        seen.add(group.key)
        if len({sample.index for sample in group.samples}) != len(group.samples):
            raise ValueError(f"group {group.key} holds the same sibling twice")
        if not len(group.prompt.token_ids):
            raise ValueError(f"group {group.key} has an empty prompt")
        for sample in group.samples:
            _check_sample(sample, group.key, version)


def _check_sample(sample: Sample, key: GroupKey, version: int) -> None:
    name = f"sample {sample.index} of group {key}"
    if sample.key != key:
        raise ValueError(f"{name} says that it belongs to group {sample.key}")
    for segment in sample.segments:
        if len(segment.token_ids) != len(segment.logprobs):
            raise ValueError(f"{name} has {len(segment.token_ids)} tokens and {len(segment.logprobs)} logprobs")
        if segment.source == "policy" and not 0 <= segment.version <= version:
            raise ValueError(f"{name} has tokens of version {segment.version}; the learner is on version {version}")
