"""Write and read DeepSpeed's JSON.

Verified with DeepSpeed 0.19.8, whose engine accepts what this module writes.
"""

from __future__ import annotations

import json
import math
from typing import Any

from shardwright.interop.converted import AUTO, Findings, Source
from shardwright.interop.emitted import Emitted, Subject, warmup_note

_OFFLOADED = {
    "optimizer": ("offload_optimizer",),
    "parameters": ("offload_optimizer", "offload_param"),
}
NOTES_KEY = "_not_expressed"
"""Key for notes: JSON has no comments, and DeepSpeed ignores unknown top-level keys."""


def write(subject: Subject) -> Emitted:
    """Write the plan for `deepspeed.initialize(config=...)`."""
    recipe = subject.recipe
    plan = subject.plan
    batch = plan.batch
    training = recipe.training
    notes = [*subject.common_notes("DeepSpeed's script"), *_layout_notes(subject)]
    config: dict[str, Any] = {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": training.max_grad_norm or 0.0,
        "steps_per_print": recipe.run.log_every_steps,
        "zero_optimization": _zero(subject),
    }
    if plan.layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": plan.layout.tp}
    config |= _precision(subject, notes)
    config |= _optimizer(subject, notes)
    config |= _scheduler(subject, notes)
    notes.append(f"training.sequence_length: {training.sequence_length}: determined by the data")
    if plan.recompute != "none":
        notes.append(
            f"recompute: {plan.recompute}: call model.gradient_checkpointing_enable() in the script"
        )
    return Emitted(json.dumps({NOTES_KEY: notes} | config, indent=2) + "\n", tuple(notes))


def _zero(subject: Subject) -> dict[str, Any]:
    layout = subject.plan.layout
    zero: dict[str, Any] = {"stage": layout.zero_stage}
    if layout.zero_stage == 3 and layout.dp_replicate > 1:
        zero["mics_shard_size"] = layout.fsdp
    for name in _OFFLOADED.get(subject.offload, ()):
        zero[name] = {"device": "cpu", "pin_memory": True}
    return zero


def _layout_notes(subject: Subject) -> list[str]:
    layout = subject.plan.layout
    notes = []
    if layout.pp > 1:
        notes.append(
            f"layout.pp: {layout.pp} ({layout.schedule}): build a PipelineModule in the script; "
            "its schedule is always 1F1B"
        )
    if layout.cp > 1:
        notes.append(
            f"layout.cp: {layout.cp}: set up Ulysses sequence parallelism in the script "
            "(UlyssesSPAttentionHF)"
        )
    if layout.ep > 1:
        notes.append(
            f"layout.ep: {layout.ep}: build the experts as "
            f"deepspeed.moe.layer.MoE(ep_size={layout.ep}) "
            "in the script"
        )
    if layout.tp > 1 and layout.sequence_parallel:
        notes.append(
            "layout.sequence_parallel: true: DeepSpeed's automatic tensor parallelism keeps the "
            "whole sequence on every rank"
        )
    if layout.zero_stage and layout.dp_replicate > 1:
        advice = "it shards over all data ranks"
        if layout.zero_stage == 3:
            advice = "build the model under deepspeed.zero.MiCS_Init"
        notes.append(f"layout.dp_replicate: {layout.dp_replicate} replicas of the shards: {advice}")
    return notes


def _precision(subject: Subject, notes: list[str]) -> dict[str, Any]:
    precision = subject.plan.precision
    if precision.kind == "bf16":
        dtype = {"fp32": "fp32", "bf16": "bfp16"}[precision.reduce_dtype]
        return {"bf16": {"enabled": True}, "communication_data_type": dtype}
    if precision.kind == "fp16":
        power = round(math.log2(precision.initial_loss_scale))
        if 2.0**power != precision.initial_loss_scale:
            notes.append(
                f"precision.initial_loss_scale: {precision.initial_loss_scale:g}: "
                f"rounded to 2^{power}"
            )
        return {
            "fp16": {
                "enabled": True,
                "initial_scale_power": power,
                "loss_scale_window": precision.loss_scale_growth_steps,
            }
        }
    if precision.kind == "fp64":
        notes.append(
            "precision.kind: fp64: DeepSpeed computes in the dtype of the model's weights; "
            "convert them to float64"
        )
    return {}


def _optimizer(subject: Subject, notes: list[str]) -> dict[str, Any]:
    optimizer = subject.recipe.optimizer
    training = subject.recipe.training
    common = {"lr": subject.peak_learning_rate, "weight_decay": training.weight_decay}
    if training.weight_decay:
        notes.append(
            "training.weight_decay: norms and biases are decayed too, "
            "unless the script passes parameter groups"
        )
    if optimizer.name == "adamw":
        moments = {
            "betas": [optimizer.beta1, optimizer.beta2],
            "eps": optimizer.eps,
            "torch_adam": True,
        }
        return {"optimizer": {"type": "AdamW", "params": common | moments}}
    if optimizer.name == "sgd":
        return {
            "optimizer": {"type": "SGD", "params": common | {"momentum": optimizer.momentum or 0.0}}
        }
    notes.append(
        f"optimizer.name: {optimizer.name}: pass it to deepspeed.initialize in the script, "
        f"with learning rate {subject.peak_learning_rate:g}"
    )
    return {}


def _scheduler(subject: Subject, notes: list[str]) -> dict[str, Any]:
    training = subject.recipe.training
    peak = subject.peak_learning_rate
    warmup = {"warmup_num_steps": max(1, training.warmup_steps), "warmup_type": "linear"}
    if training.schedule == "constant":
        if not training.warmup_steps:
            return {}
        notes.extend(warmup_note(training))
        return {
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0.0, "warmup_max_lr": peak, **warmup},
            }
        }
    if training.max_steps is None or training.schedule == "warmup_stable_decay":
        notes.append(
            f"training.schedule: {training.schedule}: DeepSpeed has no equivalent; "
            "the learning rate stays at its peak"
        )
        return {}
    notes.extend(warmup_note(training))
    total = {"total_num_steps": training.max_steps}
    if training.schedule == "cosine":
        ratio = subject.min_learning_rate / peak if peak else 0.0
        return {
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": total | {"cos_min_ratio": ratio} | warmup,
            }
        }
    if subject.min_learning_rate:
        notes.append(
            f"training.min_learning_rate: {subject.min_learning_rate:g}: WarmupDecayLR ends at 0"
        )
    return {
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": total | {"warmup_min_lr": 0.0, "warmup_max_lr": peak} | warmup,
        }
    }


_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
"""Defaults of DeepSpeed's Adam."""

_COS_MIN_RATIO = 1e-4
"""Default final learning rate of DeepSpeed's WarmupCosineLR, relative to the peak."""


def read(source: Source, found: Findings) -> None:
    """Read a DeepSpeed configuration; set DeepSpeed's defaults where ours differ."""
    source.take(NOTES_KEY)
    for key, ours in (
        ("train_batch_size", "training.global_batch_size"),
        ("train_micro_batch_size_per_gpu", "training.micro_batch_size"),
        ("gradient_accumulation_steps", "training.gradient_accumulation_steps"),
        ("steps_per_print", "run.log_every_steps"),
        ("tensor_parallel.autotp_size", "layout.tp"),
    ):
        found.put(ours, source.take(key), key)
    clipping = source.take("gradient_clipping", 0.0)
    found.put(
        "training.max_grad_norm",
        clipping or None if clipping != "auto" else clipping,
        "gradient_clipping",
    )
    _read_zero(source, found)
    _read_precision(source, found)
    _read_optimizer(source, found)
    _read_scheduler(source, found)
    for key in (
        "wall_clock_breakdown",
        "flops_profiler",
        "comms_logger",
        "zero_allow_untested_optimizer",
        "prescale_gradients",
    ):
        if (value := source.take(key)) not in (None, False):
            found.drop(key, value, "a setting of DeepSpeed's engine, without effect here")
    found.need("model.path", "data.sources", "training.sequence_length", "training.learning_rate")
    if found.value("training.global_batch_size") is None:
        found.need("training.micro_batch_size")


def _read_zero(source: Source, found: Findings) -> None:
    found.put(
        "layout.zero_stage", source.take("zero_optimization.stage", 0), "zero_optimization.stage"
    )
    shard = source.take("zero_optimization.mics_shard_size", -1)
    if isinstance(shard, int) and shard > 0:
        found.put("layout.dp_shard", shard, "zero_optimization.mics_shard_size")
    for name in ("offload_optimizer", "offload_param"):
        offload = source.take(f"zero_optimization.{name}")
        if isinstance(offload, dict) and offload.get("device", "none") != "none":
            found.drop(
                f"zero_optimization.{name}",
                offload["device"],
                "`plan` predicts offloading, but `train` does not support it",
            )
    for key, value in source.take_all("zero_optimization").items():
        reason = "a setting of DeepSpeed's engine; compare layout.prefetch_depth and related keys"
        found.drop(f"zero_optimization.{key}", value, reason)


def _read_precision(source: Source, found: Findings) -> None:
    enabled = {kind: source.take(f"{kind}.enabled") for kind in ("bf16", "fp16")}
    kinds = [kind for kind, value in enabled.items() if value is True]
    automatic = [kind for kind, value in enabled.items() if value == AUTO]
    if automatic and not kinds:
        found.put("precision.kind", AUTO, f"{automatic[0]}.enabled")
    if kinds:
        found.put("precision.kind", kinds[0], f"{kinds[0]}.enabled")
    elif not automatic:
        found.put("precision.kind", "fp32", "bf16.enabled")  # DeepSpeed's default
    power = source.take("fp16.initial_scale_power")
    window = source.take("fp16.loss_scale_window")
    if kinds == ["fp16"]:
        found.put(
            "precision.initial_loss_scale",
            2.0**power if isinstance(power, int) and abs(power) < 1024 else power,
            "fp16.initial_scale_power",
        )
        found.put("precision.loss_scale_growth_steps", window, "fp16.loss_scale_window")
    reduced = source.take("communication_data_type")
    if reduced in ("bfp16", "bf16", "bfloat16"):
        found.put("precision.reduce_dtype", "bf16", "communication_data_type")
    elif reduced not in (None, "fp32"):
        found.drop("communication_data_type", reduced, "gradients are summed in fp32 or bf16 here")
    for section in ("bf16", "fp16"):
        for key, value in source.take_all(section).items():
            reason = "no equivalent: master weights and sums are fp32, loss scaling is dynamic"
            found.drop(f"{section}.{key}", value, reason)


def _read_optimizer(source: Source, found: Findings) -> None:
    kind = source.take("optimizer.type")
    params = {
        key: source.take(f"optimizer.params.{key}")
        for key in ("lr", "betas", "eps", "weight_decay", "momentum")
    }
    source.take("optimizer.params.torch_adam")
    decoupled = source.take("optimizer.params.adam_w_mode", True)
    if kind is None:
        return
    name = str(kind).lower()
    if name == "adam" and decoupled is False and params["weight_decay"]:
        reason = "decay is part of the gradient there (Adam with L2), decoupled here (AdamW)"
        found.drop("optimizer.params.adam_w_mode", decoupled, reason)
    if name in ("adam", "adamw"):
        settings = _ADAM | {key: value for key, value in params.items() if value is not None}
        found.put("optimizer.name", "adamw", "optimizer.type")
        betas = settings["betas"]
        beta1, beta2 = betas if isinstance(betas, list | tuple) else (betas, betas)
        found.put("optimizer.beta1", beta1, "optimizer.params.betas")
        found.put("optimizer.beta2", beta2, "optimizer.params.betas")
        found.put("optimizer.eps", settings["eps"], "optimizer.params.eps")
    elif name == "sgd":
        settings = {"lr": 1e-3, "weight_decay": 0.0} | {
            key: value for key, value in params.items() if value is not None
        }
        found.put("optimizer.name", "sgd", "optimizer.type")
        found.put("optimizer.momentum", params["momentum"] or None, "optimizer.params.momentum")
    else:
        found.drop(
            "optimizer.type",
            kind,
            "of DeepSpeed's optimizers, only AdamW and SGD have an equivalent here",
        )
        settings = {key: value for key, value in params.items() if value is not None}
    found.put("training.learning_rate", settings.get("lr"), "optimizer.params.lr")
    found.put(
        "training.weight_decay", settings.get("weight_decay"), "optimizer.params.weight_decay"
    )
    if isinstance(settings.get("weight_decay"), float | int) and settings["weight_decay"]:
        found.remark(
            "training.weight_decay: norms and biases are not decayed here; "
            "DeepSpeed decays all parameters that it gets"
        )
    for key, value in source.take_all("optimizer").items():
        found.drop(f"optimizer.{key}", value, "has no equivalent")


def _read_scheduler(source: Source, found: Findings) -> None:
    kind = source.take("scheduler.type")
    names = (
        "warmup_num_steps",
        "total_num_steps",
        "warmup_max_lr",
        "cos_min_ratio",
        "warmup_min_lr",
        "warmup_min_ratio",
        "warmup_type",
    )
    params = {key: source.take(f"scheduler.params.{key}") for key in names}
    schedules = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind is not None and kind not in schedules:
        found.drop("scheduler.type", kind, f"allowed here: {', '.join(schedules)}")
    found.put("training.schedule", schedules.get(str(kind), "constant"), "scheduler.type")
    if kind in schedules:
        warmup = params["warmup_num_steps"]
        # DeepSpeed requires at least one warmup step, so 1 may stand for no warmup.
        found.put(
            "training.warmup_steps",
            (1000 if warmup is None else 0 if warmup == 1 else warmup),
            "scheduler.params.warmup_num_steps",
        )
        if params["warmup_max_lr"] is not None:
            found.put(
                "training.learning_rate", params["warmup_max_lr"], "scheduler.params.warmup_max_lr"
            )
        if params["warmup_type"] in (None, "log"):
            found.drop("scheduler.params.warmup_type", "log", "warmup is linear here")
        for key in ("warmup_min_lr", "warmup_min_ratio"):
            if params[key]:
                found.drop(f"scheduler.params.{key}", params[key], "warmup begins near 0 here")
        rate = found.value("training.learning_rate")
        if kind == "WarmupCosineLR" and isinstance(rate, float | int):
            found.put(
                "training.min_learning_rate",
                rate
                * (_COS_MIN_RATIO if params["cos_min_ratio"] is None else params["cos_min_ratio"]),
                "scheduler.params.cos_min_ratio",
            )
    found.put("training.max_steps", params["total_num_steps"], "scheduler.params.total_num_steps")
    if params["total_num_steps"] in (None, "auto"):
        found.need("training.max_steps")
    for key, value in source.take_all("scheduler").items():
        found.drop(f"scheduler.{key}", value, "has no equivalent")
