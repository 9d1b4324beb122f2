"""The scoring process: loads the reward functions once, then scores one sample after another.

Started as ``python -m actors.reward.child``. The first frame on standard input lists the functions; the answer is
``ready`` or ``failed``. Then each request is answered in order. The process ends when its input does, which is also
what happens when the parent dies.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from typing import Any, BinaryIO

from actors.reward.functions import RewardFunction, ScoringError, describe, load_function, shorten
from actors.reward.wire import decode, encode
from storage.errors import UserError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until standard input ends."""
    requests, replies = _private_channel()
    _die_with_parent(requests)
    hello = _read(requests)
    if hello is not None:
        functions = _load(hello["functions"], replies)
        while (request := _read(requests)) is not None:
            _write(replies, _score(functions, request))
    os._exit(0)  # without waiting for threads that user code may have left behind


def _private_channel() -> tuple[BinaryIO, BinaryIO]:
    """Move the channel away from descriptors 0 and 1: what user code prints or reads must not touch it."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    faulthandler.enable(all_threads=False)
    # the pool asks with this signal where a sample hangs, before it kills the process
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    return requests, replies


def _die_with_parent(requests: BinaryIO) -> None:
    """End this process, and what it started, when the parent goes, even in the middle of a hanging function."""
    if sys.platform == "linux":  # also reaches a function that never releases the interpreter lock
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(requests, 0)  # reports only that the other end was closed

    def watch() -> None:
        poll.poll()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _load(specs: list[dict[str, Any]], replies: BinaryIO) -> list[RewardFunction]:
    try:
        functions = [load_function(spec["function"], spec["arguments"]) for spec in specs]
    except BaseException as error:
        message = str(error) if isinstance(error, UserError) else describe(error)
        _write(replies, {"failed": shorten(message)})
        os._exit(1)
    parameters = [function.parameters for function in functions]
    _write(replies, {"ready": [{"required": p.required, "optional": p.optional, "any": p.any} for p in parameters]})
    return functions


def _score(functions: list[RewardFunction], request: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    parts: list[float | None] = []
    errors: list[str] = []
    for function in functions:
        try:
            parts.append(function(request["prompt"], request["completion"], request["columns"]))
        except ScoringError as error:
            parts.append(None)
            errors.append(str(error))
    seconds = time.perf_counter() - started
    return {"id": request["id"], "parts": parts, "error": shorten("; ".join(errors)), "seconds": seconds}


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    header = stream.read(4)
    body = stream.read(int.from_bytes(header, "big")) if len(header) == 4 else b""
    return decode(body) if body else None


def _write(stream: BinaryIO, message: dict[str, Any]) -> None:
    stream.write(encode(message))
    stream.flush()


if __name__ == "__main__":
    main()
