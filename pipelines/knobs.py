"""Fields of the configuration that may change while a run goes on, and which values they take then."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from pipelines.config import Config
from pipelines.config_fields import field_docs, nearest_key
from storage.errors import UserError

log = logging.getLogger(__name__)

Value = str | int | float

KNOBS: Mapping[str, str] = {
    "speculation.source": "drafts off, or on again as configured",
    "speculation.gate": "which rule decides whether drafts pay",
    "schedule.overlaunch_prompts": "groups launched per group trained in a short round of batching tail",
    "asynchrony.max_staleness": "only downwards from what was configured",
    "learner.learning_rate": "peak of the schedule, which goes on from where it is",
    "evaluation.every": "steps between evaluations, 0 for none",
    "checkpoint.every": "steps between checkpoints, 0 for none",
}
"""Fields that may change while a run goes on, with what is special about each.

They decide how fast a run is, how closely it is watched and how far it steps, and none of them changes what a group, a
reward or a checkpoint means.
"""

LAUNCHING = frozenset(("schedule.overlaunch_prompts", "asynchrony.max_staleness"))
"""Knobs that change which groups are launched and which are too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A field that may change while the run goes on.

    Attributes:
        name: Dotted path of the field.
        value: What holds now.
        coming: What will hold from the next step on; equal to ``value`` when nothing is under way.
        configured: What the run was started with.
        kind: Values that it takes, in words.
        note: What is special about it.
    """

    name: str
    value: Value
    coming: Value
    configured: Value
    kind: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An accepted change of a knob.

    Attributes:
        name: Dotted path of the field.
        before: What holds until then.
        after: What holds from ``step`` on.
        step: First step that it holds for, counted from 1.
    """

    name: str
    before: Value
    after: Value
    step: int

    def __str__(self) -> str:
        if self.before == self.after:
            return f"{self.name} is {self.after} already"
        return f"{self.name}: {self.before} -> {self.after} from step {self.step} on"


class Knobs:
    """The knobs of one run: what it was started with, what holds now, what will hold from the next step on.

    Attributes:
        config: The configuration that holds now.
    """

    def __init__(self, config: Config, saved: Mapping[str, Any]) -> None:
        """Start with the configuration of the run, and with the knobs that a checkpoint ``saved``."""
        self._started = config
        self._pending: dict[str, Value] = {}
        self.config = _restored(config, saved)

    @property
    def coming(self) -> Config:
        """The configuration from the next step on."""
        return _with(self._started, self.config, self._pending)

    @property
    def pending(self) -> frozenset[str]:
        """Knobs whose accepted change does not hold yet."""
        return frozenset(self._pending)

    @property
    def wiring(self) -> Config:
        """``config``, but with the source of drafts that workers and their successors are built for, on or off."""
        started = self._started.speculation
        built = self.config.speculation.model_copy(update={"source": started.source, "verify": started.verify})
        return self.config.model_copy(update={"speculation": built})

    def all(self) -> tuple[Knob, ...]:
        """Return what may be changed, with the present values."""
        docs, coming = field_docs(), self.coming
        return tuple(
            Knob(
                name=name,
                value=_get(self.config, name),
                coming=_get(coming, name),
                configured=_get(self._started, name),
                kind=docs[name].kind,
                note=note,
            )
            for name, note in KNOBS.items()
        )

    def set(self, name: str, value: Value) -> tuple[Value, Value]:
        """Accept a change from the next step on; returns the value until then and the value from then on.

        Raises:
            UserError: It is no knob, or the value is not one that it takes in this run.
        """
        _check_knob(name)
        before = _get(self.coming, name)
        after = _get(_validated(self._started, self.config, self._pending, name, value), name)
        _check_value(self._started, name, after)
        if after != before:
            self._pending[name] = after
        return before, after

    def apply(self) -> frozenset[str]:
        """Let the accepted changes hold from now on; returns which those are."""
        changed = self.pending
        self.config, self._pending = self.coming, {}
        return changed

    def saved(self) -> dict[str, dict[str, Value]]:
        """Knobs that differ from the configuration, accepted ones included, for a checkpoint."""
        changed = [knob for knob in self.all() if knob.coming != knob.configured]
        return {knob.name: {"value": knob.coming, "configured": knob.configured} for knob in changed}


def _restored(config: Config, saved: Mapping[str, Any]) -> Config:
    """Apply the knobs of a checkpoint, but for fields that have another value since: the command line said so."""
    kept = {
        name: entry["value"]
        for name, entry in saved.items()
        if name in KNOBS and _get(config, name) == entry["configured"]
    }
    for name, value in kept.items():
        log.info("%s is %s, as a driver has set it", name, value)
    return _with(config, config, kept)


def _check_knob(name: str) -> None:
    if name in KNOBS:
        return
    near = difflib.get_close_matches(name, KNOBS, 1, 0.4) or [k for k in KNOBS if k == nearest_key(name)]
    hint = f"; did you mean {near[0]}?" if near else ""
    reason = (
        "decides what the run or its checkpoints mean and cannot change while it goes on"
        if name in field_docs()
        else "is no field of the configuration"
    )
    raise UserError(f"{name} {reason}{hint if name not in field_docs() else ''}; what can be set: {', '.join(KNOBS)}")


def _check_value(started: Config, name: str, value: Value) -> None:
    """Raise for a value that the field takes in general, but not in this run."""
    speculation = started.speculation
    if name.startswith("speculation.") and speculation.source == "off":
        raise UserError(
            f"{name}: this run was started with speculation.source=off and keeps no history to draft from; start one "
            "with speculation.source=history"
        )
    if name == "speculation.source" and value not in ("off", speculation.source):
        raise UserError(
            f"speculation.source: got {value}; must be off or {speculation.source}, which the run was started with: "
            "its rollout workers are built for that"
        )
    if name == "schedule.overlaunch_prompts" and started.schedule.batching != "tail":
        raise UserError(
            f"schedule.overlaunch_prompts belongs to schedule.batching=tail; this run has {started.schedule.batching}"
        )
    most = started.asynchrony.max_staleness
    if name == "asynchrony.max_staleness" and int(value) > most:
        raise UserError(
            f"asynchrony.max_staleness: got {value}; must be an integer from 0 to {most}: it may only be lowered from "
            "what the run was started with, since its samples are promised to be no older than that"
        )


def _validated(started: Config, config: Config, pending: Mapping[str, Value], name: str, value: Value) -> Config:
    """Return the configuration with one more change, checked as a whole."""
    try:
        return _with(started, config, {**pending, name: value})
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = []
        for detail in details:
            if detail["type"] == "value_error":
                problems += str(detail["ctx"]["error"]).split("\n")
            else:
                problems.append(f"{name}: got {value!r}; must be {field_docs()[name].kind}{_near(name, value)}")
        raise UserError("; ".join(dict.fromkeys(problems))) from None


def _near(name: str, value: Value) -> str:
    """Return a hint at the choice that a misspelt word means."""
    kind = field_docs()[name].kind
    if not isinstance(value, str) or not kind.startswith("one of: "):
        return ""
    near = difflib.get_close_matches(value, kind.removeprefix("one of: ").split(", "), 1, 0.0)
    return f" (did you mean {near[0]}?)" if near else ""


def _with(started: Config, config: Config, values: Mapping[str, Value]) -> Config:
    """Return ``config`` with some fields changed; raises ``ValidationError``."""
    if not values:
        return config
    tree = config.model_dump(mode="python")
    for name, value in values.items():
        section, _, field = name.partition(".")
        tree[section][field] = value
        if name == "speculation.source":  # with drafts off nothing is verified
            tree[section]["verify"] = "exact" if value == "off" else started.speculation.verify
    return Config.model_validate(tree)


def _get(config: Config, name: str) -> Value:
    section, _, field = name.partition(".")
    value: Value = getattr(getattr(config, section), field)
    return value
