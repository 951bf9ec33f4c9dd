"""Another system's file as a recipe: which system it is of, what was carried, and the YAML with the rest said in comments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardwright.config.load import apply_overrides, validate_recipe
from shardwright.errors import InputError
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
    "deepspeed": ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "gradient_clipping", "bf16", "fp16"),
}
"""Keys at the top, any of which tells whose file it is; looked for in this order."""

_ORDER = ("name", "seed", "model", "tokenizer", "data", "training", "optimizer", "precision", "recompute", "layout")


@dataclass(frozen=True)
class Converted:
    """A recipe as far as the file tells it; it loads once `needed` is filled in."""

    system: str
    document: dict[str, Any]
    dropped: tuple[Dropped, ...]
    remarks: tuple[str, ...]
    needed: tuple[str, ...]

    def as_yaml(self, origin: str) -> str:
        """The recipe, with what is missing and what was left out as comments above it."""
        lines = [f"From {origin} ({self.system}) by shardwright convert."]
        lines += [f"to fill in: {key}" for key in self.needed]
        lines += [f"not carried: {item.key}: {_short(item.value)}: {item.why}" for item in self.dropped]
        lines += [f"note: {remark}" for remark in self.remarks]
        return "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(self.document, sort_keys=False, allow_unicode=True)


def convert(path: Path, system: str | None = None, overrides: Iterable[str] = ()) -> Converted:
    """Read another system's file.

    Args:
        path: JSON or YAML.
        system: one of `READERS`; without it the file's own keys tell.
        overrides: `key=value` as from `--set`, put into the recipe.

    Raises:
        InputError: the file cannot be read, is of no system that we know, or comes to a recipe that is wrong in itself.
    """
    document = _read(path)
    system = system or _system_of(document, path)
    source, found = Source(document), Findings()
    READERS[system](source, found)
    for key, value in source.left().items():
        if value not in (None, False, [], ""):
            found.drop(key, value, "has no counterpart in a recipe")
    recipe = apply_overrides(_nested(found.recipe), overrides)
    needed = [key for key in found.needed if not _has(recipe, key)]
    if not needed:
        validate_recipe(recipe)
    ordered = {key: recipe[key] for key in (*_ORDER, *sorted(recipe.keys() - set(_ORDER))) if key in recipe}
    return Converted(system, ordered, tuple(found.dropped), tuple(found.remarks), tuple(needed))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError("no such file", field="FILE", got=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", field="FILE", got=str(path)) from error
    try:
        document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise InputError(f"is no {kind}: {_where(error)}", field="FILE", got=str(path)) from error
    if not isinstance(document, dict):
        raise InputError("a configuration is a mapping", field="FILE", got=type(document).__name__)
    return document


def _where(error: Exception) -> str:
    """What is wrong and at which line, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _system_of(document: Mapping[str, Any], path: Path) -> str:
    for system, signs in _SIGNS.items():
        if any(sign in document for sign in signs):
            return system
    raise InputError(
        "of no system that we know by its keys",
        field="FILE",
        got=f"{path} with {', '.join(map(str, list(document)[:5])) or 'nothing'}",
        allowed=", ".join(READERS),
        remedy="Say whose it is (--from)",
    )


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for dotted, value in flat.items():
        *parents, last = dotted.split(".")
        here = document
        for part in parents:
            here = here.setdefault(part, {})
        here[last] = value
    return document


def _has(document: Mapping[str, Any], dotted: str) -> bool:
    here: Any = document
    for part in dotted.split("."):
        if not isinstance(here, Mapping) or part not in here:
            return dotted == "model.path" and isinstance(here, Mapping) and "config" in here
        here = here[part]
    return True


def _short(value: Any, most: int = 60) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else text[: most - 3] + "..."
