"""Which draft pack a request draws on, and which sample slot it writes.

Packs arrive and requests are registered on actor threads; rows open on the engine's thread. A pack lives while a
request that was registered with it has not been released, and the newest always lives.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from actors.drafts.pack import DraftPack
from actors.rollout.engine import Request
from storage.history.schema import prompt_hash

UNKNOWN_SLOT = -1

_MOST_UNUSED = 64
"""Packs that no request was registered with yet; the oldest is dropped beyond."""
_MOST_BINDINGS = 1 << 17
"""Requests remembered; a worker that releases its requests stays far below."""


@dataclass(slots=True)
class Binding:
    """What is known of a request.

    Attributes:
        key: Hash of its prompt.
        sample: Sample slot, ``UNKNOWN_SLOT`` when it was not registered.
        pack: Pack that it draws on, if any.
        reused: Tokens of the previous answer that were leniently kept; -1 for an answer written afresh.
    """

    key: int
    sample: int
    pack: DraftPack | None
    reused: int = -1


class PackShelf:
    """Packs and the requests bound to them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packs: list[tuple[DraftPack, bool]] = []
        self._bindings: OrderedDict[int, Binding] = OrderedDict()

    def add(self, pack: DraftPack) -> None:
        """Put a pack on the shelf; packs that were used and are not the newest any more leave it."""
        with self._lock:
            self._packs = [entry for entry in self._packs if not entry[1]][-(_MOST_UNUSED - 1) :]
            self._packs.append((pack, False))

    def register(self, request_id: int, key: int, sample: int) -> None:
        """Bind a request to the newest pack that holds its prompt, else to the newest with a shared index."""
        with self._lock:
            known = self._bindings.pop(request_id, None)
            self._bindings[request_id] = binding = Binding(key, sample, self._choose(key))
            if known is not None:  # resumed: it keeps its pack when no newer one knows the prompt, and its mark
                binding.reused = known.reused
                binding.pack = binding.pack or known.pack
            if len(self._bindings) > _MOST_BINDINGS:
                self._bindings.popitem(last=False)

    def binding(self, request: Request) -> Binding:
        """Return what a request is bound to, or what an unregistered one can use."""
        with self._lock:
            known = self._bindings.get(request.request_id)
            if known is not None:
                return known
            key = prompt_hash(request.prompt_ids)
            return Binding(key, UNKNOWN_SLOT, self._choose(key))

    def reused(self, request_id: int) -> int:
        """Return how many tokens of its previous answer a request kept, -1 for an answer written afresh."""
        with self._lock:
            known = self._bindings.get(request_id)
            return -1 if known is None else known.reused

    def release(self, request_id: int) -> None:
        """Forget a request that is done."""
        with self._lock:
            self._bindings.pop(request_id, None)

    @property
    def packs(self) -> list[DraftPack]:
        """Packs that live, each once."""
        with self._lock:
            held = [pack for pack, _ in self._packs] + [b.pack for b in self._bindings.values() if b.pack is not None]
        return list({id(pack): pack for pack in held}.values())

    def _choose(self, key: int) -> DraftPack | None:
        sharing: int | None = None
        for at in range(len(self._packs) - 1, -1, -1):
            pack = self._packs[at][0]
            if pack.knows(key):
                self._packs[at] = (pack, True)
                return pack
            if sharing is None and pack.shared is not None:
                sharing = at
        if sharing is None:
            return None
        self._packs[sharing] = (self._packs[sharing][0], True)
        return self._packs[sharing][0]
