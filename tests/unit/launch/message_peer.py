"""Other side of a connection between the launcher and a node."""

from __future__ import annotations

import json
import socket
from typing import Any


class Peer:
    """A connection's other side, which says what the test wants."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(20.0)
        self._source = connection.makefile("rb")

    def send(self, content: bytes | dict[str, Any]) -> None:
        if isinstance(content, dict):
            content = json.dumps(content).encode() + b"\n"
        self.connection.sendall(content)

    def receive(self) -> Any:
        """Return the next message; None once the connection is closed."""
        try:
            return json.loads(self._source.readline() or b"null")
        except ConnectionError:
            return None

    def close(self) -> None:
        self._source.close()
        self.connection.close()
