"""Start of a run: check it, claim its folder, then train in this process or start ranks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.checkpoint.fence import GenerationFence, acquire_fence
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe, dump_recipe
from shardwright.data.source_files import ProgressCallback
from shardwright.errors import InputError, Preempted, RankFailed, RunFailed
from shardwright.launch.devices import choose_rank_device, should_use_cuda
from shardwright.launch.elastic import LaunchAttempt, run_with_restarts
from shardwright.launch.launcher import launch_ranks
from shardwright.launch.rank_claim import join_ranks
from shardwright.launch.rank_environment import (
    RankEnvironment,
    detect_rank_environment,
    is_torchrun_restart,
)
from shardwright.launch.rank_outcome import (
    extract_first_line,
    get_control_folder,
    is_lost_peer_message,
)
from shardwright.launch.stop_signals import StopRequest, listen_for_stop
from shardwright.numerics.determinism import use_deterministic_algorithms
from shardwright.telemetry.event_logger import open_event_logger
from shardwright.telemetry.exporters import check_exporters
from shardwright.training.checkpointing import (
    ResumePoint,
    RunCheckpointer,
    find_resume_point,
    list_changes,
)
from shardwright.training.loop import TrainingLoop
from shardwright.training.oom import convert_oom_errors
from shardwright.training.precision_choice import agree_on_precision
from shardwright.training.rank_context import RankContext
from shardwright.training.rank_sync import RankSync
from shardwright.training.run_checks import ValidatedRun, validate_run
from shardwright.training.run_log import build_run_summary, log_start, log_to_run
from shardwright.training.run_prediction import predict_training_run
from shardwright.training.setup import build_state, measure_ceiling
from shardwright.watchdog.flight_recorder import record_collectives
from shardwright.watchdog.monitor import PhaseLimits, WatchdogClient, start_watchdog

ProgressOpener = Callable[[], AbstractContextManager[ProgressCallback | None]]
"""Opens a progress display for reading and tokenising data."""


def train(
    recipe: Recipe,
    *,
    num_ranks: int | None = None,
    resume: bool = False,
    resume_if_started: bool = False,
    allow_drift: Sequence[str] = (),
    open_progress: ProgressOpener = nullcontext,
) -> dict[str, Any] | None:
    """Train a recipe; return a summary of the run on rank 0, None on other ranks.

    Under torchrun or srun this process is one of their ranks. Otherwise `num_ranks` (default 1)
    run on this machine: one in this process, several through torch's elastic launcher.

    Args:
        resume: Continue a run, which must exist.
        resume_if_started: Continue the run if it exists, else start it; implied when torchrun
            has restarted the ranks.

    Raises:
        InputError: First problem found, before any rank starts. RunFailed, Preempted: The run
            failed or was stopped.
    """
    ranks = detect_rank_environment()
    if ranks is not None and num_ranks not in (None, ranks.world_size):
        raise InputError(
            f"a launcher has already started {ranks.world_size} ranks",
            field="--nproc",
            got=num_ranks,
            remedy="Remove --nproc",
        )
    world_size = ranks.world_size if ranks else num_ranks or 1
    folder = RunFolder.from_recipe(recipe)
    resume_if_started = resume_if_started or is_torchrun_restart()
    if ranks is None or ranks.is_main_rank:
        folder.check_available(resume=resume or (resume_if_started and folder.is_started))
        check_exporters(recipe.run.sinks)
    # All ranks then look for a checkpoint before one is written, so all find the same one.
    resume = resume or resume_if_started
    if ranks is None and world_size > 1:
        should_use_cuda(recipe.run.device, field="run.device")
        with open_progress() as progress:
            validate_run(recipe, world_size, progress=progress)
        with listen_for_stop() as stop:
            _train_in_ranks(recipe, world_size, stop, resume=resume, allow_drift=allow_drift)
    else:
        with listen_for_stop() as stop:
            train_rank(
                recipe,
                ranks or RankEnvironment(),
                stop,
                resume=resume,
                allow_drift=allow_drift,
                open_progress=open_progress,
            )
    return build_run_summary(folder.path) if ranks is None or ranks.is_main_rank else None


def _train_in_ranks(
    recipe: Recipe,
    world_size: int,
    stop: StopRequest,
    *,
    resume: bool,
    allow_drift: Sequence[str],
) -> None:
    """Start all ranks on this machine, again after a failure that the recipe allows."""
    hang_reports = RunFolder.from_recipe(recipe).hang_reports_path
    # Not in the run folder, which must not change before rank 0 has checked it.
    with tempfile.TemporaryDirectory(prefix="shardwright-") as name:
        path = Path(name) / "recipe.yaml"
        path.write_text(dump_recipe(recipe), encoding="utf-8")
        options = [word for field in allow_drift for word in ("--allow-drift", field)]

        def launch(attempt: LaunchAttempt) -> None:
            words = [str(path), *options]
            if resume or attempt.number:
                words.append("--resume")
            if attempt.number:
                words += [
                    "--restart",
                    f"restart {attempt.number} of at most {recipe.elastic.max_restarts}, "
                    f"{attempt.world_size} ranks: {attempt.restart_reason}",
                ]
            launch_ranks(
                attempt.world_size, "shardwright.training.worker", words, stop, hang_reports
            )

        run_with_restarts(recipe, world_size, launch, stop)


def write_run_folder(validated_run: ValidatedRun, folder: RunFolder) -> None:
    """Write recipe, plan, prediction, model configuration and tokenizer to the run folder."""
    predicted = predict_training_run(validated_run)
    prediction = None if predicted is None else predicted.as_dict()
    folder.write_metadata(
        validated_run.recipe,
        validated_run.plan.as_dict(),
        validated_run.shape.to_config(),
        prediction,
    )
    validated_run.data.tokenizer.save(folder.tokenizer_path)


def train_rank(
    recipe: Recipe,
    rank_environment: RankEnvironment,
    stop: StopRequest,
    *,
    resume: bool = False,
    allow_drift: Sequence[str] = (),
    restart: str | None = None,
    open_progress: ProgressOpener = nullcontext,
) -> None:
    """Run one rank, from joining the process group to the last step."""
    start_seconds = time.perf_counter()
    is_main_rank = rank_environment.is_main_rank
    folder = RunFolder.from_recipe(recipe)
    with ExitStack() as stack:
        if recipe.training.deterministic:
            # Before the device is chosen, because that starts CUDA.
            uses_cuda = should_use_cuda(recipe.run.device, field="run.device")
            stack.enter_context(use_deterministic_algorithms(is_cuda=uses_cuda))
        device = choose_rank_device(recipe.run.device, rank_environment, field="run.device")
        watchdog = stack.enter_context(_start_watchdog(recipe, rank_environment, folder))
        stack.enter_context(
            _join_process_group(rank_environment, device, recipe.run.timeout_seconds)
        )
        rank_sync = RankSync(rank_environment, device)
        # A node that rejoined under torchrun does not see the restart count of the others.
        resume = rank_sync.any_rank(resume)
        precision = agree_on_precision(recipe, folder, rank_sync, device, is_resumed=resume)
        with open_progress() if is_main_rank else nullcontext() as progress:
            validated_run = validate_run(
                recipe, rank_environment.world_size, auto_precision=precision, progress=progress
            )
        resume_point = find_resume_point(validated_run, folder, allow_drift) if resume else None
        starts_again = resume and resume_point is None and folder.is_started
        if is_main_rank:
            write_run_folder(validated_run, folder)
        rank_sync.barrier()
        with (
            open_event_logger(
                folder.path,
                rank=rank_environment.rank,
                exporters=recipe.run.sinks,
                log_every_steps=recipe.run.log_every_steps,
            ) as event_logger,
            log_to_run(event_logger, folder.log_path, rank=rank_environment.rank),
        ):
            context = RankContext(
                validated_run,
                rank_environment,
                device,
                folder,
                event_logger,
                rank_sync,
                stop,
                watchdog,
            )
            if restart:
                context.log_warning(restart)
            if starts_again:
                context.log_warning(
                    "the run ended before its first checkpoint: it starts again at step 0"
                )
            if is_main_rank:
                # Only with the events' lock: a refused process must not claim the checkpoints.
                context = replace(context, fence=_claim_checkpoints(folder))
            with convert_oom_errors(context):
                _train(context, resume_point, start_seconds)


def _train(context: RankContext, resume_point: ResumePoint | None, start_seconds: float) -> None:
    """Build the training state, restore it if there is a checkpoint, and train.

    Args:
        context: Context of this rank.
        resume_point: Checkpoint to continue from; None to start at step 0.
        start_seconds: Start of this process's run, a reading of `time.perf_counter`.
    """
    event_logger = context.event_logger
    matmul_flops_per_second = measure_ceiling(context.validated_run, context.device)
    state = build_state(context.validated_run, context.device)
    checkpointer = RunCheckpointer(context, state)
    loop = TrainingLoop(context, state, checkpointer, matmul_flops_per_second)
    log_start(context, state.step, matmul_flops_per_second)
    if resume_point is not None:
        _restore(context, checkpointer, resume_point)

    def log_end(status: str, final_loss: float | None = None) -> None:
        event_logger.log(
            "run_finished",
            step=state.step,
            status=status,
            total_seconds=time.perf_counter() - start_seconds,
            total_tokens=loop.num_tokens,
            final_loss=final_loss,
        )

    try:
        final_loss = loop.run()
        context.watchdog.begin_phase("save", state.step)
        checkpointer.close()
    except Preempted:
        checkpointer.close()
        log_end("preempted")
        raise
    except Exception as error:
        # Our own errors are raised on all ranks; after any other error a peer may be gone.
        checkpointer.close(is_broken=not isinstance(error, RunFailed))
        with suppress(RunFailed):  # fails on a full disk too, and `error` is what matters
            event_logger.log(
                "failed",
                step=state.step,
                message=f"{type(error).__name__}: {error}",
                rank=context.rank_environment.rank,
            )
        raise
    log_end("completed", final_loss)


def _restore(
    context: RankContext, checkpointer: RunCheckpointer, resume_point: ResumePoint
) -> None:
    """Restore the state, and warn about changed settings and about a run that has ended."""
    checkpointer.restore(resume_point)
    if changed := list_changes(resume_point, context.validated_run):
        context.log_warning(f"changed since the checkpoint: {'; '.join(map(str, changed))}")
    step = checkpointer.state.step
    total_steps = context.validated_run.total_steps
    if step >= total_steps:
        context.log_warning(
            f"no steps are left to train: the run is at step {step} of {total_steps}"
        )


def _claim_checkpoints(folder: RunFolder) -> GenerationFence:
    """Claim the checkpoint folder, so that processes of an earlier launch cannot save.

    Raises:
        InputError: The checkpoint folder is not writable.
    """
    try:
        return acquire_fence(folder.checkpoints)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}",
            field="checkpoint.dir",
            got=str(folder.checkpoints),
        ) from error


def _start_watchdog(
    recipe: Recipe, rank_environment: RankEnvironment, folder: RunFolder
) -> AbstractContextManager[WatchdogClient]:
    """Start the watchdog with the collectives' timeout in each phase, in seconds."""
    timeouts = {"save": recipe.checkpoint.timeout_seconds} | dict.fromkeys(
        ("step", "evaluate"), recipe.run.timeout_seconds
    )
    return start_watchdog(
        PhaseLimits(recipe.watchdog, timeouts),
        rank_environment.rank,
        rank_environment.world_size,
        folder=get_control_folder(),
        reports=folder.hang_reports_path,
        record_collectives=record_collectives,
    )


@contextmanager
def _join_process_group(
    rank_environment: RankEnvironment, device: torch.device, timeout_seconds: float
) -> Iterator[None]:
    """Join the process group during the block; leave it cleanly unless the block fails."""
    join_ranks(rank_environment, device, timeout_seconds)
    try:
        yield
    except RuntimeError as error:
        if is_lost_peer_message(str(error)):
            raise RankFailed(f"a peer died or hung: {extract_first_line(str(error))}") from error
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
