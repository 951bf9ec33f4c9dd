"""Nodes whose rank processes the launcher controls: this machine, and others that connect to it.

Each other node runs `node_service.py`, which starts the processes there. Messages are lines of
JSON. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, BinaryIO

from shardwright.errors import ExitCode
from shardwright.launch.rank_outcome import RankOutcome
from shardwright.watchdog.monitor import read_heartbeats

logger = logging.getLogger("shardwright")

POOL_OPTION = "--wait-for-assignments"
"""Option of the ranks' module: serve the launcher's assignments, which are lines of JSON."""
FIRST_WAIT_SECONDS = 600.0
"""Seconds that the launcher and the nodes wait for each other at the start, as torchrun does."""
LOSS_SECONDS = 15
"""Seconds without an answer of the other machine, or without a message of a node's service, after
which it counts as lost."""
_POLL_SECONDS = 0.02
_MAX_MESSAGE_BYTES = 16 * 1024**2
"""More than a recipe, or the errors of a rank, ever have."""
_MIRRORED_FILE = re.compile(r"rank-\d+\.(json|idle)")


class RankProcess(ABC):
    """Process of a rank, or a spare, on some node."""

    node: RunNode

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""

    @abstractmethod
    def send(self, message: Mapping[str, object]) -> None:
        """Write a line of JSON to its standard input; its end is noticed by its status."""

    @abstractmethod
    def close_input(self) -> None:
        """Close its standard input, which ends a process that waits."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL."""


class RunNode(ABC):
    """Machine on which up to `num_slots` ranks run."""

    name: str
    """Host name, for messages: containers of several nodes may have the same."""
    index: int
    """Place among the nodes of the run; 0 is the launcher's."""
    num_slots: int
    is_lost: bool = False
    diagnosis: str | None = None
    """Report of the node's watchdog of a hang in the current generation."""

    @abstractmethod
    def start_process(self, module: str) -> RankProcess:
        """Start a process that imports what a rank needs and waits for an assignment."""

    @abstractmethod
    def begin_generation(
        self, control: Path, arguments: Sequence[str], hang_reports: Path | None
    ) -> None:
        """Prepare for the ranks of a new generation.

        Args:
            control: Launcher's folder of the generation.
            arguments: Arguments of the ranks; the first is the file of the recipe.
            hang_reports: Folder for reports of hangs, on storage that all nodes share.
        """

    @abstractmethod
    def read_progress(self) -> dict[int, tuple[str, int]]:
        """Return phase and step by rank, of the ranks here that have a heartbeat."""


class LocalProcess(RankProcess):
    """Child of this process."""

    def __init__(
        self, node: RunNode, module: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.node = node
        # Its output stays this terminal until it gets a rank: only rank 0 writes there.
        self.process = Popen(
            [sys.executable, "-m", module, POOL_OPTION], stdin=PIPE, env=environment
        )

    def poll(self) -> int | None:
        return self.process.poll()

    def send(self, message: Mapping[str, object]) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def close_input(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def kill(self) -> None:
        self.process.kill()


def end_processes(processes: Sequence[RankProcess], seconds: float) -> None:
    """End processes: waiting ones exit immediately, others are killed after a timeout."""
    for process in processes:
        process.close_input()
    deadline = time.monotonic() + seconds
    for process in processes:
        is_killed = False
        while process.poll() is None:
            if not is_killed and time.monotonic() > deadline:
                process.kill()
                is_killed = True
            time.sleep(_POLL_SECONDS)


class LocalNode(RunNode):
    """This machine."""

    def __init__(self, num_slots: int = sys.maxsize) -> None:
        self.name = socket.gethostname()
        self.index = 0
        self.num_slots = num_slots
        self._control: Path | None = None

    def start_process(self, module: str) -> RankProcess:
        return LocalProcess(self, module)

    def begin_generation(
        self, control: Path, arguments: Sequence[str], hang_reports: Path | None
    ) -> None:
        self._control = control

    def read_progress(self) -> dict[int, tuple[str, int]]:
        if self._control is None:
            return {}
        return {beat.rank: (beat.phase, beat.step) for beat in read_heartbeats(self._control)}


class _RemoteProcess(RankProcess):
    """Child of another node's service."""

    node: RemoteNode

    def __init__(self, node: RemoteNode, number: int) -> None:
        self.node = node
        self._number = number

    def poll(self) -> int | None:
        status = self.node.statuses.get(self._number)
        return int(ExitCode.RUN_FAILED) if status is None and self.node.is_lost else status

    def send(self, message: Mapping[str, object]) -> None:
        self.node.send({"send": self._number, "message": message})

    def close_input(self) -> None:
        self.node.send({"close": self._number})

    def kill(self) -> None:
        self.node.send({"kill": self._number})


class RemoteNode(RunNode):
    """Another machine, through the connection of its service; lost with the connection."""

    def __init__(
        self, index: int, name: str, num_slots: int, connection: socket.socket, source: Any
    ) -> None:
        self.index = index
        self.name = name
        self.num_slots = num_slots
        self.statuses: dict[int, int] = {}
        """Exit status by number of the process."""
        self.heard_at_seconds = 0.0
        """Monotonic time of its last message."""
        self._connection = connection
        self._control: Path | None = None
        self._num_started = 0
        self._progress: dict[int, tuple[str, int]] = {}
        self._generation = 0
        self._sending = threading.Lock()
        threading.Thread(target=self._read, args=(source,), name="node", daemon=True).start()

    def start_process(self, module: str) -> RankProcess:
        self._num_started += 1
        self.send({"start": self._num_started, "module": module})
        return _RemoteProcess(self, self._num_started)

    def begin_generation(
        self, control: Path, arguments: Sequence[str], hang_reports: Path | None
    ) -> None:
        self._control = control
        self._progress = {}
        self._generation += 1
        self.send(
            {
                "generation": self._generation,
                "recipe": Path(arguments[0]).read_text(encoding="utf-8"),
                "hang_reports": None if hang_reports is None else str(hang_reports.absolute()),
            }
        )

    def read_progress(self) -> dict[int, tuple[str, int]]:
        return self._progress

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message; a node that does not receive it in time counts as lost."""
        try:
            with self._sending:
                send_message(self._connection, message)
        except OSError:
            self.disconnect()

    def disconnect(self) -> None:
        """Close the connection."""
        self.is_lost = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self, source: BinaryIO) -> None:
        try:
            # A node that is silent for `LOSS_SECONDS` is a TimeoutError.
            with suppress(OSError), self._connection, source:
                while (message := receive_message(source)) is not None:
                    self.heard_at_seconds = time.monotonic()
                    self._handle(message)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning(
                "node %s counts as lost: it sent a message that cannot be read (%s)",
                self.name,
                error,
            )
        finally:
            self.is_lost = True

    def _handle(self, message: dict[str, Any]) -> None:
        if "ended" in message:
            self.statuses[message["ended"]] = int(message["status"])
        elif "generation" not in message or message["generation"] != self._generation:
            return
        elif "progress" in message:
            self._progress = {rank: (phase, step) for rank, phase, step in message["progress"]}
        elif "diagnosis" in message:
            self.diagnosis = message["diagnosis"]
        elif _MIRRORED_FILE.fullmatch(message["file"]) and self._control is not None:
            path = self._control / message["file"]
            text = message["text"]
            if path.suffix == ".json":
                # Times of different nodes are not comparable: their clocks differ.
                outcome = replace(RankOutcome(**json.loads(text)), at_seconds=time.time())
                text = json.dumps(asdict(outcome))
            partial = path.with_suffix(".partial")
            with suppress(OSError):  # the generation has ended
                partial.write_text(text)
                partial.replace(path)


def send_message(connection: socket.socket, message: Mapping[str, object]) -> None:
    """Send a line of JSON."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive_message(source: BinaryIO, max_bytes: int = _MAX_MESSAGE_BYTES) -> dict[str, Any] | None:
    """Receive a message of the other side; None at its end.

    Raises:
        OSError: The connection failed, or ended within a message.
        ValueError: This is no message.
    """
    line = source.readline(max_bytes)
    if not line:
        return None
    if not line.endswith(b"\n"):
        if len(line) < max_bytes:
            raise ConnectionError("the connection ended within a message")
        raise ValueError(f"longer than {max_bytes} bytes")
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message


def detect_loss_soon(connection: socket.socket) -> None:
    """Let the system end a connection whose other machine does not answer any more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", LOSS_SECONDS * 1000),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
