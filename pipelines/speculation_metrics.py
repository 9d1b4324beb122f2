"""What drafts did in a step, from the counters of the rollout workers and from sample headers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from storage.records import SampleHeader

Counters = Mapping[str, Mapping[str, float]]

_GAUGES = ("gate_open", "predicted_gain", "measured_gain", "cost_fixed_ms", "cost_row_ms", "cost_token_ms")
_SUMS = ("index_mb", "live_index_mb")
_COUNTS = ("drafted_", "accepted_")
_RESIDUAL = ("residual_draws", "residual_tail")


def speculation_metrics(before: Counters, after: Counters) -> dict[str, float]:
    """Return the metrics of a step from the counters of each worker before and after it.

    Counts are differences summed over workers, gauges are means over workers, memory is summed.
    """
    if not after:
        return {}
    metrics: dict[str, float] = {}
    for name in {name for counters in after.values() for name in counters}:
        values = [counters[name] for counters in after.values() if name in counters]
        if name.startswith(_COUNTS):
            kind, source = name.split("_", 1)
            if gained := _gained(name, before, after):
                metrics[f"speculation/{kind}/{source}"] = gained
        elif name in _GAUGES:
            metrics[f"speculation/{name}"] = float(np.mean(values))
        elif name in _SUMS:
            metrics[f"speculation/{name}"] = float(sum(values))
    draws, tail = (_gained(name, before, after) for name in _RESIDUAL)
    if draws:
        metrics["speculation/residual_draws"] = draws
        metrics["speculation/residual_tail_mass"] = tail / draws
    return metrics


def _gained(name: str, before: Counters, after: Counters) -> float:
    """Growth of a counter over all workers; one that was replaced counts from 0 again."""
    return sum(
        max(0.0, counters[name] - before.get(worker, {}).get(name, 0.0))
        for worker, counters in after.items()
        if name in counters
    )


def bias_metrics(groups: Iterable[Sequence[SampleHeader]]) -> dict[str, float]:
    """Return how leniently reused answers differ from answers written afresh, nothing where none was reused.

    ``bias_reward`` and ``bias_length`` are means over prompts that have both kinds of (mean over reused answers - mean
    over fresh answers). The fresh share of slots is drawn without looking at answers, so an unbiased reuse has
    expectation 0.
    """
    headers = [list(group) for group in groups]
    everyone = [header for group in headers for header in group]
    reused = [header for header in everyone if header.reused >= 0]
    if not reused:
        return {}
    metrics = {
        "speculation/reused_share": len(reused) / len(everyone),
        "speculation/reused_tokens_share": sum(h.reused for h in reused) / max(1, sum(h.tokens for h in everyone)),
    }
    rewards: list[float] = []
    lengths: list[float] = []
    for group in headers:
        old = [h for h in group if h.reused >= 0]
        new = [h for h in group if h.reused < 0]
        if not (old and new):
            continue
        lengths.append(float(np.mean([h.tokens for h in old]) - np.mean([h.tokens for h in new])))
        scores = [[h.reward for h in part if h.reward is not None] for part in (old, new)]
        if all(scores):
            rewards.append(float(np.mean(scores[0]) - np.mean(scores[1])))
    if lengths:
        metrics["speculation/bias_length"] = float(np.mean(lengths))
    if rewards:
        metrics["speculation/bias_reward"] = float(np.mean(rewards))
    return metrics
