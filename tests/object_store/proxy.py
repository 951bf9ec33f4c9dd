"""A proxy in front of an S3 server that counts requests and makes some of them fail."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ERROR_CODES = {403: "AccessDenied", 404: "NoSuchUpload", 500: "InternalError", 503: "SlowDown"}
"""S3's names of errors, by HTTP status."""


def render_error(status: int) -> bytes:
    """Return the body of S3's answer to a request that failed."""
    code = ERROR_CODES[status]
    return (
        "<?xml version='1.0' encoding='UTF-8'?>"
        f"<Error><Code>{code}</Code><Message>{code} by the proxy</Message></Error>"
    ).encode()


@dataclass(frozen=True)
class Request:
    """One request that reached the proxy."""

    number: int
    method: str
    bucket: str
    key: str
    query: dict[str, list[str]]
    byte_range: str
    num_body_bytes: int

    @property
    def is_listing(self) -> bool:
        """True for a list of objects."""
        return self.method == "GET" and not self.key and "list-type" in self.query


Fault = Callable[[Request], int | float | str | None]
"""Fault of a request: an HTTP status, seconds of delay as a float, `reset` closes the connection
before the server sees the request, `lost` afterwards; None passes it on."""


@dataclass
class Proxy:
    """Running proxy; `fault` may be replaced at any time."""

    upstream_port: int
    fault: Fault = lambda request: None
    requests: list[Request] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes in bytes of the objects that were written through the proxy, by bucket/key."""
    etags: dict[str, str] = field(default_factory=dict)
    """ETags that the server gave these objects; only for those of one part."""
    frozen_sizes: dict[str, int] | None = None
    """Objects that listings show; None shows the present ones."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Address for clients."""
        return f"http://127.0.0.1:{self.port}"

    def record(self, method: str, target: str, byte_range: str, num_body_bytes: int) -> Request:
        """Record a request and return it with its number, from 1."""
        parts = urlsplit(target)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = parse_qs(parts.query, keep_blank_values=True)
        with self._lock:
            number = len(self.requests) + 1
            request = Request(number, method, bucket, key, query, byte_range, num_body_bytes)
            self.requests.append(request)
        return request

    def freeze_listings(self) -> None:
        """From now on listings show the objects of this moment."""
        self.frozen_sizes = dict(self.sizes)

    def forget(self) -> None:
        """Remove all faults and records, before the next test."""
        self.fault = lambda request: None
        self.requests.clear()
        self.frozen_sizes = None

    def count_read_bytes(self, suffix: str) -> int:
        """Return how many bytes of objects whose key ends in `suffix` were asked for by range."""
        total = 0
        for request in self.requests:
            if request.method == "GET" and request.key.endswith(suffix) and request.byte_range:
                first, _, last = request.byte_range.removeprefix("bytes=").partition("-")
                total += int(last) - int(first) + 1
        return total

    def render_listing(self, request: Request) -> bytes:
        """Return a listing of the frozen objects as S3 does."""
        prefix = request.query.get("prefix", [""])[0]
        delimiter = request.query.get("delimiter", [""])[0]
        contents: list[str] = []
        folders: set[str] = set()
        for name, size in sorted((self.frozen_sizes or {}).items()):
            bucket, _, key = name.partition("/")
            if bucket != request.bucket or not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if found:
                folders.add(prefix + head + delimiter)
            else:
                contents.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size>"
                    f"<ETag>{escape(self.etags.get(name, 'x'))}</ETag>"
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    "<StorageClass>STANDARD</StorageClass></Contents>"
                )
        shown = "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in sorted(folders)
        )
        return (
            "<?xml version='1.0' encoding='UTF-8'?>"
            "<ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
            f"<Name>{request.bucket}</Name><Prefix>{escape(prefix)}</Prefix><MaxKeys>1000</MaxKeys>"
            f"<KeyCount>{len(contents) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>"
            f"{''.join(contents)}{shown}</ListBucketResult>"
        ).encode()

    def note_change(self, request: Request, etag: str) -> None:
        """Update sizes and ETags after a request that the server accepted."""
        name = f"{request.bucket}/{request.key}"
        if request.method == "PUT" and request.key and not request.query:
            self.sizes[name] = request.num_body_bytes
            self.etags[name] = etag
        elif request.method == "POST" and "uploadId" in request.query:
            self.sizes[name] = sum(
                part.num_body_bytes
                for part in self.requests
                if part.method == "PUT" and part.query.get("uploadId") == request.query["uploadId"]
            )
        elif request.method == "DELETE" and "uploadId" not in request.query:
            self.sizes.pop(name, None)


class _Handler(BaseHTTPRequestHandler):
    owner: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_request(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        request = self.owner.record(
            self.command, self.path, self.headers.get("Range", ""), len(body)
        )
        fault = self.owner.fault(request)
        if isinstance(fault, float):
            time.sleep(fault)
        if fault == "reset":
            return self._reset()
        if isinstance(fault, int) and not isinstance(fault, bool):
            return self._reply(fault, [], render_error(fault))
        if request.is_listing and self.owner.frozen_sizes is not None:
            return self._reply(200, [], self.owner.render_listing(request))
        try:
            status, headers, content = self._forward(body)
        except OSError:
            return self._reset()
        if status < 300:
            self.owner.note_change(request, dict(headers).get("ETag", "x"))
        if fault == "lost":
            return self._reset()
        return self._reply(status, headers, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.owner.upstream_port, timeout=60)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _reply(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        is_head = self.command == "HEAD"
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length") or (
                is_head and name.lower() == "content-length"
            ):
                self.send_header(name, value)
        if not is_head:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not is_head:
            self.wfile.write(content)

    def _reset(self) -> None:
        """Close the connection with a TCP reset."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def finish(self) -> None:
        try:
            super().finish()
        except (OSError, ValueError):
            self.connection.close()

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ValueError):  # the client, or `_reset`, closed the connection
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Log nothing."""
