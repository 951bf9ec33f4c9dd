"""Service of a node whose launcher sends something wrong, or nothing.

The launcher is a socket of the tests.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import InputError, RunFailed
from shardwright.launch import node_service
from shardwright.launch.node_place import NodePlace
from tests.unit.launch.message_peer import Peer


@contextmanager
def serve(answer: bytes | None, kind: type[Exception], match: str) -> Iterator[Peer]:
    """Run the service of a node whose launcher is the test; it ends with an error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        peer = Peer(listener.accept()[0])
    if answer is not None:
        peer.send(answer)
    errors = list[BaseException]()

    def run() -> None:
        try:
            node_service.serve(near, NodePlace(1, 2, "head", 29500, "secret"), 2, "run")
        except BaseException as error:
            errors.append(error)

    service = threading.Thread(target=run)
    service.start()
    assert peer.receive()["name"] == socket.gethostname()
    yield peer
    service.join(20.0)
    assert not service.is_alive()
    peer.close()
    with pytest.raises(kind, match=match):
        raise errors[0]


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (None, r"the launcher at head:29500 gives no valid answer: timed out. Perhaps another"),
        (b"HTTP/1.1 400 Bad Request\r\n", "gives no valid answer: Expecting value"),
        (b"[]\n", "gives no valid answer: not a JSON object"),
        pytest.param(
            b"[" * 100_000 + b"\n", "gives no valid answer: nested too deeply", id="nested"
        ),
        (b"{}\n", "the launcher at head:29500 has closed the connection: it has ended"),
    ],
)
def test_a_node_ends_without_a_valid_answer(
    answer: bytes | None, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer is None:
        monkeypatch.setattr(node_service, "_ANSWER_SECONDS", 0.01)
    with serve(answer, RunFailed, match):
        pass


@pytest.mark.parametrize("closing", [b"", b'{"sta'])
def test_a_connection_closed_before_an_answer_is_no_wrong_input(closing: bytes) -> None:
    """Wrong input would keep a supervisor from starting the node again."""
    with serve(closing, RunFailed, "the launcher at head:29500") as launcher:
        launcher.connection.shutdown(socket.SHUT_WR)


def test_a_node_that_has_nothing_to_say_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system of a node answers for a service that is stopped, so the connection stays."""
    monkeypatch.setattr(node_service, "_ALIVE_SECONDS", 0.0)
    with serve(b'{"accepted": true}\n', RunFailed, "the launcher on node 0 was lost") as launcher:
        assert [launcher.receive() for _ in range(3)] == [{"alive": True}] * 3
        launcher.connection.shutdown(socket.SHUT_WR)


def test_a_refused_node_is_wrong_input() -> None:
    with serve(b'{"refused": "its RANK 1 is taken"}\n', InputError, "its RANK 1 is taken"):
        pass


@pytest.mark.parametrize(
    "message", [b"{\n", b"7\n", pytest.param(b"[" * 100_000 + b"\n", id="nested")]
)
def test_a_node_ends_after_a_malformed_message_of_the_launcher(message: bytes) -> None:
    with serve(
        b'{"accepted": true}\n', RunFailed, "on node 0: the launcher on node 0 was lost"
    ) as (launcher):
        launcher.send(message)


@pytest.mark.parametrize(
    "message",
    [{"generation": 1}, {"send": [], "message": {}}, {"finish": 3}],
)
def test_a_node_names_a_message_without_its_parts(message: dict[str, Any]) -> None:
    text = "the launcher on node 0 sent a message that cannot be read"
    with serve(b'{"accepted": true}\n', RunFailed, text) as launcher:
        launcher.send(message)


def test_a_node_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the launcher that was lost."""
    monkeypatch.setattr(node_service.tempfile, "tempdir", str(tmp_path / "absent"))
    text = "this node failed and counts as lost: .*absent"
    with serve(b'{"accepted": true}\n', RunFailed, text) as launcher:
        launcher.send({"generation": 1, "recipe": "", "hang_reports": None})
