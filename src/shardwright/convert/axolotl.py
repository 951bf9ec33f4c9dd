"""Read Axolotl's YAML, with the keys of its documentation (config reference, 0.13)."""

from __future__ import annotations

import os
from typing import Any

from shardwright.convert.accelerate import read_fsdp
from shardwright.convert.recipe_draft import FP8_NOT_CARRIED, RecipeDraft, SourceDocument

_RECIPE_KEYS = {
    "base_model": "model.path",
    "tokenizer_config": "tokenizer.path",
    "sequence_len": "training.sequence_length",
    "micro_batch_size": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "num_epochs": "training.num_epochs",
    "learning_rate": "training.learning_rate",
    "warmup_steps": "training.warmup_steps",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "dataset_prepared_path": "data.cache_dir",
    "output_dir": "run.dir",
    "logging_steps": "run.log_every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "seed": "seed",
    "tensor_parallel_size": "layout.tp",
    "context_parallel_size": "layout.cp",
    "dp_shard_size": "layout.dp_shard",
    "dp_replicate_size": "layout.dp_replicate",
    "lora_r": "adapters.rank",
    "lora_alpha": "adapters.alpha",
    "lora_dropout": "adapters.dropout",
    "neftune_noise_alpha": "training.neftune_noise_alpha",
    "label_smoothing_factor": "training.label_smoothing",
}
"""Keys with the same meaning in a recipe, and their names there."""

_STEP_KEYS = {"save_steps": "checkpoint.every_steps", "eval_steps": "evaluation.every_steps"}

_SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}

_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_torch_8bit": "adamw_8bit",
    "paged_adamw_32bit": "adamw",
    "paged_adamw_8bit": "adamw_8bit",
    "adafactor": "adafactor",
    "muon": "muon",
    "sgd": "sgd",
}

_RECORD_KINDS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": "messages",
    "completion": "text",
    "input_output": "prompt_completion",
}

_FSDP_STAGES = {"full_shard": 3, "shard_grad_op": 2}
"""`zero_stage` by entry of the list `fsdp`, which is used without `fsdp_config`."""

_SHAREGPT_PROPERTIES = {"role": "from", "content": "value"}
_SAME_AS_OURS: dict[str, tuple[Any, ...]] = {
    "message_property_mappings": ({"role": "role", "content": "content"},),
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"]),
    "train_on_eos": ("turn",),
}
"""Settings of a data set whose values are what a recipe does by default."""
_OFFLOAD_TIERS = {"offload": "host", "legacy": "host", "offload_disk": "disk", "disk": "disk"}
"""Our tier by Axolotl's value of `gradient_checkpointing` or `activation_offloading`."""
_DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def read(source: SourceDocument, draft: RecipeDraft) -> None:
    """Read an Axolotl configuration; set Axolotl's defaults where ours differ."""
    for source_key, ours in _RECIPE_KEYS.items():
        draft.set_value(ours, source.pop_value(source_key), source_key)
    if isinstance(model := draft.get_value("model.path"), str) and _is_hub_name(model):
        draft.add_remark(
            f"base_model: {model} looks like a Hugging Face Hub name: download it, "
            "and set model.path to the folder"
        )
    _read_length(source, draft)
    _read_optimisation(source, draft)
    _read_precision(source, draft)
    preferred = _read_preference(source, draft)
    _read_data(source, draft)
    if preferred:  # `records: auto` finds the columns of the two responses
        for entry in (
            *(draft.get_value("data.sources") or ()),
            *(draft.get_value("data.validation") or ()),
        ):
            entry.pop("records", None)
    _read_adapter(source, draft)
    _read_layout(source, draft)
    if source.pop_value("wandb_project"):
        draft.set_value("run.sinks", ["wandb"], "wandb_project")
    if source.pop_value("torch_compile") in (True, "auto"):
        draft.set_value("model.compile", True, "torch_compile")
    for key in (
        "flash_attention",
        "attn_implementation",  # each layer takes the fastest kernel that has its mask
        "sdp_attention",
        "sample_packing_eff_est",
        "group_by_length",
        "load_in_8bit",
        "strict",
        "model_type",
    ):
        value = source.pop_value(key)
        if key == "load_in_8bit" and value:
            draft.drop(key, value, "frozen weights are stored unquantised or in NF4")
        elif key == "group_by_length" and value:
            draft.drop(key, value, "the sample order depends on seed and index, not on length")
    draft.require_keys(
        "model.path", "data.sources", "training.sequence_length", "training.learning_rate"
    )


def _read_length(source: SourceDocument, draft: RecipeDraft) -> None:
    steps = source.pop_number("max_steps")
    if steps is not None and steps > 0:
        draft.set_value("training.max_steps", steps, "max_steps")
    for source_key, ours in _STEP_KEYS.items():
        value = source.pop_value(source_key)
        if isinstance(value, float) and value < 1:
            draft.drop(source_key, value, f"a fraction of the run; set {ours} in steps")
        else:
            draft.set_value(ours, value, source_key)
    for source_key in ("saves_per_epoch", "evals_per_epoch", "save_strategy", "eval_strategy"):
        value = source.pop_value(source_key)
        if value is not None:
            ours = (
                "checkpoint.every_steps"
                if source_key.startswith("save")
                else "evaluation.every_steps"
            )
            draft.drop(source_key, value, f"counted in epochs; set {ours} in steps")
    ratio = source.pop_number("warmup_ratio")
    limit = draft.get_value("training.max_steps")
    if ratio and isinstance(limit, int):
        draft.set_value("training.warmup_steps", round(ratio * limit), "warmup_ratio")
    elif ratio:
        reason = "a fraction of a run of unknown length; set training.warmup_steps"
        draft.drop("warmup_ratio", ratio, reason)
    if "training.max_steps" not in draft.recipe and "training.num_epochs" not in draft.recipe:
        draft.set_value("training.num_epochs", 1, "num_epochs")


def _read_optimisation(source: SourceDocument, draft: RecipeDraft) -> None:
    name = source.pop_name("optimizer", "adamw_torch_fused")
    if name is not None and name in _OPTIMIZERS:
        draft.set_value("optimizer.name", _OPTIMIZERS[name], "optimizer")
        if name.startswith("paged_"):
            draft.add_remark(f"optimizer: {name}: the same updates; moments stay on the device")
        if _OPTIMIZERS[name].startswith("adamw") and "optimizer.beta2" not in draft.recipe:
            draft.set_value("optimizer.beta2", 0.999, "adam_beta2")
    else:
        draft.drop(
            "optimizer", name, f"allowed here: {', '.join(sorted(set(_OPTIMIZERS.values())))}"
        )
    schedule = source.pop_name("lr_scheduler", "cosine")
    if schedule in _SCHEDULES:
        draft.set_value("training.schedule", _SCHEDULES[schedule], "lr_scheduler")
    else:
        draft.drop(
            "lr_scheduler",
            schedule,
            f"allowed here: {', '.join(_SCHEDULES)}, and warmup_stable_decay",
        )
    ratio = source.pop_number("cosine_min_lr_ratio")
    rate = draft.get_value("training.learning_rate")
    if ratio and isinstance(rate, float | int):
        draft.set_value("training.min_learning_rate", ratio * rate, "cosine_min_lr_ratio")
    draft.set_value("training.weight_decay", source.pop_value("weight_decay", 0.0), "weight_decay")
    draft.set_value(
        "training.max_grad_norm", source.pop_value("max_grad_norm", 1.0) or None, "max_grad_norm"
    )
    checkpointing = source.pop_value("gradient_checkpointing")
    if checkpointing:
        draft.set_value("recompute", "full", "gradient_checkpointing")
    offloading = source.pop_value("activation_offloading")
    tier = "host" if offloading is True else _OFFLOAD_TIERS.get(str(offloading or checkpointing))
    # Recomputation leaves the inputs of blocks, which both systems then move.
    draft.set_value("offload.activations", tier, "activation_offloading")
    source.pop_value("gradient_checkpointing_kwargs")


def _read_preference(source: SourceDocument, draft: RecipeDraft) -> bool:
    """Read preference tuning; return True if the recipe has it.

    An unsupported method becomes a missing key: without it, the recipe would train on something
    else.
    """
    kind = source.pop_value("rl")
    beta = source.pop_value("rl_beta")
    if kind is None:
        return False
    if kind == "dpo":
        draft.set_value("preference.kind", "dpo", "rl")
        draft.set_value("preference.beta", beta, "rl_beta")
        draft.set_value(
            "preference.label_smoothing",
            source.pop_value("dpo_label_smoothing"),
            "dpo_label_smoothing",
        )
        return True
    reason = (
        "the only preference method here is DPO (preference: {kind: dpo}); "
        "without it, training is on the tokens of responses"
    )
    draft.drop("rl", kind, reason)
    draft.require_keys("preference.kind")
    return False


def _read_precision(source: SourceDocument, draft: RecipeDraft) -> None:
    kinds = {
        kind: source.pop_value(kind)
        for kind in ("bf16", "fp16", "tf32", "fp8", "bfloat16", "float16")
    }
    if kinds["bf16"] in (True, "auto", "full") or kinds["bfloat16"]:
        draft.set_value("precision.kind", "bf16", "bf16")
        if kinds["bf16"] == "full" or kinds["bfloat16"]:
            draft.add_remark(
                "bf16: master weights and moments are always fp32 here; "
                "Axolotl may keep them in bf16"
            )
    elif kinds["fp16"] or kinds["float16"]:
        draft.set_value("precision.kind", "fp16", "fp16")
    else:
        draft.set_value("precision.kind", "fp32", "bf16")
    if kinds["tf32"]:
        draft.drop("tf32", kinds["tf32"], "fp32 matrix products do not use TF32 here")
    if kinds["fp8"]:
        draft.drop("fp8", kinds["fp8"], FP8_NOT_CARRIED)


def _read_data(source: SourceDocument, draft: RecipeDraft) -> None:
    training = _read_sources(source.pop_value("datasets"), "datasets", draft)
    size = source.pop_value("val_set_size", 0.0)
    if isinstance(size, float | int) and size >= 1:
        draft.drop(
            "val_set_size", size, "a number of samples; data.validation_fraction is a fraction"
        )
    else:
        draft.set_value("data.validation_fraction", size or None, "val_set_size")
    validation = _read_sources(source.pop_value("test_datasets"), "test_datasets", draft)
    draft.set_value("data.sources", training, "datasets")
    draft.set_value("data.validation", validation, "test_datasets")
    packing = source.pop_value("sample_packing")
    padded = source.pop_value("pad_to_sequence_len")
    draft.set_value("data.packing", "documents" if packing else "none", "sample_packing")
    if padded and not packing:
        draft.set_value("data.padding", "max_length", "pad_to_sequence_len")
    for key in ("eval_sample_packing", "shuffle_merged_datasets"):
        source.pop_value(key)
    if source.pop_value("train_on_inputs"):
        draft.set_value("data.supervise", "all", "train_on_inputs")
    template = source.pop_value("chat_template_jinja")
    if template is not None:
        draft.drop(
            "chat_template_jinja",
            "a template",
            "write it to a file and set data.chat_template to its path",
        )
    named = source.pop_value("chat_template")
    if named not in (None, "tokenizer_default"):
        reason = "the tokenizer's template is used; data.chat_template can name a file with another"
        draft.drop("chat_template", named, reason)


def _read_sources(entries: Any, key: str, draft: RecipeDraft) -> list[dict[str, Any]] | None:
    """Convert Axolotl's list of datasets to our sources."""
    if not isinstance(entries, list):
        return None
    sources = []
    for number, entry in enumerate(entries):
        options = dict(entry) if isinstance(entry, dict) else {"path": entry}
        source: dict[str, Any] = {"path": options.pop("data_files", None) or options.get("path")}
        options.pop("path", None)
        if isinstance(source["path"], list):
            source["path"] = next(iter(source["path"]), None)
            draft.drop(
                f"{key}.{number}.data_files",
                "a list",
                "only its first file is used; add a source for each",
            )
        if isinstance(kind := options.pop("type", None), str):
            records = _RECORD_KINDS.get(kind.split(".")[0].split(":")[0])
            if records is None:
                draft.drop(
                    f"{key}.{number}.type",
                    kind,
                    f"allowed here: {', '.join(_RECORD_KINDS)}; `records: auto` detects the kind",
                )
            else:
                source["records"] = records
        if isinstance(field := options.pop("field", None), str):
            source["text_field"] = field
        if isinstance(messages := options.pop("field_messages", None), str):
            source["columns"] = {"messages": messages}
        if options.get("message_property_mappings") == _SHAREGPT_PROPERTIES:
            source["records"] = "sharegpt"
            del options["message_property_mappings"]
        for name, values in _SAME_AS_OURS.items():
            if options.get(name) in values:
                del options[name]
        if options.pop("ds_type", None) in ("json", "jsonl"):
            source["format"] = "jsonl"
        for name, value in options.items():
            if (name, value) != ("split", "train"):
                draft.drop(f"{key}.{number}.{name}", value, "has no equivalent")
        if isinstance(source["path"], str) and _is_hub_name(source["path"]):
            draft.add_remark(
                f"{key}.{number}.path: {source['path']} looks like a Hugging Face Hub name: "
                "download it, and set the path to the folder"
            )
        sources.append(source)
    return sources


def _is_hub_name(path: str) -> bool:
    """True if a path looks like `owner/name`, not like a folder path or a file with a suffix, and
    does not exist here.

    >>> [_is_hub_name(path) for path in ("owner/Model-3.2-1B", "./data/a.jsonl", "data/a.jsonl")]
    [True, False, False]
    """
    return (
        path.count("/") == 1
        and not path.startswith((".", "/", "~", "$"))
        and not path.rpartition(".")[2].isalpha()
        and not os.path.exists(path)
    )


def _read_adapter(source: SourceDocument, draft: RecipeDraft) -> None:
    kind = source.pop_value("adapter")
    kinds = {name: source.pop_value(name) for name in ("peft_use_dora", "peft_use_rslora")}
    targets = source.pop_value("lora_target_modules")
    everywhere = source.pop_value("lora_target_linear")
    folder = source.pop_value("lora_model_dir")
    quantised = source.pop_value("load_in_4bit")
    if kind is None:
        for key in [key for key in draft.recipe if key.startswith("adapters.")]:
            draft.drop(
                key.replace("adapters.", "lora_"), draft.recipe.pop(key), "`adapter` is not set"
            )
        return
    if kind not in ("lora", "qlora"):
        draft.drop("adapter", kind, "allowed here: lora, qlora")
        return
    draft.set_value(
        "adapters.kind",
        "dora" if kinds["peft_use_dora"] else "rslora" if kinds["peft_use_rslora"] else "lora",
        "adapter",
    )
    if kind == "qlora" or quantised:
        draft.set_value("adapters.quantize", "nf4", "load_in_4bit")
    if folder is not None:
        for key in ("kind", "rank", "alpha"):
            draft.recipe.pop(f"adapters.{key}", None)
        draft.set_value("adapters.path", folder, "lora_model_dir")
    elif isinstance(targets, list) and everywhere:
        # Axolotl adds the named modules to all linear ones, which our default has.
        if others := [name for name in targets if name not in _DEFAULT_TARGETS]:
            reason = "lora_target_linear has every projection; these are no projections of a block"
            draft.drop("lora_target_modules", others, reason)
    elif isinstance(targets, list):
        draft.set_value("adapters.targets", targets, "lora_target_modules")
    elif targets is not None:
        draft.drop(
            "lora_target_modules",
            targets,
            "a regular expression; adapters.targets uses shell patterns",
        )
    elif not everywhere:
        draft.set_value("adapters.targets", list(_DEFAULT_TARGETS), "lora_target_modules")


def _read_layout(source: SourceDocument, draft: RecipeDraft) -> None:
    sections = [key for key in ("fsdp_config", "deepspeed") if key in source]
    flags = source.pop_value("fsdp")
    if "fsdp_config" in sections:
        source.pop_value("fsdp_version")
        read_fsdp(source, draft)
    elif isinstance(flags, list | str) and flags:
        stage = next((stage for flag, stage in _FSDP_STAGES.items() if flag in flags), None)
        draft.set_value("layout.zero_stage", stage, "fsdp")
        if stage is None or "offload" in flags or "hybrid_shard" in flags:
            draft.drop("fsdp", flags, f"only {', '.join(_FSDP_STAGES)} are read, as zero_stage")
    elif "deepspeed" in sections:
        path = str(source.pop_value("deepspeed"))
        stage = next((number for number in (1, 2, 3) if f"zero{number}" in path), None)
        draft.set_value("layout.zero_stage", stage, "deepspeed")
        draft.drop(
            "deepspeed", path, "only the stage in its name is used; convert that file for the rest"
        )
    elif not any(
        f"layout.{axis}" in draft.recipe for axis in ("tp", "cp", "dp_shard", "dp_replicate")
    ):
        draft.set_value("layout.zero_stage", 0, "fsdp_config")
