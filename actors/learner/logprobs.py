"""Logprobs of sampled tokens under the policy, as the engine would have reported them.

The engine reports the distribution that it samples: logits divided by the temperature, cut to the top k, then to the
nucleus, renormalised. The learner applies the same rule to its own logits, so that equal weights give a ratio of 1 at
any sampling setting. With truncated sampling the kept set moves with the weights: a sampled token may leave it, has no
logprob then and is reported as such. Training is exact only for top_p = 1 and top_k = 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from actors.learner.packing import MicroBatch

# Most logits alive at a time while scoring: 64 MiB in fp32, 341 positions of a vocabulary of 49,152.
_CHUNK_LOGITS = 2**24


class Scores(NamedTuple):
    """Per policy token of a micro-batch.

    Attributes:
        logprobs: float32[n], with gradient where enabled; 0 outside the support.
        entropy: float32[n], entropy of the sampled distribution at that position in nats, without gradient.
        in_support: bool[n], False where truncated sampling under these weights could not draw the token.
    """

    logprobs: Tensor
    entropy: Tensor
    in_support: Tensor


def truncate_logits(logits: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Set the logits that truncated sampling drops to -inf; float[n, vocabulary].

    ``top_k`` > 0 keeps every logit that is at least the k-th highest. ``top_p`` < 1 keeps, of what is left, the fewest
    most probable tokens whose mass reaches top_p, and everything as probable as the last of them; at least one.
    """
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p < 1:
        ordered = logits.detach().sort(dim=-1, descending=True).values
        probabilities = ordered.softmax(dim=-1)
        needed = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities < top_p
        last = needed.sum(dim=-1, keepdim=True).clamp(min=1) - 1
        logits = logits.masked_fill(logits < ordered.gather(-1, last), -torch.inf)
    return logits


class Scorer(torch.nn.Module):
    """Scores micro-batches under one model; a module, so that weights in pieces are whole while it computes."""

    def __init__(
        self, model: Any, *, temperature: float, top_p: float = 1.0, top_k: int = 0, autocast: torch.dtype | None = None
    ) -> None:
        """Wrap ``model``, a transformers causal LM.

        Args:
            model: Weights in fp32. Its output head is applied to answer positions only where it is a plain linear map
                of the last hidden state (found out by trying it); otherwise the model's own forward pass makes all
                logits of a micro-batch at once.
            temperature: Divides the logits; positive.
            top_p: Nucleus mass, 1 keeps everything.
            top_k: Highest logits kept, 0 keeps everything.
            autocast: Precision of the transformer's body; None is fp32. The head is always fp32.
        """
        super().__init__()
        self.model = model
        self._temperature, self._top_p, self._top_k = temperature, top_p, top_k
        self._autocast = autocast
        self._linear_head = self._head_is_linear()

    def forward(self, batch: MicroBatch) -> Scores:
        """Score the policy tokens of ``batch``; gradients flow unless they are disabled outside."""
        device = batch.input_ids.device.type
        with torch.autocast(device, dtype=self._autocast or torch.bfloat16, enabled=self._autocast is not None):
            if self._linear_head:
                body = self.model.base_model(input_ids=batch.input_ids, use_cache=False)
                states = body.last_hidden_state
            else:
                states = self.model(input_ids=batch.input_ids, use_cache=False).logits
        rows = states.flatten(0, 1).index_select(0, batch.places)
        with torch.autocast(device, enabled=False):
            return self._in_chunks(rows.float(), batch.targets)

    def _in_chunks(self, rows: Tensor, targets: Tensor) -> Scores:
        vocabulary = self.model.get_output_embeddings().weight.shape[0] if self._linear_head else rows.shape[1]
        size = max(1, _CHUNK_LOGITS // vocabulary)
        if len(targets) <= size:
            return Scores(*self._score(rows, targets))
        # logits of one chunk at a time: the backward pass makes them again
        parts = [
            checkpoint(self._score, states, ids, use_reentrant=False, preserve_rng_state=False)
            for states, ids in zip(torch.split(rows, size), torch.split(targets, size), strict=True)
        ]
        return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _score(self, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self._head(rows) if self._linear_head else rows
        logits = truncate_logits(logits / self._temperature, top_k=self._top_k, top_p=self._top_p)
        everything = logits.log_softmax(dim=-1)
        logprobs = everything.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        in_support = logprobs.detach() != -torch.inf
        with torch.no_grad():
            entropy = torch.special.entr(everything.exp()).sum(dim=-1)
        return torch.where(in_support, logprobs, torch.zeros_like(logprobs)), entropy, in_support

    def _head(self, rows: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        bias = None if head.bias is None else head.bias.float()
        return torch.nn.functional.linear(rows, head.weight.float(), bias)

    @torch.no_grad()
    def _head_is_linear(self) -> bool:
        head = self.model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear) or self.model.base_model is self.model:
            return False
        probe = torch.arange(4, device=head.weight.device).remainder(head.weight.shape[0]).unsqueeze(0)
        expected = self.model(input_ids=probe, use_cache=False).logits.float()
        states = self.model.base_model(input_ids=probe, use_cache=False).last_hidden_state
        if states.shape[-1] != head.in_features:
            return False
        return bool(torch.allclose(self._head(states.float()), expected, rtol=1e-4, atol=1e-4))
