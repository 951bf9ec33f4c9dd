"""Log of a run: log file, warnings, and the event of its start."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from shardwright.data.tokens.tokenizer_loading import (
    count_differing_ids,
    has_tokenizer,
    load_tokenizer,
)
from shardwright.errors import RunFailed, TokenizerError
from shardwright.masking import MaskingFormatter
from shardwright.numerics.bf16 import build_bf16_warning
from shardwright.optim.learning_rate import compute_batch_scale
from shardwright.telemetry.event_logger import EventLogger
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.rank_context import RankContext
from shardwright.training.setup import describe_device, describe_versions

logger = logging.getLogger("shardwright")

_MAX_RENAMED_SHARE = 0.01
"""Share of a tokenizer's ids that may stand for other text without a warning: reserved tokens get
names, such as those of a chat template."""


class _WarningHandler(logging.Handler):
    """Handler that writes warnings as events, on every rank."""

    def __init__(self, event_logger: EventLogger) -> None:
        super().__init__(logging.WARNING)
        self.event_logger = event_logger

    def emit(self, record: logging.LogRecord) -> None:
        # If the event file is not writable, the run fails at its next event, not in a log call.
        with suppress(RunFailed):
            self.event_logger.log("warning", message=record.getMessage())


@contextmanager
def log_to_run(event_logger: EventLogger, path: Path, *, rank: int) -> Iterator[None]:
    """Send warnings to `event_logger` and, on rank 0, other messages to the file `path`."""
    handlers: list[logging.Handler] = [_WarningHandler(event_logger)]
    if rank == 0:
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(MaskingFormatter("%(asctime)s  %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
        file.addFilter(lambda record: record.levelno < logging.WARNING)  # events
        handlers.append(file)
    former = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(former)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


def log_start(context: RankContext, step: int, matmul_flops_per_second: float) -> None:
    """Log the `run_started` event, and warnings about settings that may surprise."""
    validated_run = context.validated_run
    plan = context.plan
    world_size = context.rank_environment.world_size
    context.event_logger.log(
        "run_started",
        step=step,
        name=context.recipe.name,
        recipe=context.recipe.model_dump(mode="json"),
        plan=plan.as_dict(),
        layout=str(plan.layout),
        world_size=world_size,
        total_steps=validated_run.total_steps,
        global_batch_tokens=plan.batch.global_batch_tokens,
        data_hash=validated_run.data_hash,
        num_parameters=validated_run.shape.num_parameters,
        versions=describe_versions(),
        host=socket.gethostname(),
        devices=(describe_device(context.device),) * world_size,
        flops_per_token=validated_run.count_flops_per_token(plan.batch.sequence_length),
        matmul_flops_per_second=matmul_flops_per_second,
    )
    if context.is_main_rank and context.recipe.training.deterministic:
        logger.info(
            "training.deterministic: operations without a deterministic implementation are "
            "errors; attention uses no cuDNN kernel, NCCL sums nothing inside switches, and "
            "gradients of replicas are summed after the backward pass instead of by DDP"
        )
    if context.is_main_rank:
        for message in _list_warnings(validated_run, context.device):
            context.log_warning(message)


def _list_warnings(validated_run: ValidatedRun, device: torch.device) -> Iterator[str]:
    """Yield warnings about settings that are valid but may surprise."""
    if (
        validated_run.dtypes.compute == torch.bfloat16
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
    yield from _warn_of_another_tokenizer(validated_run)
    yield from _warn_of_unused_evaluation(validated_run)
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


def _warn_of_unused_evaluation(validated_run: ValidatedRun) -> Iterator[str]:
    """Warn if a recipe asks for evaluations and there is no data for them."""
    every_steps = validated_run.recipe.evaluation.every_steps
    if every_steps is not None and validated_run.data.validation is None:
        yield (
            f"evaluation.every_steps: {every_steps} has no effect, because there is no validation "
            "data; set data.validation or data.validation_fraction"
        )


def _warn_of_another_tokenizer(validated_run: ValidatedRun) -> Iterator[str]:
    """Warn if loaded weights were trained with a tokenizer whose ids stand for other text."""
    recipe = validated_run.recipe
    uses_own = recipe.tokenizer.kind == "huggingface" and recipe.tokenizer.path is None
    if uses_own or not recipe.model.is_pretrained:
        return
    assert recipe.model.path is not None
    if not has_tokenizer(Path(recipe.model.path)):
        return
    try:
        own = load_tokenizer(recipe.model.path)
    except TokenizerError:  # a reason to name another tokenizer
        return
    num_differing = count_differing_ids(validated_run.data.tokenizer, own)
    if num_differing > own.vocab_size * _MAX_RENAMED_SHARE:
        yield (
            f"{num_differing:,} of the {own.vocab_size:,} ids of the tokenizer in "
            f"{recipe.model.path} stand for other text in the recipe's tokenizer: the loaded "
            "weights do not know the new meanings. Remove the section `tokenizer` to use the "
            "model's own"
        )
