"""Draws tokens with Gumbel-max noise from a counter-based generator.

The noise of a token is a pure function of (run seed, request, position in the answer, token id): the same request
draws the same tokens whatever else is in the batch, and a draft is verified by drawing and comparing (DESIGN 8b).

The largest ``logit + Gumbel`` is the smallest ``E / p`` with ``E`` a standard exponential (the exponential race), which
needs one logarithm and no second one. ``E = -log(1 - v)`` with ``v = (k + 1/2) / 2**31`` and ``k`` a 31-bit hash: small
values of ``E``, the ones that win, keep their full resolution in float32, and the grid moves no probability by more
than about ``2**-31``. All hashing is done in wrapping int32 arithmetic, which gives the same bits on CPU and GPU. The
bit mixer is ``lowbias32`` (C. Wellons, "Prospecting for hash functions", 2018); keys come from SplitMix64 (Steele,
Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A, _MIX_B = 0x7FEB352D, 0x846CA68B - (1 << 32)
# Sets the uniforms that decide on drafts apart from the noise that tokens are drawn with.
_ACCEPTANCE_SALT = 0xD1B54A32D192ED03
# Sets the noise of draws from a residual apart from that of the plain draw at the same position.
_RESIDUAL_SALT = 0xA0761D6478BD642F
# Elements per piece on a CPU: 2 MB, so that the dozen passes over a piece stay in the cache; pieces are few enough
# for threads to meet rarely (on a shared machine each meeting can cost a time slice).
_CHUNK = 1 << 19
# The same elsewhere: 1 GB, so that the copies of a long draft's logits stay a small part of a GPU's memory.
_DEVICE_CHUNK = 1 << 28
# Candidates looked at first for a nucleus; widened until the nucleus is inside.
_NUCLEUS = 64


def splitmix64(state: UInt64Array) -> UInt64Array:
    """Return the SplitMix64 output function of uint64 counters (elementwise; wraps)."""
    z = state + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def request_key(run_seed: int, request_id: int) -> int:
    """Return the 64-bit noise key of a request."""
    seed = splitmix64(np.array([run_seed & (2**64 - 1)], np.uint64))
    return int(splitmix64(seed ^ np.array([request_id & (2**64 - 1)], np.uint64))[0])


def position_keys(request_keys: UInt64Array, positions: npt.NDArray[np.int64]) -> UInt64Array:
    """Return the noise key uint64[n] of each (request, position in the answer)."""
    return splitmix64(request_keys + positions.astype(np.uint64) * np.uint64(_GOLDEN))


def acceptance_uniforms(keys: UInt64Array) -> npt.NDArray[np.float64]:
    """Return a uniform number in (0, 1) for each position key, of 53 bits and independent of the token noise."""
    bits = splitmix64(keys ^ np.uint64(_ACCEPTANCE_SALT)) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def residual_keys(keys: UInt64Array) -> UInt64Array:
    """Return the keys of the noise that residuals are drawn with, uint64[n], independent of that of plain draws."""
    return splitmix64(keys ^ np.uint64(_RESIDUAL_SALT))


class Draws(NamedTuple):
    """One token drawn from each row of logits.

    Attributes:
        tokens: int64[n].
        logprobs: float32[n] under the processed distribution (temperature, then top-k, then top-p over what top-k left,
            renormalised); 0 for greedy rows, not finite for a row with a logit of NaN or +inf.
        scored: float32[n], log-probabilities of the tokens that were asked about: -inf for one that the distribution
            cuts, in greedy rows for all but the drawn one. ``None`` when none were.
        top_ids: int64[n, K], the K likeliest tokens of each row, -1 where there are fewer; ``None`` unless asked for.
        top_logprobs: float32[n, K], -inf where the id is -1.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    scored: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


class Sampler:
    """Draws one token from each row of logits.

    ``vocabulary`` is the number of logits a row; ``device`` is where the logits are.
    """

    def __init__(self, vocabulary: int, device: torch.device | str = "cpu") -> None:
        self.vocabulary = vocabulary
        # lowbias32 is a bijection: no two tokens share a hash, hence none share their noise for ever.
        x = np.arange(vocabulary, dtype=np.uint32)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(_MIX_A)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(_MIX_B & 0xFFFFFFFF)
        x ^= x >> np.uint32(16)
        self._tokens = torch.from_numpy(x.view(np.int32)).to(device)

    def exponentials(self, keys: UInt64Array) -> torch.Tensor:
        """Return the *negated* noise, float32[n, vocabulary]: minus a standard exponential for each token."""
        halves = torch.from_numpy(keys.view(np.int32).reshape(-1, 2)).to(self._tokens.device)
        low, high = halves[:, :1], halves[:, 1:]
        x = self._tokens ^ low
        x ^= (x >> 16).bitwise_and_(0xFFFF)
        x *= _MIX_A
        # The second half of the key enters between two rounds, so that 64 bits tell positions apart.
        x ^= high
        x ^= (x >> 15).bitwise_and_(0x1FFFF)
        x *= _MIX_B
        x ^= (x >> 16).bitwise_and_(0xFFFF)
        x &= 0x7FFFFFFF
        return x.float().add_(0.5).mul_(-(2.0**-31)).log1p_()

    def sample(
        self,
        logits: torch.Tensor,
        keys: UInt64Array,
        temperature: npt.NDArray[np.float32],
        top_p: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int64],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a token from each row.

        Args:
            logits: float[n, vocabulary].
            keys: uint64[n], see :func:`position_keys`.
            temperature: float32[n]; 0 is greedy.
            top_p: float32[n] in (0, 1].
            top_k: int64[n]; 0 keeps all.

        Returns:
            Tokens int64[n] and log-probabilities float32[n], as in :class:`Draws`.
        """
        drawn = self.sample_and_score(logits, keys, temperature, top_p, top_k, None)
        return drawn.tokens, drawn.logprobs

    def sample_and_score(
        self,
        logits: torch.Tensor,
        keys: UInt64Array,
        temperature: npt.NDArray[np.float32],
        top_p: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int64],
        wanted: npt.NDArray[np.int64] | None,
        top: int = 0,
    ) -> Draws:
        """Draw as :meth:`sample` does, and say how likely other tokens were.

        Args:
            logits, keys, temperature, top_p, top_k: As for :meth:`sample`.
            wanted: int64[n], a token of each row; ``None`` for none.
            top: How many of the likeliest tokens of each row to return; cut to the vocabulary.
        """
        top = min(top, self.vocabulary)
        rows = len(keys)
        asked = None if wanted is None else torch.from_numpy(wanted).to(logits.device)
        if not temperature.any():
            tokens, zeros = _greedy(logits)
            scored = None if asked is None else _point_mass(tokens, asked)
            return Draws(tokens, zeros, scored, *(_only(tokens, top) if top else ()))
        step = max(1, (_CHUNK if logits.device.type == "cpu" else _DEVICE_CHUNK) // self.vocabulary)
        if rows <= step:
            return self._draw(logits, keys, temperature, top_p, top_k, asked, top)
        parts = []
        for start in range(0, rows, step):
            part = slice(start, start + step)
            some = None if asked is None else asked[part]
            parts.append(self._draw(logits[part], keys[part], temperature[part], top_p[part], top_k[part], some, top))
        return Draws(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.logprobs for part in parts]),
            *(_joined([part[field] for part in parts]) for field in (2, 3, 4)),
        )

    def sample_residual(
        self,
        logits: torch.Tensor,
        keys: UInt64Array,
        temperature: npt.NDArray[np.float32],
        top_p: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a token from the residual max(0, p - q) of each row, see :func:`residual_weights`.

        Args:
            logits, keys, temperature, top_p, top_k: As for :meth:`sample`; no row is greedy. The noise is another than
                that of the plain draw with the same key.
            ids: int64[n, m], tokens of which q is known; -1 for none.
            logprobs: float32[n, m], log q of them.

        Returns:
            Tokens int64[n], and log p of them, float32[n]: the residual decides which is drawn, but what the token is
            worth under the policy is what the loss needs.
        """
        probabilities = processed_probabilities(logits, temperature, top_p, top_k)
        device = logits.device
        known = torch.from_numpy(ids).to(device), torch.from_numpy(logprobs).to(device)
        weights = residual_weights(probabilities, *known)
        tokens = weights.div_(self.exponentials(residual_keys(keys))).argmin(dim=-1)
        return tokens, probabilities.gather(1, tokens[:, None])[:, 0].log_()

    def _draw(
        self,
        logits: torch.Tensor,
        keys: UInt64Array,
        temperature: npt.NDArray[np.float32],
        top_p: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int64],
        wanted: torch.Tensor | None,
        top: int,
    ) -> Draws:
        probabilities = processed_probabilities(logits, temperature, top_p, top_k)
        scores = self.exponentials(keys)
        # Both are reciprocal races: the largest p / E is the smallest p / -E.
        torch.div(probabilities, scores, out=scores)
        tokens = scores.argmin(dim=-1)
        logprobs = probabilities.gather(1, tokens[:, None])[:, 0].log_()
        scored = None if wanted is None else probabilities.gather(1, wanted[:, None])[:, 0].log_()
        best_ids, best_logprobs = _likeliest(probabilities, top) if top else (None, None)
        greedy = temperature == 0
        if greedy.any():
            mask = torch.from_numpy(greedy).to(logits.device)
            best, zero = _greedy(logits)
            tokens, logprobs = torch.where(mask, best, tokens), torch.where(mask, zero, logprobs)
            if scored is not None and wanted is not None:
                scored = torch.where(mask, _point_mass(best, wanted), scored)
            if best_ids is not None and best_logprobs is not None:
                only_ids, only_logprobs = _only(best, top)
                best_ids = torch.where(mask[:, None], only_ids, best_ids)
                best_logprobs = torch.where(mask[:, None], only_logprobs, best_logprobs)
        return Draws(tokens, logprobs, scored, best_ids, best_logprobs)


def processed_probabilities(
    logits: torch.Tensor,
    temperature: npt.NDArray[np.float32],
    top_p: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
) -> torch.Tensor:
    """Return the distribution that is sampled, float32[n, vocabulary]; arguments as in :meth:`Sampler.sample`.

    Ties with the last kept value are kept too, by top-k and by top-p, so that the result does not depend on the order
    of a sort. Greedy rows (temperature 0) come out as with temperature 1.
    """
    logits = logits.float()
    if (temperature != 1).any():
        divisor = np.where(temperature > 0, temperature, np.float32(1))
        logits = logits / torch.from_numpy(divisor).to(logits.device)[:, None]
    if top_k.any():
        logits = _keep_top_k(logits, top_k)
    probabilities = torch.softmax(logits, dim=-1)
    if (top_p < 1).any():
        probabilities = _keep_top_p(probabilities, top_p)
    return probabilities


def residual_weights(probabilities: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return max(0, p - q), what is left for a token to be drawn from where a draft from q was not kept.

    A token of the draft is kept with mass min(p, q); p - min(p, q) is what it lacks (Leviathan, Kalman and Matias,
    arXiv 2211.17192, theorem 1; Chen et al., arXiv 2302.01318). Where q is not known it counts as 0. That moves the law
    of the token by no more than the unknown mass of q, in total variation: with R = sum of max(0, p - q) and e what the
    weights have too much, e <= that mass, the draw happens with probability R and is off by e / (R + e) at most.

    Args:
        probabilities: float[n, V], p.
        ids: int64[n, m], tokens of which q is known, in any order and also twice; -1 for none.
        logprobs: float[n, m], log q of them.

    Returns:
        float[n, V], not normalised; p itself in rows where nothing is left.
    """
    q = torch.zeros_like(probabilities)
    values = logprobs.to(q.dtype).exp().masked_fill_(ids < 0, 0.0)
    q.scatter_reduce_(1, ids.clamp(min=0), values, "amax")
    weights = (probabilities - q).clamp_(min=0.0)
    return torch.where(weights.sum(dim=-1, keepdim=True) > 0, weights, probabilities)


def _greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    best, tokens = logits.float().max(dim=-1)
    # x - x is 0 for a finite x and NaN otherwise.
    return tokens, best - best


def _point_mass(tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Log-probabilities float32[n] of ``wanted`` when each row has nothing but its token."""
    return torch.zeros(len(tokens), device=tokens.device).masked_fill_(tokens != wanted, float("-inf"))


def _joined(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def _likeliest(probabilities: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top`` likeliest tokens int64[n, top] of each row and their log-probabilities; -1 where p is 0."""
    values, ids = probabilities.topk(top, dim=-1)
    return ids.masked_fill_(values <= 0, -1), values.log_()


def _only(tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of rows that have nothing but their token."""
    ids = torch.full((len(tokens), top), -1, device=tokens.device)
    logprobs = torch.full((len(tokens), top), float("-inf"), device=tokens.device)
    ids[:, 0], logprobs[:, 0] = tokens, 0.0
    return ids, logprobs


def _keep_top_k(logits: torch.Tensor, top_k: npt.NDArray[np.int64]) -> torch.Tensor:
    vocabulary = logits.shape[1]
    limited = np.where((top_k > 0) & (top_k < vocabulary), top_k, 0)
    widest = int(limited.max())
    if widest == 0:
        return logits
    values = logits.topk(widest, dim=-1).values
    index = torch.from_numpy(np.maximum(limited - 1, 0)).to(logits.device)
    floor = values.gather(1, index[:, None])
    floor.masked_fill_(torch.from_numpy(limited == 0).to(logits.device)[:, None], float("-inf"))
    return logits.masked_fill(logits < floor, float("-inf"))


def _keep_top_p(probabilities: torch.Tensor, top_p: npt.NDArray[np.float32]) -> torch.Tensor:
    mass = torch.from_numpy(top_p).to(probabilities.device)[:, None].double()
    limited = mass < 1
    width = min(_NUCLEUS, probabilities.shape[1])
    while True:
        values = probabilities.topk(width, dim=-1).values
        total = values.cumsum(dim=-1, dtype=torch.float64)
        if width == probabilities.shape[1] or bool(((total[:, -1:] >= mass) | ~limited).all()):
            break
        width = min(width * 8, probabilities.shape[1])
    # The nucleus is the shortest run of most likely tokens whose mass reaches top_p.
    inside = (total - values) < mass
    last = inside.sum(dim=-1, keepdim=True).clamp_(min=1) - 1
    floor = values.gather(1, last).masked_fill_(~limited, 0.0)
    kept = probabilities.masked_fill(probabilities < floor, 0.0)
    return torch.where(limited, kept / kept.sum(dim=-1, keepdim=True), probabilities)
