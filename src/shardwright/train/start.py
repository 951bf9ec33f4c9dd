"""Start a run: check it, claim its folder, then train here, start ranks, or be one of a launcher's ranks."""

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
"""Opens what shows the reading and tokenising of data while it lasts."""


def train(
    recipe: Recipe,
    *,
    num_ranks: int | None = None,
    resume: bool = False,
    resume_if_begun: bool = False,
    allow_drift: Sequence[str] = (),
    watching: Watching = nullcontext,
) -> dict[str, Any] | None:
    """Train a recipe; returns a summary of the run, on the rank that speaks.

    `resume` goes on with a run that must be there; `resume_if_begun` with one that may be, as ranks do that torchrun starts again.

    Under torchrun or srun this process is one rank of theirs. Otherwise `num_ranks` (default 1) run on this machine: one in
    this process, several through torch's elastic launcher.

    Raises:
        InputError: what is wrong, before any rank starts.
        RunFailed, Preempted: how the run ended.
    """
    ranks = find_ranks()
    if ranks is not None and num_ranks not in (None, ranks.world_size):
        raise InputError(
            f"a launcher has started {ranks.world_size} ranks already", field="--nproc", got=num_ranks, remedy="Leave --nproc out"
        )
    world_size = ranks.world_size if ranks else num_ranks or 1
    folder = RunFolder.of(recipe)
    resume_if_begun = resume_if_begun or was_restarted()
    if ranks is None or ranks.speaks:
        folder.claim(resume=resume or (resume_if_begun and folder.begun))
        check_exporters(recipe.run.sinks)
    # Every rank looks for a checkpoint then: none is written before all have looked, so that all find the same.
    resume = resume or resume_if_begun
    if ranks is None and world_size > 1:
        wants_cuda(recipe.run.device, field="run.device")
        with watching() as progress:
            check(recipe, world_size, progress=progress)
        # Not through the run folder: until rank 0 has found that this run may go on there, it stays as it is.
        with tempfile.TemporaryDirectory(prefix="shardwright-") as name:
            path = Path(name) / "recipe.yaml"
            path.write_text(dump_recipe(recipe), encoding="utf-8")
            allowed = [word for name in allow_drift for word in ("--allow-drift", name)]

            def launch(generation: Generation) -> None:
                words = [str(path), *allowed]
                if resume or generation.number:
                    words.append("--resume")
                if generation.number:
                    of = f"restart {generation.number} of at most {recipe.elastic.max_restarts}"
                    words += ["--restart", f"{of}, {generation.world_size} ranks: {generation.after}"]
                launch_ranks(generation.world_size, "shardwright.train.worker", words, stop, folder.hangs)

            with listening_for_stop() as stop:
                run_generations(recipe, world_size, launch, stop)
    else:
        with listening_for_stop() as stop:
            train_rank(recipe, ranks or RankEnvironment(), stop, resume=resume, allow_drift=allow_drift, watching=watching)
    return summarise(folder) if ranks is None or ranks.speaks else None


def write_folder(checked: Checked, folder: RunFolder) -> None:
    """Recipe, plan, model configuration and tokenizer: all that the run folder holds before the first step."""
    predicted = forecast(checked)
    told = None if predicted is None else predicted.as_dict()
    folder.write(checked.recipe, checked.plan.as_dict(), checked.shape.to_config(), told)
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
    """One rank, from joining the others to the last step."""
    began = time.perf_counter()
    device = choose_device(recipe.run.device, ranks, field="run.device")
    pace = Pace(recipe.watchdog, _time_outs(recipe))
    watch = watched(
        pace, ranks.rank, ranks.world_size, folder=control_folder(), reports=RunFolder.of(recipe).hangs, record=recording
    )
    with watch as vigil, _joined(ranks, device, recipe.run.timeout_seconds):
        folder, meeting = RunFolder.of(recipe), Meeting(ranks, device)
        # A node that came back under torchrun does not know of a restart that the others know of.
        resume = meeting.any(resume)
        precision = agree_on_precision(recipe, folder, meeting, device, resume=resume)
        with watching() if ranks.speaks else nullcontext() as progress:
            checked = check(recipe, ranks.world_size, auto_precision=precision, progress=progress)
        start, begun = find_start(checked, folder, allow_drift) if resume else None, folder.begun
        if ranks.speaks:
            write_folder(checked, folder)
        meeting.wait()
        with (
            open_speaker(
                folder.path, rank=ranks.rank, exporters=recipe.run.sinks, log_every_steps=recipe.run.log_every_steps
            ) as speaker,
            logging_to(speaker, folder.log, rank=ranks.rank),
        ):
            if restart and ranks.speaks:
                speaker.write("warning", message=restart)
            if begun and resume and start is None and ranks.speaks:
                speaker.write("warning", message="the run ended before its first checkpoint: it begins again at step 0")
            # With the events' lock in hand: a process that is refused must not shut out the one that trains.
            fence = _claim(folder) if ranks.speaks else None
            with telling_of_memory(checked, ranks.rank, device):
                _train(checked, ranks, device, speaker, meeting, folder, stop, vigil, start=start, began=began, fence=fence)


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
    loop = Loop(checked, state, ranks, device, speaker, meeting, saver, stop, vigil, matmul_flops_per_second)
    _tell_start(loop)
    if start is not None:
        saver.restore(start)
        if ranks.speaks and (changed := changes_since(start, checked)):
            speaker.write("warning", message=f"changed since the checkpoint: {'; '.join(map(str, changed))}")
        if state.step >= checked.total_steps and ranks.speaks:
            speaker.write("warning", message=f"nothing is left to train: step {state.step} of {checked.total_steps} is done")

    def tell_end(status: str, final_loss: float | None = None) -> None:
        totals = {"total_seconds": time.perf_counter() - began, "total_tokens": loop.num_tokens}
        speaker.write("run_finished", step=state.step, status=status, **totals, final_loss=final_loss)

    try:
        final_loss = loop.run()
        vigil.begin("save", state.step)
        saver.close()
    except Preempted:
        saver.close()
        tell_end("preempted")
        raise
    except Exception as error:
        # An error of ours that ends a run is raised by every rank; after another one a peer may be gone.
        saver.close(broken=not isinstance(error, RunFailed))
        with suppress(RunFailed):  # where the disk is full this cannot be written either, and `error` is what matters
            speaker.write("failed", step=state.step, message=f"{type(error).__name__}: {error}", rank=ranks.rank)
        raise
    tell_end("completed", final_loss)


def _claim(folder: RunFolder) -> Fence:
    """Shut out whatever may be left of an earlier generation.

    Raises:
        InputError: checkpoints cannot be written there.
    """
    try:
        return claim(folder.checkpoints)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}", field="checkpoint.dir", got=str(folder.checkpoints)
        ) from error


def _time_outs(recipe: Recipe) -> dict[str, float]:
    """How long collectives wait in each phase, in seconds."""
    return {"save": recipe.checkpoint.timeout_seconds} | dict.fromkeys(("step", "evaluate"), recipe.run.timeout_seconds)


@contextmanager
def _joined(ranks: RankEnvironment, device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Be a member of the process group; leave it in good order, or at once where something broke."""
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
    checked, plan = loop.checked, loop.checked.plan
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
    """What a person may not expect of this run, though nothing is wrong with it."""
    if checked.plan.precision.kind == "bf16" and (caution := caution_of_bf16(device)) is not None:
        yield caution
    counts = checked.data.report.train.counts
    if counts.num_unknown:
        of = f"{counts.num_unknown:,} of {counts.num_tokens:,} training tokens ({counts.num_unknown / counts.num_tokens:.1%})"
        yield f"the tokenizer has no id for some of the text: {of} are its unknown token"
    adapters = checked.shape.adapters
    if adapters is not None:
        beside = [spec.beside for spec in checked.shape.parameters() if spec.part is not None and spec.beside is not None]
        narrow = [spec for spec in beside if min(spec.shape[-2:]) < adapters.rank]
        if narrow:
            sizes = " x ".join(map(str, narrow[0].shape))
            yield f"adapters.rank {adapters.rank} is more than {narrow[0].name} ({sizes}) can have: the rest is memory for nothing"
    scale = batch_scale(checked.recipe.training, checked.plan.batch.global_batch_size)
    if scale != 1.0:
        peak = checked.recipe.training.learning_rate * scale
        yield f"batch_scaling multiplies the learning rate by {scale:g}: its peak is {peak:g}"


def summarise(folder: RunFolder) -> dict[str, Any]:
    """How the run ended, from its own events."""
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
