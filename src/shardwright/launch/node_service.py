"""Service of a node: start and watch its rank processes as the launcher on node 0 requests.

The launcher's side is `RemoteNode` (`nodes.py`). Each generation has a folder on this node for
heartbeats, outcomes and the recipe, and a watchdog. The service ends with the run, or when it loses
the launcher, and leaves no process behind. Imports no torch.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardwright.errors import ExitCode, InputError, Preempted, RunFailed, ShardwrightError
from shardwright.launch.node_place import NodePlace
from shardwright.launch.nodes import (
    FIRST_WAIT_SECONDS,
    LOSS_SECONDS,
    LocalNode,
    LocalProcess,
    detect_loss_soon,
    end_processes,
    receive_message,
    send_message,
)
from shardwright.launch.rank_outcome import LAUNCHER_VARIABLE, request_stop
from shardwright.launch.stop_signals import STOP_SIGNALS
from shardwright.version import __version__
from shardwright.watchdog.monitor import Watchdog, read_heartbeats

_POLL_SECONDS = 0.02
_PROGRESS_SECONDS = 0.5
_ALIVE_SECONDS = 2.0
"""Seconds between messages without content: the system answers for a stopped process too."""
_EXIT_SECONDS = 5.0
_CONNECT_SECONDS = 0.5
_ANSWER_SECONDS = 2.0 * LOSS_SECONDS
"""Seconds that the launcher has to answer; it first waits for the loss of a former node."""
_LOST_LAUNCHER = {"finish": int(ExitCode.RUN_FAILED), "text": "the launcher on node 0 was lost"}


def serve_node(place: NodePlace, num_ranks: int, run: str) -> None:
    """Run the processes of this node until the run ends.

    Raises:
        InputError: The launcher refuses this node, or the run ended because of wrong input.
        RunFailed, Preempted: The run failed or was stopped, or the launcher was lost.
    """
    with _forward_stop_signals() as services:
        serve(connect(place), place, num_ranks, run, services)


def serve(
    connection: socket.socket,
    place: NodePlace,
    num_ranks: int,
    run: str,
    services: list[_NodeService] | None = None,
) -> None:
    """Run the processes of this node over a connection to the launcher. Raises as `serve_node`.

    Args:
        services: Receives the service, for signals.
    """
    with connection, connection.makefile("rb") as source:
        hello = {
            "token": place.token,
            "version": __version__,
            "run": run,
            "index": place.index,
            "name": socket.gethostname(),
            "num_slots": num_ranks,
        }
        _introduce(connection, source, place, hello)
        with _NodeService(connection, source) as service:
            if services is not None:
                services.append(service)
            try:
                ending = service.run()
                error = _build_error(ending["finish"], f"on node 0: {ending['text']}")
            except OSError as failure:
                raise RunFailed(f"this node failed and counts as lost: {failure}") from failure
            except (KeyError, TypeError, ValueError) as failure:
                raise RunFailed(
                    f"the launcher on node 0 sent a message that cannot be read: {failure!r}"
                ) from failure
    if error is not None:
        raise error


def _introduce(
    connection: socket.socket, source: BinaryIO, place: NodePlace, hello: dict[str, Any]
) -> None:
    """Introduce this node to the launcher.

    Raises:
        InputError: The launcher refuses this node.
        RunFailed: No launcher answers.
    """
    launcher = f"the launcher at {place.address}:{place.port}"
    connection.settimeout(_ANSWER_SECONDS)
    try:
        send_message(connection, hello)
        answer = receive_message(source) or {}
        connection.settimeout(None)
        detect_loss_soon(connection)
    except (OSError, ValueError) as error:
        raise RunFailed(
            f"{launcher} gives no valid answer: {error}. Perhaps another program uses this port"
        ) from error
    if "refused" in answer:
        raise InputError(
            f"{launcher} refuses this node: {answer['refused']}",
            remedy="Start the same command once on every node, with the variables of the job",
        )
    if "accepted" not in answer:
        raise RunFailed(f"{launcher} has closed the connection: it has ended, or is overloaded")


def connect(place: NodePlace) -> socket.socket:
    """Connect to the launcher, which may start later than this node.

    Raises:
        RunFailed: The launcher on node 0 cannot be reached in time.
    """
    deadline = time.monotonic() + FIRST_WAIT_SECONDS
    while True:
        try:
            connection = socket.create_connection((place.address, place.port), timeout=10.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"the launcher on node 0 cannot be reached at {place.address}:{place.port} "
                    f"within {FIRST_WAIT_SECONDS:g} s: {error}"
                ) from error
            time.sleep(_CONNECT_SECONDS)
            continue
        connection.settimeout(None)
        return connection


def _build_error(code: int, text: str) -> ShardwrightError | None:
    if code == ExitCode.DONE:
        return None
    if code == ExitCode.PREEMPTED:
        return Preempted(text)
    return InputError(text) if code == ExitCode.WRONG_INPUT else RunFailed(text)


@dataclass
class _Generation:
    """Generation in which processes of this node take part."""

    number: int
    control: Path
    watchdog: Watchdog
    progress: list[list[Any]]
    reported: set[str]
    """Names of the files that the launcher has; `diagnosis` once it has that."""


class _LauncherLost(Exception):
    """A message could not be sent."""


class _NodeService:
    """Processes of this node. Leave its context to end them."""

    def __init__(self, connection: socket.socket, source: Any) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._node = LocalNode()
        self._processes: dict[int, LocalProcess] = {}
        self._generation: _Generation | None = None
        self._stack = ExitStack()
        self._next_progress_seconds = 0.0
        self._next_alive_seconds = 0.0
        threading.Thread(target=self._read, args=(source,), name="launcher", daemon=True).start()

    def __enter__(self) -> _NodeService:
        return self

    def __exit__(self, *_: object) -> None:
        end_processes(list(self._processes.values()), _EXIT_SECONDS)
        self._stack.close()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads

    def _read(self, source: BinaryIO) -> None:
        with suppress(OSError, ValueError):
            while (message := receive_message(source)) is not None:
                self._messages.put(message)
        self._messages.put(_LOST_LAUNCHER)

    def run(self) -> dict[str, Any]:
        """Follow the launcher's messages; return the one that ends the run."""
        while True:
            with suppress(queue.Empty):
                message = self._messages.get(timeout=_POLL_SECONDS)
                if "finish" in message:
                    return message
                self._follow(message)
            try:
                self._report()
            except _LauncherLost:
                return _LOST_LAUNCHER

    def request_stop(self, number: int) -> None:
        """Send a stop signal to the ranks of this node: all ranks of the run then save together."""
        if self._generation is not None:
            request_stop(self._generation.control, number)

    def _follow(self, message: dict[str, Any]) -> None:
        """Follow one message of the launcher."""
        if "generation" in message:
            self._begin_generation(message)
        elif "start" in message:
            environment = os.environ | {LAUNCHER_VARIABLE: str(os.getpid())}
            self._processes[message["start"]] = LocalProcess(
                self._node, message["module"], environment
            )
        elif "send" in message:
            self._send(self._processes.get(message["send"]), message["message"])
        elif "stop" in message:
            self.request_stop(message["stop"])
        elif "close" in message and (process := self._processes.get(message["close"])):
            process.close_input()
        elif "kill" in message and (process := self._processes.get(message["kill"])):
            process.kill()

    def _begin_generation(self, message: dict[str, Any]) -> None:
        self._stack.close()
        control = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwright-"))
        )
        (control / "recipe.yaml").write_text(message["recipe"], encoding="utf-8")
        reports = message["hang_reports"]
        watchdog = Watchdog(control, control if reports is None else Path(reports), should_log=True)
        self._stack.enter_context(watchdog)
        self._generation = _Generation(message["generation"], control, watchdog, [], set())

    def _send(self, process: LocalProcess | None, message: dict[str, Any]) -> None:
        """Forward a message to a process, with its paths replaced by those of this node."""
        if process is None:
            return
        if "control" in message:
            assert self._generation is not None, "a generation begins before its ranks"
            control = self._generation.control
            message["control"] = str(control)
            message["arguments"][0] = str(control / "recipe.yaml")
            if message["log"] is not None:
                message["log"] = str(control / Path(message["log"]).name)
        process.send(message)

    def _send_to_launcher(self, **content: Any) -> None:
        try:
            send_message(self._connection, content)
        except OSError as error:
            raise _LauncherLost from error

    def _report(self) -> None:
        """Send new outcomes, waiting or ended processes, progress and a hang.

        A process's outcome comes before its end.
        """
        now = time.monotonic()
        if now > self._next_alive_seconds:
            self._next_alive_seconds = now + _ALIVE_SECONDS
            self._send_to_launcher(alive=True)
        ended = {
            number: status
            for number, process in self._processes.items()
            if (status := process.poll()) is not None
        }
        if self._generation is not None:
            self._report_generation(self._generation)
        for number, status in ended.items():
            self._send_to_launcher(ended=number, status=status)
            self._processes.pop(number).close_input()

    def _report_generation(self, generation: _Generation) -> None:
        def send(**content: Any) -> None:
            self._send_to_launcher(generation=generation.number, **content)

        new = {
            name
            for path in sorted(generation.control.glob("rank-*.*"))
            if path.suffix in (".json", ".idle")
            # A rank writes its outcome before it waits: the launcher must see them in this order.
            for name in (f"{path.stem}.json", path.name)
        } - generation.reported
        if new:
            self._report_progress(generation, send)
        for name in sorted(new, key=lambda name: name.endswith(".idle")):
            generation.reported.add(name)
            send(file=name, text=(generation.control / name).read_text(encoding="utf-8"))
        diagnosis = generation.watchdog.diagnosis
        if diagnosis is not None and "diagnosis" not in generation.reported:
            generation.reported.add("diagnosis")
            send(diagnosis=diagnosis.message)
        now = time.monotonic()
        if now > self._next_progress_seconds:
            self._next_progress_seconds = now + _PROGRESS_SECONDS
            self._report_progress(generation, send)

    def _report_progress(self, generation: _Generation, send: Any) -> None:
        progress = [
            [beat.rank, beat.phase, beat.step] for beat in read_heartbeats(generation.control)
        ]
        if progress and progress != generation.progress:
            generation.progress = progress
            send(progress=progress)


@contextmanager
def _forward_stop_signals() -> Iterator[list[_NodeService]]:
    """Forward stop signals of this process to the services in the list; without one, stop."""
    services: list[_NodeService] = []

    def forward(number: int, frame: object) -> None:
        if not services:
            raise Preempted(f"{signal.Signals(number).name} before the launcher was reached")
        for service in services:
            service.request_stop(number)

    former = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield services
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
