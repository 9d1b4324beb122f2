"""Configuration of speculation: where drafts come from, how they are verified and how long they may be."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

GateMode = Literal["auto", "acceptance", "always"]


class SpeculationOptions(BaseModel):
    """Drafts that rollouts take from their own history.

    Verified exactly (the default), drafts never change which tokens are sampled, only how fast. ``verify: lenient`` is
    SPEC-RL (arXiv 2509.23232): it keeps most of the previous epoch's answer and biases the samples.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Literal["off", "history", "previous_epoch", "hybrid"] = Field(
        "off",
        description="off: plain decoding; history: longest-suffix match in earlier answers to the same prompt and in "
        "running siblings; previous_epoch: last epoch's answer of the same sample slot, position by position, and where "
        "a row left it, that of the slot which matches furthest; hybrid: "
        "the previous answer while it agrees, then history, then plain decoding.",
    )
    verify: Literal["exact", "lenient"] = Field(
        "exact",
        description="exact: point-mass rule, the sampling law is untouched; lenient: keep a token of the previous "
        "answer with probability min(1, lenience * p / q) up to the first that is not kept, and verify drafts behind it "
        "exactly (SPEC-RL; biased; needs source previous_epoch or hybrid).",
    )
    log_lenience: float = Field(
        0.5, ge=0, le=10, description="Natural logarithm of the lenience; 0.5 is the paper's e^0.5. Lenient only."
    )
    fresh_share: float = Field(
        0.1, ge=0, le=1, description="Share of the slots that are written afresh, to measure the bias. Lenient only."
    )
    residual: bool = Field(
        False,
        description="Where a token of the previous answer is not kept, draw from the residual max(0, p - q) instead of p, "
        "q being the residual_top_k likeliest tokens of its law, which are then stored with each answer. At log_lenience 0 "
        "that is exact for an answer that does not depend on the current weights; those were trained on it, so it stays "
        "biased. Lenient only.",
    )
    residual_top_k: int = Field(
        32,
        ge=1,
        le=256,
        description="Likeliest tokens stored at each place for residual; what is beyond counts as 0 in q "
        "(speculation/residual_tail_mass says how much that is). 8 bytes each. Unit: tokens.",
    )
    max_age: int = Field(
        0,
        ge=0,
        description="Reuse no answer whose oldest token is more versions old than this; 0: no limit. Lenient only.",
    )
    index: Literal["automaton", "levels", "fuzzy"] = Field(
        "automaton",
        description="automaton: suffix automaton, matches of any length; levels: tables keyed by the last 3 to 5 tokens; "
        "fuzzy: MinHash LSH over n-grams.",
    )
    unseen: Literal["off", "global", "nearest"] = Field(
        "off",
        description="Drafts for prompts without history: off; global: one index over recent answers to other prompts; "
        "nearest: answers to the most similar prompts.",
    )
    live: bool = Field(True, description="Also draft from siblings that are being written and from the row's own text.")
    window: int = Field(
        4, ge=1, le=1000, description="Visits of a prompt whose answers are kept for drafts. Unit: visits."
    )
    recency: float = Field(
        0.7,
        gt=0,
        le=1,
        description="Weight of an answer relative to one that is a visit younger, when counts are built.",
    )
    index_mb: float = Field(
        256.0, gt=0, description="Memory for indexes; the least recently used are dropped above it. Unit: megabytes."
    )
    draft_length: Literal["calibrated", "fixed", "aimd"] = Field(
        "calibrated",
        description="calibrated: go on while the acceptance seen so far pays for the token; fixed: match match_length "
        "tokens, draft draft_tokens; aimd: HistoSpec's rule, +2 after a full acceptance, back to 2 after a rejection.",
    )
    match_length: int = Field(3, ge=1, le=64, description="Shortest match of draft_length fixed. Unit: tokens.")
    draft_tokens: int = Field(5, ge=1, le=256, description="Draft of draft_length fixed. Unit: tokens.")
    max_draft: int = Field(32, ge=1, le=512, description="Longest draft of a row in one pass. Unit: tokens.")
    order: Literal["frequency", "recency"] = Field(
        "frequency", description="Which continuation index levels prefers: the most frequent or the latest."
    )
    heat_half_life: float = Field(
        2.0,
        gt=0,
        description="Visits after which an entry of index levels counts half (frequency order). Unit: visits.",
    )
    gate: GateMode = Field(
        "auto",
        description="auto: drafts stop while they cost more than they bring, and are probed again; acceptance: they "
        "stop while less than acceptance_floor of them is accepted; always: never stop.",
    )
    acceptance_floor: float = Field(
        0.7, gt=0, lt=1, description="Share of accepted draft tokens below which gate acceptance stops drafting."
    )
    pack_wait_s: float = Field(
        1.0,
        ge=0,
        le=60,
        description="Longest time that a rollout waits for its drafts before it starts without. Unit: seconds.",
    )

    @property
    def top_tokens(self) -> int:
        """Likeliest tokens that are recorded and stored at each place of an answer; 0: none."""
        return self.residual_top_k if self.residual and self.verify == "lenient" and self.source != "off" else 0
