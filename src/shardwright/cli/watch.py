"""`shardwright watch`: the page of a run while it runs, on this machine and behind a token."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN", help="Run folders; several are laid over each other.", show_default=False)
]


def watch_command(
    runs: Runs,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Where to listen on 127.0.0.1; 0 takes a free one.")] = 0,
) -> None:
    """Serve the report of a run live, until Ctrl-C. The address holds a random token; `metrics` behind it is Prometheus text."""
    from shardwright.report.serve import LivePage, LiveServer

    page = LivePage(runs)
    page.page()  # what cannot be read at all is said here, not in the browser
    server = LiveServer(page, port)

    def stop(_number: int, _frame: FrameType | None) -> None:
        # `shutdown` waits for the loop that this very thread runs.
        threading.Thread(target=server.shutdown, daemon=True).start()

    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()
        sys.stderr.write("Ctrl-C ends it. From another machine: forward the port (ssh -L), then open the same address.\n")
        server.serve_forever(poll_interval=0.2)
    finally:
        server.server_close()
        for number, handler in former.items():
            signal.signal(number, handler)
