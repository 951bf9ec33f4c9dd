"""A rank's process that trains one generation after another, as its launcher's pool assigns.

The launcher writes lines of JSON to this process's standard input (`rank_processes.py`): an
assignment, or the request to abort the current generation because a rank is lost. The end of the
input ends a process that waits.

A process stays for the next generation only if it failed because of a lost peer, or left with all
others because more ranks follow. And nothing of the former generation may be left in it: process
groups, model, threads that save.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import queue
import socket
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.checkpoint.background_save import SAVE_THREAD_NAME
from shardwright.errors import (
    ExitCode,
    GenerationEnded,
    InputError,
    NonFiniteError,
    OutOfMemory,
    SaveFailed,
)
from shardwright.launch.rank_outcome import (
    CONTROL_VARIABLE,
    get_idle_path,
    is_lost_peer_message,
    write_outcome,
)
from shardwright.launch.stop_signals import ignore_stop_signals
from shardwright.parallel.mesh import abandon_process_groups, abort_nccl_groups
from shardwright.peer_copies.copier import COPY_THREAD_NAME

logger = logging.getLogger("shardwright")

_OWN_ERRORS = (InputError, NonFiniteError, OutOfMemory, SaveFailed)
"""Errors that are no consequence of a lost peer, also while one is lost."""


@dataclass(frozen=True)
class Assignment:
    """Generation that this process takes part in."""

    control: Path
    """Launcher's folder of the generation."""
    arguments: tuple[str, ...]
    environment: dict[str, str]
    """Rank, world size and address of the store, as torchrun sets them."""
    log: Path | None
    """File for the output; None for the terminal."""


class AssignmentReader:
    """Thread that reads the launcher's messages and aborts the generation on its request."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._assignments: queue.SimpleQueue[Assignment | None] = queue.SimpleQueue()
        self.is_aborted = threading.Event()
        """Set once the launcher has reported that a rank of the current generation is lost."""
        threading.Thread(target=self._read, name="assignments", daemon=True).start()

    def wait(self) -> Assignment | None:
        """Wait for the next assignment; None at the end of the input."""
        return self._assignments.get()

    def _read(self) -> None:
        try:
            for line in self._source:
                self._follow(json.loads(line))
        finally:  # also after an error of this thread: otherwise the process waits without end
            self._assignments.put(None)

    def _follow(self, message: dict[str, Any]) -> None:
        """Follow one message of the launcher."""
        if "abort" in message:
            self.is_aborted.set()
            try:
                abort_nccl_groups()
            except Exception as error:  # the training thread changes the groups meanwhile
                logger.warning("NCCL's groups could not be aborted: %s", error)
            disconnect_from_ranks(everywhere=message.get("all", False))
            return
        self.is_aborted.clear()
        self._assignments.put(
            Assignment(
                Path(message["control"]),
                tuple(message["arguments"]),
                message["environment"],
                None if message["log"] is None else Path(message["log"]),
            )
        )


def serve_generations(train: Callable[[Sequence[str]], BaseException | None]) -> int:
    """Train one assignment after another; return the exit code of this process.

    Args:
        train: Trains one generation as the rank that the environment names, with the given
            arguments, and returns the error that ended it.
    """
    ignore_stop_signals()  # while it waits: the launcher ends it
    reader = AssignmentReader(_take_standard_input())
    terminal = (os.dup(1), os.dup(2))
    while (assignment := reader.wait()) is not None:
        environment = dict(os.environ)
        os.environ[CONTROL_VARIABLE] = str(assignment.control)
        os.environ.update(assignment.environment)
        _redirect_output(assignment.log, terminal)
        _apply_num_threads()
        rank = int(assignment.environment["RANK"])
        failure = train(assignment.arguments)
        code = write_outcome(rank, failure)
        stays = isinstance(failure, GenerationEnded) or _is_lost_peer(
            failure, is_aborted=reader.is_aborted.is_set()
        )
        failure = None  # its traceback holds the model
        if not stays or not release_generation():
            # For the launcher a stopped rank succeeded.
            return ExitCode.DONE if code == ExitCode.PREEMPTED else code
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        get_idle_path(assignment.control, rank).touch()
    return ExitCode.DONE


def _take_standard_input() -> BinaryIO:
    """Return standard input, and replace it by an empty one for everything else."""
    source = os.fdopen(os.dup(0), "rb", buffering=0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return source


def _redirect_output(log: Path | None, terminal: tuple[int, int]) -> None:
    """Send standard output and error to a file, or to the terminal if `log` is None."""
    sys.stdout.flush()
    sys.stderr.flush()
    if log is None:
        for number, descriptor in zip((1, 2), terminal, strict=True):
            os.dup2(descriptor, number)
        return
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)


def _apply_num_threads() -> None:
    """Use the generation's number of threads, which torch has read for another number of ranks."""
    num_threads = os.environ.get("OMP_NUM_THREADS", "")
    if num_threads.isdecimal() and int(num_threads) not in (0, torch.get_num_threads()):
        torch.set_num_threads(int(num_threads))


def _is_lost_peer(failure: BaseException | None, *, is_aborted: bool) -> bool:
    """Return True if a generation failed in this process because of another rank only."""
    if failure is None or isinstance(failure, _OWN_ERRORS) or not isinstance(failure, Exception):
        return False
    return is_aborted or is_lost_peer_message(str(failure))


def disconnect_from_ranks(*, everywhere: bool = False) -> None:
    """Shut down this process's connections to processes of the same machine, from any thread.

    gloo has no abort. A rank that waits for another survivor would notice only that rank's exit,
    not that it has left the generation. Without /proc this does nothing.

    Args:
        everywhere: Shut down connections to other machines too, because ranks run there. Other
            connections, such as those to an object store, are made again.
    """
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # closed in the meantime, or not connected
            # Copies of other files would keep their locks.
            if not stat.S_ISSOCK(entry.stat().st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer = connection.getpeername()  # fails for a socket that listens: gloo needs it
                if everywhere or peer[0] == connection.getsockname()[0]:
                    connection.shutdown(socket.SHUT_RDWR)


def release_generation() -> bool:
    """Free the state of the failed generation; return False if this process cannot be reused.

    Waits until threads that save or send copies have ended, so that nothing of the generation is
    written later.
    """
    abandon_process_groups()
    for thread in threading.enumerate():
        if thread.name.startswith((SAVE_THREAD_NAME, COPY_THREAD_NAME)):
            thread.join()
    # Compiled code of the former model cannot be used again, but counts towards torch's limit of
    # recompilations. Inductor's cache on the disk stays.
    torch.compiler.reset()
    if not _clear_dtensor_caches():
        return False
    gc.collect()
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return True
        return False  # an error of the device stays until the process ends
    return True


def _clear_dtensor_caches() -> bool:
    """Clear DTensor's caches of placements, whose entries hold former meshes and their groups.

    An entry of a former mesh would also serve an equal new one. Returns False if torch has no
    function for it.
    """
    try:
        from torch.distributed.tensor import _redistribute, _sharding_prop
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    except ImportError:
        return False
    _clear_sharding_prop_cache()
    # Of these, an entry only holds its mesh; not every version of torch has them.
    for owner, name in (
        (_sharding_prop.ShardingPropagator, "_propagate_tensor_meta_cached"),
        (_redistribute, "_gen_transform_infos"),
    ):
        clear = getattr(getattr(owner, name, None), "cache_clear", None)
        if clear is not None:
            clear()
    # torch 2.11 never frees the arguments of some operations, and with them their mesh. Without
    # its groups, a mesh holds no threads and no connections.
    for value in gc.get_objects():
        if type(value) is DeviceMesh:
            vars(value).get("_pg_registry", {}).clear()
    return True
