"""`watch`: served pages, access control and shutdown."""

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
from tests.unit.report.samples import make_step, write_run


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


def send_request(
    server: LiveServer, path: str, *, host: str | None = None, method: str = "GET"
) -> tuple[int, str, http.client.HTTPMessage]:
    """Send a request; return status, body and headers."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body, response.headers


def test_page_version_and_metrics_are_served(server: LiveServer, run: Path) -> None:
    status, page, headers = send_request(server, f"/{server.token}/")
    assert status == 200
    assert "connect-src 'self'" in page
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    version = json.loads(send_request(server, f"/{server.token}/state")[1])["version"]
    assert f'<main data-version="{version}">' in page
    metrics = send_request(server, f"/{server.token}/metrics")[1]
    assert 'shardwright_step{run="run"} 5' in metrics
    assert "shardwright_rank_own_seconds" not in metrics
    server.page._next_refresh_time = 0.0
    with EventWriter(run) as writer:
        writer.append(make_step(6, 1.5))
    assert json.loads(send_request(server, f"/{server.token}/state")[1])["version"] != version
    assert 'shardwright_step{run="run"} 6' in send_request(server, f"/{server.token}/metrics")[1]
    assert send_request(server, f"/{server.token}/", method="HEAD")[:2] == (200, "")


@pytest.mark.parametrize("path", ["/", "/wrong/", "/wrong/state", "//", "/{token}x/", "/%C3%A9/"])
def test_requests_without_the_token_are_refused(server: LiveServer, path: str) -> None:
    status, body, _ = send_request(
        server, path.format(token=server.token).encode().decode("latin-1")
    )
    assert status == 403
    assert server.token not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}"]
)
def test_requests_for_another_host_are_refused(server: LiveServer, host: str) -> None:
    status, body, _ = send_request(
        server, f"/{server.token}/", host=host.format(port=server.server_address[1])
    )
    assert (status, server.token in body) == (403, False)


def test_localhost_is_an_accepted_host(server: LiveServer) -> None:
    assert (
        send_request(server, f"/{server.token}/", host=f"localhost:{server.server_address[1]}")[0]
        == 200
    )


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
def test_files_are_not_served(server: LiveServer, path: str) -> None:
    assert send_request(server, f"/{server.token}/{path}")[0] == 404


def test_the_server_listens_on_the_loopback_address_only(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 32
    with pytest.raises(InputError, match="cannot listen on port"):
        LiveServer(server.page, int(server.server_address[1]))


def test_a_folder_without_events_is_served_with_a_note(tmp_path: Path) -> None:
    page = LivePage([tmp_path])
    assert b"there are no events to show yet" in page.get_page()
    assert page.get_metrics() == b""
    page._next_refresh_time = 0.0
    write_run(tmp_path, 3)
    assert b"there are no events" not in page.get_page()


class GrowingPage(LivePage):
    """Live page of a run that gets another event after the page is first served."""

    def get_page(self) -> bytes:
        page = super().get_page()
        if b"<b>5</b>" in page:
            with EventWriter(self._runs[0]) as writer:
                writer.append(make_step(6, 1.5))
            self._next_refresh_time = 0.0
        return page


def test_an_open_page_shows_later_events(browser: str, run: Path, tmp_path: Path) -> None:
    server = LiveServer(GrowingPage([run]))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--disable-background-networking",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
        "--dump-dom",
        server.address,
    ]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert [line for line in process.stderr.splitlines() if "CONSOLE" in line] == []
    assert "<b>6</b>" in process.stdout
    assert "<b>5</b>" not in process.stdout


def test_the_verb_prints_its_address_serves_and_ends_on_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "shardwright", "watch", str(run)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline()
            match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/[\w-]+/)\n", address)
            assert match, address
            connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=120)
            connection.request("GET", match[2])
            assert connection.getresponse().status == 200
            os.kill(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == ExitCode.DONE
    assert "Traceback" not in errors
