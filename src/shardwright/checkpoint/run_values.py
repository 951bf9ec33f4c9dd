"""Schema of `values.json` in a run's checkpoint: state other than tensors. No torch.

All readers use `parse_values`: `train --resume`, rollback, `export`, `generate`, `evaluate` and
`checkpoint inspect`. A file with a correct hash may still come from another program.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shardwright.checkpoint.disk import read_small_file
from shardwright.checkpoint.manifest import MAX_VALUES_BYTES, VALUES_NAME, parse_json
from shardwright.checkpoint.storage_path import ReadableFile, StoragePath
from shardwright.config.adapter_section import AdapterKind, QuantizeKind
from shardwright.errors import CheckpointError

_MAX_SHOWN_CHARACTERS = 80
_MAX_DEPTH = 32
"""Limit of nested JSON levels (shardwright writes about six), because the code recurses."""

Count = Annotated[int, Field(ge=0, lt=2**62)]
PositiveCount = Annotated[int, Field(ge=1, lt=2**62)]


class _RunValuesPart(BaseModel):
    """Base class of all parts: strict types, finite numbers, unknown keys kept."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)


class LossScale(_RunValuesPart):
    """State of the fp16 loss scaler."""

    scale: Annotated[float, Field(gt=0)]
    finite_steps: Count


class OptimizerValues(_RunValuesPart):
    """Update rule and number of updates by parameter name.

    The hyperparameters are for readers only.
    """

    rule: str
    steps: dict[str, Count]
    hyperparameters: dict[str, dict[str, Any]]


class AdapterValues(_RunValuesPart):
    """Trained adapters, with the fields of `AdapterShape`."""

    model_config = ConfigDict(extra="forbid")

    kind: AdapterKind
    rank: PositiveCount
    alpha: Annotated[float, Field(gt=0)]
    modules: list[str]
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    quantize: QuantizeKind | None = None


class RunIdentity(_RunValuesPart):
    """Fields that a resumed run must share with the run that saved."""

    adapters: AdapterValues | None = None
    base: str | None = None
    """Fingerprint of the adapters' base weights; `random` for initialised ones."""
    model: dict[str, Any]
    tokenizer: str
    data: str
    seed: int
    sequence_length: PositiveCount
    global_batch_size: PositiveCount
    optimizer: dict[str, Any]
    precision: str
    preference: dict[str, Any] | None = None
    freeze: list[str]
    training: dict[str, Any]

    @model_validator(mode="after")
    def _check_adapters_have_base(self) -> RunIdentity:
        if self.adapters is not None and self.base is None:
            raise ValueError("adapters without a base")
        return self

    def to_saved_json(self) -> dict[str, Any]:
        """Return the JSON object as it was read: a key that was absent stays absent."""
        return self.model_dump(exclude_unset=True)


class AllowedDrift(_RunValuesPart):
    """Field that was allowed to change when the run was resumed at `step`.

    An absent side is left out.
    """

    step: Count
    field: str


class RunValues(_RunValuesPart):
    """Values of one checkpoint of a run."""

    step: Count
    """Number of finished optimizer steps; equals the manifest's step."""
    samples_seen: Count
    steps_left_out: Count = 0
    """Data that rollbacks have skipped, in steps; missing in older checkpoints."""
    skipped_in_a_row: Count
    best_loss: float | None
    loss_scaler: LossScale | None
    layout: str
    evaluation_due: bool
    run: RunIdentity
    recipe: dict[str, Any]
    """Fields of the recipe that a resumed run may change."""
    drift: list[AllowedDrift] = []
    optimizer: OptimizerValues


def read_values_file(folder: StoragePath, file: ReadableFile | None = None) -> dict[str, Any]:
    """Read `values.json` as a JSON object of bounded depth, without checking its fields.

    Args:
        file: the open file; by default it is opened.

    Raises:
        CheckpointError: it cannot be read, is not an object or is nested too deeply.
    """
    path = folder / VALUES_NAME
    content = parse_json(read_small_file(path, MAX_VALUES_BYTES, file), path)
    if not isinstance(content, dict):
        raise _build_field_error(folder, "", got=_shorten_value(content), allowed="an object")
    level: list[Any] = [content]
    for _ in range(_MAX_DEPTH):
        items = (
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
        )
        level = [item for item in items if isinstance(item, dict | list)]
    if level:
        raise _build_field_error(folder, "", got="deeper nesting", allowed=f"{_MAX_DEPTH} levels")
    return content


def parse_values(content: object, folder: StoragePath, *, step: int) -> RunValues:
    """Check the content of a checkpoint's `values.json`.

    Args:
        content: result of `read_values_file`.
        folder: folder of the checkpoint, for messages.
        step: step of the manifest.

    Raises:
        CheckpointError: a value is invalid; the message names the first field.
    """
    try:
        values = RunValues.model_validate(content)
    except ValidationError as error:
        raise _build_first_error(error, folder) from None
    if values.step != step:
        raise _build_field_error(
            folder, "step", got=str(values.step), allowed=f"{step}, as in the manifest"
        )
    samples_seen = (values.step + values.steps_left_out) * values.run.global_batch_size
    if values.samples_seen != samples_seen:
        raise _build_field_error(
            folder,
            "samples_seen",
            got=str(values.samples_seen),
            allowed=f"{samples_seen}, as the other values imply",
        )
    return values


def _build_first_error(error: ValidationError, folder: StoragePath) -> CheckpointError:
    """Turn pydantic's first error into a CheckpointError that counts the others."""
    details = error.errors(include_url=False)
    first = details[0]
    got = "nothing" if first["type"] == "missing" else _shorten_value(first["input"])
    if first["type"] == "extra_forbidden":
        got = f"the key {_shorten_value(first['loc'][-1])}"
    return _build_field_error(
        folder,
        _format_location(first["loc"]),
        got=got,
        allowed=_describe_allowed(first),
        num_others=len(details) - 1,
    )


def _build_field_error(
    folder: StoragePath, field: str, *, got: str, allowed: str, num_others: int = 0
) -> CheckpointError:
    more = (
        f"; {num_others} more field{'s are' if num_others > 1 else ' is'} wrong"
        if num_others
        else ""
    )
    return CheckpointError(
        f"not a shardwright checkpoint: `train` does not write such values{more}",
        field=f"{folder / VALUES_NAME}: {field}" if field else str(folder / VALUES_NAME),
        got=got,
        allowed=allowed,
        remedy="Remove this checkpoint to continue from an older one",
    )


_ALLOWED = {
    "missing": "a value",
    "model_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
}


def _describe_allowed(details: Any) -> str:
    """Describe the allowed values of a field, from the type of pydantic's error."""
    known = _ALLOWED.get(details["type"])
    if known is not None:
        return known
    context = details.get("ctx", {})
    for bound, words in (
        ("ge", "at least"),
        ("gt", "more than"),
        ("lt", "less than"),
        ("expected", ""),
    ):
        if bound in context:
            return f"{words} {context[bound]}".strip()
    if details["type"] == "extra_forbidden":
        return ", ".join(AdapterValues.model_fields)
    return str(details["msg"])


def _format_location(location: tuple[int | str, ...]) -> str:
    """Format a location in the JSON as `optimizer.steps['model.norm.weight']`."""
    path = ""
    for part in location:
        name = str(part)
        if name.isidentifier():
            path += f".{name:.80}"
        else:
            path += f"[{part}]" if isinstance(part, int) else f"[{_shorten_value(part)}]"
    return path.removeprefix(".")


def _shorten_value(value: object) -> str:
    """Format a JSON value, shortened."""
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."
