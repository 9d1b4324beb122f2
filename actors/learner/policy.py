"""Loads the models of a learner: the policy that is trained, and the frozen reference of a KL term."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from actors.learner.logprobs import Scorer
from actors.learner.options import LearnerOptions
from actors.learner.ranks import Ranks
from actors.learner.saving import fingerprint
from actors.learner.sharding import shard
from actors.weights import policy_state
from storage.errors import UserError
from storage.models import load_policy


class PolicyLoader:
    """Makes scorers of one model directory, as one learner's options and its place among others ask."""

    def __init__(self, path: Path, options: LearnerOptions, device: str, ranks: Ranks, **sampling: Any) -> None:
        """Remember what to load.

        Args:
            path: Hugging Face directory.
            options: Precision, recomputation, parallelism.
            device: "cpu" or "cuda".
            ranks: This learner's place.
            sampling: Temperature, ``top_p`` and ``top_k`` of the sampler in training.
        """
        self._path, self._options, self._device, self._ranks = path, options, device, ranks
        on_gpu = device == "cuda"
        low = options.dtype == "bfloat16" or (options.dtype == "auto" and on_gpu)
        self._sampling = {**sampling, "autocast": torch.bfloat16 if low else None}
        self._recompute = on_gpu if options.gradient_checkpointing is None else options.gradient_checkpointing
        self.in_pieces = ranks.count > 1 and options.parallel == "fsdp"

    def policy(self) -> Scorer:
        """Load the policy for training.

        Raises:
            UserError: The ranks found different weights under the same path.
        """
        scorer = self._load()
        strangers = self._ranks.strangers(fingerprint(policy_state(scorer.model))) if self._ranks.count > 1 else []
        if strangers:
            raise UserError(
                f"{self._path} holds other weights for learner {strangers[0]} than for learner 0: give all nodes the "
                "same files, or a path that they share"
            )
        if self._recompute:
            _recompute_activations(scorer.model)
        return self._place(scorer)

    def reference(self) -> Scorer:
        """Load the same model again, frozen."""
        scorer = self._load()
        scorer.requires_grad_(False)
        return self._place(scorer)

    def _load(self) -> Scorer:
        # a whole model may be more than a GPU holds: what is to be cut is loaded beside it
        device = "cpu" if self.in_pieces else self._device
        return Scorer(load_policy(self._path, dtype="float32", device=device), **self._sampling)

    def _place(self, scorer: Scorer) -> Scorer:
        if self.in_pieces:
            shard(scorer, self._ranks.count, self._device)
        return scorer


def _recompute_activations(model: Any) -> None:
    """Turn gradient checkpointing on; it lives in training mode, which is harmless: dropout was removed at loading."""
    # transformers 5 renamed the method on the way
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()
