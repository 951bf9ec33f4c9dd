"""Write torchtitan's command-line arguments.

Names are those of torchtitan 0.3.0 (torchtitan/config/configs.py). Its configurations are
Python functions; the arguments override one of them: `--module llama3 --config llama3_8b` and
these.
"""

from __future__ import annotations

from typing import Any

from shardwright.convert.emitted_config import EmitRequest, EmittedConfig, build_comment_header

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_LR_DECAY_TYPES = {"linear": "linear", "cosine": "cosine"}


def write(request: EmitRequest) -> EmittedConfig:
    """Write one argument per line, below comments."""
    notes = [*request.list_common_notes("torchtitan's config function"), *_build_notes(request)]
    arguments = (
        _build_parallelism_arguments(request)
        | _build_training_arguments(request)
        | _build_learning_rate_arguments(request)
    )
    if request.recipe.model.compile is True:
        arguments["compile.enable"] = True
    heading = (
        f"shardwright plan --emit torchtitan: {request.recipe.name}, {request.layout}\n"
        "# torchrun ... -m torchtitan.train --module MODULE --config FUNCTION $(grep -v '^#' "
        "THIS_FILE)"
    )
    return EmittedConfig(
        build_comment_header(tuple(notes), heading)
        + "".join(_format_argument(*item) for item in arguments.items()),
        tuple(notes),
    )


def _format_argument(name: str, value: Any) -> str:
    """Format an argument for tyro: booleans as flags, everything else with a value."""
    if isinstance(value, bool):
        section, _, last = name.rpartition(".")
        return f"--{name}\n" if value else f"--{section}.no-{last}\n"
    return f"--{name}={value}\n"


def _build_parallelism_arguments(request: EmitRequest) -> dict[str, Any]:
    layout = request.layout
    arguments: dict[str, Any] = {
        "parallelism.data-parallel-replicate-degree": layout.dp_replicate,
        "parallelism.data-parallel-shard-degree": layout.dp_shard,
        "parallelism.tensor-parallel-degree": layout.tp,
        "parallelism.pipeline-parallel-degree": layout.pp,
        "parallelism.context-parallel-degree": layout.cp,
        "parallelism.expert-parallel-degree": layout.ep,
    }
    if layout.fsdp > 1:
        arguments["parallelism.fsdp-reshard-after-forward"] = (
            "always" if layout.zero_stage == 3 else "never"
        )
    if layout.tp > 1:
        arguments["parallelism.enable-sequence-parallel"] = layout.sequence_parallel
    if layout.pp > 1:
        arguments["parallelism.pipeline-parallel-schedule"] = _SCHEDULES.get(
            layout.schedule, "1F1B"
        )
        arguments["parallelism.pipeline-parallel-microbatch-size"] = request.batch.micro_batch_size
    return arguments


def _build_training_arguments(request: EmitRequest) -> dict[str, Any]:
    batch = request.batch
    training = request.recipe.training
    # Under pipeline parallelism, torchtitan's local batch is a rank's whole batch of a step,
    # which the pipeline splits into micro-batches.
    local = batch.micro_batch_size * (
        batch.gradient_accumulation_steps if request.layout.pp > 1 else 1
    )
    arguments: dict[str, Any] = {
        "training.local-batch-size": local,
        "training.global-batch-size": batch.global_batch_size,
        "training.seq-len": batch.sequence_length,
    }
    if training.max_grad_norm is not None:
        arguments["training.max-norm"] = training.max_grad_norm
    if training.max_steps is not None:
        arguments["training.steps"] = training.max_steps
    precision = request.recipe.precision.kind
    if precision in ("bf16", "fp32"):
        arguments["training.mixed-precision-param"] = {"bf16": "bfloat16", "fp32": "float32"}[
            precision
        ]
    if request.offload == "parameters":
        arguments["training.enable-cpu-offload"] = True
    return arguments | {"debug.seed": request.recipe.seed}


def _build_learning_rate_arguments(request: EmitRequest) -> dict[str, Any]:
    training = request.recipe.training
    arguments: dict[str, Any] = {"lr-scheduler.warmup-steps": training.warmup_steps}
    peak = request.peak_learning_rate
    ratio = request.min_learning_rate / peak if peak else 0.0
    if training.schedule in _LR_DECAY_TYPES:
        return arguments | {
            "lr-scheduler.decay-type": _LR_DECAY_TYPES[training.schedule],
            "lr-scheduler.min-lr-factor": ratio,
        }
    if training.schedule == "constant":
        return arguments | {"lr-scheduler.decay-ratio": 0.0}
    if training.max_steps is not None:  # warmup_stable_decay
        decay = training.decay_steps or max(1, training.max_steps // 10)
        shape = {"lr-scheduler.decay-type": "linear", "lr-scheduler.min-lr-factor": ratio}
        return arguments | {"lr-scheduler.decay-ratio": decay / training.max_steps} | shape
    return arguments


def _build_notes(request: EmitRequest) -> list[str]:
    optimizer = request.recipe.optimizer
    training = request.recipe.training
    layout = request.layout
    notes = [
        f"optimizer: {optimizer.name}, learning rate {request.peak_learning_rate:g}, betas "
        f"{optimizer.beta1:g} and {optimizer.beta2:g}, "
        f"weight decay {training.weight_decay:g}: set them "
        f"in the config function, e.g. optimizer=default_adamw(lr={request.peak_learning_rate:g})"
    ]
    kind = request.recipe.recompute_kind  # of the layout: never None
    if kind in ("full", "selective"):
        config = {"full": "FullAC", "selective": "SelectiveAC"}[kind]
        notes.append(
            f"recompute: {kind}: activation_checkpoint={config}.Config() in the config function"
        )
    else:
        notes.append(
            "recompute: none: torchtitan recomputes selectively unless activation_checkpoint is set"
        )
    if layout.zero_stage in (1, 2):
        notes.append(
            f"layout.zero_stage: {layout.zero_stage}: torchtitan also shards parameters; "
            "`never` keeps them gathered"
        )
    if layout.pp > 1 and layout.schedule not in _SCHEDULES:
        notes.append(
            f"layout.schedule: {layout.schedule}: torchtitan has no such schedule; written as 1F1B"
        )
    if layout.cp > 1 and layout.cp_method == "ulysses":
        notes.append(
            "layout.cp_method: ulysses: torchtitan's context parallelism rotates or gathers "
            "keys and values"
        )
    if layout.pp > 1 and layout.virtual_stages not in (None, 2):
        notes.append(
            f"layout.virtual_stages: {layout.virtual_stages}: "
            "set pipeline_parallel_layers_per_stage"
        )
    if request.recipe.precision.kind in ("fp16", "fp64"):
        notes.append(
            f"precision.kind: {request.recipe.precision.kind}: "
            "torchtitan supports bfloat16 and float32"
        )
    if training.max_grad_norm is None:
        notes.append(
            "training.max_grad_norm: null: torchtitan always clips; set a large training.max-norm"
        )
    if request.offload == "optimizer":
        notes.append(
            "offload: optimizer: torchtitan offloads parameters, "
            "gradients and optimizer states together"
        )
    if training.schedule == "warmup_stable_decay" and training.max_steps is None:
        notes.append(
            "training.schedule: warmup_stable_decay: the decay ratio needs training.max_steps"
        )
    return notes
