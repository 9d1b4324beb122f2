"""Length-prefixed JSON between the scoring pool and its children.

JSON rather than pickle, because what comes back was written by a process that runs other people's code. Values that
JSON lacks are converted on the way out: arrays and their scalars become lists and numbers, bytes travel as base64.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Set
from typing import Any

_HEADER = struct.Struct(">I")
_BYTES_TAG = "$bytes"
MAX_REPLY_BYTES = 4 << 20
"""Longest frame accepted from a child; real replies take a few hundred bytes."""


class WireError(Exception):
    """The other side sent something that is not a frame of this protocol."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Return ``message`` as one frame: 4 bytes of length (big-endian), then JSON.

    Raises ``TypeError`` or ``ValueError`` for values that cannot be represented.
    """
    body = json.dumps(message, default=_plain, separators=(",", ":")).encode("ascii")
    return _HEADER.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """Read the JSON of one frame; raises :class:`WireError` when it is not a JSON object."""
    try:
        message = json.loads(body, object_hook=_restore)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise WireError("not a JSON object")
    return message


class FrameBuffer:
    """Cuts a stream of bytes into frames."""

    def __init__(self, max_bytes: int = MAX_REPLY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add ``data`` and return the frames that are now complete; raises :class:`WireError` on garbage."""
        self._data += data
        frames = []
        start = 0
        while len(self._data) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._data, start)
            if length > self._max_bytes:
                raise WireError(f"a frame of {length} bytes")
            end = start + _HEADER.size + length
            if len(self._data) < end:
                break
            frames.append(decode(bytes(self._data[start + _HEADER.size : end])))
            start = end
        del self._data[:start]
        return frames


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {_BYTES_TAG: base64.b64encode(bytes(value)).decode("ascii")}
    if hasattr(value, "tolist"):  # arrays and array scalars of numpy, and of anything that behaves like it
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return sorted(value, key=repr)
    if hasattr(value, "isoformat"):  # dates and times
        return value.isoformat()
    if type(value).__name__ in ("Decimal", "UUID", "Fraction"):
        return str(value)
    raise TypeError(f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be sent")


def _restore(value: dict[str, Any]) -> Any:
    if len(value) == 1 and _BYTES_TAG in value:
        return base64.b64decode(value[_BYTES_TAG])
    return value
