"""Groups that were drawn from the source and do not run: never launched, or left behind by a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.flow import SampleFlow
from pipelines.scheduling.policy import WaitingGroup
from storage.errors import UserError
from storage.records import GroupKey, Prompt


@dataclass(slots=True)
class Waiting:
    """A group that waits: its prompt, and how often a round has left it behind."""

    prompt: Prompt
    deferrals: int = 0


class Backlog:
    """Waiting groups, oldest first; their tokens, if they keep any, lie with the flow.

    A checkpoint holds the groups without their tokens: after a resume they begin anew, under newer weights.
    """

    def __init__(self) -> None:
        self._groups: dict[GroupKey, Waiting] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, key: GroupKey) -> bool:
        return key in self._groups

    @property
    def oldest_epoch(self) -> int | None:
        """Smallest epoch among the waiting groups; None without any."""
        return min((key.epoch for key in self._groups), default=None)

    def add(self, key: GroupKey, prompt: Prompt, deferrals: int = 0) -> None:
        """Let a group wait, behind the others."""
        self._groups[key] = Waiting(prompt, deferrals)

    def take(self, key: GroupKey) -> Waiting:
        """Take a group out, to be launched."""
        return self._groups.pop(key)

    def prompt(self, key: GroupKey) -> Prompt:
        """Prompt of a waiting group."""
        return self._groups[key].prompt

    def view(self, flow: SampleFlow, size: int) -> dict[GroupKey, WaitingGroup]:
        """Return what a policy may know of the waiting groups; a group needs ``size`` samples."""
        found: dict[GroupKey, WaitingGroup] = {}
        for key, waiting in self._groups.items():
            leases = list(flow.leases(key).values())
            versions = [
                lease.header.oldest_version for lease in leases if lease.header is not None and lease.header.tokens
            ]
            unfinished = [lease.tokens for lease in leases if lease.stage == "partial"]
            written = sum(lease.stage in ("scoring", "scored", "failed") for lease in leases)
            found[key] = WaitingGroup(
                deferrals=waiting.deferrals,
                oldest_version=min((version for version in versions if version >= 0), default=None),
                tokens=sum(lease.tokens for lease in leases),
                longest=max(unfinished, default=0),
                missing=max(0, size - written),
            )
        return found

    def state(self) -> list[list[Any]]:
        """Keys and deferrals as JSON values, in waiting order."""
        return [[str(key), waiting.deferrals] for key, waiting in self._groups.items()]

    def load_state(self, state: Sequence[Sequence[Any]], prompts: Mapping[int, Prompt]) -> None:
        """Go on where :meth:`state` was taken; ``prompts`` are the training prompts by row number."""
        for text, deferrals in state:
            key = GroupKey.parse(str(text))
            if key.prompt not in prompts:
                raise UserError(
                    f"cannot resume: the group {key} of the checkpoint has no prompt in data.train any more; put the "
                    "data back, or start a new run"
                )
            self._groups[key] = Waiting(prompts[key.prompt], int(deferrals))
