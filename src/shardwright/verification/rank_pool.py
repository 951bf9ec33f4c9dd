"""Persistent groups of worker processes on this machine, one group per number of ranks.

Starting a rank takes seconds, mostly for imports, and a verification runs hundreds of small
functions. So a server process imports once and forks the workers, and a group runs many
functions one after another.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from shardwright.errors import RankFailed
from shardwright.verification.local_group import BACKEND, use_transport
from shardwright.verification.local_transport import LocalTransport, connect_ranks
from shardwright.worker_processes import block_interrupts

_PRELOADED = [
    __name__,
    "shardwright.verification.cell",
    "torch._dynamo",  # the first optimizer of a process imports it, for most of a second
]
"""Modules that the server imports, for all workers."""
_GRACE_SECONDS = 2.0
"""Time for the other ranks to report their errors after one has failed."""
_CAUSE_GRACE_SECONDS = 10.0
"""The same if all errors so far may be consequences of a lost peer; the cause may follow."""


@dataclass
class _Worker:
    process: ForkServerProcess
    pipe: connection.Connection


@dataclass
class _Failure:
    error: BaseException
    trace: str


class RankPool:
    """Pool that runs functions on all ranks of a process group and returns each rank's result.

    Use as a context manager, or call `close`. Not thread-safe.
    """

    def __init__(self, *, timeout_seconds: float = 120.0, backend: str = BACKEND) -> None:
        """Build a pool without workers.

        Args:
            timeout_seconds: time limit of a call, and of a wait for another rank.
            backend: backend of the process group, which works on CPU tensors.
        """
        self.timeout_seconds = timeout_seconds
        self._backend = backend
        self._groups: dict[int, tuple[list[_Worker], dist.TCPStore]] = {}

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_seconds: float | None = None,
    ) -> list[Any]:
        """Call `function(*arguments)` on each of `num_ranks` ranks; return results by rank.

        The function is pickled, so it must be defined at the top level of a module. The default
        process group is initialised for it unless there is one rank. After a failure the next
        call starts a new group.

        Raises:
            RankFailed: a rank raised (its error is the cause), died, or did not answer in time.
                The message names the rank and has its traceback.
        """
        workers = self._start(num_ranks)
        message = pickle.dumps((function, arguments))
        try:
            for worker in workers:
                worker.pipe.send_bytes(message)
            return self._collect(workers, timeout_seconds or self.timeout_seconds)
        except BaseException:
            self._stop(num_ranks)
            raise

    def close(self) -> None:
        """End all workers."""
        for num_ranks in list(self._groups):
            self._stop(num_ranks)

    def _start(self, num_ranks: int) -> list[_Worker]:
        if num_ranks not in self._groups:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED)
            # The store is in this process, on a port chosen by the kernel: no race for ports.
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            workers = []
            connections = connect_ranks(num_ranks)
            for rank in range(num_ranks):
                parent_pipe, worker_pipe = context.Pipe()
                process = context.Process(
                    target=_run_worker,
                    args=(
                        worker_pipe,
                        rank,
                        connections[rank],
                        store.port,
                        self._backend,
                        self.timeout_seconds,
                    ),
                    name=f"rank {rank} of {num_ranks}",
                    daemon=True,
                )
                with block_interrupts():
                    process.start()
                worker_pipe.close()
                workers.append(_Worker(process, parent_pipe))
                for link in connections[rank].values():
                    link.close()  # or no rank would notice the end of another
            self._groups[num_ranks] = (workers, store)
        return self._groups[num_ranks][0]

    def _stop(self, num_ranks: int) -> None:
        workers, _ = self._groups.pop(num_ranks, ([], None))
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.pipe.close()  # a worker that still ran would fail to answer
        for worker in workers:
            worker.process.join()

    def _collect(self, workers: Sequence[_Worker], timeout_seconds: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, _Failure | None] = {}
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout_seconds
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                rank = waiting.pop(pipe)
                try:
                    answer = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own worker's bytes
                except EOFError:
                    failures[rank] = None
                    continue
                if isinstance(answer, _Failure):
                    failures[rank] = answer
                else:
                    results[rank] = answer[0]
            if failures:
                consequence = all(
                    failure is not None and _is_consequence(failure)
                    for failure in failures.values()
                )
                deadline = min(
                    deadline,
                    time.monotonic() + (_CAUSE_GRACE_SECONDS if consequence else _GRACE_SECONDS),
                )
        if failures:
            _raise_cause(failures, workers)
        if waiting:
            late = ", ".join(str(rank) for rank in sorted(waiting.values()))
            raise RankFailed(
                f"no answer from rank {late} of {len(workers)} within {timeout_seconds:g} s"
            )
        return [results[rank] for rank in range(len(workers))]


def _raise_cause(failures: dict[int, _Failure | None], workers: Sequence[_Worker]) -> None:
    """Raise the most likely cause rather than the error of a rank that lost its peer."""

    def sort_key(item: tuple[int, _Failure | None]) -> tuple[bool, int]:
        failure = item[1]
        return (failure is not None and _is_consequence(failure), item[0])

    rank, failure = min(failures.items(), key=sort_key)
    if failure is None:
        workers[rank].process.join(timeout=_CAUSE_GRACE_SECONDS)
        code = workers[rank].process.exitcode
        end = f"ended with exit code {code}"
        if code is not None and code < 0:
            end = f"was killed by {signal.Signals(-code).name}"
        raise RankFailed(f"rank {rank} of {len(workers)} {end}")
    raise RankFailed(
        f"rank {rank} of {len(workers)}: {failure.error}\n{failure.trace}"
    ) from failure.error


def _is_consequence(failure: _Failure) -> bool:
    """Return True if the failure may be the consequence of a lost peer."""
    return isinstance(failure.error, dist.DistError | RuntimeError)


def _run_worker(
    pipe: connection.Connection,
    rank: int,
    connections: dict[int, socket.socket],
    port: int,
    backend: str,
    timeout_seconds: float,
) -> None:
    """Join the group, then answer calls until the pipe closes."""
    torch.set_num_threads(1)
    # Compilation shows its progress by tqdm. Its lock between processes would be a semaphore, which
    # stays behind when the pool kills this process.
    tqdm.set_lock(threading.RLock())
    if connections:
        use_transport(LocalTransport(connections, timeout_seconds=timeout_seconds))
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_seconds)
        )
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=len(connections) + 1,
            timeout=timedelta(seconds=timeout_seconds),
        )
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            return
        try:
            function, arguments = pickle.loads(message)  # noqa: S301 - the parent's bytes
            answer = pickle.dumps((function(*arguments),))
        except BaseException as error:
            answer = _encode_failure(error)
        try:
            pipe.send_bytes(answer)
        except ConnectionError:  # the parent has ended, and nobody reads the answer
            return


def _encode_failure(error: BaseException) -> bytes:
    trace = "".join(traceback.format_exception(error))
    try:
        message = pickle.dumps(_Failure(error, trace))
        # An error whose constructor does not accept its `args` fails only here.
        pickle.loads(message)  # noqa: S301
    except Exception:
        message = pickle.dumps(_Failure(RankFailed(f"{type(error).__name__}: {error}"), trace))
    return message
