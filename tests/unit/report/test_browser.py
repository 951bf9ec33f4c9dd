"""The report page in a browser, where there is one: alive, quiet, small and quick."""

from __future__ import annotations

import functools
import html
import http.server
import json
import math
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.report.pages import render
from tests.unit.report.samples import falling, noisy, write_run


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "long"
    return render(write_run(folder, 100_000, noisy(0.02, 3), validation=falling, every=2000))


@pytest.mark.long
def test_a_hundred_thousand_steps_make_a_small_page(long_page: str) -> None:
    assert len(long_page) < 600_000


def test_pages_do_not_grow_with_the_steps(tmp_path: Path) -> None:
    short, longer = (
        len(render(write_run(tmp_path / str(steps), steps, noisy(0.02, 3))))
        for steps in (3000, 6000)
    )
    assert longer < 1.1 * short


PROBE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const found = { shown: [], readers: [] };
  for (const figure of document.querySelectorAll(".figure")) {
    const svgs = [...figure.querySelectorAll("svg")].filter((svg) => svg.getBoundingClientRect().width > 0);
    const drawn = svgs.length ? [...svgs[0].querySelectorAll("path.line, path.area, rect")] : [];
    const boxes = drawn.map((shape) => shape.getBBox());
    const spread = Math.max(...boxes.map((box) => box.x + box.width)) - Math.min(...boxes.map((box) => box.x));
    found.shown.push([svgs.length, boxes.length ? spread / svgs[0].viewBox.baseVal.width : 0]);
    if (!figure.dataset.chart || !svgs.length) continue;
    const box = svgs[0].getBoundingClientRect();
    svgs[0].dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 50 }));
    found.readers.push(figure.querySelector(".reader").hidden ? "" : figure.querySelector(".reader").textContent);
  }
  found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.title = JSON.stringify(found);
}, 0));
</script>
"""


DRAWN = """
<script>addEventListener("load", () => requestAnimationFrame(() => setTimeout(() => fetch("/drawn"), 0)));</script>
"""


class Server:
    """Serves one page and keeps what else was asked for, and when."""

    def __init__(self, page: str) -> None:
        self.asked: list[str] = []
        self.times: list[float] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append(self.path)
                server.times.append(time.monotonic())
                self.send_response(200 if self.path in ("/page", "/drawn") else 404)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                if self.path == "/page":
                    self.wfile.write(page.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(
            target=functools.partial(self.http.serve_forever, poll_interval=0.05)
        )
        self.thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/page"

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def serve() -> Iterator[list[Server]]:
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.close()


def open_in(
    browser: str,
    page: str,
    servers: list[Server],
    profile: Path,
    width: int,
    *,
    milliseconds: int = 3000,
) -> subprocess.CompletedProcess[str]:
    """The browser when it has shown the page, as the newest of the servers serves it, or so much of
    its own time has passed.
    """
    servers.append(Server(page))
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
        "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
        f"--window-size={width},900", f"--virtual-time-budget={milliseconds}", "--dump-dom", servers[-1].address,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)


def console_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the page said there: errors, and what its policy refused."""
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("width", [1280, 700])
def test_the_page_lives_in_a_browser(
    browser: str, eventful: Path, serve: list[Server], tmp_path: Path, width: int
) -> None:
    done = open_in(
        browser, render(eventful).replace("</body>", PROBE + "</body>"), serve, tmp_path, width
    )
    assert console_of(done) == []
    assert serve[-1].asked == ["/page"]
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title, done.stderr[-2000:]
    found = json.loads(html.unescape(title[1]))
    shown = found["shown"]
    assert len(shown) == 14
    assert all(count == 1 and share > 0.3 for count, share in shown), (
        shown
    )  # one picture per chart, and its curve has width
    assert all(re.search(r"step \d+.*\d", reader) for reader in found["readers"])
    assert found["overflow"] == 0


@pytest.mark.long
def test_a_hundred_thousand_steps_open_in_two_seconds(
    browser: str, long_page: str, serve: list[Server], tmp_path: Path
) -> None:
    """From the request to the page's word that it is drawn, by the server's clock: the browser's
    own is virtual here, and stands still while the page computes. The best of five: the machine may
    have other things to do."""
    policy = "default-src 'none'"
    assert policy in long_page
    page = long_page.replace(policy, f"{policy}; connect-src 'self'", 1).replace(
        "</body>", DRAWN + "</body>"
    )
    taken: list[float] = []
    while len(taken) < 5 and min(taken, default=2.0) >= 2.0:
        done = open_in(browser, page, serve, tmp_path, 1280, milliseconds=30_000)
        assert console_of(done) == []
        asked = serve[-1].asked
        assert asked[0] == "/page"
        # Its clock may run out before a starved browser has drawn a frame: that is a try that was
        # too slow.
        taken.append(
            serve[-1].times[1] - serve[-1].times[0] if asked[1:] == ["/drawn"] else math.inf
        )
    assert min(taken) < 2.0
