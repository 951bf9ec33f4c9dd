"""Start of a run: check it, then train in this process or start ranks.

The modules that train are imported by the processes that do: a launcher of ranks needs a third of
their import time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.checkpoint.commit import check_store
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe, dump_recipe
from shardwright.data.sources.source_files import ProgressOpener
from shardwright.errors import InputError, RunFailed
from shardwright.launch.allocator import use_expandable_segments
from shardwright.launch.devices import should_use_cuda
from shardwright.launch.elastic import LaunchAttempt, Restart, run_with_restarts
from shardwright.launch.launcher import launch_ranks
from shardwright.launch.node_connections import Nodes
from shardwright.launch.node_place import count_ranks, find_node_place
from shardwright.launch.node_service import serve_node
from shardwright.launch.rank_environment import (
    RankEnvironment,
    detect_rank_environment,
    is_restart,
)
from shardwright.launch.rank_outcome import (
    RESUME_ADVICE,
    find_launcher_pid,
    is_lost_peer_message,
)
from shardwright.launch.rank_processes import RankProcesses
from shardwright.launch.stop_signals import StopRequest, listen_for_stop, stop_when_parent_exits
from shardwright.launch.world_sizes import WorldSizes
from shardwright.telemetry.event_log import (
    EvaluationEvent,
    EventWriter,
    FailureEvent,
    RunFinishedEvent,
    StepEvent,
    read_events,
    select_surviving,
)
from shardwright.telemetry.exporters import check_exporters
from shardwright.training.checks.run_checks import validate_run


def train(
    recipe: Recipe,
    *,
    num_ranks: int | None = None,
    resume: bool = False,
    resume_if_started: bool = False,
    allow_drift: Sequence[str] = (),
    open_progress: ProgressOpener = nullcontext,
    planned_from: Recipe | None = None,
) -> dict[str, Any] | None:
    """Train a recipe; return a summary of the run on rank 0, None on other ranks.

    Under torchrun or srun this process is one of their ranks. Otherwise `num_ranks` (default 1)
    run on this machine: one in this process, several through torch's elastic launcher. With
    `elastic.warm_restarts` and `num_ranks` several nodes share the ranks: see `nodes.py`.

    Args:
        resume: Continue a run, which must exist.
        resume_if_started: Continue the run if it exists, else start it; implied when torchrun
            has restarted the ranks.
        planned_from: Recipe with `layout: auto` from which the layout of `recipe` was planned; with
            `elastic.min_ranks` the planner plans it again for fewer ranks.

    Raises:
        InputError: First problem found, before any rank starts. RunFailed, Preempted: The run
            failed or was stopped.
    """
    place = find_node_place(recipe.elastic, num_ranks)
    ranks = detect_rank_environment() if place is None else None
    if ranks is not None:
        _check_launched_ranks(recipe, ranks, num_ranks)
    world_size = count_ranks(recipe.elastic, num_ranks)
    folder = RunFolder.from_recipe(recipe)
    resume_if_started = resume_if_started or is_restart()
    should_resume = resume or (resume_if_started and folder.is_started)
    if place is not None and place.index:
        serve_node(place, num_ranks or 1, str(folder.path))
        return None
    wait_seconds = recipe.elastic.node_wait_seconds
    with Nodes(place, num_ranks or 1, str(folder.path), wait_seconds) as nodes:
        if ranks is None or ranks.is_main_rank:
            folder.check_available(resume=should_resume)
            check_store(folder.checkpoints)
            check_exporters(recipe.run.sinks)
        else:
            # Every rank finds the error by itself; otherwise the others would wait for the first.
            folder.check_started(resume=should_resume)
        # All ranks then look for a checkpoint before one is written, so all find the same one.
        resume = resume or resume_if_started
        sizes = WorldSizes(recipe, world_size, planned_from)
        if ranks is None:
            sizes.check()
        if ranks is None and (world_size > 1 or place is not None):
            if should_use_cuda(recipe.run.device, field="run.device"):
                use_expandable_segments()  # the ranks inherit it
            with open_progress() as progress:
                validate_run(recipe, world_size, progress=progress)
            with listen_for_stop(is_foreground=True) as stop:
                _train_in_ranks(
                    recipe, world_size, sizes, stop, nodes, resume=resume, allow_drift=allow_drift
                )
        else:
            from shardwright.training.rank_run import train_rank

            with listen_for_stop(is_foreground=ranks is None) as stop, _watch_launcher(stop):
                train_rank(
                    recipe,
                    ranks or RankEnvironment(),
                    stop,
                    resume=resume,
                    allow_drift=allow_drift,
                    open_progress=open_progress,
                )
    return _build_run_summary(folder.path) if ranks is None or ranks.is_main_rank else None


def _watch_launcher(stop: StopRequest) -> AbstractContextManager[None]:
    """Request a stop if the launcher of this rank is killed: it forwards no signal then, and its
    ranks would train on and hold the devices and the run folder."""
    launcher_pid = find_launcher_pid()
    return nullcontext() if launcher_pid is None else stop_when_parent_exits(stop, launcher_pid)


def _check_launched_ranks(recipe: Recipe, ranks: RankEnvironment, num_ranks: int | None) -> None:
    """Check that the recipe and --nproc suit ranks that torchrun or srun has started."""
    if num_ranks not in (None, ranks.world_size):
        raise InputError(
            f"a launcher has already started {ranks.world_size} ranks",
            field="--nproc",
            got=num_ranks,
            remedy="Remove --nproc",
        )
    if recipe.elastic.warm_restarts:
        raise InputError(
            "only `train --nproc` keeps processes across restarts; "
            "torchrun and srun start all ranks again",
            field="elastic.warm_restarts",
            got=True,
            allowed="false for ranks that a launcher starts",
            remedy="Set it to false, or let the launcher start one process per node, with --nproc",
        )


def _train_in_ranks(
    recipe: Recipe,
    world_size: int,
    sizes: WorldSizes,
    stop: StopRequest,
    nodes: Nodes,
    *,
    resume: bool,
    allow_drift: Sequence[str],
) -> None:
    """Start all ranks, again after a failure that the recipe allows."""
    folder = RunFolder.from_recipe(recipe)
    # Not in the run folder, which must not change before rank 0 has checked it.
    with tempfile.TemporaryDirectory(prefix="shardwright-") as name:
        path = Path(name) / "recipe.yaml"
        options = [word for field in allow_drift for word in ("--allow-drift", field)]
        elastic = recipe.elastic
        pool = RankProcesses(elastic.max_restarts, nodes) if elastic.warm_restarts else None

        def launch(attempt: LaunchAttempt) -> None:
            # No rank runs that could read the former recipe.
            path.write_text(dump_recipe(sizes.get_recipe(attempt.world_size)), encoding="utf-8")
            words = [str(path), *options]
            if resume or attempt.number:
                words.append("--resume")
            if pool is not None:
                is_smaller = attempt.leave_after_steps is not None
                pool.num_awaited_ranks = world_size - attempt.world_size if is_smaller else 0
                former = attempt.former_world_size or attempt.world_size
                pool.should_wait_for_nodes = attempt.world_size <= former
            if attempt.number:
                restart = Restart(
                    attempt.number,
                    elastic.max_restarts,
                    attempt.world_size,
                    attempt.restart_reason,
                    former_world_size=attempt.former_world_size,
                    leave_after_steps=attempt.leave_after_steps,
                )
                if pool is not None:
                    restart = replace(
                        restart,
                        is_warm=True,
                        surviving_ranks=pool.list_survivors(attempt.world_size),
                        stuck_ranks=pool.stuck_ranks,
                        noticed_at_seconds=pool.failed_at_seconds,
                    )
                words += ["--restart", restart.to_json()]
            launch_ranks(
                attempt.world_size,
                "shardwright.training.worker",
                words,
                stop,
                folder.hang_reports_path,
                pool=pool,
            )

        def read_newest_step() -> int:
            return pool.newest_step if pool is not None and elastic.peer_copies else 0

        with _log_failure(folder.path), nullcontext() if pool is None else pool:
            run_with_restarts(
                recipe,
                world_size,
                launch,
                stop,
                read_newest_step,
                sizes.find_smaller,
                nodes.count_slots,
            )


@contextmanager
def _log_failure(run_dir: Path) -> Iterator[None]:
    """Log why the ranks that are started in the context have ended, if they fail."""
    start_time = time.time()
    try:
        yield
    except RunFailed as error:
        with suppress(InputError, RunFailed):  # `error` is what matters
            _log_cause(run_dir, error, start_time)
        raise


def _log_cause(run_dir: Path, error: RunFailed, start_time: float) -> None:
    """Log why the ranks have ended, if rank 0 did not: it died, or has only lost another rank."""
    events = read_events(run_dir, is_lenient=True).events
    if not events or events[-1].time < start_time:
        return  # rank 0 had not begun
    last = events[-1]
    if isinstance(last, FailureEvent) and not is_lost_peer_message(last.message):
        return
    elapsed_seconds = last.elapsed_seconds + max(0.0, time.time() - last.time)
    message = str(error).partition("\n")[0].removesuffix(RESUME_ADVICE)
    with EventWriter(run_dir, elapsed_seconds=elapsed_seconds) as writer:
        writer.write("failed", step=last.step, message=message)


def _build_run_summary(folder: Path) -> dict[str, Any]:
    """Summarise the run from its events."""
    log = select_surviving(read_events(folder))
    steps = [event for event in log if isinstance(event, StepEvent)]
    evaluations = [event for event in log if isinstance(event, EvaluationEvent)]
    endings = [event for event in log if isinstance(event, RunFinishedEvent)]
    return {
        "run": str(folder),
        "status": endings[-1].status if endings else "unknown",
        "steps": steps[-1].step if steps else 0,
        "train_loss": steps[-1].loss if steps else None,
        "validation_loss": evaluations[-1].loss if evaluations else None,
        "best_validation_loss": min((event.loss for event in evaluations), default=None),
        "tokens_per_second": steps[-1].tokens_per_second if steps else None,
        "total_tokens": endings[-1].total_tokens if endings else None,
        "total_seconds": endings[-1].total_seconds if endings else None,
    }
