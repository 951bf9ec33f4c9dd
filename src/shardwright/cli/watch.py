"""`shardwright watch`: serve the live report of a run on this machine, protected by a token."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

WatchRuns = Annotated[
    list[Path],
    typer.Argument(metavar="RUN", help="Run folders; several are drawn in the same charts."),
]


def watch_command(
    runs: WatchRuns,
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 chooses a free one."),
    ] = 0,
) -> None:
    """Serve a live report of a run until Ctrl-C.

    The address contains a random token; append `metrics` to it for Prometheus text.
    """
    from shardwright.report.live_server import LivePage, LiveServer

    page = LivePage(runs)
    page.get_page()  # errors in reading appear here, not in the browser
    server = LiveServer(page, port)

    def stop(_number: int, _frame: FrameType | None) -> None:
        # `shutdown` blocks until the loop ends, which runs in this thread.
        threading.Thread(target=server.shutdown, daemon=True).start()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()
        sys.stderr.write(
            "Press Ctrl-C to stop. From another machine: forward the port (ssh -L), "
            "then open the same address.\n"
        )
        server.serve_forever(poll_interval=0.2)
    finally:
        server.server_close()
        for number, handler in previous.items():
            signal.signal(number, handler)
