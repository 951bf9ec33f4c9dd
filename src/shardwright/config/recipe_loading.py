"""Conversion of YAML text and `--set` options to a `Recipe`, and back."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shardwright.config.key_suggestions import find_models, guess_key
from shardwright.config.layout import LayoutSection
from shardwright.config.overrides import apply_overrides
from shardwright.config.recipe import Recipe, RecomputeSection
from shardwright.config.yaml_document import dump_yaml, find_line, parse_yaml
from shardwright.errors import LayoutError, RecipeError, suggest_name
from shardwright.files import read_text
from shardwright.masking import mask_values

MAX_RECIPE_BYTES = 1024**2
_PIPE_TIMEOUT_SECONDS = 30.0
_MAX_SHOWN_CHARACTERS = 200
_VARIABLE_PLACEHOLDER = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_ILL_FORMED = re.compile("[\0\ud800-\udfff]")

Locate = Callable[[Sequence[str]], str | None]
"""Function that returns the position of a recipe key ("run.yaml, line 7"), or None if
unknown."""


def load_recipe(
    path: str | Path, overrides: Iterable[str] = (), layout: str | None = None
) -> Recipe:
    """Read a recipe.

    Args:
        path: the YAML file.
        overrides: `section.key=value` as in `--set`; values are YAML.
        layout: `tp=2,zero_stage=3` as in `--layout`; replaces the whole layout of the recipe.

    Raises:
        RecipeError: with the field, the value, the allowed values and the closest known key.
    """
    path = Path(path)
    try:
        text = read_text(path, max_bytes=MAX_RECIPE_BYTES, pipe_seconds=_PIPE_TIMEOUT_SECONDS)
    except FileNotFoundError:
        raise RecipeError(
            "no such file", field="recipe", got=str(path), remedy="Give the path of a YAML recipe"
        ) from None
    except OSError as error:
        own = path / "recipe.yaml"
        raise RecipeError(
            f"cannot be read: {error.strerror}",
            field="recipe",
            got=str(path),
            remedy=f"The recipe of this run is {own}"
            if own.is_file()
            else "Give the path of a YAML recipe",
        ) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"not UTF-8 text: byte 0x{error.object[error.start]:02x} on line {line}",
            field="recipe",
            got=str(path),
            remedy="Save the file as UTF-8",
        ) from error
    document = parse_yaml(text, str(path))
    if not isinstance(document, dict):
        raise RecipeError(
            "a recipe must be a mapping",
            field=str(path),
            got="an empty file" if document is None else type(document).__name__,
            allowed="model:, data:, training:, ...",
        )
    overrides = list(overrides)
    overridden = [key.partition("=")[0].strip() for key in overrides] + (
        [] if layout is None else ["layout"]
    )

    def locate(location: Sequence[str]) -> str | None:
        name = ".".join(location)
        if any(f"{name}.".startswith(f"{key}.") for key in overridden):
            return None  # the value is from the command line
        line = find_line(text, location)
        return None if line is None else f"{path}, line {line}"

    return build_recipe(document, overrides, layout, locate)


def build_recipe(
    document: Mapping[str, Any],
    overrides: Iterable[str] = (),
    layout: str | None = None,
    locate: Locate = lambda location: None,
) -> Recipe:
    """Apply `--set` and `--layout` to a mapping and validate it; see `load_recipe`."""
    settings = apply_overrides(dict(document), overrides)
    if layout is not None:
        settings["layout"] = parse_layout(layout)
    return validate_recipe(settings, locate)


def validate_recipe(document: dict[str, Any], locate: Locate = lambda location: None) -> Recipe:
    """Validate a mapping as a `Recipe`; expand environment variables; report all problems at
    once.

    Raises:
        RecipeError: with the fields, and their positions if `locate` knows them.
    """
    try:
        return Recipe.model_validate(_expand_variables(document, (), locate))
    except ValidationError as error:
        raise _build_recipe_error(error.errors(include_url=False), Recipe, locate) from None


def check_incomplete_recipe(document: dict[str, Any]) -> None:
    """Validate what a mapping has of a recipe; keys may be missing.

    Raises:
        RecipeError: an unknown key, or a value that is not allowed.
    """
    try:
        Recipe.model_validate(_expand_variables(document, (), lambda location: None))
    except ValidationError as error:
        # Errors of a whole section may have a missing key as their cause.
        items = [
            item
            for item in error.errors(include_url=False)
            if item["type"] != "missing"
            and not (item["type"] == "value_error" and isinstance(item["input"], Mapping))
        ]
        if items:
            raise _build_recipe_error(items, Recipe, lambda location: None) from None


def parse_layout(text: str) -> dict[str, Any]:
    """Parse `tp=2,zero_stage=3` into the `layout` mapping of a recipe.

    >>> parse_layout("dp_shard=2,zero_stage=3")
    {'dp_shard': 2, 'zero_stage': 3}

    Raises:
        LayoutError: A key is unknown or given twice, or its value is not allowed.
    """
    if text.strip() == "auto":
        return {"auto": True}
    layout: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        key = key.strip()
        if key not in LayoutSection.model_fields:
            raise LayoutError(
                "unknown layout key",
                field="--layout",
                got=item,
                allowed=", ".join(LayoutSection.model_fields),
                remedy=suggest_name(key, LayoutSection.model_fields),
            )
        if key in layout:
            raise LayoutError("duplicate key", field=f"--layout {key}", got=text)
        layout[key] = _parse_layout_value(key, value.strip() if equals else "", item)
    try:
        LayoutSection.model_validate(layout)
    except ValidationError as error:
        first = error.errors()[0]
        problem, allowed = _translate_problem(first)
        raise LayoutError(
            problem,
            field=f"--layout {'.'.join(map(str, first['loc']))}",
            got=first.get("input"),
            allowed=allowed,
        ) from None
    return layout


def _parse_layout_value(key: str, value: str, item: str) -> int | bool | str:
    """Parse a value by the type of the key's default: an integer, a boolean or a name."""
    default = LayoutSection.model_fields[key].default
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise LayoutError(
                "not a boolean", field=f"--layout {key}", got=value or item, allowed="true or false"
            )
        return value.lower() == "true"
    if isinstance(default, str):
        if not value:
            raise LayoutError(
                "missing value", field=f"--layout {key}", got=item, allowed=f"e.g. {key}={default}"
            )
        return value
    if key.endswith("_bytes") and value and not value.isdigit():
        return value  # with a unit
    if not re.fullmatch(r"[0-9]{1,18}", value):
        got = _shorten_with_position(value or item, None)
        raise LayoutError(
            "not a whole number", field=f"--layout {key}", got=got, allowed="e.g. tp=2"
        )
    return int(value)


def dump_recipe(recipe: Recipe, *, should_mask: bool = False) -> str:
    """Return the recipe as YAML that loads back unchanged, apart from masked credentials.

    Args:
        should_mask: Mask credentials in URLs; a masked URL cannot be opened.
    """
    content = recipe.model_dump(mode="json")
    return dump_yaml(mask_values(content) if should_mask else content)


def _expand_variables(value: Any, location: tuple[str, ...], locate: Locate) -> Any:
    """Replace `${NAME}` in every string by the environment variable; an unset name is an
    error."""
    if isinstance(value, dict):
        for key in value:
            _check_text(str(key), (*location, str(key)), locate)
        return {
            key: _expand_variables(item, (*location, str(key)), locate)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [
            _expand_variables(item, (*location, str(index)), locate)
            for index, item in enumerate(value)
        ]
    if isinstance(value, str):

        def look_up(match: re.Match[str]) -> str:
            replacement = os.environ.get(match[1])
            if replacement is None:
                raise RecipeError(
                    f"the environment variable {match[1]} is not set",
                    field=".".join(location),
                    got=_shorten_with_position(value, locate(location)),
                    remedy=f"Set it, for example: export {match[1]}=/path",
                )
            return replacement

        expanded = _VARIABLE_PLACEHOLDER.sub(look_up, value)
        _check_text(expanded, location, locate)
        return expanded
    return value


def _check_text(text: str, location: tuple[str, ...], locate: Locate) -> None:
    """Refuse characters that are valid neither in paths nor in UTF-8: null bytes, lone
    surrogates."""
    if match := _ILL_FORMED.search(text):
        raise RecipeError(
            "the text contains a null byte"
            if match[0] == "\0"
            else "the text contains half of a surrogate pair",
            field=ascii(".".join(location))[1:-1],
            got=_shorten_with_position(ascii(text), locate(location)),
            allowed="Unicode text",
            remedy="Remove the character",
        )


def _shorten_with_position(value: str, position: str | None) -> str:
    """Shorten a value for an error message and append its position."""
    if len(value) > _MAX_SHOWN_CHARACTERS:
        value = f"{value[: _MAX_SHOWN_CHARACTERS - 40]}... ({len(value):,} characters)"
    return value if position is None else f"{value} in {position}"


def _build_recipe_error(items: Sequence[Any], root: type[BaseModel], locate: Locate) -> RecipeError:
    """Combine all of pydantic's errors into one: the first in full, the others in its
    remedy."""
    inside = {item["loc"][:-1] for item in items} | {item["loc"][:-2] for item in items}
    # A list is also reported as too short if its items are invalid: report only the items.
    items = [item for item in items if item["type"] != "too_short" or item["loc"] not in inside]
    # A value that may be `auto` or of another type is reported twice.
    numbers = {item["loc"][:-1] for item in items if item["loc"][-1:] == (_INTEGER_TYPE,)}
    items = [
        item
        for item in items
        if item["loc"][-1:] != ("bool",)
        and not (item["loc"][-1:] == (_AUTO_TYPE,) and item["loc"][:-1] in numbers)
    ]
    # A misspelled key is often the cause of the other errors: of a missing one, for example.
    items.sort(key=lambda item: item["type"] != "extra_forbidden")
    complaints = [_build_field_error(item, root, locate) for item in items]
    first = complaints[0]
    others = complaints[1:]
    if not others:
        return first
    remedy = (
        (f"{first.remedy}. " if first.remedy else "")
        + f"And {len(others)} more: "
        + "; ".join(str(other) for other in others)
    )
    return RecipeError(
        first.problem, field=first.field, got=first.got, allowed=first.allowed, remedy=remedy
    )


_EXPONENT = re.compile(r"[+-]?\d+e[+-]?\d+", re.IGNORECASE)
"""Numbers of YAML 1.2 that are text in YAML 1.1."""
_AUTO_TYPE = "literal['auto']"
_INTEGER_TYPE = "constrained-int"
_UNION_TYPES = (RecomputeSection.__name__, _AUTO_TYPE, _INTEGER_TYPE)
"""Parts that pydantic adds to the location of a value with several types."""
_PROBLEMS = {
    "literal_error": ("not an allowed value", "{expected}"),
    "greater_than": ("too small", "greater than {gt}"),
    "greater_than_equal": ("too small", "greater than or equal to {ge}"),
    "less_than": ("too large", "less than {lt}"),
    "less_than_equal": ("too large", "less than or equal to {le}"),
    "multiple_of": ("not a multiple of {multiple_of}", "multiples of {multiple_of}"),
    "int_parsing": ("not a whole number", "e.g. 8, without quotes"),
    "int_type": ("not a whole number", "e.g. 8, without quotes or decimals"),
    "int_from_float": ("not a whole number", "e.g. 8, without decimals"),
    "float_parsing": ("not a number", "e.g. 0.001 or 1e-3, without quotes"),
    "float_type": ("not a number", "e.g. 0.001 or 1e-3, without quotes"),
    "finite_number": ("not a finite number", "neither infinite nor NaN"),
    "bool_parsing": ("not a truth value", "true or false"),
    "bool_type": ("not a truth value", "true or false"),
    "tuple_type": ("not a list", "a list, e.g. [first, second]"),
    "too_short": ("too few values", "at least {min_length}"),
    "dict_type": ("not a mapping", "keys with values, e.g. {{key: value}}"),
    "string_type": ("not a text", "a text; quote a number, a date, true or false"),
    # Only the name of a run has a pattern.
    "string_pattern_mismatch": (
        "not a name for a folder",
        "letters, digits, dots, underscores and hyphens, the first one a letter or digit",
    ),
}
"""Pydantic's kinds of errors: the problem in our words, and what is allowed."""


def _build_field_error(item: Any, root: type[BaseModel], locate: Locate) -> RecipeError:
    # A union's location names the type that was tried.
    location = [str(part) for part in item["loc"] if part not in _UNION_TYPES]
    field = ".".join(location)
    place = locate(location)
    kind = item["type"]
    if kind == "extra_forbidden":
        known = list(_get_section_fields(root, location[:-1]))
        return RecipeError(
            "unknown key",
            field=field,
            got=_shorten_with_position(repr(location[-1]), place),
            allowed=", ".join(known),
            remedy=guess_key(root, location, known),
        )
    if kind == "missing":
        where = None if place is None else f"no such key in {place}"
        return RecipeError("missing key", field=field, got=where, remedy=f"Add `{location[-1]}:`")
    got = _shorten_with_position(repr(item["input"]), place)
    if kind == "value_error":
        return RecipeError(
            str(item["ctx"]["error"]),
            field=field or "recipe",
            got=place if isinstance(item["input"], Mapping | BaseModel) else got,
        )
    if kind == "model_type":
        keys = ", ".join(_get_section_fields(root, location))
        return RecipeError("not a section of keys", field=field, got=got, allowed=keys)
    problem, allowed = _translate_problem(item)
    remedy = None
    if problem == "not a number" and place is None and _EXPONENT.fullmatch(str(item["input"])):
        remedy = "PyYAML reads 1e-3 as text: write 1.0e-3, or give the path of the file"
    return RecipeError(problem, field=field, got=got, allowed=allowed, remedy=remedy)


def _translate_problem(item: Any) -> tuple[str, str | None]:
    """Return the problem of one of pydantic's errors in our words, and what is allowed."""
    if item["type"] == "value_error":
        return str(item["ctx"]["error"]), None
    problem, allowed = _PROBLEMS.get(item["type"], (str(item["msg"]), None))
    if item["loc"][-1] == _AUTO_TYPE:
        allowed = "true, false or {expected}"
    elif item["loc"][-1] == _INTEGER_TYPE:
        allowed = f"{allowed}, or 'auto'"
    context = item.get("ctx", {})
    return problem.format(**context), allowed and allowed.format(**context)


def _get_section_fields(root: type[BaseModel], location: list[str]) -> dict[str, Any]:
    """Return the fields of the model at `location`."""
    fields: dict[str, Any] = dict(root.model_fields)
    for part in location:
        if part.isdigit():
            continue
        section = next(find_models(fields[part].annotation), None) if part in fields else None
        fields = dict(section.model_fields) if section else {}
    return fields
