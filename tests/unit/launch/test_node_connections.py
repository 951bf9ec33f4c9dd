"""Messages that the launcher receives: wrong, truncated, late, repeated and missing ones.

No rank process is started; the nodes are sockets of the tests.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import ExitCode
from shardwright.launch import node_connections
from shardwright.launch.node_connections import Nodes
from shardwright.launch.node_place import NodePlace
from shardwright.launch.nodes import RemoteNode
from shardwright.launch.rank_outcome import RankOutcome, read_outcomes
from shardwright.version import __version__
from tests.unit.launch.message_peer import Peer

HELLO = {
    "token": "secret",
    "version": __version__,
    "run": "run",
    "index": 1,
    "name": "first",
    "num_slots": 2,
}
OUTCOME = {"rank": 0, "exit_code": 3, "at_seconds": 4e9}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with listen("secret") as nodes:
        yield nodes


@contextmanager
def listen(token: str) -> Iterator[Nodes]:
    """Listen as the launcher of a job of two nodes with two ranks each."""
    with Nodes(NodePlace(0, 2, "127.0.0.1", 0, token), 2, "run") as nodes:
        yield nodes


@pytest.fixture
def connect(nodes: Nodes) -> Iterator[Callable[[], Peer]]:
    peers = []

    def connect() -> Peer:
        peers.append(Peer(connect_to(nodes)))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.close()


def connect_to(nodes: Nodes) -> socket.socket:
    assert nodes._listener is not None
    return socket.create_connection(("127.0.0.1", nodes._listener.getsockname()[1]))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def accept(nodes: Nodes, peer: Peer, **changes: Any) -> RemoteNode:
    """Let a node connect; return the launcher's side of it."""
    peer.send(HELLO | changes)
    assert peer.receive() == {"accepted": True}
    wait_until(lambda: nodes.count_slots() == 4)
    node = nodes.list_connected()[1]
    assert isinstance(node, RemoteNode)
    return node


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b'{"token": "secr',
        b"\n",
        b"{\n",
        b"[]\n",
        b'"secret"\n',
        b"null\n",
        b"\xff\xfe\n",
        pytest.param(b"9" * 6000 + b"\n", id="digits"),
        pytest.param(b"[" * 9000 + b"\n", id="nested"),
        pytest.param(b" " * 20_000 + b"{}\n", id="long"),
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_a_connection_without_a_greeting_is_closed(
    nodes: Nodes, connect: Callable[[], Peer], hello: bytes
) -> None:
    other = connect()
    other.send(hello)
    with suppress(OSError):  # a line that is too long is answered by closing at once
        other.connection.shutdown(socket.SHUT_WR)
    assert other.receive() is None
    accept(nodes, connect())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token": None}, "its SHARDWRIGHT_NODE_TOKEN differs"),
        ({"token": "\udcff"}, "its SHARDWRIGHT_NODE_TOKEN differs"),
        ({"token": ["secret"]}, "its SHARDWRIGHT_NODE_TOKEN differs"),
        ({"version": "0"}, f"version '0', not '{__version__}'"),
        ({"num_slots": 8}, "num_slots 8, not 2"),
        ({"index": "1"}, "its name or number is missing"),
        ({"name": None}, "its name or number is missing"),
        ({"index": 0}, "RANK 0 of 2 nodes"),
        ({"index": 2, "run": ""}, "run '', not 'run', RANK 2 of 2 nodes"),
    ],
)
def test_a_node_of_another_run_is_refused_with_the_reason(
    connect: Callable[[], Peer], changes: dict[str, Any], reason: str
) -> None:
    peer = connect()
    peer.send(HELLO | changes)
    assert peer.receive() == {"refused": reason}
    assert peer.receive() is None


def test_a_token_may_have_any_bytes() -> None:
    with listen("\udcff") as nodes:
        peer = Peer(connect_to(nodes))
        accept(nodes, peer, token="\udcff")
        peer.close()


def test_silent_connections_exclude_no_node(
    nodes: Nodes, connect: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can open connections, until the launcher has no file descriptor left."""
    monkeypatch.setattr(node_connections, "_MAX_UNKNOWN", 1)
    silent = [connect() for _ in range(5)]
    accept(nodes, connect())
    # The node's connection was the sixth one; two besides it may be open.
    assert [peer.receive() for peer in silent[:3]] == [None] * 3
    assert not select.select([peer.connection for peer in silent[4:]], [], [], 0)[0]


def test_a_launcher_without_free_descriptors_or_threads_accepts_later_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = [socket.socketpair() for _ in range(2)]
    answers: list[OSError | socket.socket] = [
        OSError(errno.EMFILE, "too many open files"),
        OSError(errno.ECONNABORTED, "gone"),
        *(far for _, far in ends),
        OSError(errno.EINVAL, "the listener is shut down"),
    ]

    class Listener:
        def accept(self) -> tuple[socket.socket, None]:
            answer = answers.pop(0)
            if isinstance(answer, OSError):
                raise answer
            return answer, None

        def fileno(self) -> int:
            return 0

    class Thread(threading.Thread):
        def start(self) -> None:
            if len(answers) == 2:
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(node_connections, "_POLL_SECONDS", 0.0)
    nodes = Nodes()
    nodes._listener = Listener()  # type: ignore[assignment]
    monkeypatch.setattr(node_connections.threading, "Thread", Thread)
    nodes._accept()
    refused, other = (Peer(near) for near, _ in ends)
    assert refused.receive() is None
    other.send(HELLO)
    assert other.receive() == {"refused": "its SHARDWRIGHT_NODE_TOKEN differs"}
    refused.close()
    other.close()


def test_a_second_node_with_the_same_place_is_refused_while_the_first_answers(
    nodes: Nodes, connect: Callable[[], Peer]
) -> None:
    """The first one keeps its ranks, also if its greeting is sent again by somebody else."""
    first = connect()
    second = connect()
    accept(nodes, first)
    second.send(HELLO)
    while not select.select([second.connection], [], [], 0.001)[0]:
        first.send({"alive": True})
    assert second.receive() == {"refused": "its RANK 1 is taken by first, which still answers"}
    assert nodes.count_slots() == 4


@pytest.mark.parametrize("name", ["first", "another"])
def test_a_node_that_replaces_one_waits_for_its_loss(
    nodes: Nodes, connect: Callable[[], Peer], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without network counts as lost after some time, and its successor may be early."""
    monkeypatch.setattr(node_connections, "LOSS_SECONDS", 0.05)
    former = accept(nodes, connect())
    monkeypatch.setattr(node_connections, "LOSS_SECONDS", 20.0)
    successor = connect()
    successor.send(HELLO | {"name": name})
    assert successor.receive() == {"accepted": True}
    assert former.is_lost
    assert former._connection.fileno() < 0, "its descriptor is closed"
    wait_until(lambda: nodes.count_slots() == 4)
    assert nodes.list_connected()[1].name == name


def test_a_node_that_greets_when_the_run_ends_gets_its_end(nodes: Nodes) -> None:
    with listen("secret") as nodes:
        peer = Peer(connect_to(nodes))
        wait_until(lambda: len(nodes._unknown) == 1)
    peer.send(HELLO)
    assert peer.receive() == {"accepted": True}
    assert peer.receive() == {"finish": int(ExitCode.DONE), "text": ""}
    peer.close()


def begin_generation(node: RemoteNode, folder: Path) -> Path:
    recipe = folder / "recipe.yaml"
    recipe.touch()
    control = folder / f"generation-{node._generation + 1}"
    control.mkdir()
    node.begin_generation(control, [str(recipe)], None)
    return control


@pytest.mark.parametrize(
    "message",
    [
        b"{\n",
        b"7\n",
        pytest.param(b"[" * 100_000 + b"\n", id="nested"),
        {"ended": 1},
        {"ended": 1, "status": "killed"},
        {"ended": [], "status": 0},
        {"generation": 1},
        {"generation": 1, "progress": [0]},
        {"generation": 1, "file": 0},
        {"generation": 1, "file": "rank-0.json", "text": "{}"},
        {"generation": 1, "file": "rank-0.json", "text": '{"rank": 0, "exit_code": 3'},
        {"generation": 1, "file": "rank-0.json", "text": json.dumps(OUTCOME | {"other": 1})},
    ],
)
def test_a_node_with_a_malformed_message_is_lost_with_one_warning(
    nodes: Nodes,
    connect: Callable[[], Peer],
    message: bytes | dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    peer = connect()
    control = begin_generation(accept(nodes, peer), tmp_path)
    assert peer.receive()["generation"] == 1
    peer.send(message)
    assert peer.receive() is None
    wait_until(lambda: nodes.count_slots() == 2)
    (record,) = caplog.records
    text = "node first counts as lost: it sent a message that cannot be read"
    assert record.getMessage().startswith(text)
    assert not list(control.iterdir())


def test_a_node_reports_outcomes_of_its_generation_only_and_no_times(
    nodes: Nodes, connect: Callable[[], Peer], tmp_path: Path
) -> None:
    """The node's clock is wrong, one file name leads outside, and old messages come again."""
    peer = connect()
    node = accept(nodes, peer)
    former, current = (begin_generation(node, tmp_path) for _ in range(2))
    repeated = {"generation": 1, "file": "rank-0.json", "text": json.dumps(OUTCOME)}
    for message in (
        repeated,
        {"generation": 2, "file": "../rank-0.json", "text": json.dumps(OUTCOME)},
        {"generation": 2, "file": "rank-1.json", "text": json.dumps(OUTCOME | {"rank": 1})},
        repeated,
        *[{"ended": 1, "status": 0}] * 2,
    ):
        peer.send(message)
    wait_until(lambda: 1 in node.statuses)
    (outcome,) = read_outcomes(current)
    assert outcome == RankOutcome(1, 3, at_seconds=outcome.at_seconds)
    assert abs(outcome.at_seconds - time.time()) < 60.0
    assert not list(former.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "generation-1",
        "generation-2",
        "recipe.yaml",
    ]
