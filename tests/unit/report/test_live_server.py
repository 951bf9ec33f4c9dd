"""`watch`: what is served, to whom, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.errors import ExitCode, InputError
from shardwright.report.live_server import LivePage, LiveServer
from shardwright.telemetry.event_log import EventWriter
from tests.unit.report.samples import one_step, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", 5)


@pytest.fixture
def server(run: Path) -> Iterator[LiveServer]:
    server = LiveServer(LivePage([run]))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(
    server: LiveServer, path: str, *, host: str | None = None, method: str = "GET"
) -> tuple[int, str, http.client.HTTPMessage]:
    """Status, body and headers."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body, answer.headers


def test_the_page_its_version_and_its_metrics(server: LiveServer, run: Path) -> None:
    status, page, headers = ask(server, f"/{server.token}/")
    assert status == 200
    assert "connect-src 'self'" in page
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    version = json.loads(ask(server, f"/{server.token}/state")[1])["version"]
    assert f'<main data-version="{version}">' in page
    metrics = ask(server, f"/{server.token}/metrics")[1]
    assert 'shardwright_step{run="run"} 5' in metrics
    assert "shardwright_rank_own_seconds" not in metrics
    server.page._next_refresh_time = 0.0
    with EventWriter(run) as writer:
        writer.append(one_step(6, 1.5))
    assert json.loads(ask(server, f"/{server.token}/state")[1])["version"] != version
    assert 'shardwright_step{run="run"} 6' in ask(server, f"/{server.token}/metrics")[1]
    assert ask(server, f"/{server.token}/", method="HEAD")[:2] == (200, "")


@pytest.mark.parametrize("path", ["/", "/wrong/", "/wrong/state", "//", "/{token}x/", "/%C3%A9/"])
def test_nobody_without_the_token(server: LiveServer, path: str) -> None:
    status, body, _ = ask(server, path.format(token=server.token).encode().decode("latin-1"))
    assert status == 403
    assert server.token not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}"]
)
def test_no_other_host(server: LiveServer, host: str) -> None:
    status, body, _ = ask(
        server, f"/{server.token}/", host=host.format(port=server.server_address[1])
    )
    assert (status, server.token in body) == (403, False)


def test_an_address_by_name_is_this_machine(server: LiveServer) -> None:
    assert ask(server, f"/{server.token}/", host=f"localhost:{server.server_address[1]}")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "events.jsonl",
        "../../etc/passwd",
        "%2e%2e/events.jsonl",
        "..",
        "page/",
        "state/../page",
        "recipe.yaml",
    ],
)
def test_no_files(server: LiveServer, path: str) -> None:
    assert ask(server, f"/{server.token}/{path}")[0] == 404


def test_it_listens_on_this_machine_only(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 32
    with pytest.raises(InputError, match="cannot listen on port"):
        LiveServer(server.page, int(server.server_address[1]))


def test_a_folder_without_events_is_served_with_a_note_until_there_are_some(tmp_path: Path) -> None:
    page = LivePage([tmp_path])
    assert b"there are no events to show yet" in page.get_page()
    assert page.get_metrics() == b""
    page._next_refresh_time = 0.0
    write_run(tmp_path, 3)
    assert b"there are no events" not in page.get_page()


class Growing(LivePage):
    """A run that says one thing more once its page has been taken."""

    def page(self) -> bytes:
        page = super().get_page()
        if b"<b>5</b>" in page:
            with EventWriter(self._runs[0]) as writer:
                writer.append(one_step(6, 1.5))
            self._next_refresh_time = 0.0
        return page


def test_an_open_page_takes_up_what_the_run_has_said_since(
    browser: str, run: Path, tmp_path: Path
) -> None:
    server = LiveServer(Growing([run]))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--disable-background-networking", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom", server.address,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert "<b>6</b>" in done.stdout
    assert "<b>5</b>" not in done.stdout


def test_the_verb_says_its_address_serves_and_ends_on_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "shardwright", "watch", str(run)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline()
            found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/[\w-]+/)\n", address)
            assert found, address
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=120)
            connection.request("GET", found[2])
            assert connection.getresponse().status == 200
            os.kill(process.pid, signal.SIGINT)
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == ExitCode.DONE
    assert "Traceback" not in said
