"""One rank of a run: join the other ranks, check the run, claim its folder, and train."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.checkpoint.fence import GenerationFence, acquire_fence
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe
from shardwright.data.sources.source_files import ProgressCallback, ProgressOpener
from shardwright.errors import GenerationEnded, InputError, Preempted, RankFailed, RunFailed
from shardwright.launch.allocator import use_expandable_segments
from shardwright.launch.devices import choose_rank_device, should_use_cuda
from shardwright.launch.elastic import Restart
from shardwright.launch.rank_claim import join_ranks
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.launch.rank_outcome import (
    extract_first_line,
    get_control_folder,
    is_lost_peer_message,
)
from shardwright.launch.stop_signals import StopRequest
from shardwright.model.hf.hf_folder import read_generation_config
from shardwright.numerics.determinism import use_deterministic_algorithms
from shardwright.offload import OffloadedOptimizer, describe_transfers
from shardwright.parallel.direct_collectives import observe_collectives
from shardwright.telemetry.event_logger import EventLogger, open_event_logger
from shardwright.training.checkpointing import RunCheckpointer
from shardwright.training.checks.auto_choice import (
    agree_on_compilation,
    agree_on_precision,
    check_equal_layouts,
)
from shardwright.training.checks.run_checks import ValidatedRun, validate_run
from shardwright.training.loop import TrainingLoop
from shardwright.training.memory_settings import agree_on_memory_settings
from shardwright.training.metrics.run_log import log_start, log_to_run
from shardwright.training.metrics.run_prediction import predict_training_run
from shardwright.training.oom import convert_oom_errors
from shardwright.training.peer_copying import build_peer_copier, describe_copies
from shardwright.training.rank_context import RankContext
from shardwright.training.rank_sync import RankSync
from shardwright.training.resume_point import (
    CopiesInMemory,
    CopiesSearch,
    ResumePoint,
    find_copies_in_memory,
    find_resume_point,
    list_changes,
)
from shardwright.training.setup import agree_on_ceiling, build_state
from shardwright.training.step_policy import find_differing_replicas
from shardwright.training.training_state import TrainingState
from shardwright.watchdog.flight_recorder import record_collectives
from shardwright.watchdog.monitor import PhaseLimits, WatchdogClient, start_watchdog

logger = logging.getLogger("shardwright")


def write_run_folder(validated_run: ValidatedRun, folder: RunFolder, *, is_resumed: bool) -> None:
    """Write recipe, plan, prediction, the model's configurations and tokenizer to the run folder.

    Only with the events' lock: another run may have begun there since the folder was checked.

    Raises:
        InputError: it has, and has ended since.
    """
    if not is_resumed:
        folder.check_started(resume=False)
    predicted = predict_training_run(validated_run)
    prediction = None if predicted is None else predicted.as_dict()
    model_path = validated_run.recipe.model.path
    folder.write_metadata(
        validated_run.recipe,
        validated_run.plan.as_dict(),
        validated_run.shape.to_config(),
        prediction,
        None if model_path is None else read_generation_config(Path(model_path)),
        validated_run.data.tokenizer.save,
    )


def train_rank(
    recipe: Recipe,
    rank_environment: RankEnvironment,
    stop: StopRequest,
    *,
    resume: bool = False,
    allow_drift: Sequence[str] = (),
    restart: Restart | None = None,
    is_trial: bool = False,
    open_progress: ProgressOpener = nullcontext,
) -> None:
    """Run one rank, from joining the process group to the last step.

    Args:
        is_trial: Only time the steps: evaluate and save nothing, also after a stop.
    """
    start_seconds = time.perf_counter()
    is_main_rank = rank_environment.is_main_rank
    folder = RunFolder.from_recipe(recipe)
    with ExitStack() as stack:
        # Before the device is chosen, because that starts CUDA.
        uses_cuda = should_use_cuda(recipe.run.device, field="run.device")
        if uses_cuda:
            use_expandable_segments()
        if recipe.training.deterministic:
            stack.enter_context(use_deterministic_algorithms(is_cuda=uses_cuda))
        device = choose_rank_device(recipe.run.device, rank_environment, field="run.device")
        watchdog = stack.enter_context(_start_watchdog(recipe, rank_environment, folder))
        stack.enter_context(
            _join_process_group(rank_environment, device, recipe.run.timeout_seconds)
        )
        rank_sync = RankSync(rank_environment, device)
        # A node that rejoined under torchrun does not see the restart count of the others.
        resume = rank_sync.any_rank(resume)
        with open_progress() if is_main_rank else nullcontext() as progress:
            validated_run = _validate_together(
                recipe,
                folder,
                rank_environment,
                rank_sync,
                device,
                is_resumed=resume,
                progress=progress,
            )
        copies = _find_copies(recipe, folder, restart)
        resume_point: ResumePoint | CopiesInMemory | None = copies.found if copies else None
        if resume and resume_point is None:
            resume_point = find_resume_point(validated_run, folder, allow_drift)
        starts_again = resume and resume_point is None and folder.is_started
        with _open_logs(recipe, folder, rank_environment.rank) as event_logger:
            if is_main_rank:
                write_run_folder(validated_run, folder, is_resumed=resume)
            rank_sync.barrier()
            context = RankContext(
                validated_run,
                rank_environment,
                device,
                folder,
                event_logger,
                rank_sync,
                stop,
                watchdog,
                is_trial=is_trial,
                restart=restart,
            )
            if restart is not None and is_main_rank and not restart.is_growth:
                _log_restart(context, restart)
            if starts_again:
                context.log_warning(
                    "the run ended before its first checkpoint: it starts again at step 0"
                )
            if is_main_rank and not is_trial:
                # Only with the events' lock: a refused process must not claim the checkpoints.
                context = replace(context, fence=_claim_checkpoints(folder))
            with convert_oom_errors(context):
                _train(context, resume_point, copies, start_seconds)


@contextmanager
def _log_data_once(*, is_main_rank: bool) -> Iterator[None]:
    """Suppress the log of the data where another process has printed the same lines: rank 0, or
    our launcher, which prepares the data before it starts ranks."""
    data_logger = logging.getLogger("shardwright.data")
    former = data_logger.level
    if not is_main_rank or get_control_folder() is not None:
        data_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        data_logger.setLevel(former)


@contextmanager
def _open_logs(recipe: Recipe, folder: RunFolder, rank: int) -> Iterator[EventLogger]:
    """Open the rank's events and its text log.

    Raises:
        InputError: the folder cannot be written, or another process writes its events.
    """
    if rank == 0:
        folder.create()
    with (
        open_event_logger(
            folder.path,
            rank=rank,
            exporters=recipe.run.sinks,
            log_every_steps=recipe.run.log_every_steps,
        ) as event_logger,
        log_to_run(event_logger, folder.log_path, rank=rank),
    ):
        yield event_logger


def _validate_together(
    recipe: Recipe,
    folder: RunFolder,
    rank_environment: RankEnvironment,
    rank_sync: RankSync,
    device: torch.device,
    *,
    is_resumed: bool,
    progress: ProgressCallback | None,
) -> ValidatedRun:
    """Check the run on every rank, with the same choice for each `auto` on all of them."""
    check_equal_layouts(recipe, rank_sync)
    precision = agree_on_precision(recipe, folder, rank_sync, device, is_resumed=is_resumed)
    compilation = agree_on_compilation(recipe, rank_sync, device)
    with _log_data_once(is_main_rank=rank_environment.is_main_rank):
        validated_run = validate_run(
            recipe,
            rank_environment.world_size,
            auto_precision=precision,
            auto_compilation=compilation,
            progress=progress,
        )
    return agree_on_memory_settings(validated_run, rank_sync, device)


def _find_copies(recipe: Recipe, folder: RunFolder, restart: Restart | None) -> CopiesSearch | None:
    """Search for copies of the state in memory; None if the ranks before kept none. Collective."""
    if restart is None or not recipe.elastic.peer_copies:
        return None
    copies = find_copies_in_memory(folder)
    # A single rank keeps none: its state is in the checkpoint.
    return None if restart.former_world_size == 1 else copies


def _log_restart(context: RankContext, restart: Restart) -> None:
    noticed = restart.noticed_at_seconds
    context.event_logger.log(
        "restarted",
        number=restart.number,
        max_restarts=restart.max_restarts,
        world_size=restart.world_size,
        reason=restart.reason,
        is_warm=restart.is_warm,
        surviving_ranks=restart.surviving_ranks,
        stuck_ranks=restart.stuck_ranks,
        seconds_since_loss=None if noticed is None else max(0.0, time.time() - noticed),
    )


def _train(
    context: RankContext,
    resume_point: ResumePoint | CopiesInMemory | None,
    copies: CopiesSearch | None,
    start_seconds: float,
) -> None:
    """Build the training state, restore it if there is one, and train.

    Args:
        context: Context of this rank.
        resume_point: State to continue from; None to start at step 0.
        copies: Result of the search for copies in memory, if there was one.
        start_seconds: Start of this process's run, a reading of `time.perf_counter`.
    """
    event_logger = context.event_logger
    matmul_flops_per_second = agree_on_ceiling(
        context.validated_run, context.device, context.rank_sync
    )
    state = build_state(context.validated_run, context.device)
    checkpointer = RunCheckpointer(context, state, build_peer_copier(context))
    loop = TrainingLoop(context, state, checkpointer, matmul_flops_per_second)
    log_start(context, state.step, matmul_flops_per_second)
    if copies is not None and copies.found is None:
        context.log_warning(
            f"peer copies: {copies.fault}; the run continues from the newest checkpoint"
        )
    if resume_point is not None:
        finished_step = None if copies is None else copies.finished_step
        _restore(context, checkpointer, resume_point, finished_step)
    first_step = state.step

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
        if checkpointer.copier is not None and checkpointer.copier.counts.num_copies:
            logger.info("%s", describe_copies(checkpointer.copier.counts))
        if state.step > first_step:
            _log_transfers(state, state.step - first_step)
    except Preempted:
        state.model.invalidate_weights()
        checkpointer.close()
        log_end("preempted")
        raise
    except GenerationEnded:
        state.model.invalidate_weights()
        checkpointer.close()
        # No process gives up its connections while another still sends its copy.
        context.rank_sync.barrier()
        raise
    except Exception as error:
        # Our own errors are raised on all ranks; after any other error a peer may be gone.
        checkpointer.close(is_broken=not isinstance(error, RunFailed))
        with suppress(RunFailed):  # fails on a full disk too, and `error` is what matters
            event_logger.log(
                "failed",
                step=state.step,
                message=f"{type(error).__name__}: {_describe_failure(error)}",
                rank=context.rank_environment.rank,
            )
        raise
    finally:
        state.close_offloads()
    log_end("completed", final_loss)


def _describe_failure(error: Exception) -> str:
    """Return the text of an error, for a lost peer without gloo's source file and its advice."""
    text = str(error)
    return extract_first_line(text) if is_lost_peer_message(text) else text


def _log_transfers(state: TrainingState, num_steps: int) -> None:
    """Log the bytes that offloading has moved in `num_steps` steps."""
    if isinstance(state.optimizer, OffloadedOptimizer):
        logger.info("%s", describe_transfers(state.optimizer.counts, num_steps))
    if state.activation_offload is not None:
        counts = state.activation_offload.store.counts
        logger.info("%s", describe_transfers(counts, num_steps, "activations"))
    if state.weight_offload is not None:
        counts = state.weight_offload.store.counts
        subject = "frozen weights" if state.model.trained_offload is None else "weights"
        logger.info("%s", describe_transfers(counts, num_steps, subject))


def _restore(
    context: RankContext,
    checkpointer: RunCheckpointer,
    resume_point: ResumePoint | CopiesInMemory,
    finished_step: int | None,
) -> None:
    """Restore the state; warn about changed settings and a run that has already ended."""
    checkpointer.restore(resume_point, finished_step)
    if isinstance(resume_point, CopiesInMemory):
        _check_restored_replicas(context, checkpointer)
    if changed := list_changes(resume_point, context.validated_run):
        context.log_warning(f"changed since the checkpoint: {'; '.join(map(str, changed))}")
    step = checkpointer.state.step
    total_steps = context.validated_run.total_steps
    if step >= total_steps:
        context.log_warning(
            f"no steps are left to train: the run is at step {step} of {total_steps}"
        )


def _check_restored_replicas(context: RankContext, checkpointer: RunCheckpointer) -> None:
    """Compare replicated weights that came from memory, if the run compares any.

    Raises:
        RankFailed: A rank's weights differ from those of its replicas. The copies are discarded.
    """
    if context.recipe.run.replica_check_every_steps is None:
        return
    if difference := find_differing_replicas(checkpointer.state.model):
        checkpointer.discard_peer_copies()
        raise RankFailed(
            f"the copies in memory after step {checkpointer.state.step} are discarded: {difference}"
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
        record_collectives=partial(
            record_collectives,
            timeout_seconds=max(timeouts.values()),
            observe_others=observe_collectives,
        ),
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
