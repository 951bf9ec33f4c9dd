"""From YAML text and `--set` to a `Recipe`, and back."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from shardwright.config.layout import LayoutSection
from shardwright.config.schema import Recipe
from shardwright.errors import LayoutError, RecipeError, nearest

_MOST_DIGITS = 18
"""Of a degree; int() refuses more than 4,300."""

_ENVIRONMENT = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats (`1e-4` is a number, which YAML 1.1 reads as text) and no duplicate keys."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)$|^[-+]?\.[0-9_]+(?:[eE][-+]?[0-9]+)?$"),
    list("-+0123456789."),
)


def _construct_mapping(loader: Any, node: Any) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            line = key_node.start_mark.line + 1
            raise RecipeError("the key is given twice", field=str(key), got=f"a second value on line {line}", remedy="Keep one")
        seen.add(key)
    mapping: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return mapping


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _parse_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader subclass  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{origin}, line {mark.line + 1}, column {mark.column + 1}" if mark else origin
        raise RecipeError(f"not valid YAML: {error.problem}", field=where, remedy="Check indentation and quoting there") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"not valid YAML: {error}", field=origin) from error


def load_recipe(path: str | Path, overrides: Iterable[str] = (), layout: str | None = None) -> Recipe:
    """Read a recipe.

    Args:
        path: the YAML file.
        overrides: `section.key=value` as from `--set`; values are YAML.
        layout: `tp=2,zero_stage=3` as from `--layout`; replaces the recipe's layout mapping as a whole.

    Raises:
        RecipeError: names the field, what it got, what is allowed and the nearest known key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError("no such file", field="recipe", got=str(path), remedy="Give the path of a YAML recipe") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot be read: {error}", field="recipe", got=str(path)) from error
    document = _parse_yaml(text, str(path))
    if not isinstance(document, dict):
        raise RecipeError(
            "a recipe is a mapping", field=str(path), got=type(document).__name__, allowed="model:, data:, training:, ..."
        )
    document = apply_overrides(document, overrides)
    if layout is not None:
        document["layout"] = parse_layout(layout)
    return validate_recipe(document)


def validate_recipe(document: dict[str, Any]) -> Recipe:
    """A mapping to a `Recipe`; environment variables are expanded, all complaints are one error."""
    try:
        return Recipe.model_validate(_expand(document, ()))
    except ValidationError as error:
        raise _as_recipe_error(error, Recipe) from None


def apply_overrides(document: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of the mapping with each `a.b=value` put in; the value is read as YAML.

    >>> apply_overrides({"training": {"max_steps": 5}}, ["training.learning_rate=1e-4"])
    {'training': {'max_steps': 5, 'learning_rate': 0.0001}}
    """
    result: dict[str, Any] = _copy(document)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise RecipeError("not an assignment", field="--set", got=override, allowed="section.key=value")
        value = _parse_yaml(text, f"--set {key}")
        target = result
        *parents, last = key.strip().split(".")
        for depth, part in enumerate(parents):
            child = target.get(part)
            if child is None:
                child = target[part] = {}
            elif isinstance(child, str) and part == "precision":
                child = target[part] = {"kind": child}
            if not isinstance(child, dict):
                where = ".".join(parents[: depth + 1])
                raise RecipeError(f"`{where}` is not a mapping, so `{last}` cannot be set in it", field="--set", got=override)
            target = child
        target[last] = value
    return result


def parse_layout(text: str) -> dict[str, Any]:
    """`tp=2,zero_stage=3` to the mapping that a recipe would hold.

    >>> parse_layout("dp_shard=2,zero_stage=3")
    {'dp_shard': 2, 'zero_stage': 3}
    """
    if text.strip() == "auto":
        return {"auto": True}
    layout: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        key = key.strip()
        if key not in LayoutSection.model_fields:
            guess = nearest(key, LayoutSection.model_fields)
            raise LayoutError(
                "unknown key of a layout",
                field="--layout",
                got=item,
                allowed=", ".join(LayoutSection.model_fields),
                remedy=f"Did you mean `{guess}`?" if guess else None,
            )
        if key in layout:
            raise LayoutError("given twice", field=f"--layout {key}", got=text)
        layout[key] = _layout_value(key, value.strip() if equals else "", item)
    try:
        LayoutSection.model_validate(layout)
    except ValidationError as error:
        first = error.errors()[0]
        raise LayoutError(
            str(first["msg"]), field=f"--layout {'.'.join(map(str, first['loc']))}", got=first.get("input"), allowed=None
        ) from None
    return layout


def _layout_value(key: str, value: str, item: str) -> int | bool | str:
    """A degree, a switch or a name, by the type of the key's default."""
    default = LayoutSection.model_fields[key].default
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise LayoutError("a switch is on or off", field=f"--layout {key}", got=value or item, allowed="true or false")
        return value.lower() == "true"
    if isinstance(default, str):
        if not value:
            raise LayoutError("a name is missing", field=f"--layout {key}", got=item, allowed=f"e.g. {key}={default}")
        return value
    if not value.isdecimal() or len(value) > _MOST_DIGITS:
        raise LayoutError("a degree is a whole number", field=f"--layout {key}", got=value or item, allowed="e.g. tp=2")
    return int(value)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML that loads back equal."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _expand(value: Any, location: tuple[str, ...]) -> Any:
    """Replace `${NAME}` in every string by the environment's value; a name that is not set is an error."""
    if isinstance(value, dict):
        return {key: _expand(item, (*location, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, (*location, str(index))) for index, item in enumerate(value)]
    if isinstance(value, str):

        def look_up(match: re.Match[str]) -> str:
            found = os.environ.get(match[1])
            if found is None:
                raise RecipeError(
                    f"the environment variable {match[1]} is not set",
                    field=".".join(location),
                    got=value,
                    remedy=f"Set it, for example: export {match[1]}=/path",
                )
            return found

        return _ENVIRONMENT.sub(look_up, value)
    return value


def _as_recipe_error(error: ValidationError, root: type[BaseModel]) -> RecipeError:
    """All of pydantic's complaints as one error of ours: the first in full, the others a line each."""
    complaints = [_complaint(item, root) for item in error.errors()]
    first, others = complaints[0], complaints[1:]
    if not others:
        return first
    remedy = (f"{first.remedy}. " if first.remedy else "") + f"And {len(others)} more: " + "; ".join(str(other) for other in others)
    return RecipeError(first.problem, field=first.field, got=first.got, allowed=first.allowed, remedy=remedy)


def _complaint(item: Any, root: type[BaseModel]) -> RecipeError:
    location = [str(part) for part in item["loc"]]
    field = ".".join(location)
    kind = item["type"]
    if kind == "extra_forbidden":
        known = list(_section_at(root, location[:-1]))
        guess = nearest(location[-1], known) or _elsewhere(root, location[-1])
        return RecipeError(
            "unknown key",
            field=field,
            got=repr(location[-1]),
            allowed=", ".join(known),
            remedy=f"Did you mean `{guess}`?" if guess else None,
        )
    if kind == "missing":
        return RecipeError("this key is needed", field=field, remedy=f"Add `{location[-1]}:`")
    if kind == "value_error":
        return RecipeError(str(item["ctx"]["error"]), field=field or "recipe")
    if kind == "literal_error":
        return RecipeError("not a known value", field=field, got=repr(item["input"]), allowed=item["ctx"]["expected"])
    return RecipeError(item["msg"], field=field, got=repr(item["input"]))


def _section_at(root: type[BaseModel], location: list[str]) -> dict[str, Any]:
    """Fields of the model that sits at `location`."""
    fields: dict[str, Any] = dict(root.model_fields)
    for part in location:
        if part.isdigit():
            continue
        section = next(_models_in(fields[part].annotation), None) if part in fields else None
        fields = dict(section.model_fields) if section else {}
    return fields


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _elsewhere(root: type[BaseModel], word: str) -> str | None:
    """`section.key` for a key that exists, or nearly so, but in another section."""
    homes = {
        key: name
        for name, info in root.model_fields.items()
        for section in _models_in(info.annotation)
        for key in section.model_fields
    }
    guess = nearest(word, homes)
    return f"{homes[guess]}.{guess}" if guess else None
