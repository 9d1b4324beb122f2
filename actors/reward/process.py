"""A handle on one scoring process: start it, talk to it without blocking, find out where it hangs, kill it.

Processes are started afresh (never forked: the parent is a Ray actor with threads), each in a session of its own, so
that killing it takes along whatever the reward function started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from actors.reward.environment import child_environment
from actors.reward.functions import Parameters
from actors.reward.wire import FrameBuffer, encode
from storage.errors import UserError

_TAIL_BYTES = 4096
_CHUNK = 1 << 16
_STACK_WAIT_S = 0.1
_STACK_LINE = re.compile(r'File "(?P<path>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)')


class ChildProcess:
    """One running ``actors.reward.child``. Not thread-safe: it belongs to the thread that started it.

    Attributes:
        requests: Pipe to write to (non-blocking), for a selector; replies, output: pipes to read from.
    """

    def __init__(self, functions: Sequence[Mapping[str, Any]], passed: Collection[str] = ()) -> None:
        """Start the process and tell it to load ``functions`` (``function`` and ``arguments`` each).

        It sees no secrets of this process's environment but the variables in ``passed``.

        Raises ``OSError`` when no process can be started.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "actors.reward.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(passed),
            start_new_session=True,
            bufsize=0,
        )
        self.requests = _pipe(self._process.stdin)
        self.replies = _pipe(self._process.stdout)
        self.output = _pipe(self._process.stderr)
        self.pid = self._process.pid
        self._frames = FrameBuffer()
        self._unsent = bytearray()
        self._hung_up = False
        self._tail = bytearray()
        self.send(encode({"functions": list(functions)}))

    @property
    def writing(self) -> bool:
        """Whether bytes wait for room in the request pipe; call :meth:`flush` when it is writable."""
        return bool(self._unsent) and not self._hung_up

    @property
    def unread(self) -> int:
        """Bytes of what was sent that the process has not taken up; what it read before it died does not count."""
        in_pipe = fcntl.ioctl(self.requests, termios.FIONREAD, b"\0" * 4)
        return len(self._unsent) + int.from_bytes(in_pipe, sys.byteorder)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def send(self, frame: bytes) -> None:
        """Queue ``frame`` and write as much as the pipe takes."""
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Write queued bytes; a process that is gone is noticed by :meth:`receive`."""
        try:
            while self._unsent:
                written = os.write(self.requests.fileno(), self._unsent[:_CHUNK])
                del self._unsent[:written]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._hung_up = True

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the replies that have arrived, and whether the channel has ended; raises ``WireError``."""
        data = _read(self.replies)
        if data is None:
            return [], False
        return self._frames.feed(data), not data

    def read_output(self) -> bytes:
        """Return what the process has printed since the last call, and remember its end for error messages."""
        data = _read(self.output) or b""
        self._tail += data
        del self._tail[:-_TAIL_BYTES]
        return data

    def where(self) -> str:
        """Return the place in the code that the process is executing, or ``""`` when it does not say."""
        self.read_output()
        text = b""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        until = time.monotonic() + _STACK_WAIT_S
        poll = select.poll()
        poll.register(self.output, select.POLLIN)
        while b" in main\n" not in text and (left := until - time.monotonic()) > 0 and poll.poll(left * 1000):
            text += (data := self.read_output())
            if not data:
                break
        ours = str(Path(__file__).parent / "functions.py")
        library = str(Path(os.__file__).parent)
        frames = list(_STACK_LINE.finditer(text.decode(errors="replace")))
        for index, frame in enumerate(frames):
            if frame["path"] == ours:
                frames = frames[:index]  # what lies below is our own machinery
                break
        own = [f for f in frames if not f["path"].startswith((library, "<"))] or frames
        return f"{own[0]['name']} ({Path(own[0]['path']).name} line {own[0]['line']})" if own else ""

    def kill(self) -> None:
        """End the process and everything in its group, at once, and release its pipes. May be repeated."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self.requests, self.replies, self.output):
            pipe.close()

    def cause_of_death(self) -> str:
        """Say how the process ended, with the last line that it printed; kills it if only its channel has ended."""
        try:
            code = self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            return "closed its channel to the pool"
        while self.read_output():
            pass
        lines = self._tail.decode(errors="replace").strip().splitlines()
        said = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else "")
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with status {code}"
        return f"{how}; last output: {said[:200]}" if said else how


def describe_function(
    function: str, arguments: Mapping[str, Any], deadline_s: float, passed: Collection[str] = ()
) -> Parameters:
    """Import a reward function in a process of its own, which sees ``passed`` secrets, and return what it takes.

    Raises ``UserError`` when that fails, hangs for ``deadline_s`` seconds, or ends the process.
    """
    child = ChildProcess([{"function": function, "arguments": dict(arguments)}], passed)
    try:
        reply = _first_reply(child, deadline_s)
        if reply is None:
            where = child.where()
            raise UserError(
                f"reward function {function}: importing it takes longer than {deadline_s:g} s"
                f"{f', it hangs in {where}' if where else ''}"
            )
        if "failed" in reply:
            raise UserError(reply["failed"])
        if "ready" not in reply:
            raise UserError(f"reward function {function}: importing it ended the process: it {child.cause_of_death()}")
        takes = reply["ready"][0]
        return Parameters(tuple(takes["required"]), tuple(takes["optional"]), takes["any"])
    finally:
        child.kill()


def _first_reply(child: ChildProcess, deadline_s: float) -> dict[str, Any] | None:
    """Return the first reply, ``{}`` if the process ended without one, ``None`` at the deadline."""
    poll = select.poll()
    poll.register(child.replies, select.POLLIN)
    poll.register(child.output, select.POLLIN)
    until = time.monotonic() + deadline_s
    while (left := until - time.monotonic()) > 0:
        events = dict(poll.poll(left * 1000))
        if child.output.fileno() in events and not child.read_output():
            poll.unregister(child.output)
        if child.replies.fileno() in events:
            replies, ended = child.receive()
            if replies:
                return replies[0]
            if ended:
                return {}
    return None


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # all three were asked for
    os.set_blocking(pipe.fileno(), False)
    return pipe


def _read(pipe: IO[bytes]) -> bytes | None:
    """Return available bytes, ``b""`` at the end of the stream, ``None`` when there is nothing at the moment."""
    try:
        return os.read(pipe.fileno(), _CHUNK)
    except BlockingIOError:
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
