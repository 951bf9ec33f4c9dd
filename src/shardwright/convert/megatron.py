"""Write Megatron-LM's command-line arguments.

Names are those of megatron-core 0.16.1 (parallelism, recompute, optimizer) and of Megatron-LM's
megatron/training/config/training_config.py at 008e9cdb (batch, schedule), with hyphens instead
of underscores.
"""

from __future__ import annotations

from typing import Any

from shardwright.convert.emitted_config import (
    EmitRequest,
    EmittedConfig,
    build_comment_header,
    build_warmup_notes,
)

_SHARDING_STRATEGIES = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
_CP_COMM_TYPES = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a"}
_LR_DECAY_STYLES = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "warmup_stable_decay": "WSD",
}


def write(request: EmitRequest) -> EmittedConfig:
    """Write one argument per line, below comments."""
    notes = [
        *request.list_common_notes("Megatron"),
        *_build_notes(request),
        *build_warmup_notes(request.recipe.training),
    ]
    arguments = (
        _build_parallelism_arguments(request)
        | _build_batch_arguments(request)
        | _build_optimisation_arguments(request)
        | _build_recompute_arguments(request)
    )
    heading = (
        f"shardwright plan --emit megatron: {request.recipe.name}, {request.layout}\n"
        "# torchrun ... pretrain_gpt.py MODEL AND DATA ARGUMENTS $(grep -v '^#' THIS_FILE)"
    )
    lines = (
        f"--{name}\n" if value is True else f"--{name} {value}\n"
        for name, value in arguments.items()
    )
    return EmittedConfig(build_comment_header(tuple(notes), heading) + "".join(lines), tuple(notes))


def _build_parallelism_arguments(request: EmitRequest) -> dict[str, Any]:
    layout = request.layout
    arguments: dict[str, Any] = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "expert-model-parallel-size": layout.ep,
    }
    if layout.tp > 1 and layout.sequence_parallel:
        arguments["sequence-parallel"] = True
    if layout.cp > 1 and layout.cp_method in _CP_COMM_TYPES:
        arguments["cp-comm-type"] = _CP_COMM_TYPES[layout.cp_method]
    if layout.pp > 1 and layout.schedule == "interleaved_1f1b":
        arguments["num-virtual-stages-per-pipeline-rank"] = layout.virtual_stages or 2
    arguments |= {"overlap-grad-reduce": True} if layout.data_ranks > 1 else {}
    if layout.zero_stage == 1:
        arguments |= {"use-distributed-optimizer": True, "overlap-param-gather": True}
    elif layout.zero_stage > 1:
        arguments |= {
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": _SHARDING_STRATEGIES[layout.zero_stage],
        }
        arguments |= {"use-distributed-optimizer": True, "overlap-param-gather": True}
    if layout.zero_stage and layout.dp_replicate > 1:
        arguments["num-distributed-optimizer-instances"] = layout.dp_replicate
    return arguments


def _build_batch_arguments(request: EmitRequest) -> dict[str, Any]:
    batch = request.batch
    training = request.recipe.training
    arguments: dict[str, Any] = {
        "micro-batch-size": batch.micro_batch_size,
        "global-batch-size": batch.global_batch_size,
        "seq-length": batch.sequence_length,
    }
    if training.max_steps is not None:
        arguments["train-iters"] = training.max_steps
    precision = request.recipe.precision.kind
    return (
        arguments
        | ({precision: True} if precision in ("bf16", "fp16") else {})
        | {"seed": request.recipe.seed}
    )


def _build_optimisation_arguments(request: EmitRequest) -> dict[str, Any]:
    training = request.recipe.training
    optimizer = request.recipe.optimizer
    arguments: dict[str, Any] = {
        "lr": request.peak_learning_rate,
        "min-lr": request.min_learning_rate,
        "lr-decay-style": _LR_DECAY_STYLES[training.schedule],
        "lr-warmup-iters": training.warmup_steps,
        "weight-decay": training.weight_decay,
        "clip-grad": training.max_grad_norm or 0.0,
    }
    if training.schedule == "warmup_stable_decay" and training.max_steps is not None:
        arguments["lr-wsd-decay-style"] = "linear"
        arguments["lr-wsd-decay-iters"] = training.decay_steps or max(1, training.max_steps // 10)
    if optimizer.name == "adamw":
        arguments |= {
            "optimizer": "adam",
            "adam-beta1": optimizer.beta1,
            "adam-beta2": optimizer.beta2,
            "adam-eps": optimizer.eps,
        }
    elif optimizer.name == "sgd":
        arguments |= {"optimizer": "sgd", "sgd-momentum": optimizer.momentum or 0.0}
    return arguments


def _build_recompute_arguments(request: EmitRequest) -> dict[str, Any]:
    if request.recipe.recompute == "full":
        return {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
        }
    return {"recompute-granularity": "selective"} if request.recipe.recompute == "selective" else {}


def _build_notes(request: EmitRequest) -> list[str]:
    optimizer = request.recipe.optimizer
    layout = request.layout
    notes = []
    if layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved_1f1b"):
        notes.append(
            f"layout.schedule: {layout.schedule}: Megatron has 1F1B, "
            "and interleaved 1F1B with virtual stages"
        )
    if layout.cp > 1 and layout.cp_method == "auto":
        notes.append(
            "layout.cp_method: auto: Megatron uses p2p (a ring) unless cp-comm-type is set"
        )
    if layout.zero_stage > 1 and layout.pp > 1:
        notes.append(
            f"layout.zero_stage: {layout.zero_stage} with pp: "
            "Megatron's FSDP may not support pipeline parallelism"
        )
    if layout.tp > 1 and layout.cp == 1 and layout.zero_stage > 1:
        notes.append(
            "set CUDA_DEVICE_MAX_CONNECTIONS to more than 1: Megatron's FSDP requires it, "
            "whereas tensor parallelism alone requires 1"
        )
    if request.recipe.recompute == "selective":
        notes.append(
            "recompute: selective: recomputes all but matrix products and attention here, "
            "core attention there (recompute-modules)"
        )
    if request.recipe.precision.kind == "fp64":
        notes.append("precision.kind: fp64: Megatron supports fp32, bf16 and fp16")
    if optimizer.name not in ("adamw", "sgd"):
        notes.append(f"optimizer.name: {optimizer.name}: not carried")
    if request.offload != "none":
        notes.append(f"offload: {request.offload}: not carried; see optimizer-cpu-offload")
    return notes
