"""Two machines on one: network namespaces joined by a link that can be slow, lose packets, or be cut.

Not every kernel has `netem`, so the packets pass through this process: each namespace has a TUN device, and a thread
carries what is written to the one over to the other. What talks over it is the kernel's own TCP, with its timeouts and
its retransmissions.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import math
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TUN = "/dev/net/tun"
_SET_NAME = 0x400454CA
_PLAIN_PACKETS = 0x0001 | 0x1000  # IFF_TUN without a header before each packet
_LARGEST = 1 << 16
_IPV4 = 4
_BACKLOG_S = 0.5
_POLL_S = 0.2


class NoNamespaces(Exception):
    """This machine does not let us have network namespaces; says why."""


class Link(threading.Thread):
    """Carries packets between two devices; what it does to them may change at any time.

    Attributes:
        delay_s: Time that a packet takes, one way.
        loss: Share of the packets that are lost.
        bytes_per_s: Rate in each direction; what would wait for longer than half a second is lost.
        cut: Nothing passes.
        carried: Packets that passed; lost: those that did not.
    """

    def __init__(self, ends: tuple[int, int]) -> None:
        super().__init__(name="link", daemon=True)
        self.delay_s = 0.0
        self.loss = 0.0
        self.bytes_per_s = math.inf
        self.cut = False
        self.carried = self.lost = 0
        self._ends = ends
        self._free = [0.0, 0.0]
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self._random = random.Random(0)
        self._over = threading.Event()

    def heal(self) -> None:
        """Be a good link again."""
        self.delay_s, self.loss, self.bytes_per_s, self.cut = 0.0, 0.0, math.inf, False

    def close(self) -> None:
        """Carry nothing more."""
        self._over.set()
        self.join(10)

    def run(self) -> None:
        while not self._over.is_set():
            wait = self._under_way[0][0] - time.monotonic() if self._under_way else _POLL_S
            ready, _, _ = select.select(self._ends, [], [], min(_POLL_S, max(0.0, wait)))
            for end in ready:
                self._take(self._ends.index(end))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(self._under_way)
                self._give(to, packet)

    def _take(self, side: int) -> None:
        try:
            packet = os.read(self._ends[side], _LARGEST)
        except OSError:  # nothing there after all, or the device is down
            return
        if packet[0] >> 4 != _IPV4:  # what a kernel says when a device comes up
            return
        now = time.monotonic()
        leaves = max(now, self._free[side]) + len(packet) / self.bytes_per_s
        if self.cut or leaves - now > _BACKLOG_S or self._random.random() < self.loss:
            self.lost += 1
            return
        self._free[side] = leaves
        heapq.heappush(self._under_way, (leaves + self.delay_s, next(self._order), 1 - side, packet))

    def _give(self, side: int, packet: bytes) -> None:
        try:
            if not self.cut:
                os.write(self._ends[side], packet)
                self.carried += 1
                return
        except OSError:
            pass
        self.lost += 1


@dataclass(frozen=True, slots=True)
class Machine:
    """One of the two.

    Attributes:
        name: Of its namespace.
        address: Its IP address.
    """

    name: str
    address: str

    def start(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a program whose network is that of this machine."""
        entered = ["nsenter", f"--net=/var/run/netns/{self.name}", *map(str, command)]
        return subprocess.Popen(entered, start_new_session=True, **options)

    def end_everything(self) -> None:
        """Kill whatever still runs here; all of it was started through :meth:`start`."""
        for pid in subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine, Link]]:
    """Make two machines and the link between them; processes, namespaces and link end with the block.

    Raises:
        NoNamespaces: They cannot be made here.
    """
    if missing := [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]:
        raise NoNamespaces(f"{missing[0]} is not installed")
    if os.geteuid() != 0:
        raise NoNamespaces("only root may make network namespaces")
    machines = tuple(Machine(f"slipstream-{os.getpid()}-{i}", f"10.77.0.{i}") for i in (1, 2))
    with ExitStack() as made:
        ends = []
        for number, machine in enumerate(machines, 1):
            _ip("netns", "add", machine.name)
            made.callback(_ip, "netns", "delete", machine.name)
            made.callback(machine.end_everything)
            device = f"slip{os.getpid()}n{number}"
            ends.append(_device(device))
            made.callback(os.close, ends[-1])
            _ip("link", "set", device, "netns", machine.name)
            inside = ("-n", machine.name)
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "address", "add", f"{machine.address}/24", "dev", device)
            _ip(*inside, "link", "set", device, "up")
        link = Link((ends[0], ends[1]))
        link.start()
        made.callback(link.close)
        yield machines[0], machines[1], link


def _device(name: str) -> int:
    try:
        descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, _SET_NAME, struct.pack("16sH22x", name.encode(), _PLAIN_PACKETS))
    except OSError as error:
        raise NoNamespaces(f"{_TUN}: {error}") from error
    return descriptor


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoNamespaces(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
