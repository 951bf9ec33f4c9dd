"""Messages between the ranks of one machine, over one pair of connected sockets per two ranks.

gloo hands each operation to a thread of its own and wakes a second one for every message. Where
ranks outnumber cores, these switches take longer than the small steps of a verification:
docs/decisions/0152-local-process-group.md. Here the thread that needs a message reads it.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from itertools import combinations

_HEADER = struct.Struct("<8sqQQ")
"""Digest of the group's name, tag, number of the message, bytes that follow."""
_READ_BYTES = 1 << 18

Address = tuple[str, int, int]
"""Name of the group, tag, and number of the message among those of this tag."""


class PeerLost(RuntimeError):
    """A message cannot be sent or received, because the peer has ended or does not answer."""


def connect_ranks(num_ranks: int) -> list[dict[int, socket.socket]]:
    """Return the sockets of each rank, by peer."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for low, high in combinations(range(num_ranks), 2):
        sockets[low][high], sockets[high][low] = socket.socketpair()
    return sockets


class LocalTransport:
    """Ends of all connections of one rank.

    Sending blocks while the kernel's buffer is full, and takes what arrives meanwhile, so that two
    ranks that send to each other both proceed. Messages may be received in any order, each once.
    Several threads may use one transport.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], *, timeout_seconds: float) -> None:
        """Take over the sockets, by the rank of the peer."""
        self._sockets = dict(sockets)
        self.timeout_seconds = timeout_seconds
        """Limit of waiting for a peer."""
        self._received: dict[tuple[int, bytes, int, int], bytearray] = {}
        self._unparsed = {peer: bytearray() for peer in self._sockets}
        self._ended: set[int] = set()
        self._send_locks = {peer: threading.Lock() for peer in self._sockets}
        self._changed = threading.Condition()
        self._is_polling = False
        self._poll = select.poll()
        self._peers = {}
        for peer, connection in self._sockets.items():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
            self._peers[connection.fileno()] = peer

    def send(self, peer: int, address: Address, payload: bytes | memoryview) -> None:
        """Send bytes; they are in the kernel's or the peer's hands on return.

        Raises:
            PeerLost: the peer has ended, or takes nothing for the time limit.
        """
        connection = self._sockets[peer]
        message = memoryview(
            b"".join((_HEADER.pack(*_encode_address(address), len(payload)), payload))
        )
        with self._send_locks[peer]:
            while message:
                try:
                    message = message[connection.send(message) :]
                except BlockingIOError:
                    self._receive_until_writable(peer)
                except OSError as error:
                    raise PeerLost(f"rank {peer} has ended") from error

    def receive(self, peer: int, address: Address) -> bytearray:
        """Return a message of a peer; wait for it.

        Raises:
            PeerLost: the peer has ended, or does not send within the time limit.
        """
        key = (peer, *_encode_address(address))
        deadline = time.monotonic() + self.timeout_seconds
        with self._changed:
            while key not in self._received:
                if peer in self._ended:
                    raise PeerLost(f"rank {peer} has ended")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerLost(f"no message from rank {peer} within {self.timeout_seconds:g} s")
                self._read_or_wait(left)
            return self._received.pop(key)

    def has_message(self, peer: int, address: Address) -> bool:
        """Return True if `receive` would not wait."""
        key = (peer, *_encode_address(address))
        with self._changed:
            if not self._is_polling:
                self._read(0.0)
            return key in self._received

    def _read_or_wait(self, timeout_seconds: float) -> None:
        """Read what arrives, or let the thread that reads already do it."""
        if self._is_polling:
            self._changed.wait(timeout_seconds)
        else:
            self._read(timeout_seconds)

    def _read(self, timeout_seconds: float) -> None:
        """Wait for bytes of any peer and store their messages; the lock is released meanwhile."""
        self._is_polling = True
        self._changed.release()
        try:
            events = self._poll.poll(timeout_seconds * 1000)
        finally:
            self._changed.acquire()
            self._is_polling = False
            self._changed.notify_all()
        for file, _ in events:
            peer = self._peers[file]
            try:
                received = self._sockets[peer].recv(_READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                received = b""
            if received:
                self._parse(peer, received)
            elif peer not in self._ended:
                self._ended.add(peer)
                self._poll.unregister(file)

    def _parse(self, peer: int, received: bytes) -> None:
        waiting = self._unparsed[peer]
        waiting += received
        start = 0
        while len(waiting) - start >= _HEADER.size:
            digest, tag, number, size = _HEADER.unpack_from(waiting, start)
            end = start + _HEADER.size + size
            if len(waiting) < end:
                break
            self._received[peer, digest, tag, number] = waiting[start + _HEADER.size : end]
            start = end
        del waiting[:start]

    def _receive_until_writable(self, peer: int) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        while not select.select([], [self._sockets[peer]], [], 0.0)[1]:
            if time.monotonic() > deadline:
                raise PeerLost(f"rank {peer} took nothing for {self.timeout_seconds:g} s")
            with self._changed:
                self._read_or_wait(0.001)


@cache
def _compute_digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=8).digest()


def _encode_address(address: Address) -> tuple[bytes, int, int]:
    name, tag, number = address
    return _compute_digest(name), tag, number
