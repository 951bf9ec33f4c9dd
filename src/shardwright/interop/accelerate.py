"""Write and read Accelerate's YAML.

Verified with accelerate 1.15, whose launcher accepts what this module writes.
"""

from __future__ import annotations

from typing import Any

import yaml

from shardwright.interop.converted import Findings, Source
from shardwright.interop.emitted import Emitted, Subject, commented

_METHODS = {"all_gather": "allgather", "ring": "alltoall"}
"""Our `cp_method` and accelerate's cp_comm_strategy, which gathers keys and values or rotates
them."""

_MACHINE = (
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "gpu_ids",
)
_TPU = ("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "downcast_bf16")
_OURS = ("compute_environment", "debug", "enable_cpu_affinity")


def write(subject: Subject) -> Emitted:
    """Write the plan for `accelerate launch --config_file`: DDP for zero_stage 0, else
    FSDP2."""
    layout = subject.plan.layout
    precision = subject.plan.precision.kind
    notes = [*subject.common_notes("the training script"), *_script_notes(subject)]
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": _distributed_type(subject),
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": precision if precision in ("bf16", "fp16") else "no",
        "num_machines": subject.num_nodes,
        "num_processes": layout.world_size,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not subject.on_accelerators,
    }
    if not subject.on_accelerators and layout.world_size > 1:
        notes.append(
            "run.device: cpu: set ACCELERATE_USE_CPU=true for the launcher, "
            "or use Accelerator(cpu=True) in the script"
        )
    if precision == "fp64":
        notes.append("precision.kind: fp64: convert the model's weights to float64 in the script")
    if subject.recipe.model.compile:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    if _is_cut(subject):
        config["fsdp_config"] = _fsdp(subject, notes)
    degrees = {
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard,
        "tp": layout.tp,
        "cp": layout.cp,
    }
    if _is_cut(subject) and (layout.tp > 1 or layout.cp > 1 or layout.dp_replicate > 1):
        config["parallelism_config"] = {
            f"parallelism_config_{axis}_size": degree for axis, degree in degrees.items()
        }
        if layout.cp > 1:
            config["parallelism_config"]["parallelism_config_cp_comm_strategy"] = _METHODS.get(
                layout.cp_method, "allgather"
            )
    heading = f"shardwright plan --emit accelerate: {subject.recipe.name}, {layout}"
    return Emitted(
        commented(tuple(notes), heading) + yaml.safe_dump(config, sort_keys=False), tuple(notes)
    )


def _is_cut(subject: Subject) -> bool:
    layout = subject.plan.layout
    return layout.zero_stage > 0 or layout.tp > 1 or layout.cp > 1


def _distributed_type(subject: Subject) -> str:
    if _is_cut(subject):
        return "FSDP"
    # With MULTI_CPU, accelerate starts one process only, unless mpirun and a hostfile exist;
    # with MULTI_GPU it starts all of them.
    return "NO" if subject.plan.layout.world_size == 1 else "MULTI_GPU"


def _fsdp(subject: Subject, notes: list[str]) -> dict[str, Any]:
    layout = subject.plan.layout
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
    if subject.offload == "optimizer":
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
        "fsdp_offload_params": subject.offload == "parameters",
        "fsdp_activation_checkpointing": subject.plan.recompute == "full",
    }


def _script_notes(subject: Subject) -> list[str]:
    """Describe the settings that accelerate leaves to the script: most of the optimisation."""
    plan = subject.plan
    training = subject.recipe.training
    optimizer = subject.recipe.optimizer
    layout = plan.layout
    batch = plan.batch
    notes = [
        f"training: sequences of {batch.sequence_length} tokens, "
        f"{batch.micro_batch_size} per rank, "
        f"{batch.gradient_accumulation_steps} accumulation steps: set "
        "Accelerator(gradient_accumulation_steps=...) and the data loader in the script",
        f"optimizer: {optimizer.name}, learning rate {subject.peak_learning_rate:g} "
        f"({training.schedule}), weight decay {training.weight_decay:g}, "
        f"max_grad_norm {training.max_grad_norm}: set them in the script",
    ]
    if layout.pp > 1:
        notes.append(f"layout.pp: {layout.pp}: accelerate has no pipeline parallelism")
    if layout.ep > 1:
        notes.append(f"layout.ep: {layout.ep}: accelerate has no expert parallelism")
    if layout.cp > 1 and layout.cp_method not in _METHODS:
        notes.append(
            f"layout.cp_method: {layout.cp_method}: written as allgather; "
            "accelerate configures Ulysses by sp_size"
        )
    if layout.tp > 1 and layout.sequence_parallel:
        notes.append(
            "layout.sequence_parallel: true: determined by transformers' tensor-parallel plan"
        )
    if plan.recompute == "selective" or (plan.recompute == "full" and not _is_cut(subject)):
        notes.append(
            f"recompute: {plan.recompute}: call model.gradient_checkpointing_enable() in the script"
        )
    return notes


def read(source: Source, found: Findings) -> None:
    """Read an Accelerate configuration for DDP, FSDP or DeepSpeed."""
    kind = source.take("distributed_type", "NO")
    for key in (*_OURS, *_MACHINE, *_TPU):
        value = source.take(key)
        if (
            key in _MACHINE
            and key not in ("main_training_function", "rdzv_backend", "same_network")
            and value not in (None, 0, "all")
        ):
            found.drop(key, value, "`shardwright launch` determines where ranks run")
    precision = source.take("mixed_precision", "no")
    if precision == "fp8":
        found.drop(
            "mixed_precision",
            precision,
            "`plan` predicts fp8, but `train` does not support it; bf16 is the closest",
        )
    else:
        found.put(
            "precision.kind", {"no": "fp32"}.get(str(precision), precision), "mixed_precision"
        )
    if source.take("use_cpu") is True:
        found.put("run.device", "cpu", "use_cpu")
    if source.take("dynamo_config.dynamo_backend", "NO") not in ("NO", None):
        found.put("model.compile", True, "dynamo_config.dynamo_backend")
    processes = source.take("num_processes")
    machines = source.take("num_machines", 1)
    if processes is not None:
        found.remark(
            f"num_processes: {processes} on {machines} machine(s): start the same number with "
            "`train --nproc` or `launch --nodes`"
        )
    _read_kind(str(kind), source, found)
    found.need(
        "model.path",
        "data.sources",
        "training.sequence_length",
        "training.learning_rate",
        "training.max_steps",
    )
    if (
        "training.micro_batch_size" not in found.recipe
        and "training.global_batch_size" not in found.recipe
    ):
        found.need("training.micro_batch_size")


def _read_kind(kind: str, source: Source, found: Findings) -> None:
    if kind in ("NO", "MULTI_CPU", "MULTI_GPU"):
        found.put("layout.zero_stage", 0, "distributed_type")
    elif kind == "FSDP":
        read_fsdp(source, found)
    elif kind == "DEEPSPEED":
        _read_deepspeed(source, found)
    else:
        found.drop(
            "distributed_type", kind, "allowed here: NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED"
        )
    for axis in ("dp_replicate", "dp_shard", "tp", "cp"):
        key = f"parallelism_config.parallelism_config_{axis}_size"
        degree = source.take(key)
        if degree != 1:
            found.put(f"layout.{axis}", degree, key)
    strategy = source.take("parallelism_config.parallelism_config_cp_comm_strategy")
    methods = {theirs: ours for ours, theirs in _METHODS.items()}
    if strategy is not None and strategy not in methods:
        found.drop(
            "parallelism_config.parallelism_config_cp_comm_strategy",
            strategy,
            f"allowed: {', '.join(methods)}",
        )
    found.put(
        "layout.cp_method",
        methods.get(str(strategy)),
        "parallelism_config.parallelism_config_cp_comm_strategy",
    )


def read_fsdp(source: Source, found: Findings, section: str = "fsdp_config") -> None:
    """Read FSDP's section, with the keys of FSDP 1 or 2."""
    source.take(f"{section}.fsdp_version")
    source.take(f"{section}.version")
    reshard = source.take(
        f"{section}.fsdp_reshard_after_forward",
        source.take(f"{section}.reshard_after_forward", True),
    )
    strategy = source.take(f"{section}.fsdp_sharding_strategy")
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
        found.drop(
            f"{section}.fsdp_sharding_strategy",
            chosen,
            f"allowed: {', '.join(key for key in stages if not key.isdigit())}",
        )
    stage = (
        stages.get(str(chosen).upper())
        if chosen is not None
        else (3 if str(reshard).lower() == "true" else 2)
    )
    found.put("layout.zero_stage", stage, f"{section}.fsdp_reshard_after_forward")
    if str(chosen).upper() in ("HYBRID_SHARD", "4"):
        found.need("layout.dp_shard")
    for key in ("fsdp_activation_checkpointing", "activation_checkpointing"):
        if source.take(f"{section}.{key}") in (True, "true"):
            found.put("recompute", "full", key)
    for key in ("fsdp_offload_params", "offload_params"):
        if source.take(f"{section}.{key}") in (True, "true"):
            found.drop(
                f"{section}.{key}",
                True,
                "`plan` predicts offloading, but `train` does not support it",
            )
    for key, value in source.take_all(section).items():
        if value not in (None, False):
            reason = "wrapping, weight loading and sharded checkpoints are not configurable here"
            found.drop(f"{section}.{key}", value, reason)


def _read_deepspeed(source: Source, found: Findings) -> None:
    section = source.take("deepspeed_config") or {}
    for theirs, ours in (
        ("gradient_accumulation_steps", "training.gradient_accumulation_steps"),
        ("zero_stage", "layout.zero_stage"),
    ):
        found.put(ours, section.pop(theirs, None), f"deepspeed_config.{theirs}")
    clipping = section.pop("gradient_clipping", None)
    if clipping is not None:
        found.put("training.max_grad_norm", clipping, "deepspeed_config.gradient_clipping")
    for key, value in section.items():
        if key == "deepspeed_config_file":
            found.drop(
                f"deepspeed_config.{key}",
                value,
                "convert that file: it has batch, optimizer and stage",
            )
        elif value not in (None, False, "none"):
            found.drop(
                f"deepspeed_config.{key}",
                value,
                "offloading and settings of DeepSpeed's engine have no equivalent",
            )
