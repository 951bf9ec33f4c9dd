"""The key that an unknown one probably means: of other trainers' names, or by its letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from pydantic import BaseModel

from shardwright.errors import find_closest_name

_OTHER_SECTION_CUTOFF = 0.75
"""Similarity of a key of another section: short names are like something everywhere."""

_OTHER_NAMES = {
    # Axolotl, LLaMA-Factory, TRL, Hugging Face's Trainer, torchtitan, torchtune, NeMo, DeepSpeed
    "model.path": (
        "model_name",
        "model_name_or_path",
        "base_model",
        "pretrained",
        "hf_assets_path",
        "name_or_path",
    ),
    "model.attention": ("attn_implementation", "flash_attention", "attn"),
    "data.sources": ("dataset", "datasets", "dataset_path", "data_files", "train_files"),
    "data.packing": ("sample_packing", "packed", "pack_sequences"),
    "training.learning_rate": ("lr", "max_lr"),
    "training.min_learning_rate": ("min_lr", "lr_min", "eta_min"),
    "training.micro_batch_size": (
        "batch_size",
        "per_device_train_batch_size",
        "local_batch_size",
        "train_micro_batch_size_per_gpu",
        "device_batch_size",
    ),
    "training.global_batch_size": ("train_batch_size", "total_batch_size"),
    "training.gradient_accumulation_steps": ("grad_accum", "grad_accumulation_steps"),
    "training.sequence_length": (
        "seq_len",
        "seq_length",
        "max_seq_len",
        "max_seq_length",
        "max_length",
        "cutoff_len",
        "context_length",
    ),
    "training.max_steps": ("train_iters", "iters", "num_steps", "total_steps"),
    "training.num_epochs": ("epochs", "num_train_epochs"),
    "training.max_grad_norm": ("gradient_clipping", "clip_grad", "grad_clip", "max_norm"),
    "training.schedule": ("lr_scheduler", "lr_scheduler_type", "lr_schedule", "scheduler"),
    "training.warmup_steps": ("warmup", "lr_warmup_steps"),
    "training.weight_decay": ("wd",),
    "precision": ("bf16", "fp16", "dtype", "torch_dtype", "mixed_precision"),
    "recompute": (
        "activation_checkpoint",
        "activation_checkpointing",
        "gradient_checkpointing",
        "selective_ac",
    ),
    "layout": ("parallelism", "distributed", "parallel", "fsdp_config", "parallelism_config"),
    "layout.zero_stage": ("fsdp", "zero", "stage", "zero_optimization", "deepspeed"),
    "layout.dp_shard": (
        "dp",
        "data_parallel",
        "data_parallel_size",
        "data_parallel_shard_degree",
        "dp_size",
        "dp_shard_size",
        "fsdp_size",
    ),
    "layout.dp_replicate": ("data_parallel_replicate_degree", "dp_replicate_size"),
    "layout.tp": (
        "tensor_parallel",
        "tensor_parallel_degree",
        "tensor_parallel_size",
        "tensor_model_parallel_size",
        "tp_size",
    ),
    "layout.pp": (
        "pipeline_parallel",
        "pipeline_parallel_degree",
        "pipeline_model_parallel_size",
        "pp_size",
    ),
    "layout.cp": ("context_parallel", "context_parallel_degree", "context_parallel_size"),
    "layout.ep": ("expert_parallel", "expert_parallel_degree", "expert_model_parallel_size"),
    "layout.sequence_parallel": ("sp",),
    "adapters": ("lora", "peft", "adapter", "qlora"),
    "adapters.rank": ("r", "lora_r", "lora_rank"),
    "adapters.alpha": ("lora_alpha",),
    "adapters.dropout": ("lora_dropout",),
    "adapters.targets": ("target_modules", "lora_target_modules", "lora_target"),
    "adapters.quantize": ("load_in_4bit", "quantization"),
    "evaluation.every_steps": ("eval_steps", "eval_interval", "eval_every"),
    "checkpoint.asynchronous": ("async", "async_mode", "async_save"),
    "checkpoint.every_steps": ("save_steps", "save_interval", "save_every"),
    "checkpoint.keep_last": ("save_total_limit", "keep_latest_k", "keep"),
    "run.dir": ("output_dir", "dump_folder", "out_dir"),
    "run.log_every_steps": ("logging_steps", "log_interval", "log_freq", "log_every"),
    "run.sinks": ("wandb", "tensorboard", "mlflow", "report_to", "logging", "logger"),
    "model.compile": ("torch_compile",),
    # in every section that has them
    "every_steps": ("interval", "freq", "frequency", "every"),
    "dir": ("folder", "directory"),
}

KEYS_OF_OTHER_TRAINERS = {other: key for key, others in _OTHER_NAMES.items() for other in others}
"""Key of a recipe by the name that other trainers give it; a hint of error messages only."""


def guess_key(root: type[BaseModel], location: Sequence[str], known: Sequence[str]) -> str | None:
    """Return a remedy that names the key which an unknown one probably means; None if unclear.

    Names of other trainers come first: `batch_size` is like `base_batch_size` by its letters only.

    Args:
        root: the recipe.
        location: path of the unknown key.
        known: keys of its section.
    """
    word = location[-1]
    section = ".".join(part for part in location[:-1] if not part.isdigit())
    other = KEYS_OF_OTHER_TRAINERS.get(word.lower().replace("-", "_"))
    if other is not None and other.rpartition(".")[2] in known:
        return f"Did you mean `{other.rpartition('.')[2]}`?"
    if other is not None and ("." in other or other in root.model_fields) and other != section:
        return f"Did you mean `{other}`?" if "." in other or not section else _name_top_level(other)
    closest = find_closest_name(word, known) or next(
        (key for key in known if len(word) >= 4 and key.startswith(word)), None
    )
    if closest is None and section and word in root.model_fields and word != "name":
        return _name_top_level(word)
    closest = closest or _find_in_other_sections(root, word)
    return f"Did you mean `{closest}`?" if closest else None


def find_models(annotation: object) -> Iterator[type[BaseModel]]:
    """Find the sections in the type of a field, those of lists and of choices included."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from find_models(argument)


def _name_top_level(key: str) -> str:
    return f"Did you mean `{key}` at the top level of the recipe?"


def _find_in_other_sections(root: type[BaseModel], word: str) -> str | None:
    """Return `section.key` of the closest key in any other section, or None."""
    sections = {
        key: name
        for name, info in reversed(root.model_fields.items())  # the first section has the key
        for section in find_models(info.annotation)
        for key in section.model_fields
    }
    guess = find_closest_name(word, sections, cutoff=_OTHER_SECTION_CUTOFF)
    return f"{sections[guess]}.{guess}" if guess else None
