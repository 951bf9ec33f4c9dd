"""Read Axolotl's YAML, with the keys of its documentation (config reference, 0.13)."""

from __future__ import annotations

from typing import Any

from shardwright.interop.accelerate import read_fsdp
from shardwright.interop.converted import Findings, Source

_PLAIN = {
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

_STEPS = {"save_steps": "checkpoint.every_steps", "eval_steps": "evaluation.every_steps"}

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

_RECORDS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": "messages",
    "completion": "text",
    "input_output": "prompt_completion",
}

_FSDP_WORDS = {"full_shard": 3, "shard_grad_op": 2}
"""`zero_stage` by entry of the list `fsdp`, which is used without `fsdp_config`."""

_DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def read(source: Source, found: Findings) -> None:
    """Read an Axolotl configuration; set Axolotl's defaults where ours differ."""
    for theirs, ours in _PLAIN.items():
        found.put(ours, source.take(theirs), theirs)
    if isinstance(model := found.value("model.path"), str) and _reads_like_hub(model):
        found.remark(
            f"base_model: {model} looks like a Hugging Face Hub name: download it, "
            "and set model.path to the folder"
        )
    _read_length(source, found)
    _read_optimisation(source, found)
    _read_precision(source, found)
    preferred = _read_preference(source, found)
    _read_data(source, found)
    if preferred:  # `records: auto` finds the columns of the two responses
        for entry in (
            *(found.value("data.sources") or ()),
            *(found.value("data.validation") or ()),
        ):
            entry.pop("records", None)
    _read_adapter(source, found)
    _read_layout(source, found)
    if source.take("wandb_project"):
        found.put("run.sinks", ["wandb"], "wandb_project")
    if source.take("torch_compile") in (True, "auto"):
        found.put("model.compile", True, "torch_compile")
    for key in (
        "flash_attention",
        "sdp_attention",
        "sample_packing_eff_est",
        "group_by_length",
        "load_in_8bit",
        "strict",
        "model_type",
    ):
        value = source.take(key)
        if key == "load_in_8bit" and value:
            found.drop(key, value, "frozen weights are stored unquantised or in NF4")
        elif key == "group_by_length" and value:
            found.drop(key, value, "the sample order depends on seed and index, not on length")
    found.need("model.path", "data.sources", "training.sequence_length", "training.learning_rate")


def _read_length(source: Source, found: Findings) -> None:
    steps = source.take("max_steps")
    if steps is not None and steps > 0:
        found.put("training.max_steps", steps, "max_steps")
    for theirs, ours in _STEPS.items():
        value = source.take(theirs)
        if isinstance(value, float) and value < 1:
            found.drop(theirs, value, f"a fraction of the run; set {ours} in steps")
        else:
            found.put(ours, value, theirs)
    for theirs in ("saves_per_epoch", "evals_per_epoch", "save_strategy", "eval_strategy"):
        value = source.take(theirs)
        if value is not None:
            ours = (
                "checkpoint.every_steps" if theirs.startswith("save") else "evaluation.every_steps"
            )
            found.drop(theirs, value, f"counted in epochs; set {ours} in steps")
    ratio = source.take("warmup_ratio")
    limit = found.value("training.max_steps")
    if ratio and isinstance(limit, int):
        found.put("training.warmup_steps", round(ratio * limit), "warmup_ratio")
    elif ratio:
        reason = "a fraction of a run of unknown length; set training.warmup_steps"
        found.drop("warmup_ratio", ratio, reason)
    if "training.max_steps" not in found.recipe and "training.num_epochs" not in found.recipe:
        found.put("training.num_epochs", 1, "num_epochs")


def _read_optimisation(source: Source, found: Findings) -> None:
    name = source.take("optimizer", "adamw_torch_fused")
    if name in _OPTIMIZERS:
        found.put("optimizer.name", _OPTIMIZERS[name], "optimizer")
        if name.startswith("paged_"):
            found.remark(f"optimizer: {name}: the same updates; moments stay on the device")
        if _OPTIMIZERS[name].startswith("adamw") and "optimizer.beta2" not in found.recipe:
            found.put("optimizer.beta2", 0.999, "adam_beta2")
    else:
        found.drop(
            "optimizer", name, f"allowed here: {', '.join(sorted(set(_OPTIMIZERS.values())))}"
        )
    schedule = source.take("lr_scheduler", "cosine")
    if schedule in _SCHEDULES:
        found.put("training.schedule", _SCHEDULES[schedule], "lr_scheduler")
    else:
        found.drop(
            "lr_scheduler",
            schedule,
            f"allowed here: {', '.join(_SCHEDULES)}, and warmup_stable_decay",
        )
    ratio = source.take("cosine_min_lr_ratio")
    rate = found.value("training.learning_rate")
    if ratio and isinstance(rate, float | int):
        found.put("training.min_learning_rate", ratio * rate, "cosine_min_lr_ratio")
    found.put("training.weight_decay", source.take("weight_decay", 0.0), "weight_decay")
    found.put("training.max_grad_norm", source.take("max_grad_norm", 1.0) or None, "max_grad_norm")
    checkpointing = source.take("gradient_checkpointing")
    if checkpointing is True:
        found.put("recompute", "full", "gradient_checkpointing")
    elif checkpointing:
        found.drop(
            "gradient_checkpointing",
            checkpointing,
            "activations are recomputed or kept, not offloaded",
        )
    source.take("gradient_checkpointing_kwargs")


def _read_preference(source: Source, found: Findings) -> bool:
    """Read preference tuning; return True if the recipe has it.

    An unsupported method becomes a missing key: without it, the recipe would train on something
    else.
    """
    kind = source.take("rl")
    beta = source.take("rl_beta")
    if kind is None:
        return False
    if kind == "dpo":
        found.put("preference.kind", "dpo", "rl")
        found.put("preference.beta", beta, "rl_beta")
        found.put(
            "preference.label_smoothing", source.take("dpo_label_smoothing"), "dpo_label_smoothing"
        )
        return True
    reason = (
        "the only preference method here is DPO (preference: {kind: dpo}); "
        "without it, training is on the tokens of responses"
    )
    found.drop("rl", kind, reason)
    found.need("preference.kind")
    return False


def _read_precision(source: Source, found: Findings) -> None:
    kinds = {
        kind: source.take(kind) for kind in ("bf16", "fp16", "tf32", "fp8", "bfloat16", "float16")
    }
    if kinds["bf16"] in (True, "auto", "full") or kinds["bfloat16"]:
        found.put("precision.kind", "bf16", "bf16")
        if kinds["bf16"] == "full" or kinds["bfloat16"]:
            found.remark(
                "bf16: master weights and moments are always fp32 here; "
                "Axolotl may keep them in bf16"
            )
    elif kinds["fp16"] or kinds["float16"]:
        found.put("precision.kind", "fp16", "fp16")
    else:
        found.put("precision.kind", "fp32", "bf16")
    if kinds["tf32"]:
        found.drop("tf32", kinds["tf32"], "fp32 matrix products do not use TF32 here")
    if kinds["fp8"]:
        found.drop("fp8", kinds["fp8"], "`plan` predicts fp8, but `train` does not support it")


def _read_data(source: Source, found: Findings) -> None:
    training = _sources(source.take("datasets"), "datasets", found)
    size = source.take("val_set_size", 0.0)
    if isinstance(size, float | int) and size >= 1:
        found.drop(
            "val_set_size", size, "a number of samples; data.validation_fraction is a fraction"
        )
    else:
        found.put("data.validation_fraction", size or None, "val_set_size")
    validation = _sources(source.take("test_datasets"), "test_datasets", found)
    found.put("data.sources", training, "datasets")
    found.put("data.validation", validation, "test_datasets")
    packing = source.take("sample_packing")
    padded = source.take("pad_to_sequence_len")
    found.put("data.packing", "documents" if packing else "none", "sample_packing")
    if padded and not packing:
        found.put("data.padding", "max_length", "pad_to_sequence_len")
    for key in ("eval_sample_packing", "shuffle_merged_datasets"):
        source.take(key)
    if source.take("train_on_inputs"):
        found.put("data.supervise", "all", "train_on_inputs")
    template = source.take("chat_template_jinja")
    if template is not None:
        found.drop(
            "chat_template_jinja",
            "a template",
            "write it to a file and set data.chat_template to its path",
        )
    named = source.take("chat_template")
    if named not in (None, "tokenizer_default"):
        reason = "the tokenizer's template is used; data.chat_template can name a file with another"
        found.drop("chat_template", named, reason)


def _sources(entries: Any, key: str, found: Findings) -> list[dict[str, Any]] | None:
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
            found.drop(
                f"{key}.{number}.data_files",
                "a list",
                "only its first file is used; add a source for each",
            )
        if isinstance(kind := options.pop("type", None), str):
            records = _RECORDS.get(kind.split(".")[0].split(":")[0])
            if records is None:
                found.drop(
                    f"{key}.{number}.type",
                    kind,
                    f"allowed here: {', '.join(_RECORDS)}; `records: auto` detects the kind",
                )
            else:
                source["records"] = records
        if isinstance(field := options.pop("field", None), str):
            source["text_field"] = field
        if isinstance(messages := options.pop("field_messages", None), str):
            source["columns"] = {"messages": messages}
        if options.pop("ds_type", None) in ("json", "jsonl"):
            source["format"] = "jsonl"
        for name, value in options.items():
            if (name, value) != ("split", "train"):
                found.drop(f"{key}.{number}.{name}", value, "has no equivalent")
        if isinstance(source["path"], str) and _reads_like_hub(source["path"]):
            found.remark(
                f"{key}.{number}.path: {source['path']} looks like a Hugging Face Hub name: "
                "download it, and set the path to the folder"
            )
        sources.append(source)
    return sources


def _reads_like_hub(path: str) -> bool:
    """True if a path looks like `owner/name`, not like a folder path or a file with a suffix.

    >>> [_reads_like_hub(path) for path in ("owner/Model-3.2-1B", "./data/a.jsonl", "data/a.jsonl")]
    [True, False, False]
    """
    return (
        path.count("/") == 1
        and not path.startswith((".", "/", "~", "$"))
        and not path.rpartition(".")[2].isalpha()
    )


def _read_adapter(source: Source, found: Findings) -> None:
    kind = source.take("adapter")
    kinds = {name: source.take(name) for name in ("peft_use_dora", "peft_use_rslora")}
    targets = source.take("lora_target_modules")
    everywhere = source.take("lora_target_linear")
    folder = source.take("lora_model_dir")
    quantised = source.take("load_in_4bit")
    if kind is None:
        for key in [key for key in found.recipe if key.startswith("adapters.")]:
            found.drop(
                key.replace("adapters.", "lora_"), found.recipe.pop(key), "`adapter` is not set"
            )
        return
    if kind not in ("lora", "qlora"):
        found.drop("adapter", kind, "allowed here: lora, qlora")
        return
    found.put(
        "adapters.kind",
        "dora" if kinds["peft_use_dora"] else "rslora" if kinds["peft_use_rslora"] else "lora",
        "adapter",
    )
    if kind == "qlora" or quantised:
        found.put("adapters.quantize", "nf4", "load_in_4bit")
    if folder is not None:
        for key in ("kind", "rank", "alpha"):
            found.recipe.pop(f"adapters.{key}", None)
        found.put("adapters.path", folder, "lora_model_dir")
    elif isinstance(targets, list):
        found.put("adapters.targets", targets, "lora_target_modules")
    elif targets is not None:
        found.drop(
            "lora_target_modules",
            targets,
            "a regular expression; adapters.targets uses shell patterns",
        )
    elif not everywhere:
        found.put("adapters.targets", list(_DEFAULT_TARGETS), "lora_target_modules")


def _read_layout(source: Source, found: Findings) -> None:
    sections = [key for key in ("fsdp_config", "deepspeed") if key in source]
    flags = source.take("fsdp")
    if "fsdp_config" in sections:
        source.take("fsdp_version")
        read_fsdp(source, found)
    elif isinstance(flags, list | str) and flags:
        stage = next((stage for flag, stage in _FSDP_WORDS.items() if flag in flags), None)
        found.put("layout.zero_stage", stage, "fsdp")
        if stage is None or "offload" in flags or "hybrid_shard" in flags:
            found.drop("fsdp", flags, f"only {', '.join(_FSDP_WORDS)} are read, as zero_stage")
    elif "deepspeed" in sections:
        path = str(source.take("deepspeed"))
        stage = next((number for number in (1, 2, 3) if f"zero{number}" in path), None)
        found.put("layout.zero_stage", stage, "deepspeed")
        found.drop(
            "deepspeed", path, "only the stage in its name is used; convert that file for the rest"
        )
    elif not any(
        f"layout.{axis}" in found.recipe for axis in ("tp", "cp", "dp_shard", "dp_replicate")
    ):
        found.put("layout.zero_stage", 0, "fsdp_config")
