"""What each metric means: those of the steps in ``metrics.jsonl``, and the live ones on Ray's metrics endpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """What a metric means, its unit (empty: a plain number) and what to expect of a healthy run."""

    meaning: str
    unit: str = ""
    healthy: str = ""


METRICS: Mapping[str, Metric] = {
    # What the policy earns
    "reward/mean": Metric("Mean weighted reward of the step's scored answers", "", "rises"),
    "reward/std": Metric("Standard deviation of those rewards", "", "above 0: else nothing can be learned"),
    "reward/part/<function>": Metric("Mean raw value of one reward function, abstentions left out", "", "rises"),
    "reward/error_share": Metric("Answers whose scoring failed or timed out", "share", "below reward.error_alarm"),
    "reward/timeout_share": Metric(
        "Trained answers whose scoring was stopped at its deadline", "share", "below reward.error_alarm"
    ),
    "reward/score_mean_s": Metric("Mean time that the reward functions took for a trained answer", "s"),
    "reward/score_max_s": Metric("Longest of those", "s", "below reward.timeout_s"),
    "reward/deadline_s": Metric("Mean deadline of scores, with schedule.reward_deadlines.adaptive", "s"),
    "reward/deadline_short_share": Metric(
        "Scores whose deadline was below reward.timeout_s, since the prompt was answered correctly before",
        "share",
        "rises",
    ),
    "reward/zero_variance_share": Metric("Groups whose rewards are all equal: no gradient", "share", "below 0.8"),
    "accuracy/train": Metric("Answers of the step that the first reward function calls correct", "share", "rises"),
    # Held-out evaluation
    "eval/<set>/accuracy": Metric("Greedy answers that are correct", "share", "rises"),
    "eval/<set>/accuracy_stderr": Metric("Standard error of accuracy over prompts", "share", "below the gain claimed"),
    "eval/<set>/accuracy_low": Metric("Lower end of the 95 % interval of accuracy (Wilson)", "share"),
    "eval/<set>/accuracy_high": Metric("Upper end of the 95 % interval of accuracy (Wilson)", "share"),
    "eval/<set>/mean_at_k": Metric("Expected accuracy of one sampled answer, k = evaluation.samples", "share", "rises"),
    "eval/<set>/mean_at_k_stderr": Metric("Standard error of mean_at_k over prompts", "share"),
    "eval/<set>/mean_at_k_low": Metric("Lower end of the 95 % interval of mean_at_k", "share"),
    "eval/<set>/mean_at_k_high": Metric("Upper end of the 95 % interval of mean_at_k", "share"),
    "eval/<set>/pass_at_k": Metric("Chance that one of k sampled answers is correct", "share", "does not fall"),
    "eval/<set>/pass_at_k_stderr": Metric("Standard error of pass_at_k over prompts", "share"),
    "eval/<set>/pass_at_<j>": Metric("Chance that one of j sampled answers is correct (unbiased)", "share"),
    "eval/<set>/reward": Metric("Mean weighted reward of the greedy answers", "", "rises"),
    "eval/<set>/length_mean": Metric("Mean length of the greedy answers", "tokens"),
    "eval/<set>/truncated_share": Metric("Greedy answers that hit the token limit", "share", "below 0.1"),
    "eval/<set>/prompts": Metric("Prompts evaluated", "prompts"),
    "eval/<set>/error_share": Metric(
        "Answers that could not be generated or scored; they leave the figures", "share", "0"
    ),
    "eval/<set>/abstained": Metric("Answers that the first reward function did not judge", "answers", "0"),
    # Generation
    "rollout/tokens": Metric("Tokens generated in the step", "tokens"),
    "rollout/samples": Metric("Answers finished in the step", "answers"),
    "rollout/tokens_per_s": Metric("Tokens generated per second of the generation phase", "tokens/s"),
    "rollout/length_mean": Metric("Mean length of the answers", "tokens"),
    "rollout/length_p50": Metric("Median length", "tokens"),
    "rollout/length_p90": Metric("Length that 90 % of the answers stay below", "tokens"),
    "rollout/length_max": Metric("Longest answer", "tokens"),
    "rollout/truncated_share": Metric("Answers that hit rollout.max_tokens", "share", "below 0.1"),
    "rollout/error_share": Metric("Answers that could not be generated", "share", "0"),
    "rollout/acceptance": Metric("Draft tokens accepted of those verified", "share", "above 0.5 with speculation on"),
    "rollout/tokens_per_pass": Metric("Tokens emitted per forward pass and answer", "tokens", "1 without speculation"),
    "rollout/busy_share": Metric("Engine time of the busiest worker over the step", "share", "above 0.5"),
    "rollout/utilisation": Metric("Engine time over rollout.workers times the step", "share", "above 0.5"),
    "rollout/slot_bubble": Metric(
        "Slots that wrote nothing, of rollout.max_rows slots in every forward pass", "share", "below 0.5"
    ),
    "rollout/replica_idle": Metric(
        "Idle time of the workers until the busiest one is done, of all workers times its time", "share", "below 0.2"
    ),
    "rollout/pacing_overrun_share": Metric(
        "With rollout.pacing: engine steps since the start that took more than 0.7 of their paced time, worst worker",
        "share",
        "below 0.05: else the run measures the machine, not the pace",
    ),
    "rollout/freed_mb": Metric(
        "With cluster.placement=colocated: what all engines gave back when they went to sleep",
        "MB",
    ),
    "rollout/tail_s": Metric("From the time when 80 % of the trained answers were written to the last of them", "s"),
    # Drafts from history
    "speculation/drafted/<source>": Metric("Draft tokens verified in the step, by where they came from", "tokens"),
    "speculation/accepted/<source>": Metric("Draft tokens accepted in the step, by where they came from", "tokens"),
    "speculation/gate_open": Metric(
        "Share of workers whose drafts are switched on", "share", "1 from the second epoch"
    ),
    "speculation/predicted_gain": Metric("Speed of decoding that the drafts promise over plain", "", "above 1"),
    "speculation/measured_gain": Metric("Speed of decoding with drafts over plain, measured", "", "above 1"),
    "speculation/cost_fixed_ms": Metric("Fitted time of a forward pass without rows", "ms"),
    "speculation/cost_row_ms": Metric("Fitted time that each row adds to a pass", "ms"),
    "speculation/cost_token_ms": Metric("Fitted time that each token adds to a pass", "ms"),
    "speculation/index_mb": Metric("Draft packs that rollout workers hold", "MB", "below speculation.index_mb"),
    "speculation/live_index_mb": Metric("Indexes of running siblings", "MB"),
    "speculation/residual_draws": Metric("Rejected tokens that a draw from the residual replaced", "tokens"),
    "speculation/residual_tail_mass": Metric(
        "Mass of the old distribution beyond its stored likeliest tokens, mean over these draws; bounds their error",
        "share",
        "below 0.05; else raise speculation.residual_top_k",
    ),
    "speculation/reused_share": Metric("Answers that leniently kept part of the previous one", "share"),
    "speculation/reused_tokens_share": Metric("Leniently kept tokens among all of the step", "share"),
    "speculation/bias_reward": Metric("Mean reward of reused answers less that of fresh ones, by prompt", "", "near 0"),
    "speculation/bias_length": Metric("Mean length of reused answers less that of fresh ones", "tokens", "near 0"),
    # Time
    "time/step_s": Metric("Wall-clock time of the whole step", "s"),
    "time/generate_s": Metric("Engine time of the busiest rollout worker", "s", "most of the step"),
    "time/reward_s": Metric("Waiting for rewards after the last answer", "s", "near 0: rewards overlap generation"),
    "time/learn_s": Metric("Optimiser step", "s"),
    "time/publish_s": Metric("New weights from the learner to every rollout worker", "s"),
    "time/pause_s": Metric("Longest pause of a rollout worker for new weights", "s", "far below time/publish_s"),
    "time/sleep_s": Metric(
        "With cluster.placement=colocated: engines going to sleep and waking, the latter also in time/publish_s",
        "s",
        "far below time/learn_s",
    ),
    "time/checkpoint_s": Metric("Writing a checkpoint", "s"),
    "time/evaluate_s": Metric("Held-out evaluation", "s"),
    "time/other_s": Metric("Rest of the step: queues, records, bookkeeping", "s", "at most 10 % of time/step_s"),
    "time/overhead_share": Metric("time/other_s over time/step_s", "share", "at most 0.1"),
    # What the work was worth
    "goodput/tokens_per_s": Metric("Generated tokens that were trained on, per second of the whole step", "tokens/s"),
    "goodput/samples_per_s": Metric("Answers that were trained on, per second of the whole step", "answers/s"),
    "waste/tokens": Metric("Generated tokens given up in the step: no optimiser step will use them", "tokens"),
    "waste/share": Metric("Those over the tokens generated in the step", "share", "below 0.1"),
    "staleness/mean": Metric("Versions between an answer's oldest token and the step that trains on it", "versions"),
    "staleness/max": Metric("Largest of those", "versions", "at most asynchrony.max_staleness"),
    # Schedule
    "schedule/long_round": Metric("1 when the step ran a long round, without a race"),
    "schedule/waiting": Metric("Groups that wait when the step ends: deferred, or drawn and not launched", "groups"),
    "predictor/fallbacks": Metric(
        "Times that the length predictor did not answer and the history mean decided", "", "0"
    ),
    "predictor/dropped": Metric("Observations dropped because the predictor was away for too long", "", "0"),
    "predictor/restores": Metric("Times that a new replica of the predictor was told what the old one knew", "", "0"),
    # Bookkeeping of groups
    "ledger/launched": Metric("Groups issued since the start", "groups", "sum of the states below"),
    "ledger/queued": Metric("Groups waiting for a worker", "groups"),
    "ledger/leased": Metric("Groups with a worker", "groups"),
    "ledger/ready": Metric("Groups complete and waiting for the learner", "groups"),
    "ledger/trained": Metric("Groups trained on", "groups"),
    "ledger/ended/<reason>": Metric("Groups that ended without training, by reason", "groups"),
    "progress/epoch": Metric("Passes over the training prompts so far", "epochs"),
    "progress/version": Metric("Version of the weights after the step", "versions"),
    "storage/upload_s": Metric(
        "Last upload of a run directory that is a URI, beside the training", "s", "below time/step_s"
    ),
    "storage/upload_mb": Metric("Sent to the URI since the start of this process", "MB"),
    "storage/upload_failures": Metric("Attempts to send that failed; each is made again", "attempts", "0"),
    "storage/lag_steps": Metric("Steps that the URI is behind when a step is reported", "steps", "0 or 1"),
    "run/restarts": Metric("Times that the run went back to a checkpoint by itself, since it began", "", "0"),
    "run/steps_lost": Metric("Finished steps that it trained once more because of that", "steps", "few"),
    "faults/crashes": Metric("Workers that died or were replaced since the start of this process", "workers", "0"),
    # The learner. Trained tokens are those with a gradient: answers with advantage 0 are not computed without a KL term
    "learner/reward_mean": Metric("Mean reward of the scored answers of the batch, before shaping", "", "rises"),
    "learner/reward_std": Metric("Population standard deviation of those rewards", "", "above 0"),
    "learner/reward_errors": Metric("Answers of the batch whose scoring failed", "answers", "0"),
    "learner/reward_abstained": Metric("Answers of the batch that no reward function judged", "answers", "0"),
    "learner/unfinished": Metric("Answers of the batch that were aborted or not generated", "answers", "0"),
    "learner/zero_variance_groups": Metric("Groups of the batch whose rewards are all equal", "groups"),
    "learner/truncated_fraction": Metric("Answers of the batch that hit the token limit", "share", "below 0.1"),
    "learner/length_mean": Metric("Mean length of the answers of the batch", "tokens"),
    "learner/length_max": Metric("Longest answer of the batch", "tokens"),
    "learner/staleness_mean": Metric("Versions between a token and the weights that it trains", "versions"),
    "learner/staleness_max": Metric("Largest of those", "versions", "at most asynchrony.max_staleness"),
    "learner/staleness_group_mean": Metric("Mean staleness of the groups, that of their oldest token", "versions"),
    "learner/staleness_tokens/<versions>": Metric("Policy tokens of that staleness", "share"),
    "learner/staleness_groups/<versions>": Metric("Groups whose oldest token has that staleness", "share"),
    "learner/mixed_version_share": Metric("Answers that more than one version wrote", "share"),
    "learner/version_span_max": Metric("Most versions between two tokens of one answer", "versions"),
    "learner/decay_weight_min": Metric("Smallest weight that staleness decay gives to a token", "", "1 without decay"),
    "learner/decay_weight_max": Metric("Largest weight that staleness decay gives to a token", "", "1 without decay"),
    "learner/entropy_sampled": Metric("Entropy of the behaviour policy, -mean logprob of its tokens", "nats"),
    "learner/rejected_nonfinite": Metric("Answers without a finite behaviour logprob", "answers", "0"),
    "learner/rejected_support": Metric("Tokens that top-p or top-k would no longer draw", "tokens", "few"),
    "learner/answers_trained": Metric("Answers with a gradient", "answers"),
    "learner/tokens_trained": Metric("Trained tokens", "tokens"),
    "learner/entropy": Metric("Exact entropy of the policy at trained tokens", "nats", "falls slowly, not to 0"),
    "learner/kl_behaviour": Metric("KL(behaviour || current), k3 estimate", "nats", "below 0.01 on policy"),
    "learner/kl_reference": Metric("KL to the initial policy, with a KL term only", "nats", "below 1"),
    "learner/ratio_mean": Metric("Mean of pi / behaviour over trained tokens", "", "1.00 on policy"),
    "learner/ratio_p99": Metric("99th percentile of that ratio", "", "below 1.1 on policy"),
    "learner/ratio_outside": Metric(
        "Trained tokens with that ratio outside [0.9, 1.1]", "share", "below 0.01 on policy"
    ),
    "learner/clip_fraction_low": Metric("Trained tokens whose gradient the lower clip cuts", "share", "below 0.2"),
    "learner/clip_fraction_high": Metric("Trained tokens whose gradient the upper clip cuts", "share", "below 0.2"),
    "learner/dual_clip_fraction": Metric("Trained tokens whose gradient the dual clip cuts", "share", "near 0"),
    "learner/behaviour_weight_mean": Metric("Mean truncated behaviour weight, with a proximal anchor", "", "near 1"),
    "learner/behaviour_weight_capped": Metric("Trained tokens whose behaviour weight is capped", "share", "below 0.05"),
    "learner/prefix_share": Metric("Scored tokens without a gradient: an older version wrote them", "share"),
    "learner/prefix_weight_mean": Metric("Mean truncated weight of prefixes, grad_tokens=current_only", "", "near 1"),
    "learner/prefix_weight_capped": Metric("Prefixes whose weight is capped", "share", "below 0.2"),
    "learner/sequence_masked": Metric("Answers that the sequence mask left out", "share", "below 0.1"),
    "learner/ess": Metric("Effective sample size of the answers' weights over their number", "share", "above 0.5"),
    "learner/ess_tokens": Metric("Effective sample size of token weights over their number", "share", "above 0.5"),
    "learner/guard_skipped": Metric("1 when the drift guard left the batch out", "", "0"),
    "learner/guard_clipped": Metric("1 when the drift guard capped weights lower", "", "0"),
    "learner/guard_cap": Metric("The cap that it set, when it did"),
    "learner/published": Metric("1 when the step ended with a new version"),
    "learner/grad_norm": Metric("Gradient norm before clipping, mean over updates", "", "steady, no spikes"),
    "learner/learning_rate": Metric("Learning rate of the last update"),
    "learner/updates": Metric("Optimiser updates of the step", "updates", "learner.minibatches"),
    "learner/skipped_nonfinite": Metric("Updates left out for a gradient that was not finite", "updates", "0"),
    "learner/microbatches": Metric("Forward and backward passes", "passes"),
    "learner/padding_share": Metric("Padding among the tokens computed", "share", "below 0.2"),
    "learner/seconds_forward_backward": Metric("Time in forward and backward passes", "s"),
    "learner/seconds_proximal": Metric("Time recomputing proximal logprobs", "s"),
    "learner/seconds_optimiser": Metric("Time in clipping and updating", "s"),
    "learner/seconds_total": Metric("Time of the learner in the step", "s"),
}


@dataclass(frozen=True, slots=True)
class Live:
    """A metric of a running run on Ray's metrics endpoint.

    Attributes:
        kind: What Prometheus takes it for.
        meaning: What it means.
        unit: Its unit; empty for a plain number.
        healthy: What to expect of a healthy run.
        tag: Label that splits it, over a small fixed vocabulary; empty for one series. ``run`` comes on top.
        source: Name in `METRICS` of the figure that it repeats, for gauges that show the last step.
    """

    kind: Literal["gauge", "counter", "histogram"]
    meaning: str
    unit: str = ""
    healthy: str = ""
    tag: str = ""
    source: str = ""


def _last(source: str) -> Live:
    metric = METRICS[source]
    return Live("gauge", metric.meaning, metric.unit, metric.healthy, source=source)


LIVE: Mapping[str, Live] = {
    "phase": Live("gauge", "1 for what the run is doing now, 0 for everything else", "", "generating", "phase"),
    "step": Live("gauge", "Optimiser steps finished", "steps", "rises"),
    "version": _last("progress/version"),
    "reward": _last("reward/mean"),
    "accuracy": _last("accuracy/train"),
    "zero_variance_share": _last("reward/zero_variance_share"),
    "tokens": Live("counter", "Tokens since the start of the conductor's process", "tokens", "rises", "use"),
    "tokens_per_second": _last("rollout/tokens_per_s"),
    "goodput_tokens_per_second": _last("goodput/tokens_per_s"),
    "length_mean": _last("rollout/length_mean"),
    "truncated_share": _last("rollout/truncated_share"),
    "acceptance": _last("rollout/acceptance"),
    "waste_share": _last("waste/share"),
    "utilisation": _last("rollout/utilisation"),
    "bubble_share": _last("rollout/slot_bubble"),
    "replica_idle_share": _last("rollout/replica_idle"),
    "overhead_share": _last("time/overhead_share"),
    "staleness_mean": _last("staleness/mean"),
    "staleness_max": _last("staleness/max"),
    "queue_depth": Live("gauge", "Answers that are being generated, or wait for their score", "answers", "", "queue"),
    "wait_seconds": Live("gauge", "How long the run has waited for this, now", "s", "below its deadline", "label"),
    "errors": Live("gauge", "Failures since the start of the conductor's process", "failures", "0", "reason"),
    "restarts": _last("run/restarts"),
    "steps_lost": _last("run/steps_lost"),
    "ended_groups": Live("gauge", "Groups that ended without training, by reason", "groups", "few", "reason"),
    "reward_error_share": _last("reward/error_share"),
    "seconds": Live("histogram", "Durations of operations", "s", "no long tail", "operation"),
    "last_seconds": Live("gauge", "Last duration of an operation", "s", "steady", "operation"),
}
"""What Ray exports as ``ray_slipstream_<name>``; `pipelines.ray_metrics` makes exactly these series."""


def exported_names(name: str) -> tuple[str, ...]:
    """Return the names under which Prometheus finds a metric of `LIVE`."""
    full = f"ray_slipstream_{name}"
    endings = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
    return tuple(full + ending for ending in endings[LIVE[name].kind])


_PATTERNS = [(re.compile(re.sub(r"<\w+>", "[^/]+", name)), name) for name in METRICS if "<" in name]


def describe(name: str) -> Metric | None:
    """Return the documentation of a logged name, ``<placeholders>`` of `METRICS` included; ``None`` if it has none."""
    if name in METRICS:
        return METRICS[name]
    return next((METRICS[template] for pattern, template in _PATTERNS if pattern.fullmatch(name)), None)


def undocumented(names: Iterable[str]) -> list[str]:
    """Return the logged names that `METRICS` does not document, sorted; the fields that every record has are known."""
    return sorted(name for name in names if name not in ("step", "time", "wall_s") and describe(name) is None)
