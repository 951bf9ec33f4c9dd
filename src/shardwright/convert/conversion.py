"""Conversion of another system's file to a recipe, and of a plan to another system's file.

Everything that is not carried over is listed in comments or notes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.config.overrides import apply_overrides
from shardwright.config.recipe_loading import (
    MAX_RECIPE_BYTES,
    check_incomplete_recipe,
    validate_recipe,
)
from shardwright.config.yaml_document import dump_yaml, parse_yaml
from shardwright.convert import accelerate, axolotl, deepspeed, megatron, torchtitan
from shardwright.convert.emitted_config import EmitRequest, EmittedConfig
from shardwright.convert.recipe_draft import DroppedKey, RecipeDraft, SourceDocument
from shardwright.errors import InputError, suggest_name
from shardwright.files import read_text

CONFIG_READERS: dict[str, Callable[[SourceDocument, RecipeDraft], None]] = {
    "deepspeed": deepspeed.read,
    "accelerate": accelerate.read,
    "axolotl": axolotl.read,
}

CONFIG_WRITERS: dict[str, Callable[[EmitRequest], EmittedConfig]] = {
    "deepspeed": deepspeed.write,
    "accelerate": accelerate.write,
    "torchtitan": torchtitan.write,
    "megatron": megatron.write,
}

_MAX_SHOWN_CHARACTERS = 60
_WRITE_A_RECIPE = (
    "Write a recipe: recipes/first.yaml is a short one, docs/reference/recipe.md has all keys"
)
_SYSTEM_KEYS = {
    "accelerate": ("compute_environment", "distributed_type"),
    "axolotl": ("base_model", "datasets"),
    "deepspeed": (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization",
        "gradient_clipping",
    ),
}
"""Top-level keys, any of which identifies the system; checked in this order."""
_UNREAD_SYSTEM_KEYS = {
    "LLaMA-Factory": ("finetuning_type", "cutoff_len"),
    "NeMo Automodel": ("step_scheduler",),
    "torchtune": ("checkpointer",),
    "TRL or Hugging Face's Trainer": ("model_name_or_path", "per_device_train_batch_size"),
}
"""Top-level keys, any of which identifies a system whose files are not read."""

_SECTION_ORDER = (
    "name",
    "seed",
    "model",
    "tokenizer",
    "data",
    "training",
    "optimizer",
    "precision",
    "recompute",
    "layout",
)


@dataclass(frozen=True)
class ConvertedRecipe:
    """A recipe with everything that the file specifies; it is complete once `missing_keys` is
    filled in."""

    system: str
    document: dict[str, Any]
    dropped: tuple[DroppedKey, ...]
    remarks: tuple[str, ...]
    missing_keys: tuple[str, ...]

    def as_yaml(self, origin: str) -> str:
        """Return the recipe as YAML, with missing and dropped keys in comments above it."""
        lines = [f"From {origin} ({self.system}) by shardwright convert."]
        lines += [f"to fill in: {key}" for key in self.missing_keys]
        lines += [
            f"not carried: {item.key}: {_shorten(item.value)}: {item.why}" for item in self.dropped
        ]
        lines += [f"note: {remark}" for remark in self.remarks]
        return "".join(f"# {line}\n" for line in lines) + dump_yaml(self.document)


def convert(
    path: Path, system: str | None = None, overrides: Iterable[str] = ()
) -> ConvertedRecipe:
    """Convert another system's file.

    Args:
        path: JSON or YAML file.
        system: one of `CONFIG_READERS`; detected from the file's keys by default.
        overrides: `key=value` as in `--set`, applied to the recipe.

    Raises:
        InputError: the file cannot be read, its system is unknown, or a value is not allowed in
            a recipe.
    """
    document = _read(path)
    system = system or _detect_system(document, path)
    source = SourceDocument(document)
    found = RecipeDraft()
    CONFIG_READERS[system](source, found)
    for key, value in source.list_unread().items():
        if value not in (None, False, [], ""):
            found.drop(key, value, "has no equivalent in a recipe")
    recipe = apply_overrides(_nest_keys(found.recipe), overrides)
    needed = [key for key in found.missing_keys if not _has_key(recipe, key)]
    if needed:
        check_incomplete_recipe(recipe)
    else:
        validate_recipe(recipe)
    ordered = {
        key: recipe[key]
        for key in (*_SECTION_ORDER, *sorted(recipe.keys() - set(_SECTION_ORDER)))
        if key in recipe
    }
    return ConvertedRecipe(
        system, ordered, tuple(found.dropped), tuple(found.remarks), tuple(needed)
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, max_bytes=MAX_RECIPE_BYTES)
    except FileNotFoundError:
        raise InputError("no such file", field="FILE", got=str(path)) from None
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror}", field="FILE", got=str(path)
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot be read: {error}", field="FILE", got=str(path)) from error
    if path.suffix.lower() == ".toml":
        raise InputError(
            "a TOML file; those of torchtitan are written (`plan --emit torchtitan`), not read",
            field="FILE",
            got=str(path),
            allowed="JSON or YAML",
            remedy=_WRITE_A_RECIPE,
        )
    try:
        document = json.loads(text) if path.suffix == ".json" else parse_yaml(text, str(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON: {error}", field="FILE", got=str(path)) from error
    if not isinstance(document, dict):
        raise InputError(
            "a configuration must be a mapping",
            field="FILE",
            got="an empty file" if document is None else type(document).__name__,
            allowed="a JSON file of DeepSpeed, or a YAML file of Accelerate or Axolotl",
        )
    return document


def _detect_system(document: Mapping[str, Any], path: Path) -> str:
    for system, signs in _SYSTEM_KEYS.items():
        if any(sign in document for sign in signs):
            return system
    if any(isinstance(document.get(key), Mapping) for key in ("bf16", "fp16")):
        return "deepspeed"  # elsewhere these keys are true, false or `auto`
    for system, signs in _UNREAD_SYSTEM_KEYS.items():
        if any(sign in document for sign in signs):
            raise InputError(
                f"a configuration of {system}, which is not read",
                field="FILE",
                got=str(path),
                allowed=", ".join(CONFIG_READERS),
                remedy=_WRITE_A_RECIPE,
            )
    raise InputError(
        "the keys do not match those of any known system",
        field="FILE",
        got=f"{path} with {', '.join(map(str, list(document)[:5])) or 'nothing'}",
        allowed=", ".join(CONFIG_READERS),
        remedy="Name the system with --from",
    )


def _nest_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for dotted, value in flat.items():
        *parents, last = dotted.split(".")
        section = document
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = value
    return document


def _has_key(document: Mapping[str, Any], dotted: str) -> bool:
    section: Any = document
    for part in dotted.split("."):
        if not isinstance(section, Mapping) or part not in section:
            return dotted == "model.path" and isinstance(section, Mapping) and "config" in section
        section = section[part]
    return True


def _shorten(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[: _MAX_SHOWN_CHARACTERS - 3] + "..."


def emit(system: str, request: EmitRequest) -> EmittedConfig:
    """Return the plan as a configuration of one of `CONFIG_WRITERS`; notes list what it cannot
    express.

    Raises:
        InputError: an unknown system, or 8-bit or 4-bit products.
    """
    check_system(system)
    if request.recipe.precision.kind in ("fp8", "nvfp4"):
        raise InputError(
            "recipes of 8-bit and 4-bit products differ between systems and are not converted",
            field="precision.kind",
            got=request.recipe.precision.kind,
            remedy="Plan with --precision bf16, and set such products in the other system",
        )
    return CONFIG_WRITERS[system](request)


def check_system(system: str) -> None:
    """Raise InputError if the system is unknown."""
    if system not in CONFIG_WRITERS:
        raise InputError(
            "unknown system",
            field="--emit",
            got=system,
            allowed=", ".join(CONFIG_WRITERS),
            remedy=suggest_name(system, CONFIG_WRITERS),
        )
