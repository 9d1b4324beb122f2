"""The learner: groups in, better weights out. Knows neither Ray nor queues.

Several learners may share the work. Each is given every batch and makes the same plan; it computes its part, and sums
of gradients make all of them take the same step. Methods that say so must then be called on every rank, in one order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
from actors.learner.packing import Answer, MicroBatch, collate, deal_by_load, idle_microbatch, plan_microbatches
from actors.learner.policy import PolicyLoader
from actors.learner.publishing import Publisher
from actors.learner.ranks import Ranks
from actors.learner.sharding import gathered, gathered_tree, piece_like
from actors.learner.statistics import TokenStatistics, record_metrics
from actors.learner.token_weights import token_weights
from actors.weights import policy_state
from storage.records import Float32Array, Group, GroupKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Outcome of one training step.

    Attributes:
        step: As given to ``train_step``.
        stepped: True when at least one optimiser update was applied.
        published: True when there is a new snapshot for the engines; the version then went up by one.
        metrics: See ``statistics.METRICS``; those of tokens cover the whole batch on the leading rank only.
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
        ranks: Ranks | None = None,
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
            ranks: This learner's place among several; None: it is alone. All of them must be made at the same time.

        Raises:
            UserError: ``algorithm`` contradicts itself, CUDA is asked for and not there, or the ranks do not find the
                same weights.
        """
        check_algorithm(algorithm, max_tokens=max_tokens)
        self.algorithm = resolve_algorithm(algorithm)
        self.version = 0
        self.asynchrony = asynchrony or AsynchronyOptions()
        self._overlong = algorithm.overlong
        self._options, self._seed, self._max_tokens = options, seed, max_tokens
        self._model_path = Path(model_path)
        self._device = saving.resolve_device(options.device)
        self._ranks = ranks or Ranks()
        loader = PolicyLoader(
            self._model_path, options, self._device, self._ranks, temperature=temperature, top_p=top_p, top_k=top_k
        )
        self._in_pieces = loader.in_pieces
        self._scorer = loader.policy()
        self.model: Any = self._scorer.model
        self._optimiser = Optimiser(self.model, options, total_steps * options.minibatches)
        self._reference: Scorer | None = loader.reference() if self.algorithm.kl_coefficient > 0 else None
        self._publisher = Publisher(
            self.state(), blend=self.asynchrony.publish_blend, sync_every=self.asynchrony.sync_every
        )

    @property
    def leads(self) -> bool:
        """True where this learner speaks for all: alone, or on the first rank."""
        return self._ranks.leads

    def state(self) -> dict[str, Tensor]:
        """The trained policy's tensors, or this rank's pieces of them; not copies."""
        return policy_state(self.model)

    def published(self) -> dict[str, Tensor]:
        """The snapshot that ``version`` names, for ``actors.weights.pack``: what engines sample from; not copies.

        Every rank must call it; it is empty where the learner does not lead.
        """
        return self._whole(self._publisher.weights(self.state()))

    def train_step(self, groups: Sequence[Group], step: int) -> StepReport:
        """Make the updates of one global batch.

        Order of ``groups`` does not matter: they are sorted by key. The batch is divided into ``minibatches`` by group,
        each minibatch into micro-batches, and each minibatch ends with one update. When no answer has a gradient (all
        advantages 0, no KL term) nothing is computed or moved: Adam would drift on its momentum. Every rank must call
        it, with the same batch.

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
        statistics.gather(self._ranks)
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

        Every rank must call it; the leading one writes whole tensors, so any number of learners can continue.

        Raises:
            StorageError: The disk refuses it; the message names the path.
            RuntimeError: The ranks have come to hold different weights, so none of them can be trusted.
        """
        weights = self._fingerprint()
        if not self._in_pieces and self._ranks.strangers(weights):
            raise RuntimeError("the learners do not hold the same weights any more: resume from an earlier checkpoint")
        state = {
            "version": self.version,
            "optimiser": gathered_tree(self._optimiser.state_dict(), keep=self.leads),
            "weights": weights,
            "random": saving.random_states(),
            "publisher": self._publisher.state_dict(),
        }
        reference = None if self._reference is None else self._whole(policy_state(self._reference.model))
        snapshot = None if self._publisher.snapshot is None else self._whole(self._publisher.snapshot)
        if self.leads:
            saving.write_trainer(Path(directory), state, reference, snapshot)

    def load(self, directory: str | Path) -> None:
        """Continue from :meth:`save`, on the weights that :meth:`save_model` wrote at the same moment; on every rank.

        Raises:
            StorageError: The component is missing or does not belong to the weights that were loaded.
        """
        reference = None if self._reference is None else policy_state(self._reference.model)
        state = saving.read_trainer(Path(directory), self._fingerprint(), reference)
        self._optimiser.load_state_dict(state["optimiser"])
        self.version = int(state["version"])
        snapshot = saving.read_snapshot(Path(directory), state)
        if snapshot is not None:
            own = self.state()
            snapshot = {name: piece_like(tensor, own[name]) for name, tensor in snapshot.items()}
        self._publisher.restore(state["publisher"], snapshot)
        saving.restore_random_states(state["random"])

    def save_model(self, directory: str | Path) -> None:
        """Write a Hugging Face directory: fp32 safetensors, config, and the tokenizer files of the base model.

        Every rank must call it; the leading one writes.

        Raises:
            StorageError: The disk refuses it; the message names the path.
        """
        state = self._whole(self.model.state_dict(keep_vars=True))
        if self.leads:
            saving.write_model(self.model, state, self._model_path, Path(directory))

    def _whole(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return gathered(state, keep=self.leads)

    def _fingerprint(self) -> str | None:
        """Hash of the weights; None where other ranks hold pieces of them and another one leads."""
        whole = gathered(self.state(), keep=self.leads or not self._in_pieces)
        return saving.fingerprint(whole) if whole else None

    def _microbatches(self, answers: Sequence[Answer]) -> list[MicroBatch]:
        """Return this rank's part of ``answers``, planned; idle passes where pieces of weights ask for company."""
        lengths = [len(answer.token_ids) - 1 for answer in answers]
        shares = deal_by_load(lengths, self._ranks.count)
        mine = self._plan(lengths, shares[self._ranks.rank])
        batches = [collate(answers, rows, self._device) for rows in mine]
        if self._in_pieces:
            most = max(len(self._plan(lengths, share)) for share in shares)
            batches += [idle_microbatch(self._device)] * (most - len(mine))
        return batches

    def _plan(self, lengths: Sequence[int], share: Sequence[int]) -> list[list[int]]:
        plan = plan_microbatches([lengths[i] for i in share], self._options.tokens_per_microbatch)
        return [[share[i] for i in rows] for rows in plan]

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
        everyone = self._ranks.gather(torch.cat(parts) if parts else torch.zeros(0))
        return judge(torch.cat(everyone), self.algorithm)

    def _backward(
        self,
        minibatch: Minibatch,
        before: list[tuple[Tensor, Tensor]] | None,
        cap: float | None,
        statistics: TokenStatistics,
    ) -> None:
        """Accumulate the gradient of one minibatch, and sum it over the ranks."""
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
            if not batch.idle:
                statistics.add(batch, scores, earlier, reference, weights)
        if not self._in_pieces:  # pieces are summed on the way back through each layer
            self._ranks.sum_gradients([p for p in self.model.parameters() if p.requires_grad])

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
