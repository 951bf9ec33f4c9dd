"""Changes of a recipe's mapping by `--set key=value`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardwright.config.yaml_document import parse_yaml
from shardwright.errors import RecipeError

_SOURCE_KEYS = ("sources", "validation")
"""Lists of which one mapping, or the text of its path, stands for a list of one."""


def apply_overrides(document: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of the mapping with each `a.b=value` applied; values are read as YAML.

    >>> apply_overrides({"training": {"max_steps": 5}}, ["training.learning_rate=1e-4"])
    {'training': {'max_steps': 5, 'learning_rate': 0.0001}}
    >>> apply_overrides({"data": {"sources": [{"path": "a"}]}}, ["data.sources.0.path=b"])
    {'data': {'sources': [{'path': 'b'}]}}

    Raises:
        RecipeError: An entry is not key=value, or its key lies in a value that is not a mapping.
    """
    result: dict[str, Any] = _copy_mapping(document)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise RecipeError(
                "not of the form key=value",
                field="--set",
                got=override,
                allowed="section.key=value",
            )
        value = parse_yaml(text, f"--set {key}")
        target: Any = result
        *parents, last = key.strip().split(".")
        if "" in (*parents, last):
            raise RecipeError(
                "a part of the key is empty",
                field="--set",
                got=override,
                allowed="section.key=value",
            )
        for depth, part in enumerate(parents):
            if part == "0" and isinstance(target, dict) and parents[depth - 1] in _SOURCE_KEYS:
                continue  # one mapping stands for a list of one
            target = _enter(target, part)
            if target is None:
                where = ".".join(parents[: depth + 1])
                raise RecipeError(
                    f"`{where}` is not a mapping, so `{last}` cannot be set in it",
                    field="--set",
                    got=override,
                )
        if isinstance(target, dict):
            target[last] = value
        elif _is_index(last, target):
            target[int(last)] = value
        else:
            raise RecipeError(
                f"`{'.'.join(parents)}` is a list, and `{last}` is none of its items",
                field="--set",
                got=override,
                allowed=f"0 to {len(target) - 1}, as in {'.'.join(parents)}.0.{last}=...",
            )
    return result


def _enter(target: Any, part: str) -> Any:
    """Return the mapping or list under a key, or in a place of a list; None if there is none.

    A missing mapping is created. A text that stands for a mapping becomes one.
    """
    if isinstance(target, list):
        child = target[int(part)] if _is_index(part, target) else None
        return child if isinstance(child, dict | list) else None
    child = target.get(part)
    if child is None:
        child = target[part] = {}
    elif isinstance(child, str) and part == "precision":
        child = target[part] = {"kind": child}
    elif isinstance(child, str) and part in _SOURCE_KEYS:
        child = target[part] = {"path": child}
    elif isinstance(child, str) and part == "recompute":
        child = target[part] = {}
    return child if isinstance(child, dict | list) else None


def _is_index(part: str, target: list[Any]) -> bool:
    return part.isdecimal() and int(part) < len(target)


def _copy_mapping(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy_mapping(item) for key, item in value.items()}
    return [_copy_mapping(item) for item in value] if isinstance(value, list) else value
