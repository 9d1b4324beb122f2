"""The history actor: writes trained and evaluated groups to the run's Parquet archive."""

from __future__ import annotations

from typing import Any

import ray

from actors.bundles import RecordEnvelope, StopEnvelope, gather
from actors.channels import QueueReader
from storage.history.archive import RolloutArchive
from storage.records import Group, SamplingParams

CONCURRENCY_GROUPS = {"work": 1, "control": 2}


class HistoryWorker:
    """Consumes its own bounded queue; nobody waits for it but the end of the run."""

    def __init__(self, directory: str, tokenizer_fingerprint: int, sampling: dict[str, SamplingParams]) -> None:
        """Open the archive; ``sampling`` says how each split is drawn."""
        self._archive = RolloutArchive(directory, tokenizer_fingerprint)
        self._sampling = sampling

    def __repr__(self) -> str:
        """Name shown on the Ray dashboard."""
        return "HistoryWorker"

    @ray.method(concurrency_group="work")  # type: ignore[untyped-decorator]
    def run(self, queue: Any) -> Any:
        """Archive envelopes until a :class:`StopEnvelope`; yields (split, step) after each file, then None.

        The second yield keeps the header-then-payload rhythm of the other roles.
        """
        reader = QueueReader(queue)
        while True:
            envelope = reader.get()
            if isinstance(envelope, StopEnvelope):
                break
            assert isinstance(envelope, RecordEnvelope)
            self._archive.append(
                envelope.step,
                fetch_groups(envelope.groups),
                envelope.advantages,
                sampling=self._sampling[envelope.split],
                split=envelope.split,
            )
            yield (envelope.split, envelope.step)
            yield None
        reader.close()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def health(self) -> dict[str, float]:
        """Answer, to show that the process lives."""
        return {}


def fetch_groups(envelopes: Any) -> list[Group]:
    """Fetch the bundles that some group envelopes point to, each once, and assemble the groups in key order."""
    refs = list(dict.fromkeys(ref for envelope in envelopes for ref in envelope.refs))
    fetched = dict(zip(refs, ray.get(refs), strict=True))
    groups = []
    for envelope in envelopes:
        prompt, samples = gather([fetched[ref] for ref in envelope.refs], envelope.places)
        groups.append(Group(key=envelope.key, prompt=prompt, samples=samples))
    return sorted(groups, key=lambda group: group.key)
