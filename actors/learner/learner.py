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
from actors.learner.advantages import group_advantages
from actors.learner.algorithms import check_algorithm, resolve_algorithm
from actors.learner.asynchrony_options import AsynchronyOptions
from actors.learner.drift_guard import Verdict, describe, judge
from actors.learner.logprobs import Scorer
from actors.learner.losses import aggregate, denominator, log_ratio, token_losses
from actors.learner.minibatches import Deal, Minibatch, check_records, deal
from actors.learner.optimiser import Optimiser, Update
from actors.learner.options import AlgorithmOptions, LearnerOptions
from actors.learner.packing import Answer, MicroBatch, collate, plan_microbatches
from actors.learner.publishing import Publisher
from actors.learner.statistics import TokenStatistics, record_metrics
from actors.learner.token_weights import token_weights
from actors.weights import policy_state
from storage.models import load_policy
from storage.records import Float32Array, Group, GroupKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Outcome of one training step.

    Attributes:
        step: As given to ``train_step``.
        stepped: True when at least one optimiser update was applied.
        published: True when there is a new snapshot for the engines; the version then went up by one.
        metrics: See ``statistics.METRICS``.
        advantages: Per group float32[group size] in the order of its samples; 0 for an answer that left the loss.
        alarms: What a person should read: the drift guard acted, or logprobs were not finite.
    """

    step: int
    stepped: bool
    published: bool
    metrics: dict[str, float]
    advantages: dict[GroupKey, Float32Array]
    alarms: tuple[str, ...] = ()


# Per minibatch and micro-batch: logprobs of the policy before the batch, and which tokens it could draw.
_Before = list[list[tuple[Tensor, Tensor]]]


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
        asynchrony: AsynchronyOptions | None = None,
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
            asynchrony: What stale tokens count for, and what is published when; None: synchronous.

        Raises:
            UserError: ``algorithm`` contradicts itself, or CUDA is asked for and not there.
        """
        check_algorithm(algorithm, max_tokens=max_tokens)
        self.algorithm = resolve_algorithm(algorithm)
        self.version = 0
        self.asynchrony = asynchrony or AsynchronyOptions()
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
        self._publisher = Publisher(
            self.state(), blend=self.asynchrony.publish_blend, sync_every=self.asynchrony.sync_every
        )

    def state(self) -> dict[str, Tensor]:
        """The trained policy's tensors; not copies."""
        return policy_state(self.model)

    def published(self) -> dict[str, Tensor]:
        """The snapshot that ``version`` names, for ``actors.weights.pack``: what engines sample from; not copies."""
        return self._publisher.weights(self.state())

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
        check_records(groups, self.version)
        advantages = [
            group_advantages(g, self.algorithm.advantage, overlong=self._overlong, max_tokens=self._max_tokens)
            for g in groups
        ]
        metrics = record_metrics(groups, advantages, self.version)
        dealt = deal(
            groups,
            advantages,
            version=self.version,
            minibatches=self._options.minibatches,
            seed=(self._seed, step),
            asynchrony=self.asynchrony,
            every_answer=self.algorithm.kl_coefficient > 0,
        )
        statistics = TokenStatistics(self.algorithm)
        clock = {"forward_backward": 0.0, "proximal": 0.0, "optimiser": 0.0}
        before = self._policy_before(dealt.minibatches, clock)
        verdict = Verdict(ess=1.0) if before is None else self._judge(dealt.minibatches, before)
        updates: list[Update] = []
        for i, minibatch in enumerate(dealt.minibatches):
            if minibatch.answers and not verdict.skip:
                began = time.perf_counter()
                self._backward(minibatch, None if before is None else before[i], verdict.cap, statistics)
                self._synchronise()
                clock["forward_backward"] += time.perf_counter() - began
                began = time.perf_counter()
                updates.append(self._optimiser.step())
                self._synchronise()
                clock["optimiser"] += time.perf_counter() - began
        applied = [update for update in updates if update.applied]
        published = bool(applied) and self._publisher.step(self.state())
        self.version += published
        metrics |= statistics.metrics()
        metrics |= {
            "rejected_nonfinite": float(dealt.rejected),
            "decay_weight_min": dealt.decay[0],
            "decay_weight_max": dealt.decay[1],
            "guard_skipped": float(verdict.skip),
            "guard_clipped": float(verdict.cap is not None),
            "published": float(published),
            "updates": float(len(applied)),
            "skipped_nonfinite": float(len(updates) - len(applied)),
            "grad_norm": float(np.mean([update.grad_norm for update in applied])) if applied else 0.0,
            "learning_rate": applied[-1].learning_rate if applied else 0.0,
        }
        if verdict.skip:
            metrics["ess_tokens"] = verdict.ess
        if verdict.cap is not None:
            metrics["guard_cap"] = verdict.cap
        metrics |= {f"seconds_{name}": seconds for name, seconds in clock.items()}
        return StepReport(
            step=step,
            stepped=bool(applied),
            published=published,
            metrics=metrics,
            advantages={group.key: a.values for group, a in zip(groups, advantages, strict=True)},
            alarms=tuple(self._alarms(step, dealt, verdict, len(updates) - len(applied))),
        )

    def set_learning_rate(self, value: float) -> None:
        """Take another peak learning rate from the next update on; warm-up and decay go on from where they are."""
        self._optimiser.set_peak(value)

    def save(self, directory: str | Path) -> None:
        """Write everything but the policy's weights: optimiser, schedule, version, random states, reference, snapshot.

        Raises:
            StorageError: The disk refuses it; the message names the path.
        """
        state = {
            "version": self.version,
            "optimiser": self._optimiser.state_dict(),
            "weights": saving.fingerprint(self.state()),
            "random": saving.random_states(),
            "publisher": self._publisher.state_dict(),
        }
        reference = None if self._reference is None else policy_state(self._reference.model)
        saving.write_trainer(Path(directory), state, reference, self._publisher.snapshot)

    def load(self, directory: str | Path) -> None:
        """Continue from :meth:`save`, on the weights that :meth:`save_model` wrote at the same moment.

        Raises:
            StorageError: The component is missing or does not belong to the weights that were loaded.
        """
        reference = None if self._reference is None else policy_state(self._reference.model)
        state = saving.read_trainer(Path(directory), saving.fingerprint(self.state()), reference)
        self._optimiser.load_state_dict(state["optimiser"])
        self.version = int(state["version"])
        self._publisher.restore(state["publisher"], saving.read_snapshot(Path(directory), state))
        saving.restore_random_states(state["random"])

    def save_model(self, directory: str | Path) -> None:
        """Write a Hugging Face directory: fp32 safetensors, config, and the tokenizer files of the base model.

        Raises:
            StorageError: The disk refuses it; the message names the path.
        """
        saving.write_model(self.model, self._model_path, Path(directory))

    def _microbatches(self, answers: Sequence[Answer]) -> list[MicroBatch]:
        lengths = [len(answer.token_ids) - 1 for answer in answers]
        plan = plan_microbatches(lengths, self._options.tokens_per_microbatch)
        return [collate(answers, rows, self._device) for rows in plan]

    @torch.no_grad()
    def _policy_before(self, minibatches: Sequence[Minibatch], clock: dict[str, float]) -> _Before | None:
        """Score the whole batch under the weights before its first update.

        None where nothing asks for that policy, or where the training pass itself provides it: with a single update its
        detached logprobs are the same. The drift guard decides before the first gradient and cannot wait for them.
        """
        algorithm = self.algorithm
        updates = sum(bool(m.answers) for m in minibatches)
        used = (
            algorithm.anchor == "proximal" or algorithm.mask != "off" or self.asynchrony.grad_tokens == "current_only"
        )
        if not updates or not (algorithm.guard != "off" or (used and updates > 1)):
            return None
        began = time.perf_counter()
        result: _Before = []
        for minibatch in minibatches:
            scores = [self._scorer(batch) for batch in self._microbatches(minibatch.answers)]
            result.append([(score.logprobs, score.in_support) for score in scores])
        self._synchronise()
        clock["proximal"] += time.perf_counter() - began
        return result

    def _judge(self, minibatches: Sequence[Minibatch], before: _Before) -> Verdict:
        """Ask the drift guard about the tokens that would be trained, whatever minibatch they are in."""
        parts = []
        for minibatch, scores in zip(minibatches, before, strict=True):
            batches = self._microbatches(minibatch.answers) if scores else []
            for batch, (logprobs, in_support) in zip(batches, scores, strict=True):
                chosen = in_support & batch.trained & torch.isfinite(logprobs)
                parts.append(log_ratio(logprobs, batch.behaviour)[chosen].cpu())
        return judge(torch.cat(parts), self.algorithm)

    def _backward(
        self,
        minibatch: Minibatch,
        before: list[tuple[Tensor, Tensor]] | None,
        cap: float | None,
        statistics: TokenStatistics,
    ) -> None:
        """Accumulate the gradient of one minibatch."""
        divisor = denominator(
            self.algorithm.aggregation,
            tokens=minibatch.tokens,
            answers=minibatch.count,
            max_tokens=self._max_tokens,
        )
        statistics.begin_minibatch()
        for i, batch in enumerate(self._microbatches(minibatch.answers)):
            reference = None
            if self._reference is not None:
                with torch.no_grad():
                    reference = self._reference(batch).logprobs
            scores = self._scorer(batch)
            proximal, in_support = None, scores.in_support
            if before is not None:
                proximal, drawable = before[i]
                in_support = in_support & drawable
            earlier = scores.logprobs.detach() if proximal is None else proximal
            weights = token_weights(batch, in_support, earlier, self.algorithm, cap)
            losses = token_losses(
                scores.logprobs,
                behaviour=batch.behaviour,
                advantages=batch.advantages,
                algorithm=self.algorithm,
                proximal=proximal,
                reference=reference,
                answers=batch.answers,
                counted=weights.counted,
            )
            loss = aggregate(
                losses if weights.values is None else losses * weights.values,
                answer_tokens=batch.answer_tokens,
                kept=weights.kept,
                aggregation=self.algorithm.aggregation,
                denominator=divisor,
            )
            torch.autograd.backward(loss)
            statistics.add(batch, scores, earlier, reference, weights)

    def _alarms(self, step: int, dealt: Deal, verdict: Verdict, failed: int) -> list[str]:
        alarms = []
        if verdict.skip or verdict.cap is not None:
            alarms.append(describe(verdict, self.algorithm, step))
        if dealt.rejected:
            alarms.append(
                f"step {step}: {dealt.rejected} answers left the loss because their engine recorded logprobs that are "
                "not finite; the rollout workers named in these answers deserve a look"
            )
        if failed:
            alarms.append(
                f"step {step}: {failed} updates were left out because the gradient was not finite; lower "
                "learner.learning_rate, or resume from an earlier checkpoint if every step says so"
            )
        return alarms

    def _synchronise(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def _recompute_activations(model: Any) -> None:
    """Turn gradient checkpointing on; it lives in training mode, which is harmless: dropout was removed at loading."""
    # transformers 5 renamed the method on the way
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()
