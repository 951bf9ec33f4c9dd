"""Base class and shared types of the recipe's sections."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core import CoreSchema, core_schema

from shardwright.units import GIB_BYTES, SIZE_PATTERN, parse_bytes

_MAX_PATH_BYTES = 4095
_MAX_PART_BYTES = 255
_BARE_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")


def _read_path(text: str) -> str:
    """Expand a leading `~`; refuse paths that no Linux file system accepts, before they are
    opened, and variables without braces. URLs stay as they are."""
    if not text.strip():
        raise ValueError("the path is empty")
    if "://" in text:
        return text
    text = os.path.expanduser(text)
    if text.split("/")[0] == "~":
        raise ValueError("the home folder `~` is unknown; set HOME, or give the whole path")
    if len(os.fsencode(text)) > _MAX_PATH_BYTES:
        raise ValueError(f"the path is longer than {_MAX_PATH_BYTES:,} bytes")
    variable = _BARE_VARIABLE.search(text)
    if variable is not None and variable[1] in os.environ and not os.path.lexists(text):
        raise ValueError(
            f"variables are replaced in braces only: write ${{{variable[1]}}}, or create the path "
            f"if `{variable[0]}` is part of its name"
        )
    longest = max(len(os.fsencode(part)) for part in text.split("/"))
    if longest > _MAX_PART_BYTES:
        raise ValueError(
            f"a name in the path is {longest:,} bytes long; {_MAX_PART_BYTES} are allowed"
        )
    return text


PathText = Annotated[str, AfterValidator(_read_path)]
"""A path or a URL. A leading `~` becomes the home folder."""


def _check_local(text: str) -> str:
    if "://" in text:
        raise ValueError("must be a local or mounted folder, not a URL")
    return text


LocalFolderText = Annotated[PathText, AfterValidator(_check_local)]
"""A folder of a local or mounted file system."""

Positive = Annotated[int, Field(gt=0, strict=True)]
NonNegative = Annotated[int, Field(ge=0, strict=True)]
Fraction = Annotated[float, Field(strict=True, ge=0.0, lt=1.0)]


@dataclass(frozen=True)
class SizeWithUnit:
    """Annotation of a size: a number in the key's unit, or text with its own (`64MiB`)."""

    key_unit_bytes: int = 1

    def _read(self, value: Any) -> Any:
        if isinstance(value, str) and value != "auto":
            num_bytes = parse_bytes(value)
            return num_bytes if self.key_unit_bytes == 1 else num_bytes / self.key_unit_bytes
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Parse text before the type and the bounds of the annotated type are checked."""
        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Allow the annotated type, or text with a unit."""
        text = {"type": "string", "pattern": SIZE_PATTERN, "format": "size"}
        return {"anyOf": [handler(schema), text]}


PositiveBytes = Annotated[Positive, SizeWithUnit()]
"""A positive number of bytes."""
PositiveGib = Annotated[float, Field(strict=True, gt=0, le=1e6), SizeWithUnit(GIB_BYTES)]
"""A positive number of GiB."""


class RecipeSection(BaseModel):
    """Base of all sections: immutable; an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
