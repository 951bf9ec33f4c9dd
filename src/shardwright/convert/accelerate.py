"""Write and read Accelerate's YAML.

Verified with accelerate 1.15, whose launcher accepts what this module writes.
"""

from __future__ import annotations

from typing import Any

import yaml

from shardwright.convert.emitted_config import EmitRequest, EmittedConfig, build_comment_header
from shardwright.convert.recipe_draft import FP8_NOT_CARRIED, RecipeDraft, SourceDocument

_CP_COMM_STRATEGIES = {"all_gather": "allgather", "ring": "alltoall"}
"""Our `cp_method` and accelerate's cp_comm_strategy, which gathers keys and values or rotates
them."""

_MACHINE_KEYS = (
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "gpu_ids",
)
_TPU_KEYS = ("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "downcast_bf16")
_IGNORED_KEYS = ("compute_environment", "debug", "enable_cpu_affinity")


def write(request: EmitRequest) -> EmittedConfig:
    """Write the plan for `accelerate launch --config_file`: DDP for zero_stage 0, else
    FSDP2."""
    layout = request.layout
    precision = request.recipe.precision.kind
    notes = [*request.list_common_notes("the training script"), *_build_script_notes(request)]
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": _choose_distributed_type(request),
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": precision if precision in ("bf16", "fp16") else "no",
        "num_machines": request.num_nodes,
        "num_processes": layout.world_size,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not request.has_accelerators,
    }
    if not request.has_accelerators and layout.world_size > 1:
        notes.append(
            "run.device: cpu: set ACCELERATE_USE_CPU=true for the launcher, "
            "or use Accelerator(cpu=True) in the script"
        )
    if precision == "fp64":
        notes.append("precision.kind: fp64: convert the model's weights to float64 in the script")
    if request.recipe.model.compile is True:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    if _is_sharded(request):
        config["fsdp_config"] = _build_fsdp_section(request, notes)
    degrees = {
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard,
        "tp": layout.tp,
        "cp": layout.cp,
    }
    if _is_sharded(request) and (layout.tp > 1 or layout.cp > 1 or layout.dp_replicate > 1):
        config["parallelism_config"] = {
            f"parallelism_config_{axis}_size": degree for axis, degree in degrees.items()
        }
        if layout.cp > 1:
            config["parallelism_config"]["parallelism_config_cp_comm_strategy"] = (
                _CP_COMM_STRATEGIES.get(layout.cp_method, "allgather")
            )
    heading = f"shardwright plan --emit accelerate: {request.recipe.name}, {layout}"
    return EmittedConfig(
        build_comment_header(tuple(notes), heading) + yaml.safe_dump(config, sort_keys=False),
        tuple(notes),
    )


def _is_sharded(request: EmitRequest) -> bool:
    layout = request.layout
    return layout.zero_stage > 0 or layout.tp > 1 or layout.cp > 1


def _choose_distributed_type(request: EmitRequest) -> str:
    if _is_sharded(request):
        return "FSDP"
    # With MULTI_CPU, accelerate starts one process only, unless mpirun and a hostfile exist;
    # with MULTI_GPU it starts all of them.
    return "NO" if request.layout.world_size == 1 else "MULTI_GPU"


def _build_fsdp_section(request: EmitRequest, notes: list[str]) -> dict[str, Any]:
    layout = request.layout
    if layout.zero_stage == 1:
        notes.append(
            "layout.zero_stage: 1: FSDP2 has no such stage; written as 2, "
            "which reduces gradients after every micro-batch"
        )
    if layout.zero_stage == 0:
        notes.append(
            "layout.zero_stage: 0: with tensor or context parallelism, accelerate uses FSDP for "
            "all data ranks; dp_shard is 1"
        )
    if request.offload == "optimizer":
        notes.append(
            "offload: optimizer: FSDP2 offloads parameters and optimizer states together "
            "(fsdp_offload_params)"
        )
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": layout.zero_stage == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": request.offload == "parameters",
        "fsdp_activation_checkpointing": request.recipe.recompute == "full",
    }


def _build_script_notes(request: EmitRequest) -> list[str]:
    """Describe the settings that accelerate leaves to the script: most of the optimisation."""
    training = request.recipe.training
    optimizer = request.recipe.optimizer
    layout = request.layout
    batch = request.batch
    notes = [
        f"training: sequences of {batch.sequence_length} tokens, "
        f"{batch.micro_batch_size} per rank, "
        f"{batch.gradient_accumulation_steps} accumulation steps: set "
        "Accelerator(gradient_accumulation_steps=...) and the data loader in the script",
        f"optimizer: {optimizer.name}, learning rate {request.peak_learning_rate:g} "
        f"({training.schedule}), weight decay {training.weight_decay:g}, "
        f"max_grad_norm {training.max_grad_norm}: set them in the script",
    ]
    if layout.pp > 1:
        notes.append(f"layout.pp: {layout.pp}: accelerate has no pipeline parallelism")
    if layout.ep > 1:
        notes.append(f"layout.ep: {layout.ep}: accelerate has no expert parallelism")
    if layout.cp > 1 and layout.cp_method not in _CP_COMM_STRATEGIES:
        notes.append(
            f"layout.cp_method: {layout.cp_method}: written as allgather; "
            "accelerate configures Ulysses by sp_size"
        )
    if layout.tp > 1 and layout.sequence_parallel:
        notes.append(
            "layout.sequence_parallel: true: determined by transformers' tensor-parallel plan"
        )
    if request.recipe.recompute == "selective" or (
        request.recipe.recompute == "full" and not _is_sharded(request)
    ):
        notes.append(
            f"recompute: {request.recipe.recompute}: "
            "call model.gradient_checkpointing_enable() in the script"
        )
    return notes


def read(source: SourceDocument, draft: RecipeDraft) -> None:
    """Read an Accelerate configuration for DDP, FSDP or DeepSpeed."""
    kind = _read_no(source.pop_value("distributed_type", "NO"), "NO")
    for key in (*_IGNORED_KEYS, *_MACHINE_KEYS, *_TPU_KEYS):
        value = source.pop_value(key)
        if (
            key in _MACHINE_KEYS
            and key not in ("main_training_function", "rdzv_backend", "same_network")
            and value not in (None, 0, "all")
        ):
            draft.drop(key, value, "`shardwright launch` determines where ranks run")
    precision = _read_no(source.pop_value("mixed_precision", "no"), "no")
    if precision == "fp8":
        draft.drop("mixed_precision", precision, FP8_NOT_CARRIED)
    else:
        draft.set_value(
            "precision.kind", {"no": "fp32"}.get(str(precision), precision), "mixed_precision"
        )
    if source.pop_value("use_cpu") is True:
        draft.set_value("run.device", "cpu", "use_cpu")
    if source.pop_value("dynamo_config.dynamo_backend", "NO") not in ("NO", None):
        draft.set_value("model.compile", True, "dynamo_config.dynamo_backend")
    processes = source.pop_value("num_processes")
    machines = source.pop_value("num_machines", 1)
    if processes is not None:
        draft.add_remark(
            f"num_processes: {processes} on {machines} machine(s): start the same number with "
            "`train --nproc` or `launch --nodes`"
        )
    _read_distributed_type(str(kind), source, draft)
    draft.require_keys(
        "model.path",
        "data.sources",
        "training.sequence_length",
        "training.learning_rate",
        "training.max_steps",
    )
    if (
        "training.micro_batch_size" not in draft.recipe
        and "training.global_batch_size" not in draft.recipe
    ):
        draft.require_keys("training.micro_batch_size")


def _read_no(value: Any, no: str) -> Any:
    """Return the text of `no` without quotes, which YAML reads as false."""
    return no if value is False else value


def _read_distributed_type(kind: str, source: SourceDocument, draft: RecipeDraft) -> None:
    if kind in ("NO", "MULTI_CPU", "MULTI_GPU"):
        draft.set_value("layout.zero_stage", 0, "distributed_type")
    elif kind == "FSDP":
        read_fsdp(source, draft)
    elif kind == "DEEPSPEED":
        _read_deepspeed_section(source, draft)
    else:
        draft.drop(
            "distributed_type", kind, "allowed here: NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED"
        )
    for axis in ("dp_replicate", "dp_shard", "tp", "cp"):
        key = f"parallelism_config.parallelism_config_{axis}_size"
        degree = source.pop_value(key)
        if degree != 1:
            draft.set_value(f"layout.{axis}", degree, key)
    strategy = source.pop_name("parallelism_config.parallelism_config_cp_comm_strategy")
    methods = {source_key: ours for ours, source_key in _CP_COMM_STRATEGIES.items()}
    if strategy is not None and strategy not in methods:
        draft.drop(
            "parallelism_config.parallelism_config_cp_comm_strategy",
            strategy,
            f"allowed: {', '.join(methods)}",
        )
    draft.set_value(
        "layout.cp_method",
        methods.get(str(strategy)),
        "parallelism_config.parallelism_config_cp_comm_strategy",
    )


def read_fsdp(source: SourceDocument, draft: RecipeDraft) -> None:
    """Read FSDP's section, with the keys of FSDP 1 or 2."""
    section = "fsdp_config"
    source.pop_value(f"{section}.fsdp_version")
    source.pop_value(f"{section}.version")
    reshard = source.pop_value(
        f"{section}.fsdp_reshard_after_forward",
        source.pop_value(f"{section}.reshard_after_forward", True),
    )
    strategy = source.pop_value(f"{section}.fsdp_sharding_strategy")
    stages = {
        "FULL_SHARD": 3,
        "1": 3,
        "SHARD_GRAD_OP": 2,
        "2": 2,
        "NO_SHARD": 0,
        "3": 0,
        "HYBRID_SHARD": 3,
        "4": 3,
    }
    chosen = reshard if isinstance(reshard, str) and reshard.upper() in stages else strategy
    if chosen is not None and str(chosen).upper() not in stages:
        draft.drop(
            f"{section}.fsdp_sharding_strategy",
            chosen,
            f"allowed: {', '.join(key for key in stages if not key.isdigit())}",
        )
    stage = (
        stages.get(str(chosen).upper())
        if chosen is not None
        else (3 if str(reshard).lower() == "true" else 2)
    )
    draft.set_value("layout.zero_stage", stage, f"{section}.fsdp_reshard_after_forward")
    if str(chosen).upper() in ("HYBRID_SHARD", "4"):
        draft.require_keys("layout.dp_shard")
    for key in ("fsdp_activation_checkpointing", "activation_checkpointing"):
        if source.pop_value(f"{section}.{key}") in (True, "true"):
            draft.set_value("recompute", "full", key)
    for key in ("fsdp_offload_params", "offload_params"):
        if source.pop_value(f"{section}.{key}") in (True, "true"):
            draft.set_value("offload.optimizer", "host", f"{section}.{key}")
            draft.set_value("offload.parameters", "host", f"{section}.{key}")
    for key, value in source.pop_section(section).items():
        if value not in (None, False):
            reason = "wrapping, weight loading and sharded checkpoints are not configurable here"
            draft.drop(f"{section}.{key}", value, reason)


def _read_deepspeed_section(source: SourceDocument, draft: RecipeDraft) -> None:
    section = source.pop_mapping("deepspeed_config")
    for source_key, ours in (
        ("gradient_accumulation_steps", "training.gradient_accumulation_steps"),
        ("zero_stage", "layout.zero_stage"),
    ):
        draft.set_value(ours, section.pop(source_key, None), f"deepspeed_config.{source_key}")
    clipping = section.pop("gradient_clipping", None)
    if clipping is not None:
        draft.set_value("training.max_grad_norm", clipping, "deepspeed_config.gradient_clipping")
    for key, value in section.items():
        if key == "deepspeed_config_file":
            draft.drop(
                f"deepspeed_config.{key}",
                value,
                "convert that file: it has batch, optimizer and stage",
            )
        elif value not in (None, False, "none"):
            draft.drop(
                f"deepspeed_config.{key}",
                value,
                "offloading and settings of DeepSpeed's engine have no equivalent",
            )
