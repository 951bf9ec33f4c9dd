"""Start the rank processes of a case and control them: the parent's side of `pace.py`. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

from benchmarks.case import Case

LOG_TAIL_LINES = 15
ROOT = Path(__file__).resolve().parents[1]
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Set for several ranks; absent for one rank, so that contenders run it as a single process."""


class RanksFailed(RuntimeError):
    """A rank ended or does not answer; the message contains the end of its log."""


class Ranks:
    """Processes of one case, alive within the context.

    Args:
        case: case that they run.
        logs_dir: folder of their output, one file per rank.
        time_limit_seconds: longest time of the start and of one block.
        waits_to_build: True if the ranks wait for `build` once they have imported their packages.
    """

    def __init__(
        self,
        case: Case,
        logs_dir: Path,
        *,
        time_limit_seconds: float,
        threads_per_rank: int | None = 1,
        waits_to_build: bool = False,
    ) -> None:
        self.case = case
        self._logs_dir = logs_dir
        self._limit = time_limit_seconds
        self._threads = threads_per_rank
        self._start_options = ["wait"] if waits_to_build else []
        self._processes: list[subprocess.Popen[str]] = []
        self._replies: list[TextIO] = []

    def __enter__(self) -> Ranks:
        self._logs_dir.mkdir(parents=True, exist_ok=True)
        port = find_free_port()
        for rank in range(self.case.world_size):
            self._start(rank, port)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            if kind is None and process.poll() is None:
                self._send(process, "stop")
        for process in self._processes:
            try:
                process.wait(timeout=30 if kind is None else 0.1)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for replies in self._replies:
            replies.close()

    def build(self) -> None:
        """Tell ranks that wait for it to build their model."""
        for process in self._processes:
            self._send(process, "build")

    def wait_ready(self) -> list[dict[str, Any]]:
        """Wait for every rank's start-up reply: the model is built and wrapped, not trained."""
        return self._collect()

    def run_block(
        self, steps: int, option: Literal["", "memory", "waits"] = ""
    ) -> list[dict[str, Any]]:
        """Run `steps` optimizer steps; return one reply per rank (seconds, losses, memory).

        Args:
            option: `memory` adds `peak_tensor_bytes` to the replies, which needs a contender that
                counts its resident bytes; `waits` adds `num_waits`, the waits of the host for a
                CUDA device. The steps take longer.
        """
        for process in self._processes:
            self._send(process, f"{steps} {option}")
        return self._collect()

    def _start(self, rank: int, port: int) -> None:
        read_fd, write_fd = os.pipe()
        environment = {
            name: value for name, value in os.environ.items() if name not in RANK_VARIABLES
        }
        environment["TOKENIZERS_PARALLELISM"] = "false"
        # A checkout that is not installed (another machine's Python) still finds its own
        # sources.
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])
        )
        if self.case.world_size > 1:
            values = (rank, rank, self.case.world_size, self.case.world_size, "127.0.0.1", port)
            environment |= {
                name: str(value) for name, value in zip(RANK_VARIABLES, values, strict=True)
            }
        if self._threads is not None:
            environment |= {
                name: str(self._threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
            }
        with self._log_path(rank).open("w") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.rank", self.case.to_json(), str(write_fd)),
                    *self._start_options,
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[write_fd],
                env=environment,
                cwd=ROOT,
                text=True,
            )
        os.close(write_fd)
        self._processes.append(process)
        self._replies.append(os.fdopen(read_fd))

    def _send(self, process: subprocess.Popen[str], command: str) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(command + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return  # it has ended; the next read reports that with its log

    def _collect(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self._limit
        with selectors.DefaultSelector() as selector:
            for rank, replies in enumerate(self._replies):
                selector.register(replies, selectors.EVENT_READ, rank)
            messages: dict[int, dict[str, Any]] = {}
            while len(messages) < len(self._replies):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RanksFailed(
                        f"{self.case.name}: no answer within {self._limit:.0f} s. "
                        f"{self._read_log_tail()}"
                    )
                for key, _ in ready:
                    line = self._replies[key.data].readline()  # ranks write whole lines
                    if not line:
                        # After its end the log is complete.
                        self._processes[key.data].wait(self._limit)
                        raise RanksFailed(
                            f"{self.case.name}: rank {key.data} ended. "
                            f"{self._read_log_tail(key.data)}"
                        )
                    messages[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [messages[rank] for rank in sorted(messages)]

    def _log_path(self, rank: int) -> Path:
        return self._logs_dir / f"{self.case.name}-rank{rank}.log"

    def _read_log_tail(self, rank: int = 0) -> str:
        lines = self._log_path(rank).read_text(errors="replace").splitlines()
        return f"End of {self._log_path(rank)}:\n" + "\n".join(lines[-LOG_TAIL_LINES:])


def find_free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
