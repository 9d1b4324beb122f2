"""Ends what a test started, daemons included, and nothing else."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 10.0


@contextmanager
def own_processes() -> Iterator[None]:
    """Adopt the daemons that are started inside of it, and end every process that was.

    A process whose parent ends becomes a child of the nearest subreaper: with this one being it, a daemon of a daemon
    stays below us, and is found without asking for names. Linux only; needs no rights.
    """
    before = set(psutil.Process().children())
    _adopt(True)
    try:
        yield
    finally:
        try:
            _end(before)
        finally:
            _adopt(False)


def _adopt(on: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot adopt orphans")


def _end(before: set[psutil.Process]) -> None:
    """End the children that were not there before, and theirs; children of those that end come to us and are next."""
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        found: list[psutil.Process] = []
        for child in set(psutil.Process().children()) - before:
            found += [child, *child.children(recursive=True)]
        for process in found:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, timeout=_GRACE_S)
        _bury(before)
    left = set(psutil.Process().children()) - before
    assert not left, f"still running: {left}"


def _bury(before: set[psutil.Process]) -> None:
    for child in set(psutil.Process().children()) - before:
        try:
            os.waitpid(child.pid, os.WNOHANG)
        except ChildProcessError:
            continue
