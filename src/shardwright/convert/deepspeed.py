"""Write and read DeepSpeed's JSON.

Verified with DeepSpeed 0.19.8, whose engine accepts what this module writes.
"""

from __future__ import annotations

import json
import math
from typing import Any

from shardwright.convert.emitted_config import EmitRequest, EmittedConfig, build_warmup_notes
from shardwright.convert.recipe_draft import TRAINER_AUTO, RecipeDraft, SourceDocument
from shardwright.errors import InputError

_OFFLOAD_TIERS = {"cpu": "host", "nvme": "disk"}
_OFFLOAD_KEYS = {
    "optimizer": ("offload_optimizer",),
    "parameters": ("offload_optimizer", "offload_param"),
}
NOTES_KEY = "_not_expressed"
"""Key for notes: JSON has no comments, and DeepSpeed ignores unknown top-level keys."""


def write(request: EmitRequest) -> EmittedConfig:
    """Write the plan for `deepspeed.initialize(config=...)`."""
    recipe = request.recipe
    batch = request.batch
    training = recipe.training
    notes = [*request.list_common_notes("DeepSpeed's script"), *_build_layout_notes(request)]
    config: dict[str, Any] = {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": training.max_grad_norm or 0.0,
        "steps_per_print": recipe.run.log_every_steps,
        "zero_optimization": _build_zero_section(request),
    }
    if request.layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": request.layout.tp}
    config |= _build_precision_section(request, notes)
    config |= _build_optimizer_section(request, notes)
    config |= _build_scheduler_section(request, notes)
    notes.append(f"training.sequence_length: {training.sequence_length}: determined by the data")
    if request.recipe.recompute != "none":
        notes.append(
            f"recompute: {request.recipe.recompute}: "
            "call model.gradient_checkpointing_enable() in the script"
        )
    return EmittedConfig(json.dumps({NOTES_KEY: notes} | config, indent=2) + "\n", tuple(notes))


def _build_zero_section(request: EmitRequest) -> dict[str, Any]:
    layout = request.layout
    zero: dict[str, Any] = {"stage": layout.zero_stage}
    if layout.zero_stage == 3 and layout.dp_replicate > 1:
        zero["mics_shard_size"] = layout.fsdp
    for name in _OFFLOAD_KEYS.get(request.offload, ()):
        zero[name] = {"device": "cpu", "pin_memory": True}
    return zero


def _build_layout_notes(request: EmitRequest) -> list[str]:
    layout = request.layout
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


def _build_precision_section(request: EmitRequest, notes: list[str]) -> dict[str, Any]:
    precision = request.recipe.precision
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


def _build_optimizer_section(request: EmitRequest, notes: list[str]) -> dict[str, Any]:
    optimizer = request.recipe.optimizer
    training = request.recipe.training
    common = {"lr": request.peak_learning_rate, "weight_decay": training.weight_decay}
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
        f"with learning rate {request.peak_learning_rate:g}"
    )
    return {}


def _build_scheduler_section(request: EmitRequest, notes: list[str]) -> dict[str, Any]:
    training = request.recipe.training
    peak = request.peak_learning_rate
    warmup = {"warmup_num_steps": max(1, training.warmup_steps), "warmup_type": "linear"}
    if training.schedule == "constant":
        if not training.warmup_steps:
            return {}
        notes.extend(build_warmup_notes(training))
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
    notes.extend(build_warmup_notes(training))
    total = {"total_num_steps": training.max_steps}
    if training.schedule == "cosine":
        ratio = request.min_learning_rate / peak if peak else 0.0
        return {
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": total | {"cos_min_ratio": ratio} | warmup,
            }
        }
    if request.min_learning_rate:
        notes.append(
            f"training.min_learning_rate: {request.min_learning_rate:g}: WarmupDecayLR ends at 0"
        )
    return {
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": total | {"warmup_min_lr": 0.0, "warmup_max_lr": peak} | warmup,
        }
    }


_ADAM_DEFAULTS = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
"""Defaults of DeepSpeed's Adam."""

_DEFAULT_COS_MIN_RATIO = 1e-4
"""Default final learning rate of DeepSpeed's WarmupCosineLR, relative to the peak."""


def read(source: SourceDocument, draft: RecipeDraft) -> None:
    """Read a DeepSpeed configuration; set DeepSpeed's defaults where ours differ."""
    source.pop_value(NOTES_KEY)
    for key, ours in (
        ("train_batch_size", "training.global_batch_size"),
        ("train_micro_batch_size_per_gpu", "training.micro_batch_size"),
        ("gradient_accumulation_steps", "training.gradient_accumulation_steps"),
        ("steps_per_print", "run.log_every_steps"),
        ("tensor_parallel.autotp_size", "layout.tp"),
    ):
        draft.set_value(ours, source.pop_value(key), key)
    clipping = source.pop_value("gradient_clipping", 0.0)
    draft.set_value(
        "training.max_grad_norm",
        clipping or None if clipping != "auto" else clipping,
        "gradient_clipping",
    )
    _read_zero(source, draft)
    _read_precision(source, draft)
    _read_optimizer(source, draft)
    _read_scheduler(source, draft)
    for key in (
        "wall_clock_breakdown",
        "flops_profiler",
        "comms_logger",
        "zero_allow_untested_optimizer",
        "prescale_gradients",
    ):
        if (value := source.pop_value(key)) not in (None, False):
            draft.drop(key, value, "a setting of DeepSpeed's engine, without effect here")
    draft.require_keys(
        "model.path", "data.sources", "training.sequence_length", "training.learning_rate"
    )
    if draft.get_value("training.global_batch_size") is None:
        draft.require_keys("training.micro_batch_size")


def _read_zero(source: SourceDocument, draft: RecipeDraft) -> None:
    draft.set_value(
        "layout.zero_stage",
        source.pop_value("zero_optimization.stage", 0),
        "zero_optimization.stage",
    )
    shard = source.pop_value("zero_optimization.mics_shard_size", -1)
    if isinstance(shard, int) and shard > 0:
        draft.set_value("layout.dp_shard", shard, "zero_optimization.mics_shard_size")
    offload = source.pop_value("zero_optimization.offload_optimizer")
    if isinstance(offload, dict) and str(offload.get("device")) in _OFFLOAD_TIERS:
        key = "zero_optimization.offload_optimizer"
        draft.set_value("offload.optimizer", _OFFLOAD_TIERS[offload["device"]], key)
        if offload["device"] == "nvme" and "nvme_path" in offload:
            draft.set_value("offload.dir", offload["nvme_path"], f"{key}.nvme_path")
    offload = source.pop_value("zero_optimization.offload_param")
    if isinstance(offload, dict) and offload.get("device", "none") != "none":
        key = "zero_optimization.offload_param"
        if str(offload["device"]) in _OFFLOAD_TIERS and draft.get_value("offload.optimizer"):
            draft.set_value("offload.parameters", _OFFLOAD_TIERS[offload["device"]], key)
        else:
            reason = "offload.parameters is for runs that offload the optimizer states, too"
            draft.drop(key, offload["device"], reason)
    for key, value in source.pop_section("zero_optimization").items():
        reason = "a setting of DeepSpeed's engine; compare layout.prefetch_depth and related keys"
        draft.drop(f"zero_optimization.{key}", value, reason)


def _read_precision(source: SourceDocument, draft: RecipeDraft) -> None:
    enabled = {kind: source.pop_value(f"{kind}.enabled") for kind in ("bf16", "fp16")}
    kinds = [kind for kind, value in enabled.items() if value is True]
    automatic = [kind for kind, value in enabled.items() if value == TRAINER_AUTO]
    if automatic and not kinds:
        draft.set_value("precision.kind", TRAINER_AUTO, f"{automatic[0]}.enabled")
    if kinds:
        draft.set_value("precision.kind", kinds[0], f"{kinds[0]}.enabled")
    elif not automatic:
        draft.set_value("precision.kind", "fp32", "bf16.enabled")  # DeepSpeed's default
    power = source.pop_value("fp16.initial_scale_power")
    window = source.pop_value("fp16.loss_scale_window")
    if kinds == ["fp16"]:
        draft.set_value(
            "precision.initial_loss_scale",
            2.0**power if isinstance(power, int) and abs(power) < 1024 else power,
            "fp16.initial_scale_power",
        )
        draft.set_value("precision.loss_scale_growth_steps", window, "fp16.loss_scale_window")
    reduced = source.pop_value("communication_data_type")
    if reduced in ("bfp16", "bf16", "bfloat16"):
        draft.set_value("precision.reduce_dtype", "bf16", "communication_data_type")
    elif reduced not in (None, "fp32"):
        draft.drop("communication_data_type", reduced, "gradients are summed in fp32 or bf16 here")
    for section in ("bf16", "fp16"):
        for key, value in source.pop_section(section).items():
            reason = "no equivalent: master weights and sums are fp32, loss scaling is dynamic"
            draft.drop(f"{section}.{key}", value, reason)


def _read_optimizer(source: SourceDocument, draft: RecipeDraft) -> None:
    kind = source.pop_value("optimizer.type")
    params = {
        key: source.pop_value(f"optimizer.params.{key}")
        for key in ("lr", "betas", "eps", "weight_decay", "momentum")
    }
    source.pop_value("optimizer.params.torch_adam")
    decoupled = source.pop_value("optimizer.params.adam_w_mode", True)
    if kind is None:
        return
    name = str(kind).lower()
    if name == "adam" and decoupled is False and params["weight_decay"]:
        reason = "decay is part of the gradient there (Adam with L2), decoupled here (AdamW)"
        draft.drop("optimizer.params.adam_w_mode", decoupled, reason)
    if name in ("adam", "adamw"):
        settings = _ADAM_DEFAULTS | {
            key: value for key, value in params.items() if value is not None
        }
        draft.set_value("optimizer.name", "adamw", "optimizer.type")
        betas = settings["betas"]
        if not isinstance(betas, list):
            betas = [betas] * 2
        elif len(betas) != 2:
            raise InputError(
                "wrong number of values",
                field="optimizer.params.betas",
                got=betas,
                allowed="two numbers",
            )
        beta1, beta2 = betas
        draft.set_value("optimizer.beta1", beta1, "optimizer.params.betas")
        draft.set_value("optimizer.beta2", beta2, "optimizer.params.betas")
        draft.set_value("optimizer.eps", settings["eps"], "optimizer.params.eps")
    elif name == "sgd":
        settings = {"lr": 1e-3, "weight_decay": 0.0} | {
            key: value for key, value in params.items() if value is not None
        }
        draft.set_value("optimizer.name", "sgd", "optimizer.type")
        draft.set_value(
            "optimizer.momentum", params["momentum"] or None, "optimizer.params.momentum"
        )
    else:
        draft.drop(
            "optimizer.type",
            kind,
            "of DeepSpeed's optimizers, only AdamW and SGD have an equivalent here",
        )
        settings = {key: value for key, value in params.items() if value is not None}
    draft.set_value("training.learning_rate", settings.get("lr"), "optimizer.params.lr")
    draft.set_value(
        "training.weight_decay", settings.get("weight_decay"), "optimizer.params.weight_decay"
    )
    if isinstance(settings.get("weight_decay"), float | int) and settings["weight_decay"]:
        draft.add_remark(
            "training.weight_decay: norms and biases are not decayed here; "
            "DeepSpeed decays all parameters that it gets"
        )
    for key, value in source.pop_section("optimizer").items():
        draft.drop(f"optimizer.{key}", value, "has no equivalent")


def _read_scheduler(source: SourceDocument, draft: RecipeDraft) -> None:
    kind = source.pop_name("scheduler.type")
    names = (
        "warmup_num_steps",
        "total_num_steps",
        "warmup_max_lr",
        "warmup_min_lr",
        "warmup_min_ratio",
        "warmup_type",
    )
    params = {key: source.pop_value(f"scheduler.params.{key}") for key in names}
    final_share = source.pop_number("scheduler.params.cos_min_ratio")
    schedules = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind is not None and kind not in schedules:
        draft.drop("scheduler.type", kind, f"allowed here: {', '.join(schedules)}")
    draft.set_value("training.schedule", schedules.get(str(kind), "constant"), "scheduler.type")
    if kind in schedules:
        warmup = params["warmup_num_steps"]
        # DeepSpeed requires at least one warmup step, so 1 may stand for no warmup.
        draft.set_value(
            "training.warmup_steps",
            (1000 if warmup is None else 0 if warmup == 1 else warmup),
            "scheduler.params.warmup_num_steps",
        )
        if params["warmup_max_lr"] is not None:
            draft.set_value(
                "training.learning_rate", params["warmup_max_lr"], "scheduler.params.warmup_max_lr"
            )
        if params["warmup_type"] in (None, "log"):
            draft.drop("scheduler.params.warmup_type", "log", "warmup is linear here")
        for key in ("warmup_min_lr", "warmup_min_ratio"):
            if params[key]:
                draft.drop(f"scheduler.params.{key}", params[key], "warmup begins near 0 here")
        rate = draft.get_value("training.learning_rate")
        if kind == "WarmupCosineLR" and isinstance(rate, float | int):
            draft.set_value(
                "training.min_learning_rate",
                rate * (_DEFAULT_COS_MIN_RATIO if final_share is None else final_share),
                "scheduler.params.cos_min_ratio",
            )
    draft.set_value(
        "training.max_steps", params["total_num_steps"], "scheduler.params.total_num_steps"
    )
    if params["total_num_steps"] in (None, "auto"):
        draft.require_keys("training.max_steps")
    for key, value in source.pop_section("scheduler").items():
        draft.drop(f"scheduler.{key}", value, "has no equivalent")
