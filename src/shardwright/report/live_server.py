"""Local HTTP server of a run's live page: `shardwright watch`.

It listens on 127.0.0.1 only and answers only addresses with its random token. Requests whose
Host header names another machine are rejected, so that no web page can reach it by DNS
rebinding. There are four addresses and no files:

    /TOKEN/           the page
    /TOKEN/page       the same; the page fetches its updates from it
    /TOKEN/state      the version, as JSON
    /TOKEN/metrics    the latest numbers as Prometheus text
"""

from __future__ import annotations

import hmac
import http.server
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shardwright.errors import InputError
from shardwright.report.recorded_run import PREDICTION_FILE_NAME, load_runs
from shardwright.report.run_page import render_page
from shardwright.telemetry.event_log import EVENTS_FILE_NAME
from shardwright.telemetry.prometheus import format_metrics

LIVE_SERVER_HOST = "127.0.0.1"
_REQUEST_TIMEOUT_SECONDS = 5.0
"""Longest time a client may take to send its request before the connection is closed."""


class LivePage:
    """Current page of the runs, rendered again after new events in at most a tenth of the time."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self._runs = list(runs)
        self._lock = threading.Lock()
        self._page = b""
        self._metrics = b""
        self._version = ""
        self._next_refresh_time = 0.0

    def read_version(self) -> str:
        """Return a version that changes whenever the page would."""
        parts = []
        for run in self._runs:
            for path in (
                run / EVENTS_FILE_NAME if run.is_dir() else run,
                run / PREDICTION_FILE_NAME,
            ):
                try:
                    status = path.stat()
                    parts.append(f"{status.st_size:x}.{status.st_mtime_ns:x}")
                except OSError:
                    parts.append("-")
        return "_".join(parts)

    def get_page(self) -> bytes:
        """Return the page as HTML in UTF-8.

        Raises:
            InputError: the runs can no longer be read.
        """
        return self._refresh()[0]

    def get_metrics(self) -> bytes:
        """Return the latest numbers as Prometheus text in UTF-8."""
        return self._refresh()[1]

    def get_reported_version(self) -> str:
        """Return the newest version, or the rendered one while rendering must wait."""
        with self._lock:
            return (
                self._version
                if self._version and time.monotonic() < self._next_refresh_time
                else self.read_version()
            )

    def _refresh(self) -> tuple[bytes, bytes]:
        with self._lock:
            version = self.read_version()
            if version != self._version and (
                not self._page or time.monotonic() >= self._next_refresh_time
            ):
                start = time.monotonic()
                runs = load_runs(self._runs)
                self._page = render_page(runs, live_version=version).encode()
                self._metrics = format_metrics(
                    [(run.name, run.log.events) for run in runs]
                ).encode()
                self._version = version
                self._next_refresh_time = time.monotonic() + 9 * (time.monotonic() - start)
            return self._page, self._metrics


class LiveServer(http.server.ThreadingHTTPServer):
    """HTTP server of a `LivePage`, protected by a token, until `shutdown`."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0) -> None:
        """
        Args:
            port: 0 selects a free port.

        Raises:
            InputError: the port is in use.
        """
        self.page = page
        self.token = secrets.token_urlsafe(32)
        try:
            super().__init__((LIVE_SERVER_HOST, port), _Handler)
        except OSError as error:
            raise InputError(
                f"cannot listen on port {port}: {error.strerror}",
                field="--port",
                got=port,
                remedy="Leave out --port to use a free port",
            ) from error

    @property
    def address(self) -> str:
        """URL of the page, with the token."""
        return f"http://{LIVE_SERVER_HOST}:{self.server_address[1]}/{self.token}/"

    def handle_error(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any
    ) -> None:
        """Ignore clients that disconnect early."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """Handler of GET and HEAD requests."""

    server: LiveServer
    server_version = "shardwright"
    sys_version = ""
    timeout = _REQUEST_TIMEOUT_SECONDS

    def do_GET(self) -> None:
        """Answer a request to one of the four addresses."""
        self._respond(has_body=True)

    def do_HEAD(self) -> None:
        """Answer as `do_GET`, without the body."""
        self._respond(has_body=False)

    def _respond(self, *, has_body: bool) -> None:
        port = self.server.server_address[1]
        if self.headers.get("Host", "").lower() not in (
            f"{LIVE_SERVER_HOST}:{port}",
            f"localhost:{port}",
        ):
            self._send_response(
                HTTPStatus.FORBIDDEN,
                b"only this machine may use this address\n",
                "text/plain; charset=utf-8",
                has_body,
            )
            return
        _, token, *rest = urlsplit(self.path).path.split("/")
        if not hmac.compare_digest(
            token.encode("utf-8", "surrogateescape"), self.server.token.encode()
        ):
            self._send_response(
                HTTPStatus.FORBIDDEN,
                b"the address lacks the correct token\n",
                "text/plain; charset=utf-8",
                has_body,
            )
            return
        route = self._list_routes().get("/".join(rest)) if rest else None
        if route is None:
            self._send_response(
                HTTPStatus.NOT_FOUND, b"not found\n", "text/plain; charset=utf-8", has_body
            )
            return
        render, content_type = route
        try:
            body = render()
        except InputError as error:
            self._send_response(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{error}\n".encode(),
                "text/plain; charset=utf-8",
                has_body,
            )
            return
        self._send_response(HTTPStatus.OK, body, content_type, has_body)

    def _list_routes(self) -> dict[str, tuple[Callable[[], bytes], str]]:
        page = self.server.page
        html = "text/html; charset=utf-8"
        return {
            "": (page.get_page, html),
            "page": (page.get_page, html),
            "state": (
                lambda: json.dumps({"version": page.get_reported_version()}).encode(),
                "application/json",
            ),
            "metrics": (page.get_metrics, "text/plain; version=0.0.4; charset=utf-8"),
        }

    def _send_response(
        self, status: HTTPStatus, body: bytes, content_type: str, has_body: bool
    ) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", content_type), ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"), ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing, because addresses contain the token."""
