"""An S3 server in a process of its own behind a proxy; tests are skipped without its packages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.object_store.proxy import Proxy

ROOT = Path(__file__).resolve().parents[2]
ACCESS_KEY = "AKIATESTTESTTESTTEST"
SECRET_KEY = "aSecret/that+nobody/sees"


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Server:
    """The server's process and its proxy."""

    port: int
    process: subprocess.Popen[bytes]
    proxy: Proxy

    def post(self, path: str, content: bytes = b"") -> bytes:
        """Call the server's own interface."""
        address = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(address, content, {"Content-Type": "text/plain"})
        with urllib.request.urlopen(request) as answer:
            return bytes(answer.read())

    def kill(self) -> None:
        """End the process without warning: what it has in memory is lost."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def start_again(self) -> None:
        """Start a new, empty server on the same port."""
        self.process = start_process(self.port)


def start_process(port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.object_store.moto_server", str(port)], cwd=ROOT
    )
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process
        except OSError:
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
    raise AssertionError("the server does not start")


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    """Start the server and the proxy once."""
    for package in ("s3fs", "moto", "flask"):
        pytest.importorskip(package, reason=f"needs {package}: pip install 'shardwright[s3]' moto")
    port = find_free_port()
    running = Server(port, start_process(port), Proxy(port))
    yield running
    running.kill()


@pytest.fixture
def store(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return the server with one empty bucket, `bucket`, and clients that use the proxy."""
    import fsspec

    server.proxy.forget()
    server.post("/moto-api/reset")
    server.proxy.sizes.clear()
    for name, value in {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.proxy.endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shardwright.store_requests.FIRST_DELAY_SECONDS", 0.02)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    get_client().call_s3("create_bucket", Bucket="bucket")
    server.proxy.forget()
    return server


def get_client() -> Any:
    """Return the file system that the package uses for the bucket."""
    from shardwright.store_requests import open_file_system

    return open_file_system("s3://bucket/run")[0]


@pytest.fixture
def count_objects() -> Callable[[], list[str]]:
    """Return a function that lists all objects of the bucket."""

    def list_names() -> list[str]:
        client = get_client()
        client.invalidate_cache()
        return sorted(client.find("bucket"))

    return list_names
