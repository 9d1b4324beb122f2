"""The draft retrieval actor: archives every finished group, keeps the history that drafts come from, serves packs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import ray

from actors.bundles import RecordEnvelope, StopEnvelope
from actors.channels import QueueReader, fetch_groups
from actors.drafts.options import SpeculationOptions
from actors.turns import turn
from storage.files import StorageError
from storage.records import TRAIN_SPLIT, Int32Array, SamplingParams

if TYPE_CHECKING:
    from actors.drafts.pack import DraftPack
    from actors.drafts.prompt_indexes import Stamp
    from actors.drafts.retriever import DraftRetriever, PastAnswers
    from storage.history.store import HistoryStore

log = logging.getLogger(__name__)

_OBSERVE_WAIT_S = 10.0
_PREDECESSOR_S = 30.0

CONCURRENCY_GROUPS = {"work": 1, "packs": 1, "control": 2}


class DraftRetrievalWorker:
    """Consumes its own bounded queue; nobody waits for it but the end of the run.

    Wrap with ``ray.remote(concurrency_groups=CONCURRENCY_GROUPS)``.
    """

    def __init__(
        self,
        archive: str | None,
        history: str | None,
        tokenizer_fingerprint: int,
        sampling: dict[str, SamplingParams],
        options: SpeculationOptions,
        *,
        recorded: int | None = None,
    ) -> None:
        """Open the files; ``sampling`` says how each split is drawn.

        Args:
            archive: Folder of the Parquet archive, or None to keep none.
            history: Folder of the history store, or None to keep none.
            tokenizer_fingerprint: 64-bit identity of the tokenizer.
            sampling: How the tokens of each split are drawn.
            options: What drafts are to be made of the history.
            recorded: For the successor of one that died: the last training step that it has acknowledged. What it
                stored beyond comes once more. None: nothing was stored before.

        Raises:
            HistoryError: The store belongs to another tokenizer or schema version, or its manifest is damaged.
        """
        from storage.history.archive import RolloutArchive  # pyarrow, which the conductor does not need
        from storage.history.store import HistoryStore

        self._archive = None if archive is None else RolloutArchive(archive, tokenizer_fingerprint)
        self._sampling = sampling
        self._retriever: DraftRetriever | None = None
        self._ready = threading.Event()
        self._news = threading.Condition()
        self._failure = ""
        self._observed = recorded or 0
        self._loop: Iterator[Any] | None = None
        if history is None:
            self._ready.set()
            return
        store = HistoryStore(history, tokenizer_fingerprint, keep_top=options.top_tokens > 0, patience_s=_PREDECESSOR_S)
        # Indexes compile for seconds the first time, and nobody has to wait for that.
        arguments = (store, options, recorded)
        threading.Thread(target=self._prepare, args=arguments, name="prepare-drafts", daemon=True).start()

    def __repr__(self) -> str:
        """Name shown on the Ray dashboard."""
        return "DraftRetrievalWorker"

    @ray.method(concurrency_group="work")  # type: ignore[untyped-decorator]
    def run(self, queue: Any) -> Iterator[Any]:
        """Record envelopes until a :class:`StopEnvelope`, in turns (see :func:`actors.turns.turn`).

        Yields (split, step, failure, lost) after each, then None.

        ``failure`` says why answers are not kept for drafts, ``lost`` why this envelope's were not archived; both are
        empty while all is well. A disk that refuses the archive costs no drafts, and is tried again with the next step.
        The second yield keeps the header-then-payload rhythm of the other roles.
        """
        self._loop = self._loop or self._record(queue)
        yield from turn(self._loop)

    @ray.method(concurrency_group="packs")  # type: ignore[untyped-decorator]
    def pack(self, prompts: list[Int32Array], after_step: int) -> DraftPack | None:
        """Return the drafts for some prompts; None when no history is kept.

        Waits a little for the groups of ``after_step``, which may still be in the queue.
        """
        retriever = self._after(after_step)
        return None if retriever is None else retriever.pack(prompts)

    @ray.method(concurrency_group="packs")  # type: ignore[untyped-decorator]
    def answers(self, prompts: list[Int32Array], known: Mapping[int, Stamp], after_step: int) -> PastAnswers | None:
        """Return what a retriever on another node makes its drafts of; None when no history is kept. Waits likewise."""
        retriever = self._after(after_step)
        return None if retriever is None else retriever.answers(prompts, known)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def node(self) -> str:
        """Ray's id of the node that the packs are made on."""
        return str(ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def health(self) -> dict[str, float]:
        """Return counters of indexes and store; an empty one without history."""
        return {} if self._retriever is None else self._retriever.stats()

    def _record(self, queue: Any) -> Iterator[Any]:
        reader = QueueReader(queue)
        while True:
            envelope = reader.get()
            if isinstance(envelope, StopEnvelope):
                break
            assert isinstance(envelope, RecordEnvelope)
            try:
                groups = fetch_groups(envelope.groups)
            except ray.exceptions.OwnerDiedError:
                raise  # the conductor's: nobody is left to go on for
            except ray.exceptions.ObjectLostError as error:
                # Answers of over 100 kB lie on the node of who wrote them. Its death must not end the archive: a
                # successor of this role would be sent the same references.
                log.warning("answers of step %d are lost: %s", envelope.step, error)
                self._observed_step(envelope)  # packs must not wait for them
                yield (envelope.split, envelope.step, self._told(), "its answers were lost with the node they lay on")
                yield None
                continue
            sampling = self._sampling[envelope.split]
            lost = ""
            if self._archive is not None:
                try:
                    self._archive.append(
                        envelope.step, groups, envelope.advantages, sampling=sampling, split=envelope.split
                    )
                except StorageError as error:
                    lost = str(error)
            self._ready.wait()
            if self._retriever is not None and envelope.split == TRAIN_SPLIT:
                self._retriever.observe(envelope.step, groups, sampling)
                self._observed_step(envelope)
            yield (envelope.split, envelope.step, self._told(), lost)
            yield None
        reader.close()
        if self._retriever is not None:
            self._retriever.close()

    def _observed_step(self, envelope: RecordEnvelope) -> None:
        if envelope.split == TRAIN_SPLIT:
            with self._news:
                self._observed = envelope.step
                self._news.notify_all()

    def _told(self) -> str:
        return self._failure if self._retriever is None else self._retriever.failure

    def _after(self, step: int) -> DraftRetriever | None:
        self._ready.wait()
        with self._news:
            self._news.wait_for(lambda: self._retriever is None or self._observed >= step, _OBSERVE_WAIT_S)
        return self._retriever

    def _prepare(self, store: HistoryStore, options: SpeculationOptions, recorded: int | None) -> None:
        try:
            from actors.drafts.retriever import DraftRetriever

            if recorded is not None:
                store.truncate_to(recorded)
            self._retriever = DraftRetriever(store, options)
        except Exception as error:  # whatever it is, training does without drafts
            log.exception("history is not kept for drafts")
            self._failure = str(error) or type(error).__name__
        finally:
            self._ready.set()
