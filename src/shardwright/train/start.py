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

from shardwright.checkpoint.fence import Fence, claim
from shardwright.config import Recipe, dump_recipe
from shardwright.data.prepare import Progress
from shardwright.errors import InputError, Preempted, RankFailed, RunFailed
from shardwright.numerics.bf16 import caution_of_bf16
from shardwright.optim.schedules import batch_scale
from shardwright.telemetry.events import Evaluation, RunFinished, Step, read_events, surviving
from shardwright.telemetry.exporters import check_exporters
from shardwright.telemetry.speaker import Speaker, open_speaker
from shardwright.train.ceiling import measure_ceiling
from shardwright.train.devices import choose_device, wants_cuda
from shardwright.train.elastic import Generation, run_generations
from shardwright.train.folder import RunFolder
from shardwright.train.forecast import forecast
from shardwright.train.launch import launch_ranks
from shardwright.train.logs import logging_to
from shardwright.train.loop import Loop
from shardwright.train.meeting import Meeting
from shardwright.train.memory import telling_of_memory
from shardwright.train.outcome import control_folder, first_line, is_lost_peer
from shardwright.train.precision_choice import agree_on_precision
from shardwright.train.preflight import Checked, check
from shardwright.train.ranks import RankEnvironment, find_ranks, was_restarted
from shardwright.train.recorder import recording
from shardwright.train.saving import ResumeFrom, Saver, changes_since, find_start
from shardwright.train.setup import build_state, describe_device, describe_versions, join_ranks
from shardwright.train.signals import StopRequest, listening_for_stop
from shardwright.train.watchdog import Pace, Vigil, watched

Watching = Callable[[], AbstractContextManager[Progress | None]]
"""Opens a progress display for reading and tokenising data."""


def train(
    recipe: Recipe,
    *,
    num_ranks: int | None = None,
    resume: bool = False,
    resume_if_begun: bool = False,
    allow_drift: Sequence[str] = (),
    watching: Watching = nullcontext,
) -> dict[str, Any] | None:
    """Train a recipe; return a summary of the run on rank 0, None on other ranks.

    Under torchrun or srun this process is one of their ranks. Otherwise `num_ranks` (default 1)
    run on this machine: one in this process, several through torch's elastic launcher.

    Args:
        resume: Continue a run, which must exist.
        resume_if_begun: Continue the run if it exists, else start it; implied when torchrun has
            restarted the ranks.

    Raises:
        InputError: First problem found, before any rank starts.
        RunFailed, Preempted: The run failed or was stopped.
    """
    ranks = find_ranks()
    if ranks is not None and num_ranks not in (None, ranks.world_size):
        raise InputError(
            f"a launcher has already started {ranks.world_size} ranks",
            field="--nproc",
            got=num_ranks,
            remedy="Remove --nproc",
        )
    world_size = ranks.world_size if ranks else num_ranks or 1
    folder = RunFolder.of(recipe)
    resume_if_begun = resume_if_begun or was_restarted()
    if ranks is None or ranks.speaks:
        folder.claim(resume=resume or (resume_if_begun and folder.begun))
        check_exporters(recipe.run.sinks)
    # All ranks then look for a checkpoint before one is written, so all find the same one.
    resume = resume or resume_if_begun
    if ranks is None and world_size > 1:
        wants_cuda(recipe.run.device, field="run.device")
        with watching() as progress:
            check(recipe, world_size, progress=progress)
        # Not in the run folder, which must not change before rank 0 has checked it.
        with tempfile.TemporaryDirectory(prefix="shardwright-") as name:
            path = Path(name) / "recipe.yaml"
            path.write_text(dump_recipe(recipe), encoding="utf-8")
            options = [word for name in allow_drift for word in ("--allow-drift", name)]

            def launch(generation: Generation) -> None:
                words = [str(path), *options]
                if resume or generation.number:
                    words.append("--resume")
                if generation.number:
                    restart = (
                        f"restart {generation.number} of at most {recipe.elastic.max_restarts}"
                    )
                    words += [
                        "--restart",
                        f"{restart}, {generation.world_size} ranks: {generation.after}",
                    ]
                launch_ranks(
                    generation.world_size, "shardwright.train.worker", words, stop, folder.hangs
                )

            with listening_for_stop() as stop:
                run_generations(recipe, world_size, launch, stop)
    else:
        with listening_for_stop() as stop:
            train_rank(
                recipe,
                ranks or RankEnvironment(),
                stop,
                resume=resume,
                allow_drift=allow_drift,
                watching=watching,
            )
    return summarise(folder) if ranks is None or ranks.speaks else None


def write_folder(checked: Checked, folder: RunFolder) -> None:
    """Write recipe, plan, prediction, model configuration and tokenizer to the run folder."""
    predicted = forecast(checked)
    prediction = None if predicted is None else predicted.as_dict()
    folder.write(checked.recipe, checked.plan.as_dict(), checked.shape.to_config(), prediction)
    checked.data.tokenizer.save(folder.tokenizer)


def train_rank(
    recipe: Recipe,
    ranks: RankEnvironment,
    stop: StopRequest,
    *,
    resume: bool = False,
    allow_drift: Sequence[str] = (),
    restart: str | None = None,
    watching: Watching = nullcontext,
) -> None:
    """Run one rank, from joining the process group to the last step."""
    start_seconds = time.perf_counter()
    device = choose_device(recipe.run.device, ranks, field="run.device")
    pace = Pace(recipe.watchdog, _time_outs(recipe))
    watch = watched(
        pace,
        ranks.rank,
        ranks.world_size,
        folder=control_folder(),
        reports=RunFolder.of(recipe).hangs,
        record=recording,
    )
    with watch as vigil, _joined(ranks, device, recipe.run.timeout_seconds):
        folder = RunFolder.of(recipe)
        meeting = Meeting(ranks, device)
        # A node that rejoined under torchrun does not see the restart count of the others.
        resume = meeting.any(resume)
        precision = agree_on_precision(recipe, folder, meeting, device, resume=resume)
        with watching() if ranks.speaks else nullcontext() as progress:
            checked = check(recipe, ranks.world_size, auto_precision=precision, progress=progress)
        start = find_start(checked, folder, allow_drift) if resume else None
        is_started = folder.begun
        if ranks.speaks:
            write_folder(checked, folder)
        meeting.wait()
        with (
            open_speaker(
                folder.path,
                rank=ranks.rank,
                exporters=recipe.run.sinks,
                log_every_steps=recipe.run.log_every_steps,
            ) as speaker,
            logging_to(speaker, folder.log, rank=ranks.rank),
        ):
            if restart and ranks.speaks:
                speaker.write("warning", message=restart)
            if is_started and resume and start is None and ranks.speaks:
                speaker.write(
                    "warning",
                    message="the run ended before its first checkpoint: it starts again at step 0",
                )
            # Only with the events' lock: a refused process must not claim the checkpoints.
            fence = _claim(folder) if ranks.speaks else None
            with telling_of_memory(checked, ranks.rank, device):
                _train(
                    checked,
                    ranks,
                    device,
                    speaker,
                    meeting,
                    folder,
                    stop,
                    vigil,
                    start=start,
                    began=start_seconds,
                    fence=fence,
                )


def _train(
    checked: Checked,
    ranks: RankEnvironment,
    device: torch.device,
    speaker: Speaker,
    meeting: Meeting,
    folder: RunFolder,
    stop: StopRequest,
    vigil: Vigil,
    *,
    start: ResumeFrom | None,
    began: float,
    fence: Fence | None,
) -> None:
    matmul_flops_per_second = measure_ceiling(checked, device)
    state = build_state(checked, device)
    saver = Saver(checked, state, speaker, folder, ranks.speaks, fence=fence)
    loop = Loop(
        checked, state, ranks, device, speaker, meeting, saver, stop, vigil, matmul_flops_per_second
    )
    _tell_start(loop)
    if start is not None:
        saver.restore(start)
        if ranks.speaks and (changed := changes_since(start, checked)):
            speaker.write(
                "warning", message=f"changed since the checkpoint: {'; '.join(map(str, changed))}"
            )
        if state.step >= checked.total_steps and ranks.speaks:
            speaker.write(
                "warning",
                message="no steps are left to train: "
                f"the run is at step {state.step} of {checked.total_steps}",
            )

    def log_end(status: str, final_loss: float | None = None) -> None:
        totals = {"total_seconds": time.perf_counter() - began, "total_tokens": loop.num_tokens}
        speaker.write(
            "run_finished", step=state.step, status=status, **totals, final_loss=final_loss
        )

    try:
        final_loss = loop.run()
        vigil.begin("save", state.step)
        saver.close()
    except Preempted:
        saver.close()
        log_end("preempted")
        raise
    except Exception as error:
        # Our own errors are raised on all ranks; after any other error a peer may be gone.
        saver.close(broken=not isinstance(error, RunFailed))
        with suppress(RunFailed):  # fails on a full disk too, and `error` is what matters
            speaker.write(
                "failed",
                step=state.step,
                message=f"{type(error).__name__}: {error}",
                rank=ranks.rank,
            )
        raise
    log_end("completed", final_loss)


def _claim(folder: RunFolder) -> Fence:
    """Claim the checkpoint folder, so that processes of an earlier launch cannot save.

    Raises:
        InputError: The checkpoint folder is not writable.
    """
    try:
        return claim(folder.checkpoints)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}",
            field="checkpoint.dir",
            got=str(folder.checkpoints),
        ) from error


def _time_outs(recipe: Recipe) -> dict[str, float]:
    """Return the collectives' timeout in each phase, in seconds."""
    return {"save": recipe.checkpoint.timeout_seconds} | dict.fromkeys(
        ("step", "evaluate"), recipe.run.timeout_seconds
    )


@contextmanager
def _joined(ranks: RankEnvironment, device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Join the process group during the block; leave it cleanly unless the block fails."""
    join_ranks(ranks, device, timeout_seconds)
    try:
        yield
    except RuntimeError as error:
        if is_lost_peer(str(error)):
            raise RankFailed(f"a peer died or hung: {first_line(str(error))}") from error
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def _tell_start(loop: Loop) -> None:
    checked = loop.checked
    plan = checked.plan
    loop.speaker.write(
        "run_started",
        step=loop.state.step,
        name=checked.recipe.name,
        recipe=checked.recipe.model_dump(mode="json"),
        plan=plan.as_dict(),
        layout=str(plan.layout),
        world_size=loop.ranks.world_size,
        total_steps=checked.total_steps,
        global_batch_tokens=plan.batch.global_batch_tokens,
        data_hash=checked.data_hash,
        num_parameters=checked.shape.num_parameters,
        versions=describe_versions(),
        host=socket.gethostname(),
        devices=(describe_device(loop.device),) * loop.ranks.world_size,
        flops_per_token=loop.flops_per_token,
        matmul_flops_per_second=loop.matmul_flops_per_second,
    )
    if loop.ranks.speaks:
        for message in _cautions(checked, loop.device):
            loop.speaker.write("warning", message=message)


def _cautions(checked: Checked, device: torch.device) -> Iterator[str]:
    """Yield warnings about settings that are valid but may surprise."""
    if checked.plan.precision.kind == "bf16" and (caution := caution_of_bf16(device)) is not None:
        yield caution
    counts = checked.data.report.train.counts
    if counts.num_unknown:
        share = counts.num_unknown / counts.num_tokens
        yield (
            "the tokenizer has no id for some of the text: "
            f"{counts.num_unknown:,} of {counts.num_tokens:,} training tokens ({share:.1%}) "
            "are its unknown token"
        )
    adapters = checked.shape.adapters
    if adapters is not None:
        beside = [
            spec.beside
            for spec in checked.shape.parameters()
            if spec.part is not None and spec.beside is not None
        ]
        narrow = [spec for spec in beside if min(spec.shape[-2:]) < adapters.rank]
        if narrow:
            sizes = " x ".join(map(str, narrow[0].shape))
            yield (
                f"adapters.rank {adapters.rank} exceeds the rank of {narrow[0].name} ({sizes}): "
                "the excess only uses memory"
            )
    scale = batch_scale(checked.recipe.training, checked.plan.batch.global_batch_size)
    if scale != 1.0:
        peak = checked.recipe.training.learning_rate * scale
        yield f"batch_scaling multiplies the learning rate by {scale:g}: its peak is {peak:g}"


def summarise(folder: RunFolder) -> dict[str, Any]:
    """Summarise the run from its events."""
    log = surviving(read_events(folder.path))
    steps = [event for event in log if isinstance(event, Step)]
    evaluations = [event for event in log if isinstance(event, Evaluation)]
    endings = [event for event in log if isinstance(event, RunFinished)]
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
