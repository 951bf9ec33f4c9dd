"""Connections of the launcher to the nodes of a run.

A node may connect at any time: one that comes back after a loss gets ranks in the next generation.
"""

from __future__ import annotations

import errno
import hmac
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from shardwright.config.run import NODE_TOKEN_VARIABLE
from shardwright.errors import InputError, RankFailed
from shardwright.launch.node_place import NodePlace
from shardwright.launch.nodes import (
    FIRST_WAIT_SECONDS,
    LOSS_SECONDS,
    LocalNode,
    RemoteNode,
    RunNode,
    detect_loss_soon,
    receive_message,
    send_message,
)
from shardwright.launch.rank_outcome import get_exit_code
from shardwright.version import __version__

logger = logging.getLogger("shardwright")

_LATE_SECONDS = 10.0
"""Seconds that nodes which are not needed, or not any more, have to connect at the start."""
_SILENT_SECONDS = 10.0
"""Seconds after which the launcher says that it waits for nodes."""
_MAX_HELLO_BYTES = 10_000
_MAX_UNKNOWN = 64
"""Connections beyond one per node that may be open before they have shown the token."""
_POLL_SECONDS = 0.02


class Nodes:
    """Nodes of a run. Leave its context to disconnect them, which then end as this process does.

    Args:
        place: Place of this node, which is the first; None for a run on this machine only.
        num_slots: Ranks per node.
        run: Text that is the same on all nodes of the run; others are refused.
        wait_seconds: Seconds to wait for a lost node.
    """

    def __init__(
        self,
        place: NodePlace | None = None,
        num_slots: int = sys.maxsize,
        run: str = "",
        wait_seconds: float = 0.0,
    ) -> None:
        self.address = "127.0.0.1" if place is None else place.address
        self.local = LocalNode(num_slots)
        self._run = run
        self._wait_seconds = wait_seconds
        self._token = "" if place is None else place.token
        self._num_others = 0 if place is None else place.num_nodes - 1
        self._is_complete = False
        self._remote: list[RemoteNode] = []
        self._greeting = threading.Lock()
        self._unknown: list[socket.socket] = []
        """Connections that have not shown the token yet, the oldest first."""
        self._ending: dict[str, Any] | None = None
        """Message that ends the nodes."""
        self._listener: socket.socket | None = None
        if place is not None and self._num_others:
            assert place.token  # an empty one would accept everybody
            try:
                self._listener = socket.create_server(
                    ("", place.port), backlog=place.num_nodes + _MAX_UNKNOWN
                )
            except OSError as error:
                raise InputError(
                    f"the launcher cannot listen for the other nodes: {error.strerror}",
                    field="MASTER_PORT",
                    got=place.port,
                    remedy="Choose a free port",
                ) from error
            threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is not None and not self._is_complete:
            # Nodes that connect a little later would wait for the launcher for minutes.
            self._wait_for_others(_LATE_SECONDS)
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
        text = "" if error is None else str(error)
        with self._greeting:
            self._ending = {"finish": int(get_exit_code(error)), "text": text}
            for node in self._remote:
                node.send(self._ending)

    @property
    def has_several(self) -> bool:
        """True if ranks may run on other nodes."""
        return self._listener is not None

    def list_connected(self) -> list[RunNode]:
        """List the nodes that can run ranks now, this one first, the others as the job has them."""
        others = [node for node in self._remote if not node.is_lost]
        return [self.local, *sorted(others, key=lambda node: node.index)]

    def count_slots(self) -> int:
        """Return how many ranks the connected nodes can run."""
        return sum(node.num_slots for node in self.list_connected())

    def wait_for_slots(
        self, num_ranks: int, *, should_wait: bool, is_stopped: Callable[[], bool]
    ) -> None:
        """Wait until the connected nodes can run so many ranks.

        Raises:
            RankFailed: They cannot, or a stop was requested.
        """
        limit = self._wait_seconds if self._is_complete else FIRST_WAIT_SECONDS
        began = time.monotonic()
        deadline = began + (limit if should_wait else 0.0)
        is_announced = False
        while (num_slots := self.count_slots()) < num_ranks:
            if time.monotonic() > deadline or is_stopped():
                names = ", ".join(node.name for node in self.list_connected())
                raise RankFailed(
                    f"the connected nodes ({names}) can run {num_slots} of {num_ranks} ranks; "
                    f"no other node has connected within {limit:g} s"
                )
            if not is_announced and time.monotonic() > began + _SILENT_SECONDS:
                is_announced = True
                logger.warning(
                    "the connected nodes can run %d of %d ranks; waiting for others up to %g s",
                    num_slots,
                    num_ranks,
                    limit,
                )
            time.sleep(_POLL_SECONDS)
        if not self._is_complete:
            # Ranks get the nodes in the job's order, not in that of their start.
            self._wait_for_others(_LATE_SECONDS)
        self._is_complete = True

    def _wait_for_others(self, seconds: float) -> None:
        """Wait until all other nodes of the job have connected, but not longer."""
        deadline = time.monotonic() + seconds
        while (
            len({node.index for node in self._remote}) < self._num_others
            and time.monotonic() < deadline
        ):
            time.sleep(_POLL_SECONDS)

    def request_stop(self, number: int) -> None:
        """Forward a stop signal to the ranks of the other nodes."""
        for node in self._remote:
            node.send({"stop": number})

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._listener.fileno() < 0 or error.errno in (errno.EINVAL, errno.EBADF):
                    return  # the run has ended
                time.sleep(_POLL_SECONDS)  # no free file descriptor, or the other side is gone
                continue
            self._unknown.append(connection)
            if len(self._unknown) > self._num_others + _MAX_UNKNOWN:
                # Anybody can open connections; a node sends its token at once.
                with suppress(OSError):
                    self._unknown.pop(0).shutdown(socket.SHUT_RDWR)  # wakes its thread
            try:
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
            except RuntimeError as error:  # no more threads
                logger.warning("a connection to the launcher was closed: %s", error)
                self._forget(connection)
                connection.close()

    def _forget(self, connection: socket.socket) -> None:
        with suppress(ValueError):
            self._unknown.remove(connection)

    def _greet(self, connection: socket.socket) -> None:
        """Take in a node, or refuse it. A connection of anything else is closed."""
        connection.settimeout(LOSS_SECONDS)
        source = connection.makefile("rb")
        try:
            hello = receive_message(source, _MAX_HELLO_BYTES)
            if hello is not None:
                refusal = self._find_refusal(hello) or self._take_in(hello, connection, source)
                if refusal is None:
                    return
                send_message(connection, {"refused": refusal})
        except (OSError, ValueError):
            pass
        finally:
            self._forget(connection)
        connection.close()

    def _find_refusal(self, hello: dict[str, Any]) -> str | None:
        """Return why this is no node of the run; None if it is one."""
        token = str(hello.get("token")).encode(errors="surrogatepass")
        if not hmac.compare_digest(token, self._token.encode(errors="surrogatepass")):
            return f"its {NODE_TOKEN_VARIABLE} differs"
        expected = {"version": __version__, "run": self._run, "num_slots": self.local.num_slots}
        reasons = [
            f"{key} {hello.get(key)!r}, not {value!r}"
            for key, value in expected.items()
            if hello.get(key) != value
        ]
        index = hello.get("index")
        if not isinstance(index, int) or not isinstance(hello.get("name"), str):
            reasons.append("its name or number is missing")
        elif not 1 <= index <= self._num_others:
            reasons.append(f"RANK {index} of {self._num_others + 1} nodes")
        return ", ".join(reasons) or None

    def _take_in(
        self, hello: dict[str, Any], connection: socket.socket, source: BinaryIO
    ) -> str | None:
        """Take in a node of the run. Return why not, if another one has its place and is alive.

        The loss of a node without network is noticed after `LOSS_SECONDS`, and the one that
        replaces it may be here before.
        """
        self._forget(connection)
        index = hello["index"]
        began = time.monotonic()
        while (former := self._find(index)) and former.heard_at_seconds < began:
            time.sleep(_POLL_SECONDS)
        with self._greeting:
            if former := self._find(index):
                return f"its RANK {index} is taken by {former.name}, which still answers"
            detect_loss_soon(connection)
            send_message(connection, {"accepted": True})
            node = RemoteNode(index, hello["name"], self.local.num_slots, connection, source)
            self._remote.append(node)
            if self._ending is not None:
                node.send(self._ending)
        return None

    def _find(self, index: int) -> RemoteNode | None:
        """Return the node that has a place; None if it is free."""
        return next((n for n in self._remote if n.index == index and not n.is_lost), None)
