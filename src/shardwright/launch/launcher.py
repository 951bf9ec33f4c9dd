"""Start the ranks of one machine through torch's elastic launcher and report how they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from shardwright.errors import ExitCode, GenerationEnded, Preempted, RankFailed
from shardwright.launch.launch_limit import LaunchLimit
from shardwright.launch.rank_outcome import (
    CONTROL_VARIABLE,
    LAUNCHER_VARIABLE,
    RESUME_ADVICE,
    attach_skipped_collective,
    find_cause,
    read_outcomes,
    request_stop,
    write_stop,
)
from shardwright.launch.rank_processes import RankEndings, RankProcesses
from shardwright.launch.stop_signals import STOP_SIGNALS, StopRequest
from shardwright.watchdog.hang_diagnosis import find_skipped_collective
from shardwright.watchdog.monitor import Watchdog, read_heartbeats

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig


def launch_ranks(
    num_ranks: int,
    module: str,
    arguments: Sequence[str],
    stop: StopRequest | None = None,
    hang_reports: Path | None = None,
    *,
    time_limit: LaunchLimit | None = None,
    is_quiet: bool = False,
    pool: RankProcesses | None = None,
) -> None:
    """Run `python -m module arguments...` as `num_ranks` local ranks and wait for them.

    Rank 0 shares this terminal; the output of other ranks goes to files, and their errors are
    raised here with the rank. Stop signals are recorded in `stop` and forwarded to the ranks. A
    rank that hangs is detected by its heartbeat and killed; the report goes to folder
    `hang_reports`.

    Args:
        time_limit: Stops the ranks when it expires, and kills ranks that do not stop.
        is_quiet: Redirect the output of rank 0 as well.
        pool: Processes of former generations, which are used again; None starts new ones.

    Raises:
        ShardwrightError: The cause, if a rank failed. Preempted: The ranks were asked to stop
            and have saved. GenerationEnded: The ranks have left, because more ranks follow.
    """
    with tempfile.TemporaryDirectory(prefix="shardwright-") as name:
        control = Path(name)
        watcher = Watchdog(control, hang_reports or control)
        with (
            _set_rank_environment(
                num_ranks if pool is None else min(num_ranks, pool.nodes.local.num_slots), control
            ),
            _forward_stop_signals(control, stop),
            watcher,
            nullcontext() if time_limit is None else time_limit.enforce(control, stop),
        ):
            if pool is None:
                endings = _run_with_agent(num_ranks, module, arguments, control, is_quiet=is_quiet)
            else:
                endings = pool.run(num_ranks, module, arguments, control, hang_reports)
        outcomes = read_outcomes(control)
        hang = watcher.diagnosis.message if watcher.diagnosis else pool and pool.diagnosis
        if hang:
            raise RankFailed(f"{hang}{RESUME_ADVICE}")
        if endings.statuses:
            raise attach_skipped_collective(
                find_cause(outcomes, endings.statuses, endings.ended_at_seconds),
                find_skipped_collective(read_heartbeats(control)),
            )
        stopped = [outcome for outcome in outcomes if outcome.exit_code == ExitCode.PREEMPTED]
        if stopped:
            # All ranks decide together, so all of them have left or all have stopped.
            if stopped[0].kind == GenerationEnded.__name__:
                raise GenerationEnded(int(stopped[0].details["step"] or 0))
            raise Preempted(stopped[0].message)


def _run_with_agent(
    num_ranks: int, module: str, arguments: Sequence[str], control: Path, *, is_quiet: bool
) -> RankEndings:
    """Run the ranks in new processes through torch's elastic launcher."""
    # torch's launcher takes seconds to import, and recipe errors should come first.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    # Its warnings name processes and signals that users do not know; failures raise exceptions.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        config = _build_config(num_ranks, control, is_quiet=is_quiet)
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        return RankEndings(
            {rank: failure.exitcode for rank, failure in error.failures.items()},
            {rank: failure.timestamp for rank, failure in error.failures.items()},
        )
    return RankEndings()


def _build_config(num_ranks: int, control: Path, *, is_quiet: bool) -> LaunchConfig:
    """Return the configuration of torch's launcher for ranks on this machine."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(control / "logs"),
            redirects=dict.fromkeys(range(0 if is_quiet else 1, num_ranks), Std.ALL),
        ),
        # Stop signals are forwarded by us: the launcher would stop at once, we save first.
        signals_to_handle="SIGQUIT",
    )


@contextmanager
def _set_rank_environment(num_ranks: int, control: Path) -> Iterator[None]:
    """Set the environment variables that every rank inherits; restore them afterwards.

    Args:
        num_ranks: Number of ranks that share the cores of this machine.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    added = {
        CONTROL_VARIABLE: str(control),
        LAUNCHER_VARIABLE: str(os.getpid()),
        # Ranks that use all cores slow each other down; torchrun's default is 1.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // num_ranks))),
        # c10d warns about each lost peer on its own line; we report the cause once, at the end.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    former = {key: os.environ.get(key) for key in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for key, value in former.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextmanager
def _forward_stop_signals(control: Path, stop: StopRequest | None) -> Iterator[None]:
    """Forward stop signals to the ranks that have written their process id; kill them when a
    further one interrupts this process."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        try:
            if stop is not None:
                stop.record(number)
        except KeyboardInterrupt:
            request_stop(control, signal.SIGKILL)
            raise
        request_stop(control, number)

    former = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    if stop:  # while no rank ran
        write_stop(control, stop.cause)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
