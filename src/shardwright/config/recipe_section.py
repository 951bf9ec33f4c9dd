"""Base class and shared types of the recipe's sections."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_MAX_PATH_BYTES = 4095
_MAX_PART_BYTES = 255


def _read_path(text: str) -> str:
    """Expand a leading `~`; refuse paths that no Linux file system accepts, before they are
    opened. URLs stay as they are."""
    if not text.strip():
        raise ValueError("the path is empty")
    if "://" in text:
        return text
    text = os.path.expanduser(text)
    if text.split("/")[0] == "~":
        raise ValueError("the home folder `~` is unknown; set HOME, or give the whole path")
    if len(os.fsencode(text)) > _MAX_PATH_BYTES:
        raise ValueError(f"the path is longer than {_MAX_PATH_BYTES:,} bytes")
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


class RecipeSection(BaseModel):
    """Base of all sections: immutable; an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
