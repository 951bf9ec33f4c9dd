"""Start of a run: check it, claim its folder, then train in this process or start ranks."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
from shardwright.numerics.bf16 import build_bf16_warning
from shardwright.optim.learning_rate import compute_batch_scale
from shardwright.telemetry.event_log import (
    EvaluationEvent,
    RunFinishedEvent,
    StepEvent,
    read_events,
    select_surviving,
)
from shardwright.telemetry.event_logger import EventLogger, open_event_logger
from shardwright.telemetry.exporters import check_exporters
from shardwright.train.checkpointing import (
    ResumePoint,
    RunCheckpointer,
    find_resume_point,
    list_changes,
)
from shardwright.train.loop import TrainingLoop
from shardwright.train.mfu_ceiling import measure_ceiling
from shardwright.train.oom import convert_oom_errors
from shardwright.train.precision_choice import agree_on_precision
from shardwright.train.rank_sync import RankSync
from shardwright.train.run_checks import ValidatedRun, validate_run
from shardwright.train.run_log import log_to_run
from shardwright.train.run_prediction import predict_training_run
from shardwright.train.setup import build_state, describe_device, describe_versions, join_ranks
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
        # Not in the run folder, which must not change before rank 0 has checked it.
        with tempfile.TemporaryDirectory(prefix="shardwright-") as name:
            path = Path(name) / "recipe.yaml"
            path.write_text(dump_recipe(recipe), encoding="utf-8")
            options = [word for name in allow_drift for word in ("--allow-drift", name)]

            def launch(generation: LaunchAttempt) -> None:
                words = [str(path), *options]
                if resume or generation.number:
                    words.append("--resume")
                if generation.number:
                    restart = (
                        f"restart {generation.number} of at most {recipe.elastic.max_restarts}"
                    )
                    words += [
                        "--restart",
                        f"{restart}, {generation.world_size} ranks: {generation.restart_reason}",
                    ]
                launch_ranks(
                    generation.world_size,
                    "shardwright.train.worker",
                    words,
                    stop,
                    folder.hang_reports_path,
                )

            with listen_for_stop() as stop:
                run_with_restarts(recipe, world_size, launch, stop)
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
    return build_run_summary(folder) if ranks is None or ranks.is_main_rank else None


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
    device = choose_rank_device(recipe.run.device, rank_environment, field="run.device")
    pace = PhaseLimits(recipe.watchdog, _list_phase_timeouts(recipe))
    watch = start_watchdog(
        pace,
        rank_environment.rank,
        rank_environment.world_size,
        folder=get_control_folder(),
        reports=RunFolder.from_recipe(recipe).hang_reports_path,
        record_collectives=record_collectives,
    )
    with watch as vigil, _join_process_group(rank_environment, device, recipe.run.timeout_seconds):
        folder = RunFolder.from_recipe(recipe)
        meeting = RankSync(rank_environment, device)
        # A node that rejoined under torchrun does not see the restart count of the others.
        resume = meeting.any_rank(resume)
        precision = agree_on_precision(recipe, folder, meeting, device, is_resumed=resume)
        with open_progress() if rank_environment.is_main_rank else nullcontext() as progress:
            checked = validate_run(
                recipe, rank_environment.world_size, auto_precision=precision, progress=progress
            )
        start = find_resume_point(checked, folder, allow_drift) if resume else None
        is_started = folder.is_started
        if rank_environment.is_main_rank:
            write_run_folder(checked, folder)
        meeting.barrier()
        with (
            open_event_logger(
                folder.path,
                rank=rank_environment.rank,
                exporters=recipe.run.sinks,
                log_every_steps=recipe.run.log_every_steps,
            ) as speaker,
            log_to_run(speaker, folder.log_path, rank=rank_environment.rank),
        ):
            if restart and rank_environment.is_main_rank:
                speaker.log("warning", message=restart)
            if is_started and resume and start is None and rank_environment.is_main_rank:
                speaker.log(
                    "warning",
                    message="the run ended before its first checkpoint: it starts again at step 0",
                )
            # Only with the events' lock: a refused process must not claim the checkpoints.
            fence = _claim_checkpoints(folder) if rank_environment.is_main_rank else None
            with convert_oom_errors(checked, rank_environment.rank, device):
                _run_loop(
                    checked,
                    rank_environment,
                    device,
                    speaker,
                    meeting,
                    folder,
                    stop,
                    vigil,
                    start=start,
                    start_seconds=start_seconds,
                    fence=fence,
                )


def _run_loop(
    validated_run: ValidatedRun,
    rank_environment: RankEnvironment,
    device: torch.device,
    event_logger: EventLogger,
    rank_sync: RankSync,
    folder: RunFolder,
    stop: StopRequest,
    watchdog: WatchdogClient,
    *,
    start: ResumePoint | None,
    start_seconds: float,
    fence: GenerationFence | None,
) -> None:
    matmul_flops_per_second = measure_ceiling(validated_run, device)
    state = build_state(validated_run, device)
    saver = RunCheckpointer(
        validated_run, state, event_logger, folder, rank_environment.is_main_rank, fence=fence
    )
    loop = TrainingLoop(
        validated_run,
        state,
        rank_environment,
        device,
        event_logger,
        rank_sync,
        saver,
        stop,
        watchdog,
        matmul_flops_per_second,
    )
    _log_start(loop)
    if start is not None:
        saver.restore(start)
        if rank_environment.is_main_rank and (changed := list_changes(start, validated_run)):
            event_logger.log(
                "warning", message=f"changed since the checkpoint: {'; '.join(map(str, changed))}"
            )
        if state.step >= validated_run.total_steps and rank_environment.is_main_rank:
            event_logger.log(
                "warning",
                message="no steps are left to train: "
                f"the run is at step {state.step} of {validated_run.total_steps}",
            )

    def log_end(status: str, final_loss: float | None = None) -> None:
        totals = {
            "total_seconds": time.perf_counter() - start_seconds,
            "total_tokens": loop.num_tokens,
        }
        event_logger.log(
            "run_finished", step=state.step, status=status, **totals, final_loss=final_loss
        )

    try:
        final_loss = loop.run()
        watchdog.begin_phase("save", state.step)
        saver.close()
    except Preempted:
        saver.close()
        log_end("preempted")
        raise
    except Exception as error:
        # Our own errors are raised on all ranks; after any other error a peer may be gone.
        saver.close(is_broken=not isinstance(error, RunFailed))
        with suppress(RunFailed):  # fails on a full disk too, and `error` is what matters
            event_logger.log(
                "failed",
                step=state.step,
                message=f"{type(error).__name__}: {error}",
                rank=rank_environment.rank,
            )
        raise
    log_end("completed", final_loss)


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


def _list_phase_timeouts(recipe: Recipe) -> dict[str, float]:
    """Return the collectives' timeout in each phase, in seconds."""
    return {"save": recipe.checkpoint.timeout_seconds} | dict.fromkeys(
        ("step", "evaluate"), recipe.run.timeout_seconds
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


def _log_start(loop: TrainingLoop) -> None:
    checked = loop.validated_run
    plan = checked.plan
    loop.event_logger.log(
        "run_started",
        step=loop.state.step,
        name=checked.recipe.name,
        recipe=checked.recipe.model_dump(mode="json"),
        plan=plan.as_dict(),
        layout=str(plan.layout),
        world_size=loop.rank_environment.world_size,
        total_steps=checked.total_steps,
        global_batch_tokens=plan.batch.global_batch_tokens,
        data_hash=checked.data_hash,
        num_parameters=checked.shape.num_parameters,
        versions=describe_versions(),
        host=socket.gethostname(),
        devices=(describe_device(loop.device),) * loop.rank_environment.world_size,
        flops_per_token=loop.flops_per_token,
        matmul_flops_per_second=loop.matmul_flops_per_second,
    )
    if loop.rank_environment.is_main_rank:
        for message in _list_warnings(checked, loop.device):
            loop.event_logger.log("warning", message=message)


def _list_warnings(validated_run: ValidatedRun, device: torch.device) -> Iterator[str]:
    """Yield warnings about settings that are valid but may surprise."""
    if (
        validated_run.plan.precision.kind == "bf16"
        and (caution := build_bf16_warning(device)) is not None
    ):
        yield caution
    counts = validated_run.data.report.train.counts
    if counts.num_unknown:
        share = counts.num_unknown / counts.num_tokens
        yield (
            "the tokenizer has no id for some of the text: "
            f"{counts.num_unknown:,} of {counts.num_tokens:,} training tokens ({share:.1%}) "
            "are its unknown token"
        )
    adapters = validated_run.shape.adapters
    if adapters is not None:
        beside = [
            spec.adapted_matrix
            for spec in validated_run.shape.list_parameters()
            if spec.adapter_part is not None and spec.adapted_matrix is not None
        ]
        narrow = [spec for spec in beside if min(spec.shape[-2:]) < adapters.rank]
        if narrow:
            sizes = " x ".join(map(str, narrow[0].shape))
            yield (
                f"adapters.rank {adapters.rank} exceeds the rank of {narrow[0].name} ({sizes}): "
                "the excess only uses memory"
            )
    scale = compute_batch_scale(
        validated_run.recipe.training, validated_run.plan.batch.global_batch_size
    )
    if scale != 1.0:
        peak = validated_run.recipe.training.learning_rate * scale
        yield f"batch_scaling multiplies the learning rate by {scale:g}: its peak is {peak:g}"


def build_run_summary(folder: RunFolder) -> dict[str, Any]:
    """Summarise the run from its events."""
    log = select_surviving(read_events(folder.path))
    steps = [event for event in log if isinstance(event, StepEvent)]
    evaluations = [event for event in log if isinstance(event, EvaluationEvent)]
    endings = [event for event in log if isinstance(event, RunFinishedEvent)]
    return {
        "run": str(folder.path),
        "status": endings[-1].status if endings else "unknown",
        "steps": steps[-1].step if steps else 0,
        "train_loss": steps[-1].loss if steps else None,
        "validation_loss": evaluations[-1].loss if evaluations else None,
        "best_validation_loss": min((event.loss for event in evaluations), default=None),
        "tokens_per_second": steps[-1].tokens_per_second if steps else None,
        "total_tokens": endings[-1].total_tokens if endings else None,
        "total_seconds": endings[-1].total_seconds if endings else None,
    }
