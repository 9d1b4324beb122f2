"""What each named algorithm means: one frozen specification, resolved from the options.

A field that the options leave null takes the value of the table below. This module needs no torch, so a dry run can
check an algorithm before anything is loaded.

What the clipped ratio is anchored on matters more than any constant. With one optimiser update per batch the proximal
policy *is* the current policy, so a ratio to recomputed logprobs is 1 and its clip is inert. Hence:

* ``grpo``, ``dr_grpo``, ``dapo`` anchor on **behaviour**: the logprobs that the engine recorded when it sampled. The
  ratio covers staleness and numerical mismatch between engine and learner alike, and no further weight is applied.
* ``decoupled_ppo``, ``tis`` anchor on the **proximal** policy (the weights just before the batch) and multiply by the
  detached, truncated behaviour weight min(pi_proximal / pi_behaviour, cap). Never neither, never both.
* ``gspo``, ``cispo`` anchor on **behaviour**, as in their papers, where the old policy is the one that sampled;
  ``anchor: proximal`` gives their decoupled forms, with the behaviour weight (of the sequence, for GSPO) in front.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from actors.learner.options import AlgorithmOptions
from storage.errors import UserError

Anchor = Literal["behaviour", "proximal"]
Level = Literal["token", "sequence"]
Surrogate = Literal["clip", "weight"]
Aggregation = Literal["token", "sequence", "constant"]
AdvantageKind = Literal["group_std", "group_mean"]
KlEstimator = Literal["k1", "k2", "k3"]
MaskMode = Literal["off", "geometric", "max"]
GuardAction = Literal["off", "skip", "clip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An objective with every constant decided; which groups it asks for is ``AlgorithmOptions.filters_zero_variance``.

    Attributes:
        name: As in the options.
        anchor: Denominator of the clipped ratio.
        level: token: a ratio per token; sequence: the geometric mean of an answer's ratios, for all of its tokens.
        surrogate: clip: PPO's pessimistic minimum; weight: the clipped ratio as a detached weight of log pi.
        clip_low: Ratios below 1 - clip_low are clipped.
        clip_high: Ratios above 1 + clip_high are clipped.
        dual_clip: For negative advantages the objective is at least dual_clip * advantage; None is off.
        aggregation: How token losses become one number, see ``losses.aggregate``.
        advantage: How rewards become advantages, see ``advantages.group_advantages``.
        behaviour_cap: Cap of the behaviour weight; None exactly where the anchor is the behaviour policy.
        behaviour_cap_negative: The same for negative advantages; None: ``behaviour_cap``.
        prefix_cap: Cap of the importance weight of a prefix that has no gradient itself.
        mask: Which ratios decide whether an answer stays in the loss, see ``token_weights``.
        mask_low: Smallest such ratio.
        mask_high: Largest such ratio.
        guard: What happens to a batch with a small effective sample size, see ``drift_guard``.
        ess_floor: What counts as small, as a share of the tokens.
        kl_coefficient: Weight of the KL term towards the reference; 0 is off.
        kl_estimator: Estimator of that term per token.
    """

    name: str
    anchor: Anchor
    level: Level = "token"
    surrogate: Surrogate = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation
    advantage: AdvantageKind = "group_std"
    behaviour_cap: float | None = None
    behaviour_cap_negative: float | None = None
    prefix_cap: float = 2.0
    mask: MaskMode = "off"
    mask_low: float = 0.5
    mask_high: float = 2.0
    guard: GuardAction = "off"
    ess_floor: float = 0.3
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k3"


# Sources: GRPO arXiv 2402.03300; Dr.GRPO 2503.20783; DAPO 2503.14476; decoupled PPO 2110.00641 and AReaL 2505.24298
# (which caps at 5); TIS, "Your efficient RL framework secretly brings you off-policy RL training" (which caps at 2);
# GSPO 2507.18071; CISPO (MiniMax-M1) 2506.13585, which has no lower bound and leaves the upper one open: 5 here.
DEFAULTS: dict[str, Algorithm] = {
    "grpo": Algorithm(name="grpo", anchor="behaviour", aggregation="sequence"),
    "dr_grpo": Algorithm(name="dr_grpo", anchor="behaviour", aggregation="constant", advantage="group_mean"),
    "dapo": Algorithm(name="dapo", anchor="behaviour", aggregation="token", clip_high=0.28),
    "decoupled_ppo": Algorithm(name="decoupled_ppo", anchor="proximal", aggregation="token", behaviour_cap=5.0),
    "tis": Algorithm(name="tis", anchor="proximal", aggregation="token", behaviour_cap=2.0),
    "gspo": Algorithm(
        name="gspo", anchor="behaviour", level="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence"
    ),
    "cispo": Algorithm(
        name="cispo", anchor="behaviour", surrogate="weight", clip_low=1.0, clip_high=4.0, aggregation="token"
    ),
}
FREE_ANCHOR = ("gspo", "cispo")
_DECOUPLED_CAP = 5.0


def resolve_algorithm(options: AlgorithmOptions) -> Algorithm:
    """Fill the null fields of ``options`` from :data:`DEFAULTS`.

    Raises:
        UserError: A behaviour cap for an algorithm whose ratio is already taken to the behaviour policy, an anchor for
            one whose name decides it, or a dual clip where nothing is clipped.
    """
    default = DEFAULTS[options.name]
    anchor = options.anchor or default.anchor
    if anchor != default.anchor and options.name not in FREE_ANCHOR:
        same = " or ".join(name for name, algorithm in DEFAULTS.items() if algorithm.anchor == anchor)
        raise UserError(
            f"algorithm.anchor={anchor} contradicts algorithm.name={options.name}, which is anchored on the "
            f"{default.anchor} policy: remove it, or choose algorithm.name={same}"
        )
    for field, value in (
        ("behaviour_cap", options.behaviour_cap),
        ("behaviour_cap_negative", options.behaviour_cap_negative),
    ):
        if value is not None and anchor == "behaviour":
            proximal = " or ".join(name for name, algorithm in DEFAULTS.items() if algorithm.anchor == "proximal")
            other = ", or set algorithm.anchor=proximal" if options.name in FREE_ANCHOR else ""
            raise UserError(
                f"algorithm.{field} has no meaning for {options.name}, whose ratio is taken to the behaviour policy "
                f"itself: remove it, or choose algorithm.name={proximal}{other}"
            )
    if options.dual_clip is not None and default.surrogate == "weight":
        raise UserError(
            f"algorithm.dual_clip has no meaning for {options.name}, whose weights are bounded by clip_high whatever "
            "the advantage: remove it"
        )
    cap = _given(options.behaviour_cap, default.behaviour_cap or _DECOUPLED_CAP) if anchor == "proximal" else None
    return replace(
        default,
        anchor=anchor,
        clip_low=_given(options.clip_low, default.clip_low),
        clip_high=_given(options.clip_high, default.clip_high),
        dual_clip=options.dual_clip,
        aggregation=options.aggregation or default.aggregation,
        advantage=options.advantage or default.advantage,
        behaviour_cap=cap,
        behaviour_cap_negative=options.behaviour_cap_negative,
        prefix_cap=options.prefix_cap,
        mask=options.sequence_mask.mode,
        mask_low=options.sequence_mask.low,
        mask_high=options.sequence_mask.high,
        guard=options.drift_guard.action,
        ess_floor=options.drift_guard.ess_floor,
        kl_coefficient=options.kl.coefficient,
        kl_estimator=options.kl.estimator,
    )


def check_algorithm(options: AlgorithmOptions, *, max_tokens: int) -> None:
    """Reject options that contradict each other; needs no model.

    Raises:
        UserError: Names the field and what to do.
    """
    algorithm = resolve_algorithm(options)
    if options.overlong.mode == "soft" and options.overlong.buffer_tokens >= max_tokens:
        raise UserError(
            f"algorithm.overlong.buffer_tokens={options.overlong.buffer_tokens} covers every answer: it must be below "
            f"rollout.max_tokens={max_tokens}"
        )
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1 + algorithm.clip_high:
        raise UserError(
            f"algorithm.dual_clip={algorithm.dual_clip} must lie above 1 + clip_high = {1 + algorithm.clip_high:g}: "
            "it bounds ratios that the ordinary clip lets through"
        )


T = TypeVar("T")


def _given(value: T | None, default: T) -> T:
    return default if value is None else value
