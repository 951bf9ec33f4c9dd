"""Conversion of another system's file to a recipe, with comments on everything not carried
over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.config.document import dump_yaml, parse_yaml
from shardwright.config.load import MAX_RECIPE_BYTES, apply_overrides, validate_recipe
from shardwright.errors import InputError
from shardwright.files import read_text
from shardwright.interop import accelerate, axolotl, deepspeed
from shardwright.interop.converted import Dropped, Findings, Source

READERS: dict[str, Callable[[Source, Findings], None]] = {
    "deepspeed": deepspeed.read,
    "accelerate": accelerate.read,
    "axolotl": axolotl.read,
}

_SIGNS = {
    "accelerate": ("compute_environment", "distributed_type"),
    "axolotl": ("base_model", "datasets"),
    "deepspeed": (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization",
        "gradient_clipping",
        "bf16",
        "fp16",
    ),
}
"""Top-level keys, any of which identifies the system; checked in this order."""

_ORDER = (
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
class Converted:
    """A recipe with everything that the file specifies; it is complete once `needed` is filled
    in."""

    system: str
    document: dict[str, Any]
    dropped: tuple[Dropped, ...]
    remarks: tuple[str, ...]
    needed: tuple[str, ...]

    def as_yaml(self, origin: str) -> str:
        """Return the recipe as YAML, with missing and dropped keys in comments above it."""
        lines = [f"From {origin} ({self.system}) by shardwright convert."]
        lines += [f"to fill in: {key}" for key in self.needed]
        lines += [
            f"not carried: {item.key}: {_short(item.value)}: {item.why}" for item in self.dropped
        ]
        lines += [f"note: {remark}" for remark in self.remarks]
        return "".join(f"# {line}\n" for line in lines) + dump_yaml(self.document)


def convert(path: Path, system: str | None = None, overrides: Iterable[str] = ()) -> Converted:
    """Convert another system's file.

    Args:
        path: JSON or YAML file.
        system: one of `READERS`; detected from the file's keys by default.
        overrides: `key=value` as in `--set`, applied to the recipe.

    Raises:
        InputError: the file cannot be read, its system is unknown, or the recipe is
            inconsistent.
    """
    document = _read(path)
    system = system or _system_of(document, path)
    source = Source(document)
    found = Findings()
    READERS[system](source, found)
    for key, value in source.left().items():
        if value not in (None, False, [], ""):
            found.drop(key, value, "has no equivalent in a recipe")
    recipe = apply_overrides(_nested(found.recipe), overrides)
    needed = [key for key in found.needed if not _has(recipe, key)]
    if not needed:
        validate_recipe(recipe)
    ordered = {
        key: recipe[key] for key in (*_ORDER, *sorted(recipe.keys() - set(_ORDER))) if key in recipe
    }
    return Converted(system, ordered, tuple(found.dropped), tuple(found.remarks), tuple(needed))


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
    try:
        document = json.loads(text) if path.suffix == ".json" else parse_yaml(text, str(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON: {error}", field="FILE", got=str(path)) from error
    if not isinstance(document, dict):
        raise InputError(
            "a configuration must be a mapping", field="FILE", got=type(document).__name__
        )
    return document


def _system_of(document: Mapping[str, Any], path: Path) -> str:
    for system, signs in _SIGNS.items():
        if any(sign in document for sign in signs):
            return system
    raise InputError(
        "the keys match no known system",
        field="FILE",
        got=f"{path} with {', '.join(map(str, list(document)[:5])) or 'nothing'}",
        allowed=", ".join(READERS),
        remedy="Name the system with --from",
    )


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for dotted, value in flat.items():
        *parents, last = dotted.split(".")
        section = document
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = value
    return document


def _has(document: Mapping[str, Any], dotted: str) -> bool:
    section: Any = document
    for part in dotted.split("."):
        if not isinstance(section, Mapping) or part not in section:
            return dotted == "model.path" and isinstance(section, Mapping) and "config" in section
        section = section[part]
    return True


def _short(value: Any, most: int = 60) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else text[: most - 3] + "..."
